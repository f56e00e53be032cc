"""Compare the main memory of ranks with their machine's, for linter and planner."""

from typing import NamedTuple

from trainer_plugins.units import MIB, parse_size, size

# Python and its libraries in a rank: 452 MiB after import, 600 to 700 after a training step.
# Measured on the CPU (docs/internals/plans.md); CUDA's libraries and context are extra.
PROCESS_BYTES = 600 * MIB


class HostNeed(NamedTuple):
    """Holds the main memory of all ranks on one machine, in bytes."""

    tensor_bytes: int  # pinned ones count with the size of their blocks
    pinned_bytes: int  # the part of `tensor_bytes` that is pinned and cannot be swapped
    num_ranks: int  # the ranks of this machine
    save_bytes: int = 0  # gathered by a save on one of the ranks, besides `tensor_bytes`
    until_resume_bytes: int | None = None  # `tensor_bytes` of a run that is never resumed, if less
    rank_bytes: int = PROCESS_BYTES  # of Python, its libraries and data, in each rank

    @property
    def process_bytes(self) -> int:
        return self.num_ranks * self.rank_bytes

    @property
    def total_bytes(self) -> int:
        return self.tensor_bytes + self.save_bytes + self.process_bytes


class HostLimits(NamedTuple):
    """Holds the limits of a machine's main memory, in bytes; None: unknown."""

    total_bytes: int | None = None  # main memory of the machine, or of its container
    pinned_bytes: int | None = None  # the part that can be pinned, if that is less, as under WSL

    @classmethod
    def read(
        cls, host_memory: str | None, pinned_memory: str | None, here_bytes: int | None
    ) -> "HostLimits":
        """Parse the sizes that a user gave, as in "252GB"; `here_bytes` is the default."""
        return cls(
            total_bytes=here_bytes if host_memory is None else _size("--host-memory", host_memory),
            pinned_bytes=None if pinned_memory is None else _size("--pinned-memory", pinned_memory),
        )

    def shortage(self, need: HostNeed) -> str | None:
        """Describe the shortage; None if there is none, or if the limits are unknown."""
        if self.total_bytes is not None and need.total_bytes > self.total_bytes:
            needed = size(need.total_bytes)
            what = f"each machine needs {needed} of main memory, but has {size(self.total_bytes)}"
            if need.until_resume_bytes in (None, need.tensor_bytes):
                return what
            never = need.total_bytes - need.tensor_bytes + (need.until_resume_bytes or 0)
            return f"{what}; a run that is never resumed needs {size(never)}"
        if self.pinned_bytes is not None and need.pinned_bytes > self.pinned_bytes:
            pinned = f"each machine pins {size(need.pinned_bytes)} of main memory"
            return f"{pinned}, but can pin {size(self.pinned_bytes)}"
        return None


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
