"""Adjust an inference engine's share of the card: smaller, larger, or shorter requests."""

import re
from math import ceil, floor
from typing import NamedTuple

from trainer_plugins.advice import Advice, Door, smaller_share
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.shared import remedy
from trainer_plugins.explain.text.causes.others import SHARE
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import GIB, size

_WANTED = r"desired GPU memory utilization \((?P<share>[\d.]+),"
_TOTAL = r"total_gpu_memory=([\d.]+)GiB"
_KV_CACHE = r"Available KV cache memory: (-[\d.]+) GiB"
_LENGTH = r"maximum model length is (\d+)|stored in KV cache \((\d+)\)"
_BESIDE_TRAINING = 0.4  # of a card that also trains, where no number shows what is missing
_LARGEST_SHARE, _SMALLEST_SHARE, _STEP = 0.95, 0.1, 0.05


class _Engine(NamedTuple):
    words: str
    door: Door
    usual_share: float  # its default


_PROGRAMS = (
    _Engine(r"\bverl\b|actor_rollout_ref", Door.VERL, 0.5),
    _Engine(r"sglang(?!\s*: *not)|mem.fraction.static", Door.SGLANG, 0.88),
    _Engine(r"(?i)\btrl\b|GRPO|colocate|use_vllm|vllm_gpu_mem", Door.TRL, 0.3),
    _Engine(r"", Door.VLLM, 0.9),
)


def lower(one: Advice, facts: TextFacts) -> Remedy | None:
    """Lower the share below the one in the text, by the missing memory or to the free memory."""
    refuses_to_start = facts.oom.source == "engine"
    if refuses_to_start and not is_startup(facts):
        return None
    (share, default), total = _share(facts), _total(facts)
    free, asked = facts.free_bytes, facts.asked_bytes
    if refuses_to_start and total and free is not None:
        new = floor(round(free / total * 100, 3)) / 100
        if new > share:  # what it asked for was free: weights, graphs and cache exceed it together
            return remedy(one, _spell(one, facts, smaller_share(share)), one.effect + default)
        effect = f"limits the engine to {size(new * total)} of the {size(free)} that are free"
    elif total and free is not None and asked and asked > free:
        missing = asked - free
        new = smaller_share(share, missing / total)
        given = size((share - new) * total)
        effect = f"releases {given}; at least {size(missing)} are missing"
    else:
        new, effect = smaller_share(share), one.effect
        if is_in_training(facts):
            new = min(new, _BESIDE_TRAINING)
    if new < (_SMALLEST_SHARE if refuses_to_start else _STEP):
        return None
    is_known = total and free is not None
    return remedy(one, _spell(one, facts, new), effect + default, by_arithmetic=is_known)


def higher(one: Advice, facts: TextFacts) -> Remedy | None:
    """Raise the share, if possible: weights and graphs have left no room for the cache."""
    if not _has_no_cache(facts) or " runs out of memory" in facts.oom.text:
        return None
    (share, default), total, missing = _share(facts), _total(facts), 0
    if facts.asked_bytes and facts.free_bytes is not None:
        missing = max(0, facts.asked_bytes - facts.free_bytes)
    elif below := facts.says(_KV_CACHE):
        missing = int(-float(below[1]) * GIB)
    least = max(share + _STEP, share + missing / total if total else 0)
    if share >= _LARGEST_SHARE or least > 1:
        return None
    new = min(_LARGEST_SHARE, ceil(round(least * 100, 3)) / 100)
    known = f"; {size(missing)} are missing" if missing else ""
    effect = (
        f"gives the KV cache the rest of a share above {share:g}, after weights and"
        f" graphs{known}{default}"
    )
    return remedy(one, _spell(one, facts, new), effect, by_arithmetic=missing and total)


def shorter(one: Advice, facts: TextFacts) -> Remedy | None:
    """Take the length that would fit according to the engine."""
    found = facts.says(_LENGTH) if _has_no_cache(facts) else None
    if not found:
        return None
    door = Door.TRL if _program(facts).door is Door.TRL else Door.VLLM
    return remedy(one, door, by_arithmetic=True, length=found[1] or found[2])


def fewer_sequences(one: Advice, facts: TextFacts) -> Remedy | None:
    """Warm up with fewer sequences: the engine measures its activations with all of them."""
    if named := re.search(r"smaller number for `(--[\w-]+)`", facts.oom.text):
        return remedy(
            one, f"{named[1]} 8", "follows the engine's suggestion, which limits its memory"
        )
    door = _program(facts).door
    has_length = _has_no_cache(facts) and facts.says(_LENGTH)
    if door not in (Door.VLLM, Door.SGLANG) or is_startup(facts) or has_length:
        return None
    name = one.flag(door).split()[0]
    found = facts.settings.count(name.strip("-").replace("-", "[-_]"))
    usual = 64 if door is Door.VLLM else 32
    return remedy(one, door, sequences=max(1, found // 2) if found else usual)


def spread_weights(one: Advice, facts: TextFacts) -> Remedy | None:
    """Spread the weights over more cards."""
    door = Door.SGLANG if _program(facts).door is Door.SGLANG else Door.VLLM
    return remedy(one, door) if _has_no_cache(facts) else None


def is_in_training(facts: TextFacts) -> bool:
    """Return whether an engine that has started runs in the training process."""
    return _program(facts).door in (Door.TRL, Door.VERL) and facts.oom.source != "engine"


def is_startup(facts: TextFacts) -> bool:
    """Return whether the engine found less free memory than its share."""
    return facts.oom.source == "engine" and " on startup" in facts.oom.text


def _has_no_cache(facts: TextFacts) -> bool:
    return facts.oom.source == "engine" and not is_startup(facts)


def _share(facts: TextFacts) -> tuple[float, str]:
    """Return the share in force, and a clause if it is only the program's default."""
    if found := facts.says(_WANTED) or facts.says(SHARE):
        return float(found["share"]), ""
    usual = _program(facts).usual_share
    return usual, f"; {usual:g} is the default"


def _program(facts: TextFacts) -> _Engine:
    return next(each for each in _PROGRAMS if facts.says(each.words))


def _spell(one: Advice, facts: TextFacts, share: float) -> str:
    """Write the setting as in the text, if it is a flag, an argument or an override there."""
    found = facts.says(SHARE)
    if found and (found["name"].startswith("-") or found["sep"].strip() == "="):
        return f"{found['name']}{found['sep']}{share:g}"
    return one.flag(_program(facts).door, share=f"{share:g}")


def _total(facts: TextFacts) -> int | None:
    found = facts.says(_TOTAL)
    cards = facts.cards[facts.oom.device or 0 :]
    return facts.total_bytes or (
        int(float(found[1]) * GIB) if found else cards[0][1] if cards else None
    )
