"""Takes torch's own snapshot when a CUDA out-of-memory error is thrown; not yet on a GPU."""

import logging
import os
import pickle
from contextlib import suppress
from pathlib import Path
from time import time

import torch

from trainer_plugins.record.folder import replacing

logger = logging.getLogger(__name__)

MAX_ENTRIES = 100_000  # how many allocations torch keeps; by default without limit


class _State:
    draft: Path | None = None  # where the next snapshot goes
    is_attached = False  # torch cannot detach an observer, so ours does nothing without a draft


_state = _State()


def record_history(folder: Path, rank: int) -> bool:
    """Record allocations from now on, for a snapshot; False where torch has no snapshots."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or not torch.cuda.is_available():
        return False
    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    if not _state.is_attached:
        _state.is_attached = True
        attach(_on_out_of_memory)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    _state.draft = folder / f".oom-rank{rank}-{os.getpid()}.pickle"
    return True


def keep_snapshot() -> str:
    """Rename the last snapshot, which the next one would replace, and return its name, if any."""
    draft = _state.draft
    if draft is None or not draft.exists():
        return ""
    rank = draft.name.split("-")[1]
    kept = draft.with_name(f"oom-{rank}-{int(time())}-{os.getpid()}.pickle")
    draft.rename(kept)
    return kept.name


def forget_history() -> None:
    """Stop recording, and remove a snapshot that was not kept."""
    draft, _state.draft = _state.draft, None
    if draft is not None:
        torch.cuda.memory._record_memory_history(enabled=None)
        with suppress(OSError):
            draft.unlink()


def _on_out_of_memory(device: int, asked: int, allocated: int, free: int) -> None:
    """Write the snapshot; torch calls this before the error unwinds any frame."""
    draft = _state.draft
    if draft is None:
        return
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with replacing(draft) as file:
            # torch's viewer reads protocols 2 to 4.
            pickle.dump(torch.cuda.memory._snapshot(), file, protocol=4)
    except Exception:
        # An error here would hide the one that is being thrown.
        logger.warning("torch's snapshot could not be written to %s", draft, exc_info=True)
