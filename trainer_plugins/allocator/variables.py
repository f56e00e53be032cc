"""The variables that hold allocator settings, and which of them each torch version reads."""

from collections.abc import Iterable, Mapping

from trainer_plugins.allocator.machine import Machine, gather_machine

UNIFIED = "PYTORCH_ALLOC_CONF"
CUDA = "PYTORCH_CUDA_ALLOC_CONF"
HIP = "PYTORCH_HIP_ALLOC_CONF"
NAMES = (CUDA, HIP, UNIFIED)


def names_read(machine: Machine) -> tuple[str, ...]:
    """Return the names that this torch reads; the first one set wins, even if it is empty.

    Up to 2.9, CUDA's allocator only reads the old name (pytorch#183387); from 2.10 on also the
    unified one, last. Checked in CUDA builds of 2.9 to 2.13; the place of the HIP name is from the
    header.
    """
    hip = (HIP,) if machine.rocm else ()
    return (CUDA, *hip, UNIFIED) if machine.torch >= (2, 10) else (CUDA, *hip)


def names_known(machine: Machine) -> tuple[str, ...]:
    """Return the names that some version reads on this platform."""
    return NAMES if machine.rocm else (CUDA, UNIFIED)


def pick(environ: Mapping[str, str], names: Iterable[str] = NAMES) -> dict[str, str]:
    """Return those of the variables that are set, with their texts."""
    return {name: environ[name] for name in names if name in environ}


def find_read(environ: Mapping[str, str], machine: Machine) -> str | None:
    """Return the variable that this torch reads; None if none is set."""
    return next(iter(pick(environ, names_read(machine))), None)


def read_text(environ: Mapping[str, str]) -> str:
    """Return the allocator settings that the installed torch reads; empty if none are set."""
    return environ.get(find_read(environ, gather_machine(environ)) or "", "")
