"""Builds DeepSpeed's extensions before a launch, and finishes builds that were interrupted."""

import os
import time
from collections.abc import Callable
from typing import Any

from trainer_plugins.launch.extensions import lock_findings, read_locks
from trainer_plugins.launch.lint.document import ConfigError
from trainer_plugins.patched import Patches


def build(name: str) -> float:
    """Build an extension as a rank would, and return the seconds; ranks that wait for it go on.

    The lock of an interrupted build stays until the extension is there: ranks that wait load it
    when the lock is gone, and fail if there is nothing to load.
    """
    try:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
    except ImportError as error:
        raise ConfigError(f"DeepSpeed cannot be imported: {error}") from None
    if name not in ALL_OPS:
        raise ConfigError(f"DeepSpeed has no extension {name}: it has {', '.join(sorted(ALL_OPS))}")
    for lock in read_locks(os.environ):
        if lock.path.parent.name == name and lock.unseen and lock.holder is None:
            raise ConfigError(str(next(lock_findings([lock]))))
    begun = time.monotonic()
    with Patches() as patches:
        _inherit_locks(patches)
        try:
            ALL_OPS[name].load(verbose=False)
        except (RuntimeError, ImportError) as error:
            lines = str(error).splitlines()
            wrong = next((line for line in lines if " error: " in line), lines[0])
            raise RuntimeError(f"{name} cannot be built: {wrong}. See `ds_report`") from error
    return time.monotonic() - begun


def _inherit_locks(patches: Patches) -> None:
    """Let a lock that no process holds be this process's."""
    from torch.utils import cpp_extension

    def try_acquire(original: Callable[[Any], bool], baton: Any) -> bool:
        left = (each.path for each in read_locks(os.environ) if each.holder is None)
        if not original(baton) and any(path.samefile(baton.lock_file_path) for path in left):
            baton.fd = os.open(baton.lock_file_path, os.O_RDONLY)
        return baton.fd is not None

    if hasattr(cpp_extension, "FileBaton"):  # with a later torch, no lock outlives its process
        patches.wrap(cpp_extension.FileBaton, "try_acquire", try_acquire)
