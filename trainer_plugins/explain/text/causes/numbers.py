"""Judge causes by the numbers of a message."""

import re

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.shared import Said, cause, is_in_pieces, say
from trainer_plugins.explain.text.causes.arithmetic import speaks_of_oom
from trainer_plugins.explain.text.solved import solve_activations
from trainer_plugins.explain.text.states import read_states
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.snapshot.owners import IMPOSSIBLE_BYTES, is_refused_though_free
from trainer_plugins.units import GIB, MIB

_OTHER_FRACTION = 0.25
_MUCH_CACHE_BYTES = 4 * GIB
_LITTLE_FRACTION = 0.5  # live at the peak, as a fraction of reserved memory
# `max_allocated: 8.34e+03`, `| GPU reserved memory | 5542 MiB`, DeepSpeed's `MA 8.3 GB  CA 55 GB`.
_NOTED = re.compile(
    r"(?<![a-z])(?:max_?|peak[_ ]|GPU |memory_)?((?:[Aa]lloc|[Rr]eserv|[Cc]ache)[a-z]*|MA|CA)\b"
    r"(?:[ _]memory)?[^\d\n]{0,14}?(\d[\d.]*(?:e[+-]?\d+)?) ?(GiB|GB|MiB|MB)?"
)
_LEAST_OTHERS_BYTES = 2 * GIB
_LEAST_OTHERS_FRACTION = 0.15
_IMPORTANT_FRACTION = 0.85
_GROUPED = (
    "Each answer of a prompt passes through the model again with gradients: activations and"
    " logits grow with the answers of a micro-batch."
)
_MASKED = (
    "the card was full, and torch has no numbers: NVML failed (MIG, Jetson, a container, an"
    " updated driver)"
)


def impossible_size(facts: TextFacts) -> Cause | None:
    """More than a TiB at once is a wrong shape."""
    is_cut = "1EB" in facts.oom.text  # torch's word for any larger size
    if not is_cut and (facts.asked_bytes or 0) <= IMPOSSIBLE_BYTES:
        return None
    asked = "The request was {requested_bytes} at once."
    return cause(
        "impossible-size",
        "The request was more than 1 EB at once." if is_cut else facts.states(asked),
        "An index, a shape or a length is wrong, or comes from damaged data: no memory"
        " setting helps.",
    )


def is_held_by_others(facts: TextFacts) -> bool:
    """Return whether others hold more of the card than a context or a desktop takes."""
    total = facts.total_bytes or 0
    least = max(_LEAST_OTHERS_FRACTION * total, min(_LEAST_OTHERS_BYTES, total / 2))
    named = sum(size for _, size in facts.neighbours)
    return max(facts.others_bytes or 0, named) > least


def is_held_outside_torch(facts: TextFacts) -> bool:
    """Return whether this process holds much of the card outside torch: an engine, JAX, NCCL."""
    least = max(_LEAST_OTHERS_BYTES, _LEAST_OTHERS_FRACTION * (facts.total_bytes or 0))
    return facts.outside_torch_bytes > least


def contradictory(facts: TextFacts) -> Cause | None:
    """The driver refused before torch held any memory, or although memory was free."""
    room = facts.total_bytes if facts.free_bytes is None else facts.free_bytes
    held_nothing = facts.live_bytes == 0 and room is not None and (facts.asked_bytes or 0) <= room
    if held_nothing or "cudaGetDeviceCount" in facts.oom.text:
        return _judge_early_refusal(facts)
    return judge_refusal(facts)


def judge_refusal(facts: TextFacts) -> Cause | None:
    """The driver refused although memory was free."""
    free, total, asked = facts.free_bytes, facts.total_bytes, facts.asked_bytes
    if free is None or asked is None or facts.oom.limit_bytes is not None:
        return None
    if facts.oom.source == "engine":
        return None  # it has not asked for anything yet
    is_absurd = total is not None and free > total
    # Another process may release memory between the refusal and the message.
    slack = asked if is_held_by_others(facts) else 0.05 * asked
    if not is_absurd and not is_refused_though_free(asked, free, slack):
        return None
    of = " of {capacity_bytes}" if total is not None else ""
    return cause(
        "contradictory",
        facts.states(f"It asked for {{requested_bytes}} while {{free_bytes}}{of} were free."),
        "A smaller request may fail too: some limit is below the card's size.",
        doubt="The text does not show which limit it was: the system's (WSL, Windows, ROCm, unified"
        " memory), the number of mappings, or a process that freed memory before the message"
        " was written. `nvidia-smi` during the run, and `dmesg`, settle it",
    )


def _judge_early_refusal(facts: TextFacts) -> Cause:
    asked = "The request was {requested_bytes} of {capacity_bytes}; torch held nothing."
    return cause(
        "contradictory",
        facts.states(asked)
        if facts.asked_bytes and facts.total_bytes
        else "It was the first request.",
        summary="the card refused memory before this process held any",
        doubt="The text does not show how much was free: another process, or a driver limit (of one"
        " allocation, of mappings, of WSL). `nvidia-smi` before the start settles it",
    )


def judge_spill(facts: TextFacts) -> Cause | None:
    """More is allocated than the card has: Windows lends main memory."""
    live, total = facts.live_bytes, facts.total_bytes
    if live is None or total is None or live <= total:
        return None
    return cause(
        "capacity",
        facts.states("{allocated_bytes} were allocated on a card of {capacity_bytes}."),
        "The driver then uses main memory, which is many times slower than the card's.",
        summary="the run needs more memory than the card has, and had spilled into main memory",
        doubt="The text does not show that Windows or WSL lends memory: an engine that sleeps"
        " (vLLM) may count released memory; its log shows that",
        is_sure=facts.is_windows,
    )


def mps_other(facts: TextFacts) -> Cause | None:
    """Most of a Mac's limit is held outside torch's tensors."""
    other = facts.says(r"other allocations: ([\d.]+) ([KMG])i?B, max allowed: ([\d.]+) ([KMG])i?B")
    if not other or "MPS" not in facts.oom.text:
        return None
    held, limit = (
        int(float(other[number]) * 1024 ** " KMG".index(other[number + 1])) for number in (1, 3)
    )
    if held < _OTHER_FRACTION * limit:
        return None
    return cause(
        "mps-other",
        say(
            "{other_bytes} of the {allowed_bytes} limit are 'other allocations': torch's"
            " cache, Metal's graphs, or other libraries.",
            other_bytes=held,
            allowed_bytes=limit,
        ),
        facts.states("Live tensors hold {allocated_bytes}."),
        doubt="The text does not show whether torch's cache or Metal holds it: print"
        " torch.mps.driver_allocated_memory() before and after torch.mps.empty_cache()",
    )


def fragmentation(facts: TextFacts) -> Cause | None:
    """The request would have fit into torch's unused memory, were that contiguous."""
    if not is_fragmented(facts):
        return None
    setting = advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT).partition("=")[2]
    return cause(
        "fragmentation",
        facts.states(
            "The request was {requested_bytes}; torch held {unused_bytes} unused, and"
            " {free_bytes} were free."
        ),
        doubt=f"The text does not show how the pieces lie. `{setting}` settles it: if it fails"
        " again with little unallocated, the run is too large",
    )


def mostly_cache(facts: TextFacts) -> Cause | None:
    """Log lines show far more reserved than was ever allocated; the message has no numbers."""
    if facts.live_bytes is not None or facts.oom.source not in ("allocator", "masked"):
        return None
    found: dict[bool, float] = {}
    lines = [line for line in facts.text.splitlines() if "by PyTorch" not in line]
    for line in lines:
        of_line = re.search(r"\((GiB|GB|MiB|MB)\)", line)
        for name, number, unit in _NOTED.findall(line):
            unit = unit or (of_line[1] if of_line else "")
            if unit:
                num_bytes = float(number) * (GIB if unit[0] in "Gg" else MIB)
                is_reserved = name[0].lower() in "rc"
                found[is_reserved] = max(found.get(is_reserved, 0.0), num_bytes)
    live, reserved = found.get(False, 0.0), found.get(True, 0.0)
    if not 0 < live <= _LITTLE_FRACTION * reserved or reserved < _MUCH_CACHE_BYTES:
        return None
    return cause(
        "fragmentation",
        say(
            "The log shows {reserved_bytes} reserved, but at most {peak_allocated_bytes}"
            " allocated: the rest is the allocator's cache.",
            reserved_bytes=int(reserved),
            peak_allocated_bytes=int(live),
        ),
        summary="the allocator's cache fills the card, in pieces too small for the requests",
        doubt="The text does not show how the pieces lie: torch.cuda.memory_summary() before the"
        " failing step shows inactive_split bytes",
    )


def pieces_beside_others(facts: TextFacts) -> Cause | None:
    """Others hold much too, but torch's own unused memory is more, and would have been enough."""
    was_enough = (facts.unused_bytes or 0) > max(facts.asked_bytes or 0, facts.others_bytes or 0)
    is_doubtful = is_held_by_others(facts) and not facts.neighbours
    return fragmentation(facts) if was_enough and is_doubtful else None


def is_fragmented(facts: TextFacts) -> bool:
    """Return whether the unused reserved memory was large enough to matter here."""
    is_full = (facts.asked_bytes or 0) >= (facts.free_bytes or 0)
    return is_full and facts.total_bytes is not None and is_in_pieces(facts.numbers)


def wrong_shape(facts: TextFacts) -> Cause | None:
    """One tensor is larger than the card."""
    asked, total = facts.asked_bytes, facts.total_bytes
    if asked is None or total is None or asked <= total:
        return None
    return cause(
        "api-misuse",
        facts.states("The request was {requested_bytes} at once, on a card of {capacity_bytes}."),
        facts.users_line,
        grade="possible",
        doubt="The text does not show whether you meant this shape: print the shapes of that line's"
        " inputs. Usual causes are a wrong axis, an unpadded length, or a full data set in one"
        " batch",
    )


def capacity(facts: TextFacts) -> Cause:
    """No other cause is shown: the run is too large for the card."""
    live, total, frame = facts.live_bytes, facts.total_bytes, facts.users_frame or facts.failed
    limit, states = facts.oom.limit_bytes, read_states(facts)
    fills = live is not None and bool(total) and live >= _IMPORTANT_FRACTION * (total or 0)
    filled: str | Said = ""
    if limit is not None and total is not None and "MPS" not in facts.oom.text:
        filled = facts.states("This process may use only {limit_bytes} of {capacity_bytes}.")
    elif live is not None and total:
        words = "Live tensors hold {allocated_bytes} of {capacity_bytes} ({live_fraction})."
        filled = facts.states(words, live_fraction=live / total)
    outside = say(
        "This process holds {own_outside_bytes} outside torch: NCCL, graphs, other libraries.",
        own_outside_bytes=facts.outside_torch_bytes,
    )
    evidence = [
        filled,
        outside if is_held_outside_torch(facts) else "",
        f"It failed in {frame}." if frame else "",
        solve_activations(facts),
        "" if facts.frames or states is None else states.describe(),
        _GROUPED if not facts.frames and facts.says("num_generations") else "",
    ]
    summary = _MASKED if "NVML_SUCCESS" in facts.oom.text else ""
    if facts.oom.source == "driver" and total is None:
        doubt = (
            "The driver does not say which memory was full: the card's, used by others or by this"
            " run (`nvidia-smi` while it fails), or, if the card had room, pinned main memory"
        )
    elif facts.frames or facts.asked_bytes:
        doubt = (
            "The text does not show what fills the card: weights, optimizer states, activations or"
            " leftovers of earlier steps. `trainer-plugins plan` predicts the need of this run"
            + ("" if facts.frames else "; a traceback would show where it failed")
        )
    elif speaks_of_oom(facts):
        doubt = (
            "When does it fail: loading, the first step, a later one, evaluation or a save; and"
            " with how many rows of what length? The whole traceback shows the first, and"
            " `trainer-plugins plan` counts the second before a run"
        )
    else:
        summary = "no error is in this text, only a question about memory"
        doubt = (
            "Do rows and their real lengths decide, or weights, states and an engine's share? With"
            " torch's cache, nvidia-smi shows the largest step so far: compare"
            " torch.cuda.max_memory_allocated() and the lengths of two runs"
        )
    return cause(
        "capacity",
        *(evidence if any(evidence) else [facts.words]),
        summary=summary,
        grade="likely" if fills else "possible",
        doubt=doubt,
    )
