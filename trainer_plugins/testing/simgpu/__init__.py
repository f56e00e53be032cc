"""simgpu: an accelerator in main memory, on which an unmodified Trainer really runs out of memory.

    from trainer_plugins.testing import simgpu
    simgpu.enable(capacity_bytes=2 << 30)      # before the Trainer, or:
    $ python -m trainer_plugins.testing.simgpu --capacity 2GiB train.py --any-arguments

Tensors of the device `simgpu` live in main memory behind a caching allocator with CUDA's rules.
`torch.accelerator` reports on it, and when the card is full torch raises its own `OutOfMemoryError`
in CUDA's words. Operations run on the CPU's kernels, so their results (up to rounding) and their
speed are the CPU's. Random numbers come from the CPU's generator.

Other processes on the card, scripted or real, are in the card file (`SimCard`); with
`SIMGPU_CARD=path` several processes share one. Under torchrun and `accelerate launch` each rank has
its own card, `simgpu:0`, and gloo runs the collectives.

It differs from a CUDA card:

* Temporary memory of an operation (such as a convolution's workspace) does not count; its results
  do.
* Attention stores no scores, like CUDA's flash kernel, except with dropout, where CUDA's still does
  not.
* Of the allocator's settings (`PYTORCH_ALLOC_CONF`, under the name that this torch reads) only
  `expandable_segments` has an effect, as set when simgpu was enabled.
* There is no fp16 in the Trainer (accelerate lists the devices that have it), no fused LSTM or GRU,
  no sparse tensor, no graph and no second stream.
* The card has no memory outside PyTorch, such as a context of a few hundred MiB;
  `SimCard.hold(os.getpid(), ...)` adds it.

Importing this module does nothing. Enabling affects the process and cannot be undone; it sets
`ACCELERATE_TORCH_DEVICE`, and `teach.py` lists the three functions of other libraries that it
changes, and why. Enabling needs a C++ compiler once for each torch (about ten seconds; the result
is kept in the cache). Before you enable it, everything else here raises RuntimeError.
"""

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainer_plugins.allocator.settings import read, values_of
from trainer_plugins.allocator.variables import read_text
from trainer_plugins.testing.card import SimCard
from trainer_plugins.testing.simgpu.build import SimgpuUnavailable, load, unavailable_reason
from trainer_plugins.units import MIB, size

__all__ = [
    "SimCard", "SimgpuUnavailable", "allocations", "card", "enable", "fail_at", "is_enabled",
    "set_capacity", "unavailable_reason",
]  # fmt: skip

_SMALLEST_CAPACITY_BYTES = 2 * MIB  # one segment of the small pool


class _Enabled(NamedTuple):
    library: ctypes.CDLL
    card: SimCard


_enabled: _Enabled | None = None


def enable(capacity_bytes: int | None = None, card: SimCard | None = None) -> None:
    """Make simgpu the accelerator of this process, before the Trainer's arguments are built.

    A second call only sets the capacity. There is an index `simgpu:0`, `simgpu:1` and so on for
    each rank of the machine; only the first has memory, tensors without bytes can be on any.

    Args:
        capacity_bytes: the memory of the card; None leaves the given card's as it is.
        card: the card to use, which gets that capacity; None is the one that `SIMGPU_CARD` names,
            or else a private one, removed when the process ends.

    Raises:
        ValueError: the capacity is below 2 MiB or unknown, or a second call names another card.
        SimgpuUnavailable: it cannot be built here.
    """
    global _enabled
    if capacity_bytes is not None:
        _check_capacity(capacity_bytes)
    if _enabled is not None:
        if card is not None and card.path != _enabled.card.path:
            raise ValueError(
                f"simgpu already uses the card {_enabled.card.path}, and cannot change it"
            )
        if capacity_bytes is not None:
            set_capacity(capacity_bytes)
        return
    if "TRAINER_PLUGINS_DRYCUDA" in os.environ:
        return  # in a plan's dry run, the dry card is the card
    library = load()
    chosen = card if card is not None else _default_card(capacity_bytes)
    if capacity_bytes is not None:
        chosen.capacity_bytes = capacity_bytes
    name = " ".join([Path(sys.executable).name, *sys.argv[:1]])[:47]  # of this process
    _check(library, library.simgpu_attach_card(os.fsencode(chosen.path), name.encode()))
    settings, _ = read(read_text(os.environ))
    library.simgpu_expandable(bool(values_of(settings).get("expandable_segments")))
    _enabled = _Enabled(library, chosen)
    _register(library)


def is_enabled() -> bool:
    """Return whether `enable` has been called in this process."""
    return _enabled is not None


def set_capacity(capacity_bytes: int) -> None:
    """Change the capacity of the card, at least 2 MiB. Reserved memory stays, even above it."""
    _check_capacity(capacity_bytes)
    card().capacity_bytes = capacity_bytes


def card() -> SimCard:
    """Return this process's card, to list its processes and to script others."""
    return _require_enabled().card


def fail_at(n: int) -> None:
    """Make the n-th allocation from now raise `torch.OutOfMemoryError`, once, even with room.

    As in a real failure, the cache is flushed and a retry counted first; the message says that
    nothing is free.
    """
    if n < 1:
        raise ValueError(f"allocations are counted from 1, got {n}")
    _require_enabled().library.simgpu_fail_at(n)


def allocations() -> int:
    """Return the number of allocations since simgpu was enabled, the range of a `fail_at` sweep."""
    return int(_require_enabled().library.simgpu_num_allocations())


def _register(library: ctypes.CDLL) -> None:
    import torch
    from torch.utils import backend_registration

    from trainer_plugins.testing.simgpu.module import make_module
    from trainer_plugins.testing.simgpu.teach import teach_libraries

    num_indices = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    backend_registration.rename_privateuse1_backend("simgpu")
    _check(library, library.simgpu_register(num_indices))
    module = make_module(card, num_indices, library.simgpu_limit)
    torch._register_device_module("simgpu", module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "simgpu:0"
    teach_libraries()
    # Autograd's device thread may still drop the graph of a pass, which needs the interpreter's
    # lock: taken during finalisation, the lock ends the thread in a C++ destructor (exit code 134),
    # as on CUDA. A forked child has no such thread.
    _call_at_exit(library.simgpu_finish_backward)


def _call_at_exit(function: Callable[[], object]) -> None:
    """Call a function when this process ends, and not when a forked child does."""
    owner_pid = os.getpid()
    atexit.register(lambda: function() if os.getpid() == owner_pid else None)


def _default_card(capacity_bytes: int | None) -> SimCard:
    path = os.environ.get("SIMGPU_CARD")
    if path and Path(path).exists():
        return SimCard(path)
    if capacity_bytes is None:
        raise ValueError("simgpu needs a capacity, as in --capacity 2GiB, or a card that has one")
    if path:
        return SimCard.create(path, capacity_bytes)
    directory = tempfile.mkdtemp(prefix="simgpu-")
    _call_at_exit(partial(shutil.rmtree, directory, ignore_errors=True))
    own = uuid.uuid5(uuid.NAMESPACE_OID, f"simgpu {os.getpid()}")
    return SimCard.create(Path(directory) / "card", capacity_bytes, f"GPU-{own}")


def _check(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise SimgpuUnavailable(library.simgpu_last_error().decode())


def _check_capacity(capacity_bytes: int) -> None:
    if capacity_bytes < _SMALLEST_CAPACITY_BYTES:
        raise ValueError(f"simgpu needs a capacity of at least 2 MiB, got {size(capacity_bytes)}")


def _require_enabled() -> _Enabled:
    if _enabled is None:
        raise RuntimeError("simgpu is not enabled, call simgpu.enable first")
    return _enabled
