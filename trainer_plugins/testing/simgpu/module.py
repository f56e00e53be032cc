"""Build `torch.simgpu`, which answers torch, transformers and accelerate as `torch.cuda` does."""

import contextlib
import types
from collections.abc import Callable

import torch

from trainer_plugins.testing.card import SimCard

Device = torch.device | str | int | None
Functions = dict[str, object]

_FROM_ACCELERATOR = (
    "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
)  # fmt: skip


_NO_LIMIT = 2**64 - 1


def make_module(
    current_card: Callable[[], SimCard], num_indices: int, limit: Callable[[int], None]
) -> types.ModuleType:
    """Build the module; `limit` sets how many bytes the allocator may reserve."""
    module = types.ModuleType(
        "torch.simgpu", "simgpu as torch sees it; made by trainer_plugins.testing.simgpu."
    )
    module.__dict__.update(
        _device(num_indices)
        | _properties(current_card)
        | _limits(current_card, limit)
        | {name: getattr(torch.accelerator, name) for name in _FROM_ACCELERATOR}
    )
    return module


def _device(num_indices: int) -> Functions:
    """Return the functions for devices, the only stream, and the CPU's generator (device.h)."""
    return {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict.fromkeys(("init", "_lazy_init"), lambda: None),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: num_indices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": contextlib.nullcontext,
        "synchronize": lambda device=None: None,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": contextlib.nullcontext,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: torch.accelerator.current_stream(),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.default_generator.manual_seed),
        **dict.fromkeys(("seed", "seed_all"), torch.seed),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }


def _properties(current_card: Callable[[], SimCard]) -> Functions:
    def get_device_properties(device: Device = None) -> types.SimpleNamespace:
        card = current_card()
        return types.SimpleNamespace(
            name="simgpu",
            total_memory=card.capacity_bytes,
            uuid=card.uuid.removeprefix("GPU-"),  # as CUDA's, which has no driver's prefix in str()
            major=9,
            minor=0,
            multi_processor_count=1,
        )

    def mem_get_info(device: Device = None) -> tuple[int, int]:
        card = current_card()
        return card.free_bytes, card.capacity_bytes

    return {
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: "simgpu",
        "get_device_capability": lambda device=None: (9, 0),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": mem_get_info,
    }


def _limits(current_card: Callable[[], SimCard], limit: Callable[[int], None]) -> Functions:
    fractions = {0: 1.0}

    def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        fractions[0] = fraction
        limit(int(fraction * current_card().capacity_bytes) if fraction < 1 else _NO_LIMIT)

    return {
        "set_per_process_memory_fraction": set_per_process_memory_fraction,
        "get_per_process_memory_fraction": lambda device=None: fractions[0],
    }
