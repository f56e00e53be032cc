"""Reads the text of PYTORCH_ALLOC_CONF the way torch 2.13 does.

torch parses a number as far as it can: `128MB` is 128, and `-1` is 2**64 - 1. We mark such a value
`misread`; in a list, or after a separator other than `:`, it is an error here. Source:
AllocatorConfig.h and .cpp of c10/core and c10/cuda, and the parsers of torch 2.9 to 2.13.
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import Enum
from typing import NamedTuple

Value = bool | int | float | str | tuple[int, ...]

# `roundup_power2_divisions`: one number for each power of 2 from 1 MiB to 32 GiB
NUM_INTERVALS = 16

_ENTRY = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_SIZE_MAX = 2**64 - 1


class Kind(Enum):
    """The ways in which torch parses a value."""

    FLAG = "True or False, in exactly this spelling"
    COUNT = "a whole number"
    FRACTION = "a number"
    BACKEND = "native or cudaMallocAsync"
    DIVISIONS = "a power of 2, or a list as in [256:1,512:2,>:4]"


class Option(NamedTuple):
    """One option, and the range of values that torch accepts."""

    key: str
    kind: Kind
    since: tuple[int, int] = (0, 0)  # first version with this option, from 2.9 on
    minimum: int = 0
    power_of_2: bool = False
    maximum: int | None = None


OPTIONS = (
    Option("backend", Kind.BACKEND),
    Option("max_split_size_mb", Kind.COUNT, minimum=20),
    Option("max_non_split_rounding_mb", Kind.COUNT, minimum=20),
    Option("roundup_power2_divisions", Kind.DIVISIONS),
    Option("garbage_collection_threshold", Kind.FRACTION),
    Option("expandable_segments", Kind.FLAG),
    Option("large_segment_size_mb", Kind.COUNT, since=(2, 11), minimum=11),
    Option("release_lock_on_cudamalloc", Kind.FLAG),
    Option("release_lock_on_hipmalloc", Kind.FLAG),
    Option("graph_capture_record_stream_reuse", Kind.FLAG),
    Option("per_process_memory_fraction", Kind.FRACTION, since=(2, 10)),
    Option("throw_on_cudamalloc_oom", Kind.FLAG, since=(2, 12)),
    Option("pinned_use_cuda_host_register", Kind.FLAG),
    Option("pinned_use_hip_host_register", Kind.FLAG),
    Option("pinned_num_register_threads", Kind.COUNT, minimum=1, power_of_2=True, maximum=128),
    Option("pinned_use_background_threads", Kind.FLAG),
    Option("pinned_reserve_segment_size_mb", Kind.COUNT, since=(2, 10), minimum=1),
    Option("pinned_max_round_threshold_mb", Kind.COUNT, since=(2, 13)),
    Option("pinned_max_cached_size_mb", Kind.COUNT, since=(2, 13)),
    Option("pinned_free_catch_all", Kind.FLAG, since=(2, 12)),
)
OPTION_OF = {option.key: option for option in OPTIONS}


class SettingsError(ValueError):
    """torch rejects a text, or reads it differently than it looks."""


class UnknownOptionError(SettingsError):
    """No torch up to 2.13 knows this key."""


class Setting(NamedTuple):
    """One option with its value."""

    key: str
    text: str
    value: Value
    misread: bool = False  # torch reads part of the text, or wraps a negative number


def values_of(settings: Iterable[Setting]) -> dict[str, Value]:
    """Return the value of each option that is set; if one is given twice, the last value counts."""
    return {setting.key: setting.value for setting in settings}


def parse(text: str) -> dict[str, Value]:
    """Parse the text of PYTORCH_ALLOC_CONF; raises the first error.

    >>> parse("expandable_segments:True, garbage_collection_threshold:0.8")
    {'expandable_segments': True, 'garbage_collection_threshold': 0.8}
    """
    settings, errors = read(text)
    if errors:
        raise errors[0]
    return values_of(settings)


def read(text: str) -> tuple[tuple[Setting, ...], tuple[SettingsError, ...]]:
    """Parse every readable entry, in order, and return all errors, for a linter to list."""
    settings: list[Setting] = []
    errors: list[SettingsError] = []
    for entry in _entries(text):
        if isinstance(entry, SettingsError):
            errors.append(entry)
            continue
        try:
            settings.append(_setting(*entry))
        except SettingsError as error:
            errors.append(error)
    return tuple(settings), (*errors, *_against_large_segments(values_of(settings)))


def _entries(text: str) -> Iterator[tuple[str, str] | SettingsError]:
    compact = re.sub(r"\s", "", text)  # torch ignores white space, even inside a word
    position = 0
    while position < len(compact):
        entry = _ENTRY.match(compact, position)
        if entry is None:
            yield SettingsError(
                "settings are key:value pairs separated by commas, as in expandable_segments:True, "
                f"got {compact[position:]!r}"
            )
            return
        yield entry[1], entry[2]
        position = entry.end()


def _setting(key: str, text: str) -> Setting:
    option = OPTION_OF.get(key)
    if option is None:
        near = get_close_matches(key.lower(), OPTION_OF, n=1)
        raise UnknownOptionError(
            f"no torch up to 2.13 knows the option {key!r}"
            + (f": it is {near[0]}" if near else f"; it knows {', '.join(OPTION_OF)}")
        )
    if option.kind is Kind.FLAG:
        if text not in ("True", "False"):
            raise SettingsError(f"{key} needs {option.kind.value}, got {text!r}")
        return Setting(key, text, text == "True")
    if option.kind is Kind.BACKEND:
        if text not in ("native", "cudaMallocAsync", "hipMallocAsync"):
            raise SettingsError(
                f"{key} needs {option.kind.value} (on ROCm also hipMallocAsync), got {text!r}"
            )
        return Setting(key, text, text)
    if option.kind is Kind.DIVISIONS:
        return Setting(key, text, _divisions(key, text))
    return _fraction(option, text) if option.kind is Kind.FRACTION else _count(option, text)


def _whole_number(key: str, text: str) -> tuple[int, bool]:
    """Return a number as C's stoull reads it, and whether that differs from the text."""
    digits = re.match(r"[+-]?\d+", text, re.ASCII)
    if digits is None or abs(int(digits[0])) > _SIZE_MAX:
        raise SettingsError(f"{key} needs a whole number below 2**64, got {text!r}")
    number = int(digits[0])
    return number % (_SIZE_MAX + 1), number < 0 or digits[0] != text


def _count(option: Option, text: str) -> Setting:
    number, misread = _whole_number(option.key, text)
    if number < option.minimum:
        raise SettingsError(f"{option.key} needs at least {option.minimum}, got {text!r}")
    if option.power_of_2 and number & (number - 1):
        raise SettingsError(f"{option.key} needs a power of 2, got {text!r}")
    if option.maximum is not None and number > option.maximum:
        raise SettingsError(f"{option.key} needs at most {option.maximum}, got {text!r}")
    return Setting(option.key, text, number, misread)


def _fraction(option: Option, text: str) -> Setting:
    digits = re.match(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE | re.ASCII)
    if digits is None:
        raise SettingsError(f"{option.key} needs a number, got {text!r}")
    number = float(digits[0])
    if option.key == "garbage_collection_threshold":
        if not 0 < number < 1:
            raise SettingsError(f"{option.key} needs a number above 0 and below 1, got {text!r}")
    elif not 0 <= number <= 1:
        raise SettingsError(f"{option.key} needs a number from 0 to 1, got {text!r}")
    return Setting(option.key, text, number, digits[0] != text)


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """Return the divisions of the sixteen intervals as torch 2.10 and later fill them.

    The first interval named also covers those below it, and `>` those above the last one.
    """
    if not text.startswith("["):
        return (_power_of_2(key, text, "divisions"),) * NUM_INTERVALS
    divisions = [0] * NUM_INTERVALS
    last: int | None = None
    for pair in filter(None, text[1:-1].split(",")):
        interval, colon, count = pair.partition(":")
        if not colon:
            raise SettingsError(
                f"{key} needs interval:divisions in its list, as in [256:1,>:4], got {pair!r}"
            )
        number = 0 if count == "0" else _power_of_2(key, count, "divisions, or 0 for none")
        if interval == ">":
            start = (last or 0) + 1
            divisions[start:] = [number] * (NUM_INTERVALS - start)
            continue
        index = min(_power_of_2(key, interval, "interval").bit_length() - 1, NUM_INTERVALS - 1)
        if last is None:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _power_of_2(key: str, text: str, what: str) -> int:
    number, misread = _whole_number(key, text)
    if misread or number == 0 or number & (number - 1):
        raise SettingsError(f"{key} needs a power of 2 as {what}, got {text!r}")
    return number


def _against_large_segments(values: dict[str, Value]) -> Iterator[SettingsError]:
    """Yield an error for each split size below the large segment size, in any order."""
    large = values.get("large_segment_size_mb", 0)
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        value = values.get(key)
        if isinstance(value, int) and isinstance(large, int) and value < large:
            yield SettingsError(
                f"{key} needs at least large_segment_size_mb, which is {large}, got '{value}'"
            )
