"""Predict a run from a few of its layers where that is proven to be the same, else in full.

Imports torch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer_plugins.planner.compare.extrapolate import longer
from trainer_plugins.planner.compare.layers import Repetition, repetition_of, with_layers
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest


class Foresight:
    """Predictions of runs of one model, one after the other.

    Args:
        watch: rehearses a run.
        judge: makes a plan of what was watched.
    """

    def __init__(
        self, watch: Callable[[PlanRequest], Any], judge: Callable[[PlanRequest, Any], MemoryPlan]
    ) -> None:
        self._watch = watch
        self._judge = judge
        self._repetition: dict[str, Repetition | None] = {}
        self._unproven: set[tuple[str, str | None]] = set()

    def __call__(self, request: PlanRequest) -> tuple[MemoryPlan, bool]:
        """Predict, and say whether every layer was run.

        Raises:
            PlanError: as a prediction in full does.
        """
        watched = self._from_few_layers(request)
        in_full = watched is None
        return self._judge(request, self._watch(request) if in_full else watched), in_full

    def _from_few_layers(self, request: PlanRequest) -> Any:
        source = request.source
        assert isinstance(source, ConfigSource)
        model = repr(source.config)
        if model not in self._repetition:
            self._repetition[model] = repetition_of(source)
        repetition, way = self._repetition[model], (model, request.launch_file)
        if repetition is None or way in self._unproven:
            return None
        try:
            seen = [
                self._watch(replace(request, source=with_layers(source, count)))
                for count in repetition.counts
            ]
        except PlanError:
            return None  # the run in full says what is wrong, of the model that was asked about
        num_more = repetition.num_more
        trace = longer([each.trace for each in seen], num_more)
        sizes = {
            name: _grown([getattr(each, name) for each in seen], num_more)
            for name in ("num_parameters", "num_trainable_parameters")
        }
        is_pinned = any(
            each.host_pinned_bytes_per_node for each in seen
        )  # in powers of two, which do not add up
        if trace is None or None in sizes.values() or is_pinned:
            self._unproven.add(way)  # buckets that span layers do so with every batch
            return None
        return replace(seen[0], trace=trace, **sizes)


def _grown(numbers: list[int], num_more: int) -> int | None:
    """The next but so many of a row of three; None where they do not grow evenly."""
    first, second, third = numbers
    return first + num_more * (second - first) if third - second == second - first else None
