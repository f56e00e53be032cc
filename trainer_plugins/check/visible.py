"""Says which cards CUDA will show a process, by the text of CUDA_VISIBLE_DEVICES.

CUDA reads the list from the left and stops at the first entry that names nothing: CUDA C++
Programming Guide, "CUDA Environment Variables". Numbers, UUIDs and MIG slices cannot be mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_plugins.check.facts import CardFacts


@dataclass(frozen=True, slots=True)
class Visible:
    """Holds the cards and slices that a process sees, in its order."""

    uuids: tuple[str, ...]
    trouble: str = ""
    """Why entries of the list are not seen; empty if all are."""

    by_number: bool = False
    """Whether cards are named by numbers, which depend on CUDA_DEVICE_ORDER."""


def visible(text: str | None, cards: Sequence[CardFacts]) -> Visible:
    """Read the list as CUDA does.

    Args:
        text: CUDA_VISIBLE_DEVICES; None if it is not set.
        cards: the cards of this machine, in the order of the driver.
    """
    if text is None:
        return Visible(tuple(each for card in cards for each in card.slices[:1] or (card.uuid,)))
    found: list[str] = []
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    kind = _kind(entries[0]) if entries else ""
    for entry in entries:
        if _kind(entry) != kind:
            why = f"{entry} is {_kind(entry)}, and the list began with {kind}: they cannot be mixed"
            return Visible(tuple(found), why, kind == _NUMBER)
        named, why = _named(entry, cards)
        if named in found:
            # torch/cuda/__init__.py, _parse_visible_devices: CUDA reports no devices then
            return Visible((), f"{entry} names a card twice, so CUDA shows none", kind == _NUMBER)
        if named is None:
            return Visible(tuple(found), why, kind == _NUMBER)
        found.append(named)
    return Visible(tuple(found), by_number=kind == _NUMBER)


_NUMBER, _CARD, _SLICE = "a number", "a card's UUID", "a MIG slice"


def _kind(entry: str) -> str:
    if entry.startswith("GPU-"):
        return _CARD
    return _SLICE if entry.startswith("MIG-") else _NUMBER


def _named(entry: str, cards: Sequence[CardFacts]) -> tuple[str | None, str]:
    """Return the UUID that an entry names, or why it names none."""
    if _kind(entry) == _NUMBER:
        if entry.isdecimal() and int(entry) < len(cards):
            return cards[int(entry)].uuid, ""
        return None, f"there is no card {entry}: this machine has {len(cards)}"
    there = [
        each
        for card in cards
        for each in (card.slices if _kind(entry) == _SLICE else (card.uuid,))
        if each.startswith(entry)
    ]
    if len(there) == 1:
        return there[0], ""
    what = "no card or slice has the UUID" if not there else f"{len(there)} cards begin with"
    return None, f"{what} {entry}"
