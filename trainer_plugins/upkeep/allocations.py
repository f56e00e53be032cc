"""Keeps torch's history of allocations while training runs, and its snapshot of an OOM."""

import logging
import os
import pickle
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import time
from typing import Any

import torch

from trainer_plugins.record.folder import replacing

logger = logging.getLogger(__name__)

MAX_ENTRIES = 100_000  # allocations that torch keeps; its default is no limit


_draft: Path | None = None  # path of torch's next snapshot


@cache  # torch cannot detach an observer, so ours does nothing without a draft
def _observe_errors() -> None:
    native: Any = torch._C
    native._cuda_attach_out_of_memory_observer(_on_out_of_memory)


def record_history(folder: Path, rank: int) -> bool:
    """Record allocations from now on, for a snapshot; False if torch has no snapshots here."""
    global _draft
    if not torch.cuda.is_available():
        return False
    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    _observe_errors()
    _draft = folder / f".oom-rank{rank}-{os.getpid()}.pickle"
    return True


def keep_snapshot() -> str:
    """Rename the last snapshot, which the next one would replace; return its name, if any."""
    if _draft is None or not _draft.exists():
        return ""
    rank = _draft.name.split("-")[1]
    kept = _draft.with_name(f"oom-{rank}-{int(time())}-{os.getpid()}.pickle")
    _draft.rename(kept)
    return kept.name


def forget_history() -> None:
    """Stop recording, and remove a snapshot that was not kept."""
    global _draft
    draft, _draft = _draft, None
    if draft is not None:
        torch.cuda.memory._record_memory_history(enabled=None)
        with suppress(OSError):
            draft.unlink()


def _on_out_of_memory(device: int, asked: int, allocated: int, free: int) -> None:
    """Write the snapshot; torch calls this before the error unwinds any frame."""
    draft = _draft
    if draft is None:
        return
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with replacing(draft) as file:
            # torch's viewer reads protocols 2 to 4.
            pickle.dump(torch.cuda.memory._snapshot(), file, protocol=4)
    except Exception:
        # An error here would hide the original.
        logger.warning("torch's snapshot could not be written to %s", draft, exc_info=True)
