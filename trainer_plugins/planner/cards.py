"""List cards by name: their memory, what a process loses before its first tensor, their kernels."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

from trainer_plugins.compiled import cache_folder
from trainer_plugins.planner.plan import Moment, PlanError
from trainer_plugins.units import GIB, MIB, parse_size, size

GUESSED_CONTEXT_BYTES = 512 * MIB

# an attention kernel, or what torch falls back to
Kernel = Literal["cuDNN", "flash", "memory-efficient", "all scores"]

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads of a multiprocessor; 2048 of what is not here (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""

_MAX_HEAD = 256  # of flash and of cuDNN
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Card:
    """Describes one kind of card. Sizes in bytes."""

    name: str
    capacity_bytes: int  # that torch reports, less than the card is sold with
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132  # kernels may keep sums for each
    context_bytes: int = GUESSED_CONTEXT_BYTES  # of CUDA and its libraries in a process
    context_source: str | None = None  # who measured the context; None if it is a guess
    is_unified: bool = False  # whether its memory is the main memory of its machine

    @property
    def num_threads(self) -> int:
        """Return the threads of a multiprocessor."""
        return _THREADS.get(self.capability, 2048)


def of_size(name: str, total_bytes: int, *, is_unified: bool = False) -> Card:
    """Return a card of which only the size is known; a test's may be too small for a context."""
    if total_bytes > GUESSED_CONTEXT_BYTES:
        return Card(name, total_bytes, is_unified=is_unified)
    return Card(
        name, total_bytes, context_bytes=0, context_source="none has room in so small a card"
    )


def about_context(card: Card) -> str:
    """Say in one line where the context of a plan comes from."""
    if card.context_source is not None:
        return f"the context of {size(card.context_bytes)} on {card.name}: {card.context_source}"
    return (
        f"a context of {size(card.context_bytes)} on {card.name} is a guess: "
        "contexts of 141 MiB to 1.3 GiB have been published; --calibrate measures it"
    )


def in_one_memory(card: Card, process_bytes: int, host_peaks: Mapping[Moment, int]) -> int:
    """Return what main memory takes of a card whose memory it is, after the load; else 0.

    The weights that are read from a file are given up when they are on the card.
    """
    if not card.is_unified:
        return 0
    later = (num_bytes for moment, num_bytes in host_peaks.items() if moment != "load")
    return process_bytes + max(later, default=0)


def about_size(card: Card) -> str:
    """Say how a size in GB was read; empty for a card with a name, and for GiB.

    >>> about_size(card_of("24GB")).partition(";")[0]
    '24GB is read as 24,000,000,000 bytes, which are 22.35 GiB'
    """
    if not re.fullmatch(r"[\d.]+\s*[kmg]b", card.name.strip(), re.IGNORECASE):
        return ""
    return (
        f"{card.name} is read as {card.capacity_bytes:,} bytes, which are"
        f" {size(card.capacity_bytes)}; cards that are sold with that number differ: name the card,"
        " or give GiB"
    )


# Each capacity is from a published message of torch ("GPU 0 has a total capacity of 79.10 GiB").
# Drivers and ECC differ, so it is the smallest that was found. The RTX 6000 Ada has that of the RTX
# A6000, which has as many memory chips. Multiprocessors are those of NVIDIA's data sheets.
CARDS = (
    Card("t4", int(14.56 * GIB), (7, 5), 40, 141 * MIB, "published by fitcheck-llm 0.3.1, on a T4"),
    Card("v100-16gb", int(15.77 * GIB), (7, 0), 80),
    Card("v100-32gb", int(31.73 * GIB), (7, 0), 80),
    Card("rtx3090", int(23.68 * GIB), (8, 6), 82),
    Card("rtx4090", int(23.51 * GIB), (8, 9), 128),
    Card("rtx5090", int(31.36 * GIB), (12, 0), 170),
    Card(
        "rtxa6000",
        int(47.40 * GIB),
        (8, 6),
        84,
        750 * 10**6,
        "what vramcalc 0.1.2 counts on an RTX A6000",
    ),
    Card("rtx6000ada", int(47.40 * GIB), (8, 9), 142),
    Card("a10g", int(21.98 * GIB), (8, 6), 80),
    Card("l4", int(21.95 * GIB), (8, 9), 58),
    Card("l40s", int(44.34 * GIB), (8, 9), 142),
    Card("a100-40gb", int(39.38 * GIB), (8, 0), 108),
    Card("a100-80gb", int(79.14 * GIB), (8, 0), 108),
    Card(
        *("h100-80gb", int(79.10 * GIB), (9, 0), 132, 758 * MIB),
        "as measured with torch 2.11 for CUDA 13 and driver 580 (docs/on_a_card.md)",
    ),
    Card("h200-141gb", int(139.72 * GIB), (9, 0), 132),
    Card("b200-180gb", int(178.35 * GIB), (10, 0), 148),
    Card("gb10", int(121.69 * GIB), (12, 1), 48, is_unified=True),  # what vLLM printed on one
)
_BY_NAME = {card.name: card for card in CARDS}


class Speed(NamedTuple):
    """Holds what a card can do at most."""

    teraflops: float  # of dense bf16, of fp16 before Ampere, with sums in float32
    memory: float  # bytes a second
    bus: float  # bytes a second to main memory, one way: what is reached, not PCIe's own figure
    link: float  # bytes a second to other cards, one way: NVLink, else the bus


def _speed(teraflops: float, memory_gb: float, bus_gb: float, link_gb: float | None) -> Speed:
    return Speed(teraflops, memory_gb * 1e9, bus_gb * 1e9, (link_gb or bus_gb) * 1e9)


# NVIDIA's data sheets of the cards (SXM where there are several); of the RTX cards its white papers
# of GA102, Ada and Blackwell. They print twice the dense figure where they count sparse matrices,
# and NVLink both ways. The bus of PCIe 5.0 is what docs/on_a_card.md measured, that of 4.0
# `BUS_BYTES_PER_SECOND`, of 3.0 half of it. gb10 has no figure for bf16.
SPEEDS = {
    "t4": _speed(65, 300, 12, None),
    "v100-16gb": _speed(125, 900, 12, 150),
    "v100-32gb": _speed(125, 900, 12, 150),
    "rtx3090": _speed(71, 936, 25, None),
    "rtx4090": _speed(165, 1008, 25, None),
    "rtx5090": _speed(209, 1792, 55, None),
    "rtxa6000": _speed(155, 768, 25, None),
    "rtx6000ada": _speed(364, 960, 25, None),
    "a10g": _speed(70, 600, 25, None),
    "l4": _speed(121, 300, 25, None),
    "l40s": _speed(362, 864, 25, None),
    "a100-40gb": _speed(312, 1555, 25, 300),
    "a100-80gb": _speed(312, 2039, 25, 300),
    "h100-80gb": _speed(989, 3350, 55, 450),
    "h200-141gb": _speed(989, 4800, 55, 450),
    "b200-180gb": _speed(2250, 8000, 55, 900),
}


def card_of(text: str) -> Card:
    """Find a card by its name, or make one with a given size.

    >>> card_of("H100-80GB").capability, card_of("24GiB").capacity_bytes // MIB
    ((9, 0), 24576)
    >>> card_of("61GiB unified").is_unified  # one memory for both, as of Jetson and Apple
    True
    >>> card_of("64MiB").context_bytes
    0
    """
    name = re.sub(r"[\s_]", "", text).lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    sized = re.match(r"([\d.]+\s*[kmg]i?b)([\s_-]unified)?$", text.strip(), re.IGNORECASE)
    if sized:
        try:
            return of_size(text, parse_size(sized[1]), is_unified=sized[2] is not None)
        except ValueError as error:
            raise PlanError(f"--gpu: {error}") from error
    # A part of a name may stand for several: a100 is sold with 40 and with 80 GB.
    near = [each for each in _BY_NAME if name and name in each]
    near = near or get_close_matches(name, _BY_NAME, n=1)
    hint = f"is it {' or '.join(near)}?" if near else f"known cards are {', '.join(_BY_NAME)}."
    raise PlanError(f"no card is named {text!r}: {hint} You can also give a size, as in 24GiB")


def context_file(card_name: str) -> Path:
    """Return the file for the context of this card with the installed torch; it may not exist."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", card_name)
    return cache_folder() / "contexts" / f"{name}-torch{version('torch')}.json"


def keep_context(card_name: str, context_bytes: int, measured_in: Path) -> Path:
    """Keep a context that was measured in the folder of a run, and return its file."""
    file = context_file(card_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"context_bytes": context_bytes, "measured_in": str(measured_in)}))
    draft.replace(file)
    return file


def with_measured_context(card: Card) -> Card:
    """Return the card with the context measured on this machine, or unchanged if there is none."""
    file = context_file(card.name)
    try:
        kept = json.loads(file.read_text())
        measured, folder = int(kept["context_bytes"]), kept["measured_in"]
    except (OSError, ValueError, KeyError, TypeError):
        return card
    source = f"measured in {folder} and kept in {file}; --no-calibration plans without it"
    return replace(card, context_bytes=measured, context_source=source)


def prefers_cudnn(torch_version: str, capability: tuple[int, int]) -> bool:
    """Return whether attention asks cuDNN first (sdp_utils.cpp, check_prefer_cudnn_attention).

    It needs cuDNN 9.15.1, which comes with CUDA 13: with the builds that PyPI has since torch 2.11.
    """
    number, _, build = torch_version.partition("+")
    is_new = [int(part) for part in number.split(".")[:2]] >= [2, 11]
    return is_new and capability[0] in (9, 10) and not build.startswith("cu12")


def attention_kernel(
    dtype: str,
    head_size: int,
    value_size: int,
    capability: tuple[int, int],
    has_mask: bool,
    has_groups: bool = False,
    asks_cudnn: bool = False,
) -> Kernel:
    """Return the kernel that `scaled_dot_product_attention` takes on a card (sdp_utils.cpp).

    Flash and cuDNN can share keys among groups of heads, the memory-efficient kernel cannot.
    """
    is_half = dtype in ("float16", "bfloat16")
    sizes = (head_size, value_size)
    if asks_cudnn and is_half and max(sizes) <= _MAX_HEAD and not any(each % 8 for each in sizes):
        return "cuDNN"
    fits_flash = is_half and value_size == head_size <= _MAX_HEAD
    if fits_flash and capability >= _AMPERE and not has_mask:
        return "flash"
    has_kernel = dtype != "float64" and (dtype != "bfloat16" or capability >= _AMPERE)
    if has_kernel and head_size % (8 if is_half else 4) == 0 and not has_groups:
        return "memory-efficient"
    return "all scores"
