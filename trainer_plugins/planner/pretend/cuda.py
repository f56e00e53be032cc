"""Answer what programs ask torch.cuda, and simulate its streams.

A freed block goes back to the pool of its stream at once. After `record_stream` it waits for
another stream, which runs as late as the program lets it (`tracing.position.Lag`).
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_plugins.allocator.model import AllocatorRules, first_of_a_size
from trainer_plugins.patched import Patches
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.tracing.position import Lag
from trainer_plugins.planner.tracing.replay import by_card, replay
from trainer_plugins.planner.tracing.trace import Tracker


def answer(patches: Patches, tracker: Tracker, card: Card, num_cards: int) -> None:
    """Answer what programs ask torch.cuda before and between steps."""
    import transformers

    capability = card.capability

    class Properties:
        name = "a card that is not there"  # no library knows a special case of it
        major, minor = capability
        total_memory = card.capacity_bytes
        multi_processor_count = card.num_multiprocessors
        gcnArchName = ""  # noqa: N815 - torch's name
        uuid = "00000000-0000-0000-0000-000000000000"

    answers: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_cards,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": contextlib.nullcontext,  # as in `with torch.cuda.device(0):`
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: Properties,
        "get_device_name": lambda device=None: Properties.name,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": tracker.emptied,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "get_rng_state_all": list,
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
        **_memory(tracker, card),
        **_streams(tracker),
    }
    for name, value in answers.items():
        patches.set(torch.cuda, name, value)
    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # transformers asks the build of torch too, which may have no CUDA
    has_tf32 = capability >= (8, 0)
    patches.set(transformers.training_args, "is_torch_tf32_available", lambda: has_tf32)
    # FakeTensorMode would initialise CUDA to learn the number of the current device.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda self: True))
    _have_one_kernel(patches)


def _memory(tracker: Tracker, card: Card) -> dict[str, object]:
    """Return what stands in for the names of torch.cuda that are about memory."""
    rules = AllocatorRules(first_of_a_size=first_of_a_size(torch.__version__))

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return index or 0

    def allocated(device: Any = None) -> int:
        return tracker.allocated_bytes[index_of(device)]

    def reserved(device: Any = None) -> int:
        """Tell what is held of one card; transformers asks how much of it is unused."""
        of_card = by_card(tracker.trace()).get(index_of(device))
        return replay(of_card, None, rules).reserved_bytes if of_card is not None else 0

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return card.capacity_bytes - allocated(device), card.capacity_bytes

    return {
        "mem_get_info": mem_get_info,
        "memory_allocated": allocated,
        "max_memory_allocated": allocated,
        "memory_reserved": reserved,
        "max_memory_reserved": allocated,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
    }


def _have_one_kernel(patches: Patches) -> None:
    """Let RMSNorm, and the backward of SiLU and Mish, be one kernel (native_functions.yaml)."""

    def gradient_of(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def norm(x: torch.Tensor, shape: Sequence[int], weight: Any = None, _: Any = None) -> Any:
        return _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]

    kernels = {"silu_backward": gradient_of, "mish_backward": gradient_of, "_fused_rms_norm": norm}
    for name, kernel in kernels.items():
        if hasattr(torch.ops.aten, name):
            library = patches.enter_context(torch.library._scoped_library("aten", "IMPL"))
            library.impl(name, kernel, "AutogradCUDA")


class _RmsNorm(torch.autograd.Function):
    """Keeps its input, and one number of each row: native/cuda/layer_norm_kernel.cu."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> Any:
        whole = x.contiguous()
        made = torch.empty_like(whole)
        shape = (*x.shape[:-num_dims], *[1] * num_dims)
        of_rows = torch.empty(shape, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, of_rows)
        ctx.mark_non_differentiable(of_rows)
        ctx.set_materialize_grads(False)
        return made, of_rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        gradient, whole = gradient.contiguous(), x.contiguous()
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return torch.empty_like(whole), of_weight, None


def _events_of(lag: Lag) -> type:
    """Return the class of events of a card."""

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self.mark = 0

        def record(self, *_: object) -> "Event":
            self.mark = lag.mark()
            return self

        def wait(self, *_: object) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            lag.finish(self.mark)

    return Event


def _streams(tracker: Tracker) -> dict[str, object]:
    """Return what stands in for the names of torch.cuda that are about streams."""
    numbers, lag, event_class = itertools.count(1), tracker.lag, _events_of(tracker.lag)

    class Stream:
        device_index, device_type = 0, 1  # of CUDA, in c10/core/DeviceType.h; torch 2.15 asks

        def __init__(self, *_: object, **__: object) -> None:
            self.stream_id = next(numbers)

        def wait_stream(self, _: object) -> None:
            pass

        wait_event = wait_stream

        def record_event(self, event: Any = None) -> Any:
            return (event_class() if event is None else event).record()

        def synchronize(self) -> None:
            lag.finish(lag.mark())

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

    def current(*_: object) -> Stream:
        stream = Stream.__new__(Stream)
        stream.stream_id = tracker.stream
        return stream

    @contextlib.contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        with tracker.streams.using(stream.stream_id if stream is not None else tracker.stream):
            yield

    return {
        "Stream": Stream,
        "Event": event_class,
        "current_stream": current,
        "stream": use,
        "synchronize": lambda device=None: lag.finish(lag.mark()),
    }
