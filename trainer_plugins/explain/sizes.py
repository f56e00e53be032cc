"""Compare the size of a failed request with the size of a tensor.

For a tensor of 10 MiB or more torch asks the driver for a multiple of 2 MiB (kMinLargeAlloc and
kRoundLarge of CUDACachingAllocator), and prints that with two digits after the point.
"""

from math import ceil, floor

from trainer_plugins.units import GIB, MIB

_LEAST_BYTES, _ROUNDED_BYTES = 10 * MIB, 2 * MIB
_SELDOM = 64  # by chance, one in 64 sizes gives as round a number of units


def is_size_of(asked_bytes: int, num_bytes: int) -> bool:
    """Return whether the failed request may be a tensor of this size.

    >>> is_size_of(int(3.91 * GIB), 8192 * 128_256 * 4), is_size_of(int(3.91 * GIB), 4 * GIB)
    (True, False)
    """
    digits = _digits(asked_bytes)
    is_as_large = -digits <= asked_bytes - num_bytes < _ROUNDED_BYTES + digits
    return num_bytes >= _LEAST_BYTES and is_as_large


def match_tokens(asked_bytes: int, token_bytes: int, rows: int, length: int) -> int | None:
    """Return the tokens of a batch whose tensor the failed request may be; None if it was another.

    A loss drops the first token of each row.
    """
    likely = (rows * length, rows * (length - 1))
    return next((each for each in likely if is_size_of(asked_bytes, each * token_bytes)), None)


def count_units(asked_bytes: int, unit_bytes: int) -> int | None:
    """Return the number of units, such as tokens, in the failed request, if suspiciously round.

    >>> count_units(int(3.91 * GIB), 128_256 * 4), count_units(int(3.91 * GIB), 152_064 * 4)
    (8192, None)
    """
    digits = _digits(asked_bytes)
    most = floor((asked_bytes + digits) / unit_bytes)
    least = ceil((asked_bytes - digits - _ROUNDED_BYTES) / unit_bytes)
    if asked_bytes < _LEAST_BYTES or most < max(1, least):
        return None
    power = 1 << most.bit_length()
    while most // power * power < least:
        power //= 2
    return most // power * power if power >= _SELDOM * (most - least + 1) else None


def _digits(asked_bytes: int) -> float:
    return 0.005 * (GIB if asked_bytes >= GIB else MIB)
