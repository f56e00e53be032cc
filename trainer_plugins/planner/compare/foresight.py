"""Predict a run from a few of its layers if that is proven to be the same, else in full.

Imports torch.
"""

from collections.abc import Callable
from dataclasses import replace

from trainer_plugins.planner.compare.extrapolate import longer
from trainer_plugins.planner.compare.layers import Repetition, repetition_of, with_layers
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.rehearse.watch import Watched
from trainer_plugins.planner.request import ConfigSource, PlanRequest


class Foresight:
    """Predicts runs of one model, one after the other.

    Args:
        watch: rehearses a run.
        judge: makes a plan of what was watched.
    """

    def __init__(
        self,
        watch: Callable[[PlanRequest], Watched],
        judge: Callable[[PlanRequest, Watched], MemoryPlan],
    ) -> None:
        self._watch = watch
        self._judge = judge
        self._repetition: dict[str, Repetition | None] = {}
        self._unproven: set[tuple[str, str | None]] = set()

    def __call__(self, request: PlanRequest) -> tuple[MemoryPlan, bool]:
        """Predict a run, and return also whether all of its layers were run.

        Raises:
            PlanError: a prediction in full would raise the same.
        """
        watched = self._from_few_layers(request)
        if watched is None:
            return self._judge(request, self._watch(request)), True
        return self._judge(request, watched), False

    def _from_few_layers(self, request: PlanRequest) -> Watched | None:
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
            return None  # the run in full raises it for the model that was asked about
        num_more = repetition.num_more
        trace = longer([each.trace for each in seen], num_more)
        num_parameters = _grown([each.num_parameters for each in seen], num_more)
        num_trainable = _grown([each.num_trainable_parameters for each in seen], num_more)
        # pinned memory is in powers of two, which do not add up
        is_pinned = any(each.host.pinned_bytes for each in seen)
        if trace is None or num_parameters is None or num_trainable is None or is_pinned:
            # with another batch it would be the same, as with buckets that span layers
            self._unproven.add(way)
            return None
        return replace(
            seen[0],
            trace=trace,
            num_parameters=num_parameters,
            num_trainable_parameters=num_trainable,
        )


def _grown(numbers: list[int], num_more: int) -> int | None:
    """Continue three numbers by `num_more` steps from the first; None if they grow unevenly."""
    first, second, third = numbers
    return first + num_more * (second - first) if third - second == second - first else None
