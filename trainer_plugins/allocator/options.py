"""Lists every option of PYTORCH_ALLOC_CONF in torch 2.13: its type, its range, and since when.

Source: AllocatorConfig.h and .cpp of c10/core and c10/cuda, and the parsers of torch 2.9 to 2.13.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Says how torch reads a value."""

    FLAG = "True or False, in exactly this spelling"
    COUNT = "a whole number"
    FRACTION = "a number"
    BACKEND = "native or cudaMallocAsync"
    DIVISIONS = "a power of 2, or a list as in [256:1,512:2,>:4]"


@dataclass(frozen=True, slots=True)
class Option:
    """Describes one option; `settings` judges its range when it reads a value."""

    key: str
    kind: Kind
    since: tuple[int, int] = (0, 0)  # the first version that knows it, from 2.9 on
    cuda_only: bool = False  # other builds ignore it like a misspelt key
    minimum: int = 0
    power_of_2: bool = False
    maximum: int | None = None


OPTIONS = (
    Option("backend", Kind.BACKEND, cuda_only=True),
    Option("max_split_size_mb", Kind.COUNT, minimum=20),
    Option("max_non_split_rounding_mb", Kind.COUNT, minimum=20),
    Option("roundup_power2_divisions", Kind.DIVISIONS),
    Option("garbage_collection_threshold", Kind.FRACTION),
    Option("expandable_segments", Kind.FLAG),
    Option("large_segment_size_mb", Kind.COUNT, since=(2, 11), minimum=11),
    Option("release_lock_on_cudamalloc", Kind.FLAG, cuda_only=True),
    Option("release_lock_on_hipmalloc", Kind.FLAG, cuda_only=True),
    Option("graph_capture_record_stream_reuse", Kind.FLAG, cuda_only=True),
    Option("per_process_memory_fraction", Kind.FRACTION, since=(2, 10), cuda_only=True),
    Option("throw_on_cudamalloc_oom", Kind.FLAG, since=(2, 12), cuda_only=True),
    Option("pinned_use_cuda_host_register", Kind.FLAG, cuda_only=True),
    Option("pinned_use_hip_host_register", Kind.FLAG, cuda_only=True),
    Option(
        "pinned_num_register_threads",
        Kind.COUNT,
        cuda_only=True,
        minimum=1,
        power_of_2=True,
        maximum=128,
    ),
    Option("pinned_use_background_threads", Kind.FLAG),
    Option("pinned_reserve_segment_size_mb", Kind.COUNT, since=(2, 10), cuda_only=True, minimum=1),
    Option("pinned_max_round_threshold_mb", Kind.COUNT, since=(2, 13)),
    Option("pinned_max_cached_size_mb", Kind.COUNT, since=(2, 13)),
    Option("pinned_free_catch_all", Kind.FLAG, since=(2, 12), cuda_only=True),
)
OPTION_OF = {option.key: option for option in OPTIONS}
