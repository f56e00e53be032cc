"""The names under which allocator settings are given, and which of them a version of torch reads."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_plugins.allocator.machine import Machine

UNIFIED = "PYTORCH_ALLOC_CONF"
CUDA = "PYTORCH_CUDA_ALLOC_CONF"
HIP = "PYTORCH_HIP_ALLOC_CONF"


def names_read(machine: Machine) -> tuple[str, ...]:
    """The names that this torch reads, the one that wins first.

    A name that is set, even to nothing, wins.

    Up to 2.9 the CUDA allocator reads the old name alone (pytorch#183387); from 2.10 on also the
    unified one, last (`CUDAAllocatorConfig::instance`). Seen in the CUDA builds of 2.9.0, 2.10.0,
    2.11.0, 2.12.0 and 2.13.0; the HIP name is from the header, which puts it between the two.
    """
    hip = (HIP,) if machine.rocm else ()
    return (CUDA, *hip, UNIFIED) if machine.torch >= (2, 10) else (CUDA, *hip)


def names_known(machine: Machine) -> tuple[str, ...]:
    """The names that mean something on this platform in some version."""
    return (CUDA, HIP, UNIFIED) if machine.rocm else (CUDA, UNIFIED)


@dataclass(frozen=True, slots=True)
class Variables:
    """What the variables of a process hold: only those that are set."""

    texts: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Variables":
        """Those of an environment."""
        return cls({name: environ[name] for name in (CUDA, HIP, UNIFIED) if name in environ})

    def read_by(self, machine: Machine) -> str | None:
        """The name that this torch takes its settings from, or None where it finds none."""
        return next((name for name in names_read(machine) if name in self.texts), None)

    def of_platform(self, machine: Machine) -> dict[str, str]:
        """Those that mean something on this platform."""
        return {name: self.texts[name] for name in names_known(machine) if name in self.texts}
