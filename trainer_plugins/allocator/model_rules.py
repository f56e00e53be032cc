"""AllocatorRules: the settings by which CUDA's caching allocator places memory."""

from dataclasses import dataclass

from trainer_plugins.allocator.addresses import Order
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
    segments: Order = "chunks"
    """Where new segments lie, which decides between free blocks of one size."""

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
