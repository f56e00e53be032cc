"""Causes outside this run: neighbours on the card, other ranks, frameworks, earlier runs."""

from collections import defaultdict

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.causes.numbers import is_held_by_others
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import percent, size

_SURE_FRACTION = 0.8
_FULL_FRACTION = 0.75
_UNEVEN = 1.3
_TRIAL = r"[Tt]rial ?#?[1-9]\d*(?: failed| as TrialState\.FAIL)"
_DESERIALISES = r"_cuda_deserialize|restore_location"


def ddp_gpu0(facts: TextFacts) -> Cause | None:
    """Processes of other cards hold a context on the first card."""
    cards_of = _cards_of(facts)
    first = min((one.card for one in facts.processes), default=0)
    stray = [one for one in facts.processes if one.card == first and len(cards_of[one.pid]) > 1]
    if len(stray) < 2:
        return None
    return Cause(
        code="ddp-gpu0",
        grade="likely",
        summary=f"several ranks hold memory on card {first} beside their own card",
        evidence=(
            f"nvidia-smi lists {len(stray)} processes on card {first} that hold another card too,"
            f" with {size(sum(one.num_bytes for one in stray))} on card {first}.",
        ),
        doubt="Where the context is opened is not in the text: look for torch.load without"
        " map_location and for CUDA calls before torch.cuda.set_device",
    )


def data_parallel(facts: TextFacts) -> Cause | None:
    """One process drives several cards, and gathers what they make on the first."""
    frame = facts.called(r"scatter_gather\.py|Gather\.apply|gather\(outputs", innermost=6)
    evidence = [f"It failed in {frame}."] if frame else []
    for pid, cards in _cards_of(facts).items():
        held = sorted(
            ((one.card, one.num_bytes) for one in facts.processes if one.pid == pid),
        )
        rest = max((num_bytes for _, num_bytes in held[1:]), default=0)
        if len(cards) > 1 and held[0][1] > _UNEVEN * rest:
            evidence.append(
                f"nvidia-smi shows one process (pid {pid}) on {len(cards)} cards, with"
                f" {size(held[0][1])} on card {held[0][0]} and at most {size(rest)} on the others."
            )
    if not evidence:
        return None
    return Cause(
        code="data-parallel",
        grade="likely",
        summary="one process drives all cards (DataParallel): the first holds more than the others",
        evidence=tuple(evidence[:2]),
        doubt="A model that device_map spreads over the cards looks alike in nvidia-smi: print"
        " type(trainer.model_wrapped), or see whether torchrun started the script",
    )


def _cards_of(facts: TextFacts) -> dict[int, set[int]]:
    cards: dict[int, set[int]] = defaultdict(set)
    for one in facts.processes:
        cards[one.pid].add(one.card)
    return cards


def gave_up(facts: TextFacts) -> Cause | None:
    """Whoever looks for a batch size that fits caught each OOM, and found none."""
    if not facts.has_tried_one_row or facts.progress:
        return None
    return Cause(
        code="capacity",
        grade="likely",
        summary="not even one row fits: auto_find_batch_size has tried all sizes down to it",
        evidence=(f"The words are: {facts.oom.text[:200]}",),
        doubt="The OOM that was caught is not in the text, nor whether the tries before have left"
        " something: the run prints it with --auto_find_batch_size False and one row",
    )


def other_framework(facts: TextFacts) -> Cause | None:
    """JAX or TensorFlow got no memory: what is known of torch does not apply."""
    if not facts.framework:
        return None
    asked = f"It asked for {size(facts.asked)} at once." if facts.asked else ""
    return Cause(
        code="capacity",
        grade="likely",
        summary=f"{facts.framework}, not torch, found no room on the card",
        evidence=tuple(filter(None, (f"The words are: {facts.oom.text.strip()[:200]}", asked))),
        doubt="What fills the card is not in the text:"
        " jax.profiler.save_device_memory_profile('memory.prof') shows it"
        if facts.framework == "JAX"
        else "What fills the card is not in the text:"
        " tf.config.experimental.get_memory_info('GPU:0') shows what is this program's",
    )


def foreign(facts: TextFacts) -> Cause | None:
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
                sum_of(facts),
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


def _ranks_on_one_card(facts: TextFacts) -> Cause:
    return Cause(
        code="ddp-gpu0",
        grade="likely",
        summary="a checkpoint is loaded onto the card it was saved from, on which others are",
        evidence=(sum_of(facts), f"It failed in {facts.called(_DESERIALISES)}."),
        doubt="Whether the others are ranks of this run, which load onto the same card, or somebody"
        " else's is not in the text: `nvidia-smi` settles it",
    )


def _would_fit_alone(facts: TextFacts) -> bool:
    room = (facts.free or 0) + (facts.others or 0) + (facts.unused or 0)
    return (facts.asked or 0) <= room


def sum_of(facts: TextFacts) -> str:
    """Say whose the card's memory is."""
    return (
        f"{size(facts.total or 0)} card: {size(facts.own or 0)} yours, {size(facts.free or 0)}"
        f" free, so {size(facts.others or 0)} are others'. You asked for {size(facts.asked or 0)}."
    )


def _names(facts: TextFacts) -> tuple[str, ...]:
    told = [f"process {pid} has {size(held)}" for pid, held in facts.neighbours]
    told += [f"{one.name} (pid {one.pid}) has {size(one.num_bytes)}" for one in facts.processes]
    return (f"The text names {', '.join(told[:6])}.",) if told else ()


def _by_table(facts: TextFacts) -> Cause | None:
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


def _at_first_touch(facts: TextFacts) -> Cause | None:
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


def leftover(facts: TextFacts) -> Cause | None:
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


def kept_after_catch(facts: TextFacts) -> Cause | None:
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
