"""Predict a run from a few of its layers: exactly if that is proven, or sooner and nearly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_plugins.planner.compare.extrapolate import continued, longer, without_passing
from trainer_plugins.planner.compare.switches import source_of, with_flags
from trainer_plugins.planner.plan import MemoryPlan, PlanError, Streamed, peak_until_resume
from trainer_plugins.planner.rehearse.model_of_config import model_of
from trainer_plugins.planner.rehearse.watch import Watched, read_arguments
from trainer_plugins.planner.request import (
    LAYER_COUNTS,
    ONLINE_TRAINERS,
    ConfigSource,
    PlanRequest,
)

_STEPS_OF_A_PROBE = 2
_MICRO_STEPS_OF_A_PROBE = 2  # the second micro-step is the first with gradients
_FIRST = 3  # the first layer that may repeat: the second follows the first


@dataclass(frozen=True, slots=True)
class Repetition:
    """Describes how the layers of a model repeat."""

    num_layers: int
    period: int  # the distance in layers from a layer to the next that is like it

    @property
    def first(self) -> int:
        """Return the least number of layers to which adding whole periods gives all of them."""
        least = _FIRST + self.period - 1
        return least + (self.num_layers - least) % self.period

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of layers of the three runs from which the whole is extrapolated."""
        return (self.first, self.first + self.period, self.first + 2 * self.period)

    @property
    def num_more(self) -> int:
        """Return how many periods the first of these runs lacks."""
        return (self.num_layers - self.first) // self.period


class Foresight:
    """Predicts runs of one model, one after the other."""

    def __init__(
        self,
        watch: Callable[[PlanRequest], Watched],
        judge: Callable[[PlanRequest, Watched], MemoryPlan],
        works: PlanRequest | None = None,
    ) -> None:
        """Take what rehearses a run and what judges it; `works` is a run that has a plan."""
        self._watch = watch
        self._judge = judge
        self._works = works
        self._repetition: dict[str, Repetition | None] = {}
        self._unproven: set[tuple[str, str | None]] = set()

    def __call__(self, request: PlanRequest) -> tuple[MemoryPlan, bool]:
        """Predict a run, and return also whether all of its layers were run."""
        watched = self._from_few_layers(request)
        if watched is None:
            return self._judge(request, self._watch(request)), True
        return self._judge(request, watched), False

    def probe(self, request: PlanRequest) -> MemoryPlan:
        """Predict a run nearly: from two runs of few layers, with two steps of two micro-steps."""
        num_micro_steps = read_arguments(request).gradient_accumulation_steps
        few = min(num_micro_steps, _MICRO_STEPS_OF_A_PROBE)
        if source_of(request).trainer in ONLINE_TRAINERS:
            few = num_micro_steps  # as many rows are generated at once
        short = with_flags(request, gradient_accumulation_steps=few)
        plan = self._probed(request, replace(short, num_steps=_STEPS_OF_A_PROBE))
        base = plan.streamed
        return plan if base is None else replace(plan, streamed=base.with_step_of(num_micro_steps))

    def _probed(self, request: PlanRequest, short: PlanRequest) -> MemoryPlan:
        seen = self._seen(short, 2)
        if seen is None:
            return self._judge(request, self._watch(short))
        repetition = self._repetition_of(short)
        assert repetition is not None
        plainer = [replace(each, trace=without_passing(each.trace)) for each in seen]
        for watched in (_longer(each, repetition.num_more) for each in (seen, plainer)):
            if watched is not None:
                return self._judge(request, watched)
        first, second = (self._judge(request, each) for each in seen)
        return _in_proportion(first, second, repetition.num_more)

    def _from_few_layers(self, request: PlanRequest) -> Watched | None:
        model = repr(source_of(request).config)
        way = (model, request.launch_file)
        seen = None if way in self._unproven else self._seen(request, 3)
        repetition = self._repetition_of(request)
        if seen is None or repetition is None:
            return None
        if any(each.host.pinned_bytes for each in seen):
            return None  # pinned memory is in powers of two, which do not add up
        watched = _longer(seen, repetition.num_more)
        if watched is None:
            # with another batch it would be the same, as with buckets that span layers
            self._unproven.add(way)
        return watched

    def _seen(self, request: PlanRequest, num_runs: int) -> list[Watched] | None:
        """Rehearse runs of few layers; return None if the layers do not repeat."""
        repetition = self._repetition_of(request)
        if repetition is None:
            return None
        try:
            return [self._watch(_cut(request, count)) for count in repetition.counts[:num_runs]]
        except PlanError:
            if self._can_be_cut:
                raise
            return None  # the run in full raises it for the model that was asked about

    @cached_property
    def _can_be_cut(self) -> bool:
        """Return whether the run that works does so with few layers too: errors are no others."""
        if self._works is None or (repetition := self._repetition_of(self._works)) is None:
            return False
        short = replace(self._works, num_steps=_STEPS_OF_A_PROBE)
        try:
            self._watch(_cut(short, repetition.first))
        except PlanError:
            return False
        return True

    def _repetition_of(self, request: PlanRequest) -> Repetition | None:
        source = source_of(request)
        model = repr(source.config)
        if model not in self._repetition:
            self._repetition[model] = repetition_of(source)
        return self._repetition[model]


def _longer(seen: Sequence[Watched], num_more: int) -> Watched | None:
    """Make the rehearsal of all layers from those of few; return None if they do not repeat."""
    trace = longer([each.trace for each in seen], num_more)
    num_parameters = continued([each.num_parameters for each in seen], num_more)
    num_trainable = continued([each.num_trainable_parameters for each in seen], num_more)
    pinned = continued([each.host.pinned_bytes for each in seen], num_more)
    if trace is None or num_parameters is None or num_trainable is None or pinned is None:
        return None
    return replace(
        seen[0],
        trace=trace,
        num_parameters=num_parameters,
        num_trainable_parameters=num_trainable,
        host=replace(
            seen[0].host,
            tensor_bytes=max(trace.host_peaks.values(), default=0),
            pinned_bytes=pinned,
            until_resume_bytes=peak_until_resume(trace.host_peaks),
        ),
        streamed=_streamed(seen[0].streamed, seen[1].streamed, num_more),
    )


def _streamed(first: Streamed | None, second: Streamed | None, num_more: int) -> Streamed | None:
    """Continue the figures of a base that is streamed: each is even in layers."""
    if first is None or second is None:
        return None
    numbers = {
        name: getattr(first, name) + num_more * (getattr(second, name) - getattr(first, name))
        for name in ("num_layers", "num_bytes", "copied_bytes_per_micro_batch")
    }
    return replace(first, **numbers)


def _in_proportion(first: MemoryPlan, second: MemoryPlan, num_more: int) -> MemoryPlan:
    """Continue the figures of two plans, for buckets that span layers.

    What is reserved beyond the allocated is uneven in layers: the least of it counts, so that
    nothing is left out that fits.
    """

    def further(one: int, two: int) -> int:
        return one + num_more * (two - one)

    allocated = further(first.allocated_peak_bytes, second.allocated_peak_bytes)
    beside = min(each.reserved_peak_bytes - each.allocated_peak_bytes for each in (first, second))
    peak = allocated + beside + second.context_bytes
    return replace(
        second,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=allocated + beside,
        nvidia_smi_peak_bytes=peak,
        host_ram_bytes_per_node=further(
            first.host_ram_bytes_per_node, second.host_ram_bytes_per_node
        ),
        host_pinned_bytes_per_node=further(
            first.host_pinned_bytes_per_node, second.host_pinned_bytes_per_node
        ),
        host_moments={},
        host_shortage=None,
        streamed=_streamed(first.streamed, second.streamed, num_more),
        fits=None if second.capacity_bytes is None else peak <= second.capacity_bytes,
        breakdown={
            name: further(first.breakdown.get(name, 0), num_bytes)
            for name, num_bytes in second.breakdown.items()
        },
        top_tensors=(),
        moments={},
        timeline=(),
    )


def grown(plan: MemoryPlan, factor: float) -> int:
    """Estimate the allocated peak with `factor` times the tokens, of which only a batch grows."""
    if plan.moment not in ("forward", "backward", "evaluation"):
        return plan.allocated_peak_bytes
    batch = sum(plan.breakdown.get(name, 0) for name in ("activations", "logits and loss"))
    return int(plan.allocated_peak_bytes + (factor - 1) * batch)


def repetition_of(source: ConfigSource) -> Repetition | None:
    """Build the whole model without bytes, and compare its layers; None if few, or not alike."""
    counts = {*_counts(source).values()}
    if len(counts) != 1:
        return None
    (num_layers,) = counts
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, _ = model_of(replace(source, peft=None))
    except PlanError:
        return None
    stacks = [
        [_look(layer) for layer in module]
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    for period in range(1, num_layers // 2):
        found = Repetition(num_layers, period)
        if sum(found.counts) >= num_layers:  # then all of them are as fast
            return None
        if stacks and all(_repeats(stack, period) for stack in stacks):
            return found
    return None


def _cut(request: PlanRequest, num_layers: int) -> PlanRequest:
    return replace(request, source=with_layers(source_of(request), num_layers))


def with_layers(source: ConfigSource, num_layers: int) -> ConfigSource:
    """Make the config of the same model with fewer layers; lists with an entry a layer are cut."""
    counts = _counts(source)
    before = max(counts.values())
    lists = {
        name: value[:num_layers]
        for name, value in source.config.items()
        if isinstance(value, list) and len(value) == before
    }
    return replace(source, config={**source.config, **dict.fromkeys(counts, num_layers), **lists})


def _counts(source: ConfigSource) -> dict[str, int]:
    """Return the keys of a config that count layers, with their values."""
    found = {name: source.config.get(name) for name in LAYER_COUNTS}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _repeats(stack: list[list[object]], period: int) -> bool:
    """Compare from the second layer on: the first may hold what all others use."""
    return all(stack[index] == stack[index - period] for index in range(1 + period, len(stack)))


def _look(layer: torch.nn.Module) -> list[object]:
    """Return what makes two layers alike: modules, sizes and plain attributes."""
    return [
        (
            name,
            type(module).__qualname__,
            [(key, parameter.shape) for key, parameter in module.named_parameters(recurse=False)],
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (str, bool, int, float))
                and not key.endswith(("idx", "index", "layer_id"))
            ),
        )
        for name, module in layer.named_modules()
    ]
