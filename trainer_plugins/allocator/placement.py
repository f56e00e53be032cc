"""AllocatorRules: the settings by which CUDA's caching allocator places memory."""

from dataclasses import dataclass

from trainer_plugins.allocator.settings import NUM_INTERVALS, AllocatorSettings
from trainer_plugins.units import MIB

LARGE_SEGMENT_BYTES = 20 * MIB
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """Holds the settings that decide where memory comes from; sizes in bytes, defaults CUDA's."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    garbage_collection_threshold: float = 0.0
    """It counts only together with `memory_fraction`, as in torch."""

    roundup_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    memory_fraction: float | None = None
    """The fraction of the card that this process may reserve; None is all of it."""

    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    rising_segment_bytes: int = 32 * MIB
    """Size from which new segments are placed downwards instead of upwards.

    A new segment up to this size lies above earlier ones of such a size; a larger one lies below
    the earlier large ones. This decides between free blocks of one size. No source of CUDA's says
    so. It was learned from 16 published figures of a T4 (`tests/planner/published.toml`, fitcheck
    2026-09-15): missed by up to 9 % where all segments rise, 0.3 % where those above 2 MiB fall,
    0.03 % with any size from 20 to 40 MiB, 0.6 % with 48 and 64. 32 MiB is a choice among those,
    and so is that what falls lies above what rises. On 53 figures of an L40S, from which nothing of
    this was learned, all these choices differ by 1 % at most, and by 0.03 % in the mean. 0 is how
    Linux maps host memory (simgpu).
    """

    @classmethod
    def of(cls, settings: AllocatorSettings) -> "AllocatorRules":
        """Read the rules from parsed PYTORCH_ALLOC_CONF settings.

        Raises:
            ValueError: the settings name another backend than the native one.
        """
        values = settings.values
        if values.get("backend", "native") != "native":
            raise ValueError(
                f"not predicted: the allocator backend {values['backend']}, only native is modelled"
            )
        given: dict[str, object] = {}
        for key, name in (
            ("max_split_size_mb", "max_split_bytes"),
            ("large_segment_size_mb", "large_segment_bytes"),
        ):
            if isinstance(megabytes := values.get(key), int):
                given[name] = min(megabytes * MIB, UNLIMITED)
        for key, name in (
            ("expandable_segments", "expandable_segments"),
            ("garbage_collection_threshold", "garbage_collection_threshold"),
            ("roundup_power2_divisions", "roundup_divisions"),
            ("per_process_memory_fraction", "memory_fraction"),
        ):
            if key in values:
                given[name] = values[key]
        return cls(**given)  # type: ignore[arg-type]
