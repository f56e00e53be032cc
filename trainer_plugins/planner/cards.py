"""List cards by name: the memory of each, and what a process loses before the first tensor."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.units import GIB, MIB, parse_size, size

GUESSED_CONTEXT_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Describes one kind of card. Sizes in bytes."""

    name: str
    capacity_bytes: int
    """The total memory that torch reports, which is less than the card is sold with."""

    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132
    """By which kernels of Triton divide their work; each may keep a sum of its own."""

    context_bytes: int = GUESSED_CONTEXT_BYTES
    """What CUDA, its libraries and their code take in one process.

    It depends on the driver and on what the process imports.
    """

    context_source: str | None = None
    """Who measured the context; None if it is a guess."""


def about_context(card: Card) -> str:
    """Say in one line where the context of a plan comes from."""
    if card.context_source is not None:
        return f"the context of {size(card.context_bytes)} on {card.name}: {card.context_source}"
    return (
        f"a context of {size(card.context_bytes)} on {card.name} is a guess: "
        "contexts of 141 MiB to 1.3 GiB have been published; --calibrate measures it"
    )


def about_size(card: Card) -> str:
    """Say what a size in GB was taken for; empty for a card with a name, and for GiB.

    >>> about_size(card_of("24GB")).partition(";")[0]
    '24GB is taken for 24,000,000,000 bytes, which are 22.35 GiB'
    """
    if not re.fullmatch(r"[\d.]+\s*[kmg]b", card.name.strip(), re.IGNORECASE):
        return ""
    return (
        f"{card.name} is taken for {card.capacity_bytes:,} bytes, which are"
        f" {size(card.capacity_bytes)}; cards that are sold with that number differ: name the card,"
        " or give GiB"
    )


def _card(
    name: str,
    capacity_gib: float,
    capability: tuple[int, int],
    num_multiprocessors: int,
    context: tuple[int, str] | None = None,
) -> Card:
    return Card(
        name=name,
        capacity_bytes=int(capacity_gib * GIB),
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        context_bytes=context[0] if context is not None else GUESSED_CONTEXT_BYTES,
        context_source=context[1] if context is not None else None,
    )


# Each capacity is from a published message of torch ("GPU 0 has a total capacity of 79.10 GiB").
# Drivers and ECC differ, so it is the smallest that was found. The RTX 6000 Ada has that of the RTX
# A6000, which has as many memory chips. Multiprocessors are those of NVIDIA's data sheets.
CARDS = (
    _card("t4", 14.56, (7, 5), 40, (141 * MIB, "published by fitcheck-llm 0.3.1, on a T4")),
    _card("v100-16gb", 15.77, (7, 0), 80),
    _card("v100-32gb", 31.73, (7, 0), 80),
    _card("rtx3090", 23.68, (8, 6), 82),
    _card("rtx4090", 23.51, (8, 9), 128),
    _card("rtx5090", 31.36, (12, 0), 170),
    _card(
        "rtxa6000", 47.40, (8, 6), 84, (750 * 10**6, "what vramcalc 0.1.2 counts on an RTX A6000")
    ),
    _card("rtx6000ada", 47.40, (8, 9), 142),
    _card("a10g", 21.98, (8, 6), 80),
    _card("l4", 21.95, (8, 9), 58),
    _card("l40s", 44.34, (8, 9), 142),
    _card("a100-40gb", 39.38, (8, 0), 108),
    _card("a100-80gb", 79.14, (8, 0), 108),
    _card("h100-80gb", 79.10, (9, 0), 132),
    _card("h200-141gb", 139.72, (9, 0), 132),
    _card("b200-180gb", 178.35, (10, 0), 148),
)
_BY_NAME = {card.name: card for card in CARDS}


def card_of(text: str) -> Card:
    """Find a card by its name, or make one with a given size.

    >>> card_of("H100-80GB").capability, card_of("24GiB").capacity_bytes // MIB
    ((9, 0), 24576)

    Raises:
        PlanError: the text is neither a known name nor a size.
    """
    name = re.sub(r"[\s_]", "", text).lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    if re.match(r"[\d.]+\s*[kmg]i?b$", text.strip(), re.IGNORECASE):
        try:
            return Card(name=text, capacity_bytes=parse_size(text))
        except ValueError as error:
            raise PlanError(f"--gpu: {error}") from error
    # A part of a name may stand for several: a100 is sold with 40 and with 80 GB.
    near = [each for each in _BY_NAME if name and name in each]
    near = near or get_close_matches(name, _BY_NAME, n=1)
    hint = f"is it {' or '.join(near)}?" if near else f"known cards are {', '.join(_BY_NAME)}."
    raise PlanError(
        f"no card is known by the name {text!r}: {hint} You can also give a size, as in 24GiB"
    )
