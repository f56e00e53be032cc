"""Fill in advice from a text: rows, bytes, lines, cards and the command of the run."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.version_faults import find_fault
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.shared import remedy
from trainer_plugins.explain.text.causes.arithmetic import FITS_WITHOUT, FRAMES
from trainer_plugins.explain.text.causes.others import list_strangers
from trainer_plugins.explain.text.remedies import engine
from trainer_plugins.explain.text.remedies.plan_command import LEFT_OPEN, list_options
from trainer_plugins.explain.text.settings import LENGTH, ROWS, SHOWN_STEPS, STEPS, TOKENS
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import GIB, size

_FEW_GENERATIONS = 4  # half of less leaves nothing to compare an answer with
_ROWS = "per_device_train_batch_size"
_ANSWERS = "max_completion_length|max_response_length|max_new_tokens"
# With transformers 5 their losses are means, and the Trainer takes them for sums over the step.
# `tests/test_accumulation.py` measures each class with such a name.
SUMMED = (
    r"\b(?!BrosSpade|Esm|EuroBert|ModernBert|Ultrabert|Zamba2)\w+For(?:SequenceClassification"
    r"|MaskedLM|TokenClassification|MultipleChoice|NextSentencePrediction|XVector)\b"
    r"|\b(?:U?M?T5|LongT5|M?Bart|Pegasus|Whisper|M2M100)ForConditionalGeneration\b"
)
_SUMMED_PRICE = (
    "with transformers 5 the gradients of {model} add up over micro-batches, unless you set"
    " trainer.model_accepts_loss_kwargs = False; survive_oom splits the batch exactly"
)
WANTED_CARD = r"(?:device|gpu)[\"']?[:=] ?[\"']?cuda:([1-9])"
_OF_THE_REST = 0.95  # the rest is the card's context and fragmentation
_OTHER_LOOPS = (
    r"\bverl\b|actor_rollout_ref|\bmegatron (?:sft|pt|rlhf)|local_batch_size|\btune run\b"
)
_IN_TRAINER = (
    r"transformers[/\\]trainer|\btrl[/\\]|Trainer\.\w|swift[/\\](?:llm|trainers)|llamafactory[/\\]"
    r"|axolotl[/\\]"
)
_NAMES = (
    r"TrainingArguments|\b(?:SFT|DPO|GRPO|ORPO|KTO|Reward)(?:Trainer|Config)\b"
    r"|\bswift (?:sft|rlhf|pt)\b"
)


def uses_trainer(facts: TextFacts) -> bool:
    """Return whether TrainingArguments flags apply; without any frame, we assume so."""
    return shows_trainer(facts) or not (facts.frames or facts.says(_OTHER_LOOPS))


def shows_trainer(facts: TextFacts) -> bool:
    """Return whether a frame or a word belongs to a transformers Trainer."""
    return bool(facts.find_call(_IN_TRAINER) or facts.says(rf"{_ROWS}|{_NAMES}"))


def _smaller_micro_batch(one: Advice, facts: TextFacts) -> Remedy | None:
    settings = facts.settings
    rows = settings.rows
    steps = int(settings.value(STEPS, r"\d{1,6}") or settings.count(SHOWN_STEPS) or 1)
    if rows == 1 or facts.has_tried_one_row:
        return None
    half, factor = (rows // 2, 2) if rows and rows % 2 == 0 else (1, rows or 2)
    values: dict[str, object] = {"rows": half, "steps": steps * factor} if rows else {}
    effect, asked = f"{one.effect}. You may have to halve it again", facts.asked_bytes
    has_rows = facts.find_call(r"\bforward\b|backward|loss|logits", innermost=4) is not None
    if asked and has_rows:
        smaller = f"{size(asked // factor)} instead of {size(asked)}"
        effect = f"{one.effect}. That allocation becomes {smaller}; you may have to halve it again"
    door = Door.TRAINER if rows or uses_trainer(facts) else Door.CODE
    own = settings.respell(ROWS, half) if rows else ""
    if not rows and (tokens := settings.value(TOKENS, r"\d+")):
        return remedy(one, settings.respell(TOKENS, int(tokens) // 2), effect)
    if rows and own and "per_device_train" not in own:
        more = settings.respell(STEPS, steps * factor)
        found = remedy(one, ", ".join(filter(None, (own, more))), effect, by_arithmetic=asked)
    else:
        found = remedy(one, door, effect, by_arithmetic=asked and has_rows, **values)
    model = facts.says(SUMMED) if uses_trainer(facts) else None
    return replace(found, price=_SUMMED_PRICE.format(model=model[0])) if model else found


def _survive(one: Advice, facts: TextFacts) -> Remedy:
    if facts.find_call(r"hydra[/\\]"):
        return remedy(one, f"{facts.launched} {one.flag(Door.HYDRA)}")
    found = _suggest_relaunch(one, facts)
    if facts.has_tried_one_row:
        without = "leave out auto_find_batch_size, which starts over with fewer rows"
        return replace(found, effect=f"{found.effect}; {without}")
    return found


def _suggest_relaunch(one: Advice, facts: TextFacts) -> Remedy:
    return remedy(one, Door.SHELL, command=facts.launched)


def _plan(one: Advice, facts: TextFacts) -> Remedy:
    words = [*list_options(facts)]
    missing = [word for word in words if word in LEFT_OPEN]
    unknown = f" (the text does not show {' and '.join(missing)})" if missing else ""
    return remedy(one, shlex.join(["trainer-plugins", "plan", *words]), one.effect + unknown)


def _fewer_generations(one: Advice, facts: TextFacts) -> Remedy | None:
    number = int(facts.settings.value("num_generations", r"\d{1,3}") or 0)
    return remedy(one, Door.TRL, generations=number // 2) if number >= _FEW_GENERATIONS else None


def _smaller_eval_batch(one: Advice, facts: TextFacts) -> Remedy | None:
    if not uses_trainer(facts):
        return _add_shortage(one, facts)
    rows = facts.settings.count("per_device_eval_batch_size") or 2
    return remedy(one, Door.TRAINER, rows=ceil(rows / 2)) if rows > 1 else None


def _add_shortage(one: Advice, facts: TextFacts) -> Remedy:
    effect, asked, free = "", facts.asked_bytes, facts.free_bytes
    if asked and free is not None and asked > free:
        effect = f"saves memory: at least {size(asked - free)} are missing"
    return remedy(one, Door.CODE, effect, by_arithmetic=effect)


def _add_request(one: Advice, facts: TextFacts) -> Remedy:
    asked = f"{one.effect} ({size(facts.asked_bytes)} at that place)" if facts.asked_bytes else ""
    return remedy(one, effect=asked, by_arithmetic=facts.asked_bytes)


def _shorter_rows(one: Advice, facts: TextFacts) -> Remedy:
    settings = facts.settings
    effect, asked = one.effect, facts.asked_bytes
    is_table = facts.find_call(r"attn|attention|softmax|matmul|bmm", innermost=3) is not None
    if asked and is_table:
        effect = f"asks for {size(asked / 4)}, not {size(asked)}, at half the length, and {effect}"
    names = next((each for each in (_ANSWERS, LENGTH) if settings.value(each, r"\d+")), "")
    door: str | Door = Door.TRL if uses_trainer(facts) else Door.CODE
    if names:
        door = settings.respell(names, int(settings.value(names, r"\d+")) // 2)
    return remedy(one, door, effect, by_arithmetic=asked and is_table)


def _expandable_segments(one: Advice, facts: TextFacts) -> Remedy:
    if facts.unused_bytes is None or facts.asked_bytes is None:
        return remedy(one, Door.ENVIRONMENT)
    pieces, needed = size(facts.unused_bytes), size(facts.asked_bytes)
    effect = f"joins up to {pieces} of small pieces; {needed} are needed"
    return remedy(one, Door.ENVIRONMENT, effect, by_arithmetic=True)


def _fewer_frames(one: Advice, facts: TextFacts) -> Remedy:
    found = FRAMES.search(facts.whole)
    return remedy(one, found and f"{found['is_set']}{max(8, int(found['frames']) // 4)}")


def _list_processes(one: Advice, facts: TextFacts) -> Remedy:
    found = [pid for pid, _ in facts.neighbours] or [one.pid for one in list_strangers(facts)]
    pids = ", ".join(map(str, found)) or "the text names none"
    then = "if they are not ranks of this run, take another card"
    return remedy(one, Door.SHELL, f"{one.effect} ({pids}): {then}")


def _other_card(one: Advice, facts: TextFacts) -> Remedy | None:
    if len(facts.cards) == 1:
        return None
    wanted = facts.says(WANTED_CARD)
    rooms = [each.total_bytes - each.used_bytes for each in facts.cards]
    best = rooms.index(max(rooms)) if rooms else 0 if facts.oom.device else 1
    best = int(wanted[1]) if wanted else best
    there = f"where {size(rooms[best])} were free" if rooms and not wanted else "if there is one"
    gone = f"; others hold {size(facts.others_bytes)} on this one" if facts.others_bytes else ""
    values = {"card": best, "command": facts.launched}
    effect = f"{one.effect}, {there}{gone}"
    return remedy(one, Door.SHELL, effect, by_arithmetic=rooms or gone, **values)


def _one_process_a_card(one: Advice, facts: TextFacts) -> Remedy:
    num_cards = len({each.card for each in facts.processes}) or len(facts.cards) or "CARDS"
    script = re.search(r"\S+\.py\b.*", facts.launched)
    command = script[0] if script else "train.py"
    return remedy(one, Door.SHELL, cards=num_cards, command=command)


def _load_into_main_memory(one: Advice, facts: TextFacts) -> Remedy:
    first = min((each.card for each in facts.processes), default=0)
    stray = sum(each.num_bytes for each in facts.processes if each.card == first)
    shown = f"; nvidia-smi shows {size(stray)} on card {first}" if stray else ""
    return remedy(one, Door.CODE, one.effect + shown, by_arithmetic=stray)


def _room_in_the_map(one: Advice, facts: TextFacts) -> Remedy:
    asked, total = facts.asked_bytes, facts.total_bytes
    if not asked or not total or asked >= total / 2:
        return remedy(one, Door.CODE)
    most = f"{int(_OF_THE_REST * (total - asked) / GIB)}GiB"
    effect = f"{one.effect}: the failing request was {size(asked)}"
    return remedy(one, Door.CODE, effect, by_arithmetic=True, size=most)


def _place(facts: TextFacts) -> str:
    frame = facts.users_frame
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}" if frame else ""


def _look_at(one: Advice, facts: TextFacts) -> Remedy | None:
    if not (place := _place(facts)):
        return None
    asked = f"shows what asked for {size(facts.asked_bytes)} at once" if facts.asked_bytes else ""
    return remedy(one, Door.CODE, asked, by_arithmetic=asked, place=place)


def _back_to_what_fitted(one: Advice, facts: TextFacts) -> Remedy:
    if fault := find_fault(facts.whole):
        return remedy(one, fault[0].cure, "leaves the fault out")
    said = FITS_WITHOUT.search(facts.text)
    if said and (named := re.search(r"(?<![a-z])[a-z]+_[a-z_\d]+", said[0])):
        return remedy(one, f"leave {named[0]} out")
    fitted = facts.says(
        r"(?:work|ran|runs?|fine|fits?)\w* [^.\n]{0,20}?([a-z]\w+)[ =v]{1,3}(\d+\.[\d.]*\d)"
    )
    return remedy(one, f"pip install '{fitted[1]}=={fitted[2]}'" if fitted else Door.SHELL)


FILLED: Mapping[Advice, Callable[[Advice, TextFacts], Remedy | None]] = {
    advice.SMALLER_MICRO_BATCH: _smaller_micro_batch,
    advice.SURVIVE: _survive,
    advice.OBSERVE: _suggest_relaunch,
    advice.ONE_CARD: _suggest_relaunch,
    advice.PLAN_THE_RUN: _plan,
    advice.FEWER_GENERATIONS: _fewer_generations,
    advice.SMALLER_EVAL_BATCH: _smaller_eval_batch,
    advice.FEWER_INPUTS: _add_shortage,
    advice.LIGER: _add_request,
    advice.ARGMAX_LOGITS: _add_request,
    advice.SHORTER_ROWS: _shorter_rows,
    advice.EXPANDABLE_SEGMENTS: _expandable_segments,
    advice.LIST_PROCESSES: _list_processes,
    advice.OTHER_CARD: _other_card,
    advice.RESTART_KERNEL: lambda one, facts: remedy(
        one, Door.CODE if facts.is_notebook else "run each training in a process of its own"
    ),
    advice.ONE_PROCESS_A_CARD: _one_process_a_card,
    advice.LOAD_INTO_MAIN_MEMORY: _load_into_main_memory,
    advice.ROOM_IN_THE_MAP: _room_in_the_map,
    advice.PRINT_SHAPES: lambda one, facts: remedy(
        one, Door.CODE, place=_place(facts) or "the failing line"
    ),
    advice.LOOK_AT: _look_at,
    advice.BACK_TO_WHAT_FITTED: _back_to_what_fitted,
    advice.FEWER_FRAMES: _fewer_frames,
    advice.FEWER_WORKERS: lambda one, facts: remedy(
        one, Door.TRAINER if uses_trainer(facts) else Door.CODE, workers=0
    ),
    advice.SHORTER_REQUESTS: engine.shorter,
    advice.SMALLER_ENGINE_SHARE: engine.lower,
    advice.LARGER_ENGINE_SHARE: engine.higher,
    advice.FEWER_SEQUENCES: engine.fewer_sequences,
    advice.TENSOR_PARALLEL: engine.spread_weights,
}  # advice filled in from the text; all other advice is the same for each text
