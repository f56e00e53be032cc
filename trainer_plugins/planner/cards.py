"""List GPUs by name: memory, context size, and the kernels they choose."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
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
    def num_threads(self) -> int:
        """Return the maximum number of threads of a multiprocessor."""
        return _PER_MULTIPROCESSOR.get(self.capability, (2048, 228))[0]

    @property
    def shared_kib(self) -> int:
        """Return the shared memory of a multiprocessor in KiB."""
        return _PER_MULTIPROCESSOR.get(self.capability, (2048, 228))[1]


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


# GiB: from a published message of torch ("GPU 0 has a total capacity of 79.10 GiB"). Drivers and
# ECC differ, so this is the smallest we found. ~24 is the advertised size: torch gets about 0.98 of
# it less 0.15 GiB, slightly less than on any GeForce we found a figure for. A card with the same
# memory chips has the figure of its sister (rtx6000ada, a10, a40, l20, l40; h800 and a800 are an
# H100 and an A100). For b300 we know nvidia-smi's 275,040 MiB, from which we subtract the loss of a
# B200. Capability, multiprocessors and L2 (MiB): NVIDIA's data sheets, and its white papers on
# GA100, GA102, Ada, Hopper and both Blackwells. Speeds: the same papers (SXM if there are several),
# which print twice the dense figure where they count sparse matrices, and NVLink in both
# directions. The bus of PCIe 5.0 is measured in docs/internals/measured.md; that of 4.0 is
# `BUS_BYTES_PER_SECOND`, and 3.0 has half of it. gb10 has no bf16 figure.
_TABLE = """
name                GiB   sm   SMs  L2   TFLOPS  GB/s  bus  link
t4                14.56   7.5   40   4       65   300   12    12
v100-16gb         15.77   7.0   80   6      125   900   12   150
v100-32gb         31.73   7.0   80   6      125   900   12   150
rtx2080ti           ~11   7.5   68   6
rtx3050              ~8   8.6   20   2
rtx3060             ~12   8.6   28   3
rtx3060laptop        ~6   8.6   30   3
rtx3060ti            ~8   8.6   38   4
rtx3070              ~8   8.6   46   4
rtx3070laptop        ~8   8.6   40   4
rtx3070ti            ~8   8.6   48   4
rtx3070tilaptop      ~8   8.6   46   4
rtx3080-10gb       9.78   8.6   68   5
rtx3080-12gb        ~12   8.6   70   6
rtx3080-8gblaptop    ~8   8.6   48   4
rtx3080-16gblaptop  ~16   8.6   48   4
rtx3080ti           ~12   8.6   80   6
rtx3080tilaptop     ~16   8.6   58   4
rtx3090           23.68   8.6   82   6       71   936   25    25
rtx3090ti           ~24   8.6   84   6
rtxa2000-6gb         ~6   8.6   26   3
rtxa2000-12gb       ~12   8.6   26   3
rtxa4000            ~16   8.6   48   4
rtxa4500            ~20   8.6   56   6
rtxa5000            ~24   8.6   64   6
rtxa5500            ~24   8.6   80   6
rtxa6000          47.40   8.6   84   6      155   768   25    25
a2                  ~15   8.6   10   2
a10               21.98   8.6   72   6
a10g              21.98   8.6   80   6       70   600   25    25
a16                 ~15   8.6   10   2
a30               23.53   8.0   56  24
a40               44.34   8.6   84   6
a100-40gb         39.38   8.0  108  40      312  1555   25   300
a100-80gb         79.14   8.0  108  40      312  2039   25   300
a800-40gb         39.38   8.0  108  40      312  1555   25   200
a800-80gb         79.14   8.0  108  40      312  2039   25   200
rtx4050laptop        ~6   8.9   20  12
rtx4060              ~8   8.9   24  24
rtx4060laptop        ~8   8.9   24  32
rtx4060ti-8gb        ~8   8.9   34  32
rtx4060ti-16gb      ~16   8.9   34  32
rtx4070             ~12   8.9   46  36
rtx4070laptop        ~8   8.9   36  32
rtx4070super        ~12   8.9   56  48
rtx4070ti           ~12   8.9   60  48
rtx4070tisuper      ~16   8.9   66  48
rtx4080             ~16   8.9   76  64
rtx4080laptop       ~12   8.9   58  48
rtx4080super        ~16   8.9   80  64
rtx4090           23.51   8.9  128  72      165  1008   25    25
rtx4090d          23.51   8.9  114  72
rtx4090laptop       ~16   8.9   76  64
rtx2000ada          ~16   8.9   22  12
rtx4000ada          ~20   8.9   48  48
rtx4500ada          ~24   8.9   60  48
rtx5000ada          ~32   8.9  100  72
rtx5880ada          ~48   8.9  110  72
rtx6000ada        47.40   8.9  142  96      364   960   25    25
l4                21.95   8.9   58  48      121   300   25    25
l20               44.34   8.9   92  96
l40               44.34   8.9  142  96
l40s              44.34   8.9  142  96      362   864   25    25
h20-96gb            ~96   9.0   78  60
h20-141gb        139.72   9.0   78  60
h100-80gb         79.10   9.0  132  50      989  3350   55   450
h100-pcie         79.10   9.0  114  50
h100-nvl            ~94   9.0  132  60
h200-141gb       139.72   9.0  132  50      989  4800   55   450
h800              79.10   9.0  132  50      989  3350   55   200
gh200-96gb        94.50   9.0  132  60
gh200-144gb        ~144   9.0  132  60
b200-180gb       178.35  10.0  148 126     2250  8000   55   900
gb200            184.31  10.0  152 126
b300             267.88  10.3  148 126
gb300            267.88  10.3  152 126
rtx5050              ~8  12.0   20  24
rtx5060              ~8  12.0   30  32
rtx5060laptop        ~8  12.0   26  32
rtx5060ti-8gb        ~8  12.0   36  32
rtx5060ti-16gb      ~16  12.0   36  32
rtx5070             ~12  12.0   48  48
rtx5070laptop        ~8  12.0   36  32
rtx5070ti           ~16  12.0   70  48
rtx5070tilaptop     ~12  12.0   46  48
rtx5080             ~16  12.0   84  64
rtx5080laptop       ~16  12.0   60  64
rtx5090           31.36  12.0  170  96      209  1792   55    55
rtx5090d          31.36  12.0  170  96
rtx5090laptop       ~24  12.0   82  64
rtxpro4000          ~24  12.0   70  48
rtxpro4500          ~32  12.0   82  64
rtxpro5000          ~48  12.0  110  96
rtxpro6000        94.97  12.0  188 128
gb10             121.69  12.1   48  24
mi210             63.98   amd
mi250x            63.98   amd
mi300x           191.98   amd
mi325x           255.98   amd
mi355x           287.98   amd
"""
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


CARDS = tuple(_card(*line.split()) for line in _TABLE.strip().splitlines()[1:])
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
    hint = f"is it {' or '.join(names)}?" if names else f"known cards are {', '.join(_BY_NAME)}."
    raise PlanError(f"no card is named {text!r}: {hint} You can also give a size, as in 24GiB")


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
