"""Fills advice with what a text shows: rows, bytes, lines, cards and the command of the run."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.explain.advised import remedy
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.text.remedies import engine
from trainer_plugins.explain.text.remedies.plan_command import plan_command
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import size

_ROWS, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_IN_TRAINER = r"transformers[/\\]trainer|trl[/\\]trainer|Trainer\.\w|swift[/\\]trainers"


def uses_trainer(facts: TextFacts) -> bool:
    """Return whether flags of TrainingArguments fit; without any frame they are assumed to."""
    return (
        not facts.frames
        or facts.called(_IN_TRAINER) is not None
        or facts.says(rf"{_ROWS}|TrainingArguments") is not None
    )


def _smaller_micro_batch(facts: TextFacts) -> Remedy | None:
    """Divide the micro-batch and accumulate more, so that the effective batch stays the same."""
    rows, steps = facts.rows(_ROWS), facts.rows(_STEPS) or 1
    if rows == 1 or facts.has_tried_one_row:
        return None
    half, factor = (rows // 2, 2) if rows and rows % 2 == 0 else (1, rows or 2)
    if rows:
        do = advice.SMALLER_MICRO_BATCH.flag(Door.TRAINER, rows=half, steps=steps * factor)
    else:
        do = advice.SMALLER_MICRO_BATCH.flag(Door.TRAINER if uses_trainer(facts) else Door.CODE)
    effect = f"{advice.SMALLER_MICRO_BATCH.effect}; one halving may not be enough"
    has_rows = facts.asked and facts.called(r"\bforward\b|backward|loss|logits", innermost=4)
    if has_rows and facts.asked:
        effect = f"{size(facts.asked // factor)} instead of {size(facts.asked)} there; {effect}"
    return remedy(advice.SMALLER_MICRO_BATCH, do, effect, by_arithmetic=has_rows)


def _survive(facts: TextFacts) -> Remedy:
    if facts.called(r"hydra[/\\]"):
        do = f"{facts.launched} {advice.SURVIVE.flag(Door.HYDRA)}"
    else:
        do = advice.SURVIVE.flag(Door.SHELL, command=facts.launched)
    return remedy(advice.SURVIVE, do)


def _observe(facts: TextFacts) -> Remedy:
    return remedy(advice.OBSERVE, advice.OBSERVE.flag(Door.SHELL, command=facts.launched))


def _plan(facts: TextFacts) -> Remedy:
    do, missing = plan_command(facts)
    unknown = f" (the text does not show {' and '.join(missing)})" if missing else ""
    return remedy(advice.PLAN_THE_RUN, do, advice.PLAN_THE_RUN.effect + unknown)


def _smaller_eval_batch(facts: TextFacts) -> Remedy | None:
    if not uses_trainer(facts):
        return _with_shortage(advice.SMALLER_EVAL_BATCH, facts)
    rows = facts.rows("per_device_eval_batch_size")
    if rows == 1:
        return None
    flag = advice.SMALLER_EVAL_BATCH.flag(Door.TRAINER, rows=ceil(rows / 2) if rows else 1)
    return remedy(advice.SMALLER_EVAL_BATCH, flag)


def _with_shortage(one: Advice, facts: TextFacts) -> Remedy:
    """Say how much less is needed, in a loop of the user's own."""
    if facts.framework:
        effect = f"{size(facts.asked)} were asked for at once" if facts.asked else ""
    elif facts.asked is None or facts.free is None or facts.asked <= facts.free:
        effect = ""
    else:
        effect = f"at least {size(facts.asked - facts.free)} less are needed"
    return remedy(one, Door.CODE, effect, by_arithmetic=effect)


def _with_asked(one: Advice, facts: TextFacts) -> Remedy:
    """Say how much was asked for at the place that it changes."""
    asked = f"{one.effect} ({size(facts.asked)} at that place)" if facts.asked else ""
    return remedy(one, next(iter(one.spellings)), asked, by_arithmetic=facts.asked)


def _shorter_rows(facts: TextFacts) -> Remedy:
    is_table = facts.asked and facts.called(r"attn|attention|softmax|matmul|bmm", innermost=3)
    effect = f"{size(facts.asked / 4)} instead of {size(facts.asked)} at half the length; " if (
        facts.asked and is_table
    ) else ""  # fmt: skip
    return remedy(
        advice.SHORTER_ROWS,
        Door.TRL if uses_trainer(facts) else Door.CODE,
        effect + advice.SHORTER_ROWS.effect,
        by_arithmetic=effect,
    )


def _expandable_segments(facts: TextFacts) -> Remedy:
    pieces, needed = size(facts.unused or 0), size(facts.asked or 0)
    effect = f"up to {pieces} in pieces become usable, {needed} are needed"
    return remedy(advice.EXPANDABLE_SEGMENTS, Door.ENVIRONMENT, effect, by_arithmetic=True)


def _list_processes(facts: TextFacts) -> Remedy:
    pids = ", ".join(str(pid) for pid, _ in facts.neighbours) or "the text names none"
    return remedy(advice.LIST_PROCESSES, Door.SHELL, f"{advice.LIST_PROCESSES.effect} ({pids})")


def _other_card(facts: TextFacts) -> Remedy | None:
    if len(facts.cards) == 1:
        return None
    rooms = [total - used for used, total in facts.cards]
    best = rooms.index(max(rooms)) if rooms else 0 if facts.oom.device else 1
    there = f"{size(rooms[best])} were free there" if rooms else "if there is one"
    gone = f"; {size(facts.others)} are in the way on this one" if facts.others else ""
    return remedy(
        advice.OTHER_CARD,
        advice.OTHER_CARD.flag(Door.SHELL, card=best, command=facts.launched),
        f"{advice.OTHER_CARD.effect}, {there}{gone}",
        by_arithmetic=rooms or gone,
    )


def _one_card(facts: TextFacts) -> Remedy:
    return remedy(advice.ONE_CARD, advice.ONE_CARD.flag(Door.SHELL, command=facts.launched))


def _one_process_a_card(facts: TextFacts) -> Remedy:
    num_cards = len({one.card for one in facts.processes}) or len(facts.cards) or "CARDS"
    script = re.search(r"\S+\.py\b.*", facts.launched)
    command = script[0] if script else "train.py"
    one = advice.ONE_PROCESS_A_CARD
    return remedy(one, one.flag(Door.SHELL, cards=num_cards, command=command))


def _load_into_main_memory(facts: TextFacts) -> Remedy:
    first = min((one.card for one in facts.processes), default=0)
    stray = sum(one.num_bytes for one in facts.processes if one.card == first)
    told = f"; nvidia-smi shows {size(stray)} on card {first}" if stray else ""
    one = advice.LOAD_INTO_MAIN_MEMORY
    return remedy(one, Door.CODE, one.effect + told, by_arithmetic=told)


def _restart_kernel(facts: TextFacts) -> Remedy:
    effect = f"frees {size(facts.live)}, if it is left from before" if facts.live else ""
    return remedy(advice.RESTART_KERNEL, Door.CODE, effect, by_arithmetic=effect)


def _place(facts: TextFacts) -> str:
    frame = facts.users_frame
    return f"{frame.path.rsplit('/', 1)[-1]}:{frame.line}" if frame else ""


def _print_shapes(facts: TextFacts) -> Remedy:
    do = advice.PRINT_SHAPES.flag(Door.CODE, place=_place(facts) or "the failing line")
    return remedy(advice.PRINT_SHAPES, do)


def _look_at(facts: TextFacts) -> Remedy | None:
    if not (place := _place(facts)):
        return None
    asked = f"{size(facts.asked)} were asked for at once" if facts.asked else ""
    do = advice.LOOK_AT.flag(Door.CODE, place=place)
    return remedy(advice.LOOK_AT, do, asked, by_arithmetic=asked)


def _fewer_workers(facts: TextFacts) -> Remedy:
    is_growth = facts.progress and not facts.says(r"(?i)dataloader|shared memory|bus error")
    grows = "it had run for some time: each worker's copy of the data set grows as it is read"
    door = Door.TRAINER if uses_trainer(facts) else Door.CODE
    do = advice.FEWER_WORKERS.flag(door, workers=0)
    return remedy(advice.FEWER_WORKERS, do, grows if is_growth else "")


def _wrap_layers(facts: TextFacts) -> Remedy:
    del facts
    layer = "LlamaDecoderLayer  # your model's layer"
    return remedy(advice.WRAP_LAYERS, advice.WRAP_LAYERS.flag(Door.ACCELERATE, layer=layer))


def _more_main_memory(facts: TextFacts) -> Remedy:
    del facts
    return remedy(advice.MORE_MAIN_MEMORY, Door.SHELL)


def _larger_shm(facts: TextFacts) -> Remedy:
    del facts
    return remedy(advice.LARGER_SHM, advice.LARGER_SHM.flag(Door.SHELL, size="16g"))


FILLED: Mapping[Advice, Callable[[TextFacts], Remedy | None]] = {
    advice.SMALLER_MICRO_BATCH: _smaller_micro_batch,
    advice.SURVIVE: _survive,
    advice.OBSERVE: _observe,
    advice.PLAN_THE_RUN: _plan,
    advice.SMALLER_EVAL_BATCH: _smaller_eval_batch,
    advice.FEWER_INPUTS: partial(_with_shortage, advice.FEWER_INPUTS),
    advice.LIGER: partial(_with_asked, advice.LIGER),
    advice.ARGMAX_LOGITS: partial(_with_asked, advice.ARGMAX_LOGITS),
    advice.SHORTER_ROWS: _shorter_rows,
    advice.EXPANDABLE_SEGMENTS: _expandable_segments,
    advice.LIST_PROCESSES: _list_processes,
    advice.OTHER_CARD: _other_card,
    advice.ONE_CARD: _one_card,
    advice.ONE_PROCESS_A_CARD: _one_process_a_card,
    advice.LOAD_INTO_MAIN_MEMORY: _load_into_main_memory,
    advice.RESTART_KERNEL: _restart_kernel,
    advice.PRINT_SHAPES: _print_shapes,
    advice.LOOK_AT: _look_at,
    advice.FEWER_WORKERS: _fewer_workers,
    advice.WRAP_LAYERS: _wrap_layers,
    advice.MORE_MAIN_MEMORY: _more_main_memory,
    advice.LARGER_SHM: _larger_shm,
    advice.SHORTER_REQUESTS: engine.shorter,
    advice.SMALLER_ENGINE_SHARE: engine.lower,
    advice.LARGER_ENGINE_SHARE: engine.higher,
    advice.FEWER_SEQUENCES: engine.fewer_sequences,
    advice.TENSOR_PARALLEL: engine.spread_weights,
    advice.EXPORT_SETTINGS_FOR_VLLM: engine.settings,
}
"""Advice that takes something of the text; all other is the same in each text."""
