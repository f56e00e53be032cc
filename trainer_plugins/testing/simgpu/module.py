"""`torch.simgpu`: what torch, transformers and accelerate ask about a device, as `torch.cuda` is for CUDA."""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer_plugins.testing.card import SimCard

Device = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` tells, as far as a simulated card has it."""

    name: str
    total_memory: int
    uuid: str
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1


def make_module(current_card: Callable[[], SimCard], num_indices: int) -> types.ModuleType:
    """Build the module; `current_card` is asked each time, since the card may be exchanged."""
    accelerator = torch.accelerator

    def get_device_properties(device: Device = None) -> DeviceProperties:
        card = current_card()
        # str() of CUDA's uuid is the bare text, without the driver's prefix.
        return DeviceProperties("simgpu", card.capacity_bytes, card.uuid.removeprefix("GPU-"))

    def mem_get_info(device: Device = None) -> tuple[int, int]:
        card = current_card()
        return card.free_bytes, card.capacity_bytes

    @contextlib.contextmanager
    def in_context(_: Any = None) -> Iterator[None]:
        yield

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: num_indices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": in_context,
        "synchronize": lambda device=None: None,
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: "simgpu",
        "get_device_capability": lambda device=None: (9, 0),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        # One generator for both devices: see Hooks in device.h.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "seed": torch.seed,
        "seed_all": torch.seed,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        # One stream, on which work is done when it is asked for.
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": in_context,
        "current_stream": lambda device=None: accelerator.current_stream(),
        "default_stream": lambda device=None: accelerator.current_stream(),
        "mem_get_info": mem_get_info,
    }
    for name in (
        "empty_cache",
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    ):
        functions[name] = getattr(accelerator, name)
    module = types.ModuleType(
        "torch.simgpu", "simgpu as torch sees it; made by trainer_plugins.testing.simgpu."
    )
    module.__dict__.update(functions)
    return module
