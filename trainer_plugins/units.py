"""Render and parse sizes; inside the package every size is an int of bytes, GiB only in text."""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}


def size(num_bytes: float) -> str:
    """Render a size for people: GiB from 1 GiB up, MiB below.

    >>> size(85_899_345_920), size(3 << 20), size(-2 * GIB)
    ('80.00 GiB', '3.0 MiB', '-2.00 GiB')
    """
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"


def count_in_words(number: int, noun: str) -> str:
    """Render a number of things for people.

    >>> count_in_words(1, "row"), count_in_words(8, "row")
    ('1 row', '8 rows')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def parse_size(text: str) -> int:
    """Parse a size as people write it, in bytes; `GiB` is 2**30 and `GB` is 10**9.

    >>> parse_size("2GiB"), parse_size("100 MiB"), parse_size("1.5GB"), parse_size("1TB")
    (2147483648, 104857600, 1500000000, 1000000000000)

    Raises:
        ValueError: the text is not a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError(
            f"a size is a positive number with a unit, as in 2GiB or 100MiB, got {text!r}"
        )
    return int(float(match[1]) * unit)


def percent(fraction: float) -> str:
    """Render a fraction of one.

    >>> percent(0.973)
    '97%'
    """
    return f"{fraction:.0%}"
