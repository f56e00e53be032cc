"""Explains the errors of the NVIDIA driver: what is so, and what to do about it."""

from enum import Enum
from typing import Protocol

import pynvml  # importing it reads and starts nothing


class CodedError(Protocol):
    """Names what is read of a pynvml.NVMLError: its return code."""

    value: int


class NvmlErrorKind(Enum):
    """Names how the driver failed to answer, by what one can do about it."""

    MISSING = "missing"
    """There is no driver library."""

    DRIVER = "driver"
    """The library is there but cannot reach the kernel driver: not loaded, or another version."""

    NOT_SUPPORTED = "not supported"
    """This driver or card does not offer that number."""

    NO_PERMISSION = "no permission"
    """This user or this container is not allowed to know that."""

    LOST = "lost"
    """The card fell off the bus, needs a reset, or is not the device that was opened any more."""

    TIMEOUT = "timeout"
    """No answer this time: the driver is busy, or fails without naming a reason."""

    NOT_FOUND = "not found"
    """No card has that UUID, or this process is not allowed to see it."""

    NONSENSE = "nonsense"
    """The answer cannot be true, such as more free memory than there is."""

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
    """Turn an error of pynvml into one that says what to do.

    Args:
        what: what was asked about the card, for the message.
        uuid: the card's.
        error: pynvml's.
    """
    kind, text = NvmlErrorKind.TIMEOUT, _NO_ANSWER
    for code, known_kind, known_text in _EXPLANATIONS:
        if error.value == getattr(pynvml, f"NVML_ERROR_{code}", None):
            kind, text = known_kind, known_text
    bare_uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return NvmlError(kind, text.format(what=what, uuid=uuid, bare_uuid=bare_uuid, error=error))


# Return codes that are missing below may pass: timeout, in use, out of memory, unknown.
_NO_ANSWER = (
    "the driver did not tell the {what} of {uuid} ({error}); ask again later, and read `dmesg` if"
    " it goes on"
)

_NOT_TOLD = "the driver does not tell the {what} of {uuid}: "

_EXPLANATIONS = (
    (
        "LIBRARY_NOT_FOUND",
        NvmlErrorKind.MISSING,
        "there is no NVIDIA driver library here, libnvidia-ml.so.1; install the driver, or give the"
        " container the cards (docker --gpus) and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    (
        "DRIVER_NOT_LOADED",
        NvmlErrorKind.DRIVER,
        "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia), and read `dmesg` if"
        " that fails",
    ),
    (
        "LIB_RM_VERSION_MISMATCH",
        NvmlErrorKind.DRIVER,
        "the NVIDIA library and the loaded kernel driver have different versions, as after an"
        " update; reboot the machine, or restart the container if only that is older",
    ),
    (
        "NOT_SUPPORTED",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "this card does not offer it; do without",
    ),
    (
        "FUNCTION_NOT_FOUND",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "it is too old for that; update it or do without",
    ),
    (
        "ARGUMENT_VERSION_MISMATCH",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "its version and that of nvidia-ml-py do not match; update the older one",
    ),
    (
        "NO_PERMISSION",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD + "this user is not allowed to know it; run as one who may open /dev/nvidia*",
    ),
    (
        "OPERATING_SYSTEM",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD
        + "the operating system or the container forbids it; allow access to /dev/nvidia*",
    ),
    (
        "GPU_IS_LOST",
        NvmlErrorKind.LOST,
        "{uuid} has fallen off the bus, and its memory is lost; look for Xid in `dmesg`, then"
        " reboot",
    ),
    (
        "RESET_REQUIRED",
        NvmlErrorKind.LOST,
        "{uuid} needs a reset; stop what runs on it, then `nvidia-smi --gpu-reset -i {uuid}` or"
        " reboot the machine",
    ),
    (
        "INVALID_ARGUMENT",
        NvmlErrorKind.LOST,
        "{uuid} is not the device that was opened any more, as after MIG slices were created anew;"
        " start the run on a device that exists",
    ),
    (
        "NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "no card or MIG slice here has the UUID {bare_uuid}; compare all of it with"
        " `nvidia-smi -L`, and check whether this container was given that card",
    ),
    (
        "GPU_NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "there is no NVIDIA card here; check whether this container was given one",
    ),
)
