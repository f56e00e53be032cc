"""Causes outside this process: neighbours on the card, engines, ranks, earlier runs."""

import re
from collections import defaultdict

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.causes.numbers import is_held_beside_torch, is_held_by_others
from trainer_plugins.explain.text.facts import Facts
from trainer_plugins.units import percent, size

_SURE_FRACTION = 0.8
_FULL_FRACTION = 0.75
_ENGINE = r"(?i)(?<![a-z])(?:vllm|sglang)(?![a-z])|VllmWorker|EngineCore|cumem_allocator"
_TRIAL = r"[Tt]rial ?#?[1-9]\d*(?: failed| as TrialState\.FAIL)"
_DESERIALISES = r"_cuda_deserialize|restore_location"


def ddp_gpu0(facts: Facts) -> Cause | None:
    """Processes of other cards hold a context on card 0."""
    cards_of = defaultdict(set)
    for one in facts.processes:
        cards_of[one.pid].add(one.card)
    stray = [one for one in facts.processes if one.card == 0 and len(cards_of[one.pid]) > 1]
    if len(stray) < 2:
        return None
    return Cause(
        code="ddp-gpu0",
        grade="likely",
        summary="several ranks hold memory on card 0 beside their own card",
        evidence=(
            f"nvidia-smi lists {len(stray)} processes on card 0 that hold another card too, with"
            f" {size(sum(one.num_bytes for one in stray))} on card 0.",
        ),
        doubt="Where the context is opened is not in the text: look for torch.load without"
        " map_location and for CUDA calls before torch.cuda.set_device",
    )


def engine_share(facts: Facts) -> Cause | None:
    """An inference engine has a fixed share of the card."""
    inside = facts.called(r"[/\\](?:vllm|sglang)[/\\]|\b(?:vllm|sglang)\.")
    engine = inside or re.search(_ENGINE, facts.writer + facts.oom.text.split("\n")[0])
    warming = "warming up" in facts.oom.text
    if facts.called(r"load_weights|create_weights|initialize_model|get_model\b") and not warming:
        return None
    if not warming and not engine and not (_no_room(facts) and facts.says(_ENGINE)):
        return None
    evidence = [_sum_of(facts)] if facts.others is not None else []
    if warming:
        evidence.append("vLLM says that its sampler did not fit when it was warmed up.")
    elif engine:
        evidence.append(f"It failed in {inside or facts.writer or 'vLLM, as the words say'}.")
    else:
        evidence.append("The text speaks of vLLM or SGLang on the same card.")
    return Cause(
        code="engine-share",
        grade="certain" if warming else "likely",
        summary="the inference engine's share of the card leaves too little",
        evidence=tuple(evidence),
        doubt=""
        if warming
        else "Whether the engine or the training takes too much is not in the text: the engine's"
        " log says what it reserved for its KV cache",
    )


def foreign(facts: Facts) -> Cause | None:
    """Other processes hold the card."""
    if facts.others is not None and facts.total:
        if not is_held_by_others(facts) or not _would_fit_alone(facts):
            return None
        if facts.called(_DESERIALISES, innermost=12):
            return _ranks_on_one_card(facts)
        named = bool(facts.neighbours)
        sure = named or facts.others >= _SURE_FRACTION * facts.total
        return Cause(
            code="foreign",
            grade="certain" if sure else "likely",
            summary="another process holds the card",
            evidence=(
                _sum_of(facts),
                *_names(facts),
                *(
                    ["It is not this run: no batch size, no allocator setting helps."]
                    if sure
                    else []
                ),
            ),
            doubt=""
            if sure
            else "Memory of this process outside torch (TensorFlow, JAX, a second library) would"
            " look alike: `nvidia-smi --query-compute-apps=pid,used_memory --format=csv` tells",
        )
    return _by_table(facts) or _at_first_touch(facts)


def _no_room(facts: Facts) -> bool:
    """Return whether others hold the card, or the engine counts what it has given back."""
    held = is_held_by_others(facts) or is_held_beside_torch(facts)
    return held or (facts.live or 0) > (facts.total or facts.live or 0)


def _ranks_on_one_card(facts: Facts) -> Cause:
    return Cause(
        code="ddp-gpu0",
        grade="likely",
        summary="a checkpoint is loaded onto the card it was saved from, on which others are",
        evidence=(_sum_of(facts), f"It failed in {facts.called(_DESERIALISES)}."),
        doubt="Whether the others are ranks of this run, which load onto the same card, or somebody"
        " else's is not in the text: `nvidia-smi` settles it",
    )


def _would_fit_alone(facts: Facts) -> bool:
    room = (facts.free or 0) + (facts.others or 0) + (facts.unused or 0)
    return (facts.asked or 0) <= room


def _sum_of(facts: Facts) -> str:
    return (
        f"{size(facts.total or 0)} card: {size(facts.own or 0)} yours, {size(facts.free or 0)}"
        f" free, so {size(facts.others or 0)} are others'. You asked for {size(facts.asked or 0)}."
    )


def _names(facts: Facts) -> tuple[str, ...]:
    told = [f"process {pid} has {size(held)}" for pid, held in facts.neighbours]
    told += [f"{one.name} (pid {one.pid}) has {size(one.num_bytes)}" for one in facts.processes]
    return (f"The text names {', '.join(told[:6])}.",) if told else ()


def _by_table(facts: Facts) -> Cause | None:
    """Judge by a pasted nvidia-smi table, where the message has no numbers."""
    device = facts.oom.device or 0
    full = [one for one in facts.cards if one[0] >= _FULL_FRACTION * one[1]]
    if not full or facts.oom.source not in ("driver", "library", "masked") or facts.live:
        return None
    used, total = facts.cards[device] if device < len(facts.cards) else full[0]
    if used < _FULL_FRACTION * total:
        used, total = full[0]
    return Cause(
        code="foreign",
        grade="likely",
        summary="another process holds the card",
        evidence=(f"nvidia-smi shows {size(used)} of {size(total)} in use.", *_names(facts)),
        doubt="The table may have been made while this run was on the card: make it again when the"
        " run is gone",
    )


def _at_first_touch(facts: Facts) -> Cause | None:
    """A driver that refuses the first thing it is asked for."""
    is_later = facts.progress or facts.called(r"\bforward\b|backward|_step\b|optimizer")
    if facts.oom.source != "driver" or not facts.failed or is_later:
        return None
    return Cause(
        code="foreign",
        grade="possible",
        summary="the card was probably full before this process began",
        evidence=(f"The driver refused the first memory that was asked for, in {facts.failed}.",),
        doubt="The message has no numbers: `nvidia-smi --query-gpu=index,memory.used,memory.total"
        " --format=csv` before the start settles it",
    )


def leftover(facts: Facts) -> Cause | None:
    """Something of an earlier run in this process is still alive."""
    trial = facts.says(_TRIAL)
    full = facts.live is not None and bool(facts.total)
    full = full and (facts.live or 0) >= 0.7 * (facts.total or 0)
    small = (facts.asked or 0) < 0.05 * (facts.total or 0)
    if not trial and not (facts.is_notebook and full and small):
        return None
    if trial:
        evidence = f"The text says '{trial[0]}': the trials share one process."
    else:
        share = percent((facts.live or 0) / (facts.total or 1))
        evidence = f"A notebook asked for {size(facts.asked or 0)} when {share} was already live."
    return Cause(
        code="leftover",
        grade="possible",
        summary="an earlier run in this process may still hold its memory",
        evidence=(evidence,),
        doubt="Whether a cell or a trial ran before is not in the text: restart the kernel, and see"
        " whether the first run fails as well",
    )


def kept_after_catch(facts: Facts) -> Cause | None:
    """The script catches the OOM, and what it caught keeps the tensors."""
    if facts.num_skipped < 2:
        return None
    return Cause(
        code="leak",
        grade="likely",
        summary="the script catches the OOM and keeps its tensors",
        evidence=(f"{facts.num_skipped} lines say that a batch was skipped.",),
        doubt="Whether each failure has its own reason is not in the text: print"
        " torch.cuda.memory_allocated() after each skipped batch; it should fall back",
    )
