"""Find GPUs by name (cards.txt): memory, context size, and the kernels they choose."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from trainer_plugins.planner.plan import Moment, PlanError
from trainer_plugins.units import GIB, MIB, parse_size, size

GUESSED_CONTEXT_BYTES = 512 * MIB

# an attention kernel, or torch's fallback, which writes all scores
Kernel = Literal["cuDNN", "flash", "memory-efficient", "all scores"]

_MAX_HEAD = 256  # the limit of flash and of cuDNN
_AMPERE = (8, 0)

_PER_MULTIPROCESSOR = {
    (7, 5): (1024, 64), (7, 0): (2048, 96), (8, 0): (2048, 164), (8, 6): (1536, 100),
    (8, 9): (1536, 100), (12, 0): (1536, 100), (12, 1): (1536, 100),
}  # fmt: skip
"""Threads and KiB of shared memory of a multiprocessor, by capability; (2048, 228) for all others
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
"""


class Speed(NamedTuple):
    """Holds the peak rates of a card."""

    teraflops: float  # dense bf16 (fp16 before Ampere), accumulated in float32
    memory: float  # bytes a second
    bus: float  # bytes a second to main memory, one way: the rate reached, not PCIe's nominal one
    link: float  # bytes a second to other cards, one way: NVLink, else the bus


@dataclass(frozen=True, slots=True)
class Card:
    """Describes one kind of card. Sizes in bytes."""

    name: str
    capacity_bytes: int  # as torch reports it: less than the advertised size
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132  # some kernels keep a sum for each
    context_bytes: int = GUESSED_CONTEXT_BYTES  # CUDA and its libraries in one process
    context_source: str | None = None  # who measured the context; None if it is a guess
    is_unified: bool = False  # whether it shares the main memory of its machine
    l2_mib: int = 50  # the second-level cache
    speed: Speed | None = None  # None if unknown
    guess: str = ""  # which of these figures are guesses, in words

    @property
    def of_multiprocessor(self) -> tuple[int, int]:
        """Return the threads and the KiB of shared memory of a multiprocessor."""
        return _PER_MULTIPROCESSOR.get(self.capability, (2048, 228))


NO_CARD = Card(name="a card without a limit", capacity_bytes=4096 * GIB)
"""For a run that names no card: the plan gives its memory, but not whether it fits."""


def describe_context(card: Card) -> str:
    """Say in one line where the plan's context size comes from."""
    if card.context_source is not None:
        return f"the context of {size(card.context_bytes)} on {card.name}: {card.context_source}"
    return (
        f"a context of {size(card.context_bytes)} on {card.name} is a guess: published"
        " contexts take 141 MiB to 1.3 GiB; measure it with --calibrate"
    )


def count_unified_memory(card: Card, process_bytes: int, host_peaks: Mapping[Moment, int]) -> int:
    """Return the bytes that the host takes of a unified memory after loading; 0 otherwise.

    The host copies of weights are freed once the weights are on the card.
    """
    if not card.is_unified:
        return 0
    later = (num_bytes for moment, num_bytes in host_peaks.items() if moment != "load")
    return process_bytes + max(later, default=0)


def describe_size(card: Card) -> str:
    """Explain how a size in GB was read; empty for a card's name and for GiB.

    >>> describe_size(card_of("24GB")).partition(";")[0]
    '24GB is read as 24,000,000,000 bytes, which are 22.35 GiB'
    """
    if not re.match(r"[\d.]+\s*[kmg]b\b", card.name.strip(), re.IGNORECASE):
        return ""
    return (
        f"{card.name} is read as {card.capacity_bytes:,} bytes, which are"
        f" {size(card.capacity_bytes)}; cards sold with that number differ: name the card, or"
        " give GiB"
    )


_CONTEXTS: Mapping[str, tuple[int, str]] = {
    "t4": (141 * MIB, "published by fitcheck-llm 0.3.1, on a T4"),
    "rtxa6000": (750 * 10**6, "what vramcalc 0.1.2 counts on an RTX A6000"),
    "h100-80gb": (
        758 * MIB,
        "as measured with torch 2.11 for CUDA 13 and driver 580 (docs/internals/measured.md)",
    ),
}
_UNIFIED = ("gb10",)  # as vLLM printed on one

# The usual card up to each size in GiB: its kernels stand for those of a card without a name.
_USUAL = (
    (9, "rtx4060"), (14.4, "rtx4070"), (14.8, "t4"), (19, "rtx4080"), (28, "rtx4090"),
    (36, "rtx5090"), (43, "a100-40gb"), (60, "l40s"), (83, "h100-80gb"), (97, "rtxpro6000"),
    (150, "h200-141gb"), (220, "b200-180gb"), (float("inf"), "b300"),
)  # fmt: skip


def _card(name: str, gib: str, capability: str, *numbers: str) -> Card:
    """Build a card from a line of the table."""
    sold = float(gib.removeprefix("~"))
    capacity = 0.98 * sold - 0.15 if gib.startswith("~") else sold
    context_bytes, source = _CONTEXTS.get(name, (GUESSED_CONTEXT_BYTES, None))
    guess = f"capacity of {capacity:.2f} GiB, from the {sold:g} GB on its label"
    card = Card(
        *(name, int(capacity * GIB)),
        context_bytes=context_bytes,
        context_source=source,
        is_unified=name in _UNIFIED,
        guess=guess if gib.startswith("~") else "",
    )
    if capability == "amd":
        return replace(card, guess="only its size is known; kernels of CUDA's sm_90")
    major, minor = map(int, capability.split("."))
    sms, l2_mib, *speeds = map(int, numbers)
    if speeds:
        card = replace(card, speed=Speed(speeds[0], *(10**9 * each for each in speeds[1:])))
    return replace(card, capability=(major, minor), num_multiprocessors=sms, l2_mib=l2_mib)


_LINES = Path(__file__).with_name("cards.txt").read_text().partition("\n\n")[2].splitlines()[1:]
CARDS = tuple(_card(*line.split()) for line in _LINES)
_BY_NAME = {card.name: card for card in CARDS}

_NO_NAME = re.compile(
    r"nvidia|amd|instinct|geforce|quadro|tesla|rtx|graphics|gpu|generation|blackwell|superchip|"
    r"workstation|server|edition|max-?q|sxm\d?|hbm\d?e?|(?<=\d)\s*gi?b\b"
)
"""Words in the names of drivers and shops that do not distinguish cards."""


def card_of(text: str) -> Card:
    """Find a card by name, or build one from a size (with a capability if given).

    >>> card_of("NVIDIA A100-SXM4-80GB").name, card_of("rtx 6000 pro").capability
    ('a100-80gb', (12, 0))
    >>> card_of("15.99GiB").capability, card_of("15.99GiB,sm_80").capability
    ((8, 9), (8, 0))
    >>> card_of("61GiB unified").is_unified  # one memory for both, as on Jetson and Apple
    True
    >>> card_of("64MiB").context_bytes
    0
    """
    sized = re.fullmatch(
        r"([\d.]+\s*[kmg]i?b)([\s_-]unified)?(?:[\s,]+sm_?(\d+)(\d))?", text.strip(), re.IGNORECASE
    )
    if sized:
        try:
            return make_card(text, parse_size(sized[1]), sized[2] is not None, sized[3], sized[4])
        except ValueError as error:
            raise PlanError(f"--gpu: {error}") from error
    asked = _parts(text)
    for wanted in (asked, tuple(part for part in asked if part != "pcie")):
        found = [card for card in CARDS if _parts(card.name) == wanted]
        # Part of a name may match several: a100 comes with 40 and with 80 GB.
        near = [card for card in CARDS if wanted and {*wanted} <= {*_parts(card.name)}]
        if found or len(near) == 1:
            return (found or near)[0]
    names = [card.name for card in near]
    names = names or get_close_matches(re.sub(r"[\s_]", "", text).lower(), _BY_NAME, n=3)
    hint = f"did you mean {' or '.join(names)}?" if names else f"choose from {', '.join(_BY_NAME)}."
    raise PlanError(f"unknown GPU {text!r}: {hint} You can also give its memory, as in 24GiB")


def _parts(name: str) -> tuple[str, ...]:
    """Return the words and numbers that distinguish a card, sorted.

    >>> _parts("NVIDIA RTX PRO 6000 Blackwell Server Edition"), _parts("rtx5090laptop")
    (('6000', 'pro'), ('5090', 'laptop'))
    """
    text = _NO_NAME.sub(" ", name.lower()).replace("super", " super ").replace("laptop", " laptop ")
    return tuple(sorted(re.findall(r"[a-z]+|\d+", text)))


def make_card(
    text: str, capacity_bytes: int, is_unified: bool = False, major: str = "", minor: str = ""
) -> Card:
    """Build a card of a given size; without a capability, like the usual card of that size."""
    usual = next(name for most, name in _USUAL if capacity_bytes <= most * GIB)
    like = _BY_NAME[usual]
    generation = f"sm_{like.capability[0]}{like.capability[1]}"
    guess = (
        f"kernels of {usual} ({generation}), guessed from its size; {text.strip()},sm_80 is another"
    )
    if major:
        asked = (int(major), int(minor))
        known = [card for card in CARDS if card.capability == asked]
        if not known:
            raise ValueError(f"no card here has the capability sm_{major}{minor}")
        like, guess = min(known, key=lambda card: abs(card.capacity_bytes - capacity_bytes)), ""
    has_room = capacity_bytes > GUESSED_CONTEXT_BYTES  # not on a test's tiny card
    return replace(
        *(like,),
        name=text,
        capacity_bytes=capacity_bytes,
        context_bytes=GUESSED_CONTEXT_BYTES if has_room else 0,
        context_source=None if has_room else "no GPU generation has so small a card",
        is_unified=is_unified,
        speed=None,
        guess=guess,
    )


def prefers_cudnn(torch_version: str, capability: tuple[int, int]) -> bool:
    """Return whether attention tries cuDNN first (sdp_utils.cpp, check_prefer_cudnn_attention).

    It needs cuDNN 9.15.1, which comes with CUDA 13: PyPI's builds have it since torch 2.11.
    """
    number, _, build = torch_version.partition("+")
    is_new = [int(part) for part in number.split(".")[:2]] >= [2, 11]
    return is_new and capability[0] in (9, 10) and not build.startswith("cu12")


def attention_kernel(
    dtype: str, head_size: int, capability: tuple[int, int], *, has_mask: bool, asks_cudnn: bool
) -> Kernel:
    """Return the kernel that `scaled_dot_product_attention` picks on a card (sdp_utils.cpp)."""
    is_half = dtype in ("float16", "bfloat16")
    if asks_cudnn and is_half and head_size <= _MAX_HEAD and head_size % 8 == 0:
        return "cuDNN"
    if is_half and head_size <= _MAX_HEAD and capability >= _AMPERE and not has_mask:
        return "flash"
    has_kernel = dtype != "float64" and (dtype != "bfloat16" or capability >= _AMPERE)
    if has_kernel and head_size % (8 if is_half else 4) == 0:
        return "memory-efficient"
    return "all scores"
