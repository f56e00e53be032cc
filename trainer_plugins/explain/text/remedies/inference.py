"""Remedies for an inference engine's share of the card: smaller, larger, or shorter rows."""

from math import ceil, floor

from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.text.remedies.card import foreign
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import GIB, size

_SETTING = (
    r"(?P<name>[\w.-]*(?:gpu[-_]memory[-_]utilization|vllm_gpu_util|mem[-_]fraction[-_]static))"
    r"(?P<sep>[\"']?(?: ?[=:] ?| ))(?P<share>[01]?\.\d{1,4}|1)\b"
)
_WANTED = r"desired GPU memory utilization \((?P<share>[\d.]+),"
_TOTAL = r"total_gpu_memory=([\d.]+)GiB"
_KV_CACHE = r"Available KV cache memory: (-[\d.]+) GiB"
_LENGTH = r"maximum model length is (\d+)|stored in KV cache \((\d+)\)"
# How each program spells it, and what it takes if nobody says it.
_SPELLINGS = (
    (r"\bverl\b|actor_rollout_ref", "actor_rollout_ref.rollout.gpu_memory_utilization=", 0.5),
    (r"sglang|mem.fraction.static", "--mem-fraction-static ", 0.88),
    (r"(?i)\btrl\b|GRPO|colocate|use_vllm", "--vllm_gpu_memory_utilization ", 0.3),
    (r"", "--gpu-memory-utilization ", 0.9),
)
_MOST_SEQUENCES = ("--max-num-seqs", 64)
_LARGEST_SHARE, _SMALLEST_SHARE, _STEP = 0.95, 0.1, 0.05


def engine_share(facts: TextFacts) -> list[Remedy]:
    """Give the engine less where it takes too much, more where it has no room for its cache."""
    if facts.oom.source != "engine":
        return [*_lower(facts), *_fewer_at_once(facts), *_allocator(facts)]
    if " on startup" in facts.oom.text:
        who, *_, end = foreign(facts)
        return [*_lower(facts), who, end]
    shorter = _shorter(facts)
    return [*shorter, *_raise(facts), *([] if shorter else _fewer_at_once(facts)), *_weights(facts)]


def _lower(facts: TextFacts) -> list[Remedy]:
    """Lower the share below the one in the text, by what is missing or to what is free."""
    share, is_told = _share(facts)
    total, free, asked = _total(facts), facts.free, facts.asked
    if facts.oom.source == "engine" and total and free is not None:
        new = _down(free / total)
        effect = f"{size(new * total)} of the {size(free)} that are free"
    elif total and free is not None and asked and asked > free:
        missing = asked - free
        new = _down(max(min(share - missing / total, share - _STEP), share / 2))
        given = int((share - new) * total)
        effect = f"gives {size(given)} back; at least {size(missing)} are missing" + (
            ", so the training has to take less too" * (given < missing)
        )
    else:
        new = _down(share - max(_STEP, share / 8))
        effect = "the engine reserves this share of the card, weights and KV cache together"
    if new < (_SMALLEST_SHARE if facts.oom.source == "engine" else _STEP):
        return []
    return [
        Remedy(
            do=_spelled(facts, new),
            effect=effect + ("" if is_told else f"; {share:g} is the default"),
            grade="arithmetic" if total and free is not None else "known",
            price="fewer sequences at once in the engine",
        )
    ]


def _raise(facts: TextFacts) -> list[Remedy]:
    """Raise the share, if there is room above it: weights and graphs have left no cache."""
    share, is_told = _share(facts)
    total, missing = _total(facts), _missing(facts)
    least = (
        share + _STEP if not (missing and total) else max(share + _STEP, share + missing / total)
    )
    new = min(_LARGEST_SHARE, ceil(round(least * 100, 3)) / 100)
    if share >= _LARGEST_SHARE or least > 1:
        return []
    known = f"; {size(missing)} are missing" if missing else ""
    return [
        Remedy(
            do=_spelled(facts, new),
            effect=f"more than {share:g}: what weights and graphs leave of it is the KV cache"
            + known
            + ("" if is_told else f"; {share:g} is the default"),
            grade="arithmetic" if missing and total else "known",
            price="less room beside the engine",
        )
    ]


def _shorter(facts: TextFacts) -> list[Remedy]:
    """Take the length that the engine says would fit."""
    told = facts.says(_LENGTH)
    if not told:
        return []
    length = told[1] or told[2]
    by_trainer = _spelling(facts)[0].startswith("--vllm")
    return [
        Remedy(
            do=f"--vllm_max_model_length {length}" if by_trainer else f"--max-model-len {length}",
            effect="the longest request that the KV cache holds as it is",
            grade="arithmetic",
            price="longer requests are refused",
        )
    ]


def _fewer_at_once(facts: TextFacts) -> list[Remedy]:
    """Warm up for fewer sequences: the engine measures its activations with all of them."""
    name, _ = _spelling(facts)
    if not name.startswith(("--gpu", "--mem")):
        return []
    flag, usual = ("--cuda-graph-max-bs", 32) if name.startswith("--mem") else _MOST_SEQUENCES
    told = facts.rows(flag.strip("-").replace("-", "[-_]"))
    return [
        Remedy(
            do=f"{flag} {max(1, told // 2) if told else usual}",
            effect="the sampler and the graphs are warmed up for fewer sequences",
            grade="known",
            price="fewer sequences at once",
        )
    ]


def _weights(facts: TextFacts) -> list[Remedy]:
    """Put less of the weights on each card."""
    name, _ = _spelling(facts)
    return [
        Remedy(
            do="--tp 2" if name.startswith("--mem") else "--tensor-parallel-size 2",
            effect="half of the weights on each of two cards; a quantised checkpoint helps too",
            grade="known",
            price="another card",
        )
    ]


def _allocator(facts: TextFacts) -> list[Remedy]:
    if _spelling(facts)[0].startswith(("--gpu", "--mem")):
        return []
    return [
        Remedy(
            do='eval "$(trainer-plugins env --vllm)"',
            effect="allocator settings that go with vLLM in the training process",
            grade="known",
        )
    ]


def _share(facts: TextFacts) -> tuple[float, bool]:
    """Return the share in force, and whether the text tells it."""
    told = facts.says(_WANTED) or facts.says(_SETTING)
    return (float(told["share"]), True) if told else (_spelling(facts)[1], False)


def _spelling(facts: TextFacts) -> tuple[str, float]:
    return next((name, share) for words, name, share in _SPELLINGS if facts.says(words))


def _spelled(facts: TextFacts, share: float) -> str:
    """Write the setting as the text does, if it is a flag, an argument or an override there."""
    told = facts.says(_SETTING)
    if told and (told["name"].startswith("-") or told["sep"].strip() == "="):
        return f"{told['name']}{told['sep']}{share:g}"
    return f"{_spelling(facts)[0]}{share:g}"


def _total(facts: TextFacts) -> int | None:
    told = facts.says(_TOTAL)
    cards = facts.cards[facts.oom.device or 0 :]
    return facts.total or (int(float(told[1]) * GIB) if told else cards[0][1] if cards else None)


def _missing(facts: TextFacts) -> int:
    """Return how much more the KV cache needs, as far as the engine says it; else 0."""
    if facts.asked and facts.free is not None:
        return max(0, facts.asked - facts.free)
    below = facts.says(_KV_CACHE)
    return int(-float(below[1]) * GIB) if below else 0


def _down(share: float) -> float:
    return floor(round(share * 100, 3)) / 100
