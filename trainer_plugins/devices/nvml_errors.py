"""Explains the NVIDIA driver's errors: what is wrong, and what to do about it."""

from enum import Enum
from typing import NamedTuple, Protocol

import pynvml  # importing it reads and starts nothing


class CodedError(Protocol):
    """Names what is read of a pynvml.NVMLError: its return code."""

    value: int


class NvmlErrorKind(Enum):
    """Classifies failures of the driver by what the user can do about them."""

    MISSING = "missing"
    """There is no driver library."""

    DRIVER = "driver"
    """The library is there but cannot reach the kernel driver: not loaded, or another version."""

    NOT_SUPPORTED = "not supported"
    """This driver or card does not have that number."""

    NO_PERMISSION = "no permission"
    """This user or container may not know that."""

    LOST = "lost"
    """The card fell off the bus, needs a reset, or is no longer the device that was opened."""

    TIMEOUT = "timeout"
    """The driver did not answer this time: it is busy, or fails without a reason."""

    NOT_FOUND = "not found"
    """No card has that UUID, or this process may not see it."""

    NONSENSE = "nonsense"
    """The answer is impossible, such as more free memory than there is."""

    HANGS = "hangs"
    """The driver has not answered for seconds, and may never do so."""


class NvmlError(RuntimeError):
    """Reports that the driver did not answer; the message says why and what to do."""

    def __init__(self, kind: NvmlErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def permanent(self) -> bool:
        """Return whether asking again in this process is useless."""
        return self.kind is not NvmlErrorKind.TIMEOUT


def explained(what: str, uuid: str, error: CodedError) -> NvmlError:
    """Turn pynvml's error into one that says what to do.

    Args:
        what: what was asked about the card, for the message.
        uuid: the card's.
        error: pynvml's error.
    """
    kind, text = NvmlErrorKind.TIMEOUT, _NO_ANSWER
    for known in _EXPLANATIONS:
        # Earlier versions of pynvml lack some of these codes.
        if error.value == getattr(pynvml, f"NVML_ERROR_{known.code}", None):
            kind, text = known.kind, known.text
    bare_uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return NvmlError(kind, text.format(what=what, uuid=uuid, bare_uuid=bare_uuid, error=error))


class _Explanation(NamedTuple):
    code: str
    kind: NvmlErrorKind
    text: str


# Codes that are missing below are temporary: timeout, in use, out of memory, unknown.
_NO_ANSWER = (
    "the driver did not report the {what} of {uuid} ({error}); ask again later, and read `dmesg` if"
    " it keeps failing"
)

_NOT_TOLD = "the driver does not report the {what} of {uuid}: "

_EXPLANATIONS = (
    _Explanation(
        "LIBRARY_NOT_FOUND",
        NvmlErrorKind.MISSING,
        "there is no NVIDIA driver library here, libnvidia-ml.so.1; install the driver, or give the"
        " container the cards (docker --gpus) and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    _Explanation(
        "DRIVER_NOT_LOADED",
        NvmlErrorKind.DRIVER,
        "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia), and read `dmesg` if"
        " that fails",
    ),
    _Explanation(
        "LIB_RM_VERSION_MISMATCH",
        NvmlErrorKind.DRIVER,
        "the NVIDIA library and the loaded kernel driver have different versions, as after an"
        " update; reboot the machine, or restart the container if only that is older",
    ),
    _Explanation(
        "NOT_SUPPORTED",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "this card does not support it; do without",
    ),
    _Explanation(
        "FUNCTION_NOT_FOUND",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "it is too old; update it or do without",
    ),
    _Explanation(
        "ARGUMENT_VERSION_MISMATCH",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "its version and that of nvidia-ml-py do not match; update the older one",
    ),
    _Explanation(
        "NO_PERMISSION",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD + "this user may not know it; run as a user who can open /dev/nvidia*",
    ),
    _Explanation(
        "OPERATING_SYSTEM",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD + "the system or the container forbids it; allow access to /dev/nvidia*",
    ),
    _Explanation(
        "GPU_IS_LOST",
        NvmlErrorKind.LOST,
        "{uuid} has fallen off the bus, and its memory is lost; look for Xid in `dmesg`, then"
        " reboot",
    ),
    _Explanation(
        "RESET_REQUIRED",
        NvmlErrorKind.LOST,
        "{uuid} needs a reset; stop what runs on it, then `nvidia-smi --gpu-reset -i {uuid}` or"
        " reboot the machine",
    ),
    _Explanation(
        "INVALID_ARGUMENT",
        NvmlErrorKind.LOST,
        "{uuid} is no longer the device that was opened, as after MIG slices were recreated; start"
        " the run on a device that exists",
    ),
    _Explanation(
        "NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "no card or MIG slice here has the UUID {bare_uuid}; compare the full UUID with"
        " `nvidia-smi -L`, and check whether this container was given that card",
    ),
    _Explanation(
        "GPU_NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "there is no NVIDIA card here; check whether this container was given one",
    ),
)
