"""Explains the NVIDIA driver's errors: what is wrong, and what to do about it."""

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import pynvml  # importing it reads and starts nothing


class CodedError(Protocol):
    """Names what we use of pynvml.NVMLError: its return code."""

    value: int


class NvmlErrorKind(Enum):
    """Classifies failures of the driver by what the user can do about them."""

    MISSING = "missing"  # there is no driver library
    DRIVER = "driver"
    """The library is there but cannot reach the kernel driver: not loaded, or another version."""

    NOT_SUPPORTED = "not supported"  # this driver or card does not have that number
    NO_PERMISSION = "no permission"  # this user or container may not know that
    LOST = "lost"
    """The card fell off the bus, needs a reset, or is no longer the device that was opened."""

    TIMEOUT = "timeout"
    """The driver did not answer this time: it is busy, or fails without a reason."""

    NOT_FOUND = "not found"  # no card has that UUID, or this process may not see it
    NONSENSE = "nonsense"  # the answer is impossible, such as more free memory than there is
    HANGS = "hangs"  # the driver has not answered for seconds, and may never do so


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
    """Turn pynvml's error into one that says what to do; `what` is what was asked of the card."""
    kind, text = NvmlErrorKind.TIMEOUT, _NO_ANSWER
    for known_kind, texts in _EXPLANATIONS.items():
        for code, known_text in texts.items():
            # Earlier versions of pynvml lack some of these codes.
            if error.value == getattr(pynvml, f"NVML_ERROR_{code}", None):
                kind, text = known_kind, known_text
    bare_uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return NvmlError(kind, text.format(what=what, uuid=uuid, bare_uuid=bare_uuid, error=error))


# Codes that are missing below are temporary: timeout, in use, out of memory, unknown.
_NO_ANSWER = (
    "the driver did not report the {what} of {uuid} ({error}); ask again later, and read `dmesg` if"
    " it keeps failing"
)

_NOT_TOLD = "the driver does not report the {what} of {uuid}: "

_EXPLANATIONS: Mapping[NvmlErrorKind, Mapping[str, str]] = {
    NvmlErrorKind.MISSING: {
        "LIBRARY_NOT_FOUND": "there is no NVIDIA driver library here, libnvidia-ml.so.1; install"
        " the driver, or give the container the cards (docker --gpus) and"
        " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    },
    NvmlErrorKind.DRIVER: {
        "DRIVER_NOT_LOADED": "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia),"
        " and read `dmesg` if that fails",
        "LIB_RM_VERSION_MISMATCH": "the NVIDIA library and the loaded kernel driver have different"
        " versions, as after an update; reboot the machine, or restart the container if only that"
        " is older",
    },
    NvmlErrorKind.NOT_SUPPORTED: {
        "NOT_SUPPORTED": _NOT_TOLD + "this card does not support it; do without",
        "FUNCTION_NOT_FOUND": _NOT_TOLD + "it is too old; update it or do without",
        "ARGUMENT_VERSION_MISMATCH": _NOT_TOLD
        + "its version and that of nvidia-ml-py do not match; update the older one",
    },
    NvmlErrorKind.NO_PERMISSION: {
        "NO_PERMISSION": _NOT_TOLD
        + "this user may not know it; run as a user who can open /dev/nvidia*",
        "OPERATING_SYSTEM": _NOT_TOLD
        + "the system or the container forbids it; allow access to /dev/nvidia*",
    },
    NvmlErrorKind.LOST: {
        "GPU_IS_LOST": "{uuid} has fallen off the bus, and its memory is lost; look for Xid in"
        " `dmesg`, then reboot",
        "RESET_REQUIRED": "{uuid} needs a reset; stop what runs on it, then `nvidia-smi --gpu-reset"
        " -i {uuid}` or reboot the machine",
        "INVALID_ARGUMENT": "{uuid} is no longer the device that was opened, as after MIG slices"
        " were recreated; start the run on a device that exists",
    },
    NvmlErrorKind.NOT_FOUND: {
        "NOT_FOUND": "no card or MIG slice here has the UUID {bare_uuid}; compare the full UUID"
        " with `nvidia-smi -L`, and check whether this container was given that card",
        "GPU_NOT_FOUND": "there is no NVIDIA card here; check whether this container was given one",
    },
}
"""What each code of pynvml means for the user, by kind; `NVML_ERROR_` is left out."""
