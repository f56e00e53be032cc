"""Decides from text alone whether an error is an OOM, and whether training can go on.

To add a message, write a rule in `trainer_plugins/oom/rules.py` that cites the source of its words,
and make sure that `_HINTS` in `trainer_plugins/explain/text/excerpt.py` has one of them.
`tests/oom/corpus.py` has the real text, and `tests/oom/detectors.txt` lists who recognises it.
"""

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from trainer_plugins.oom.rules import LOST_CONTEXT, PINS, RULES, Rule, Source
from trainer_plugins.units import GIB, KIB, size


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """An out-of-memory error; all sizes are in bytes.

    The exception itself is not kept: its frames would keep tensors alive.
    """

    source: Source
    # False if these words usually, but not always, mean a full device: check its free memory.
    is_certain: bool
    # Why this process cannot go on; empty if it can, using less memory. Also set if the numbers of
    # the message contradict each other: they cannot be trusted.
    fatal: str
    text: str  # the first lines of the message, six at most
    # In the numbering of the process: with CUDA_VISIBLE_DEVICES=3, `GPU 0` is card 3.
    device: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None  # the memory this process may use, if less than the whole device
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None  # reserved but in no tensor; a large value means fragmentation
    # Pairs (pid, bytes) of the processes in the message; pid None is the failed process. In a
    # container torch prints a wrong pid for itself, so we recognise it by its bytes.
    process_bytes: tuple[tuple[int | None, int], ...] = ()

    @property
    def is_survivable(self) -> bool:
        """Return whether the process can go on: context, allocator and communicators still work."""
        return not self.fatal


@cache
def _compile_rules() -> tuple[tuple[Rule, re.Pattern[str]], ...]:
    return tuple((rule, re.compile(rule.pattern, re.MULTILINE)) for rule in RULES)


# After these, every call on the device fails until a restart. They are not OOMs but may follow one.
_STICKY = (
    r"illegal memory access|device-side assert triggered|unspecified launch failure"
    r"|misaligned address|illegal instruction|uncorrectable (?:ECC|NVLink)|the launch timed out"
    r"|hardware stack error|invalid program counter|DEVICE_LOST"
)

# These errors are about the program or the data, and may quote any text.
_NEVER = (
    "ArithmeticError|AssertionError|AttributeError|EOFError|ImportError|IndexError|KeyError"
    "|LookupError|ModuleNotFoundError|NameError|NotImplementedError|SyntaxError|TypeError"
    "|UnicodeDecodeError|UnicodeEncodeError|ValueError|Warning"
)
# Text allowed before the words in their line: a log prefix or the name of an error, but no
# sentence, quotation, or `raise` statement quoted by a traceback.
_LED = r"^\s*$|[:\])>|│-]\s+$|Error:$|^(?!.*\braise ).*Error\(['\"]$"
_LED_BY_OTHER = rf"(?:{_NEVER}): $"

# torch divides by 1024 whatever unit it prints; older MPS allocators write GB, the kernel kB.
_SIZE = r"(\d{1,20}(?:\.\d{0,9})?) ?([KkMGTPE]?)i?[Bb](?:ytes)?"
_NUMBERS = {
    "requested_bytes": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"Requested {{0,40}}: {_SIZE}",
        rf"Unable to allocate {_SIZE}",
        rf"Invalid buffer size: {_SIZE}",
        rf"desired GPU memory utilization \([\d.]{{1,9}}, {_SIZE}",
        rf"{_SIZE} KV cache is needed",
        r"[Aa]lloc\w{0,20}(?: async| failed for size| of size)? ?:{0,2}(\d{1,20})()"
        r"(?: bytes| \(|\sfailed)",
        r"(?:mmap|allocation of|Attempting to allocate) (\d{1,20})() bytes",
        r"Attempting to allocate (\d{1,9}\.\d{1,9})([KMGT])\. ",
    ),
    "total_bytes": (
        rf"total capaci?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Free memory on device.{{0,40}}\(\d{{1,9}}(?:\.\d{{1,9}})?/{_SIZE}\)",
        rf"Device limit {{0,40}}: {_SIZE}",
    ),
    "free_bytes": (
        rf"of which {_SIZE} is free",
        rf"{_SIZE} free;",
        r"Free memory on device.{0,40}\((\d{1,9}(?:\.\d{1,9})?)/\d{1,9}(?:\.\d{1,9})? ([KMGT])iB",
        rf"available KV cache memory \({_SIZE}\)",
        rf"Free \(according to CUDA\): {_SIZE}",
    ),
    "limit_bytes": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}"),
    "allocated_bytes": (
        rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"Currently allocated {{0,40}}: {_SIZE}",
        rf"MPS allocated: {_SIZE}",
    ),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
    "unused_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached\)"),
}
_DEVICE = r"\b(?:[GN]PU|on device) {1,4}(?:cuda:|npu:|xpu:)?(\d{1,9})\b"
_HOLDER = (
    rf"(?:this process|[Pp]rocess (\d{{1,20}})) has {_SIZE} memory in use"
    rf"|Killed process (\d{{1,20}}) .{{0,200}}anon-rss:{_SIZE}"
)
_NUM_LINES = 6
_HEAD_CHARACTERS = 600  # longer than any prefix of a log or a traceback
_MESSAGE_CHARACTERS = 6000
_CONTEXT_BYTES = 2 * GIB  # upper bound for CUDA and NCCL outside torch's allocator
_ROUNDING_BYTES = 10 << 20  # messages print two decimals
_LARGEST_BYTES = 1 << 60  # no device has more; NVML's "not available" reads as 1 << 64


def classify(error: BaseException | str) -> OutOfMemory | None:
    """Decide whether an error or a log text is an out-of-memory error; None if it is not.

    Only text counts: the class names and the message of an exception, then those of the exceptions
    in its group, its cause and its context; the nearest OOM wins. Exceptions that end the program
    (KeyboardInterrupt, SystemExit) never count, whatever they interrupted. No reference to the
    exception is kept.

    >>> found = classify("RuntimeError: CUDA error: out of memory")
    >>> found.source, found.is_survivable
    ('driver', True)
    >>> classify("OSError: [Errno 28] No space left on device") is None
    True
    """
    if isinstance(error, str):
        return _read(error, [error])
    chain = list(_chain(error))
    all_texts = [text for one in chain for text in _texts(one)]
    return next((found for text in all_texts if (found := _read(text, all_texts))), None)


def classify_anywhere(line: str) -> OutOfMemory | None:
    """Classify a line whatever precedes the words, such as a sentence that someone wrote."""
    starts = [match.start() for _, pattern in _compile_rules() if (match := pattern.search(line))]
    return _read(line[min(starts) :], [line]) if starts else None


def _chain(error: BaseException) -> Iterator[Exception]:
    """Yield the error and its causes, each once (a chain may be circular)."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or not isinstance(one, Exception):
            continue
        seen.add(id(one))
        yield one
        # `exceptions` by attribute: in Python 3.10 exception groups come from a library.
        grouped = getattr(one, "exceptions", ())
        waiting += grouped if isinstance(grouped, (list, tuple)) else ()
        waiting.append(one.__cause__ if one.__suppress_context__ else one.__context__)


def _texts(error: Exception) -> list[str]:
    """Return the last line of the traceback for each class of the MRO, so that subclasses match."""
    names = [
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
        for kind in type(error).__mro__[:-2]
    ]
    if any(re.search(rf"(?:{_NEVER})$", name) for name in names):
        return []
    return [f"{_pinning(error)}{name}: {error}" for name in names]


def _pinning(error: Exception) -> str:
    """Return the line that raised, if it requested page-locked memory: the error does not say."""
    raised = [
        f"in {frame.name}: {frame.line}\n"
        for frame in traceback.extract_tb(error.__traceback__, limit=-1)
    ]
    return "".join(line for line in raised if re.search(PINS, line))


def _read(text: str, all_texts: list[str]) -> OutOfMemory | None:
    """Find the first OOM in a text: certain rules first, then by place, then by rule order."""
    # Progress bars end their lines with a lone \r.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    matches = [
        (rule, match)
        for rule, pattern in _compile_rules()
        if (match := _first(rule, pattern, text)) is not None
    ]
    if not matches:
        return None
    rule, match = min(matches, key=lambda one: (not one[0].is_certain, one[1].start()))
    end = match.end()
    message = text[end - len(_head(text, end)) : end + _MESSAGE_CHARACTERS]
    lines = "\n".join(message.splitlines()[:_NUM_LINES])
    is_lost = any(re.search(_STICKY, one) for one in all_texts)
    return _make_error(rule, lines, LOST_CONTEXT if is_lost else rule.fatal)


def _first(rule: Rule, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    for match in pattern.finditer(text):
        head = _head(text, match.start())
        if rule.follows_anything or (re.search(_LED, head) and not re.search(_LED_BY_OTHER, head)):
            return match
    return None


def _head(text: str, end: int) -> str:
    start = max(0, end - _HEAD_CHARACTERS)
    return text[max(start, text.rfind("\n", start, end) + 1) : end]


def _make_error(rule: Rule, message: str, fatal: str) -> OutOfMemory:
    holders = []
    for match in re.finditer(_HOLDER, message):
        pid = match[1] or match[4]
        num_bytes = _bytes(match[2] or match[5], match[3] or match[6])
        holders.append((int(pid) if pid else None, num_bytes))
    device = re.search(_DEVICE, message)
    found = OutOfMemory(
        source=rule.source,
        is_certain=rule.is_certain,
        fatal=fatal,
        text=message,
        device=int(device[1]) if device else None,
        process_bytes=tuple(holders),
        **{name: _number(patterns, message) for name, patterns in _NUMBERS.items()},
    )
    return replace(
        found, fatal=fatal or _contradiction(found), process_bytes=tuple(_own_marked(found))
    )


def _number(patterns: tuple[str, ...], message: str) -> int | None:
    matches = (re.search(pattern, message) for pattern in patterns)
    return next((_bytes(*match.groups()) for match in matches if match), None)


def _contradiction(found: OutOfMemory) -> str:
    """Return why the numbers of a message cannot all be true; empty if they can."""
    numbers = (
        found.total_bytes,
        found.free_bytes,
        found.allocated_bytes,
        found.reserved_bytes,
        found.unused_bytes,
        *(num_bytes for _, num_bytes in found.process_bytes),
    )
    largest = max((number for number in numbers if number is not None), default=0)
    if largest >= _LARGEST_BYTES:
        return f"its numbers cannot be true: {size(largest)} of a device"
    if found.total_bytes is None or found.free_bytes is None:
        return ""
    if found.free_bytes > found.total_bytes:
        return (
            f"its numbers cannot be true: {size(found.free_bytes)} free of"
            f" {size(found.total_bytes)}"
        )
    refused = found.requested_bytes
    if refused is None or found.limit_bytes is not None:
        return ""
    # Another process may free a block between the refusal and the message, but not half a card.
    if found.free_bytes < max(2 * refused, found.total_bytes // 2):
        return ""
    return (
        f"its numbers contradict each other: {size(refused)} were refused with"
        f" {size(found.free_bytes)} of {size(found.total_bytes)} free, so asking for less may not"
        " help"
    )


def _own_marked(found: OutOfMemory) -> list[tuple[int | None, int]]:
    """Set pid None for the failed process, which we find by its bytes: containers change pids."""
    holders = list(found.process_bytes)
    own_bytes = (found.allocated_bytes or 0) + (found.unused_bytes or 0)
    if found.allocated_bytes is None or any(pid is None for pid, _ in holders):
        return holders
    rounding = own_bytes // 1000 + _ROUNDING_BYTES
    fits = [one for one in holders if own_bytes - rounding <= one[1] <= own_bytes + _CONTEXT_BYTES]
    own = min(fits, key=lambda one: one[1], default=None)
    return [(None, one[1]) if one is own else one for one in holders]


def _bytes(number: str, unit: str | None) -> int:
    return int(float(number.rstrip(".")) * KIB ** (" KMGTPE".index(unit.upper()) if unit else 0))
