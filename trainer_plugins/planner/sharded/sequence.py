"""Divide the tokens of each row among cards as DeepSpeed does: accelerate's `sp_size`.

DeepSpeed's own code (runtime/sequence_parallel/ulysses_sp.py, from Ulysses and ALST) gathers the
batches of these cards, which then compute one batch after the other together. Each has a part of
every row; around each attention they exchange it for all tokens of some heads. Imports torch and
DeepSpeed.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer_plugins.planner.sharded.zero import Zero
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.tracing.values import Values


class Ulysses(Zero):
    """Divides each row among cards, and what the stage of ZeRO divides."""

    not_reliable: tuple[str, ...] = (
        *Zero.not_reliable,
        "sequence parallelism: DeepSpeed's own exchange of heads for tokens; checked on simulated "
        "cards, not on a GPU",
    )

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        with (
            # they are kept for the process: the next prediction is another run
            patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
            patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", None),
            patch.object(parallel_state_sp, "_SEQUENCE_DATA_PARALLEL_GROUP", None),
            _ranks_have_as_many_tokens(tracker),
            super().around(tracker),
        ):
            yield


def _ranks_have_as_many_tokens(tracker: Tracker) -> contextlib.AbstractContextManager[object]:
    """Let the rows of other ranks be as long as those of this one: their lengths are not sent."""
    refill = UlyssesSPDataLoaderAdapter.refill

    def refilled(adapter: Any) -> None:
        asked = tracker.values.asked
        if not isinstance(adapter.iter, _Counted):
            adapter.iter = _Counted(adapter.iter, tracker.values)
        try:
            refill(adapter)
        finally:
            tracker.values.asked = asked

    return patch.object(UlyssesSPDataLoaderAdapter, "refill", refilled)


class _Counted:
    """Passes batches on, and lets a count that is not known be the length of the last one."""

    def __init__(self, batches: Iterator[Any], values: Values) -> None:
        self._batches = batches
        self._values = values

    def __next__(self) -> Any:
        batch = next(self._batches)
        length = batch["input_ids"].shape[1]
        self._values.asked = replace(self._values.asked, count=length)
        return batch
