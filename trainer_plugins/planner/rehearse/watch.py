"""Rehearse the run of a request, and keep what one rank allocates and frees. Imports torch."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from trainer_plugins.launch.main_memory import HostNeed
from trainer_plugins.planner import progress
from trainer_plugins.planner.plan import NotPredicted, PlanError, Streamed, peak_until_resume
from trainer_plugins.planner.pretend import eight_bit, fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world
from trainer_plugins.planner.rehearse import refusals, rollout
from trainer_plugins.planner.rehearse.arguments import arguments_of
from trainer_plugins.planner.rehearse.build import rehearsal_of
from trainer_plugins.planner.rehearse.description import planned_of
from trainer_plugins.planner.rehearse.failures import told_in_one_line
from trainer_plugins.planner.rehearse.rehearsal import Rehearsed, rehearse
from trainer_plugins.planner.rehearse.replaced import replace_again
from trainer_plugins.planner.rehearse.spread import num_cards_of
from trainer_plugins.planner.rehearse.streamed import Streaming
from trainer_plugins.planner.request import PlanRequest, TrainerSource
from trainer_plugins.planner.sharded.launched import resolved
from trainer_plugins.planner.sharded.ranks import forget_accelerate
from trainer_plugins.planner.sharded.strategies import Strategy, strategy_of
from trainer_plugins.planner.tracing.events import Trace
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Holds what a rehearsal showed, before the allocator's rules are applied."""

    trace: Trace
    num_gpus: int
    num_parameters: int
    num_trainable_parameters: int
    host: HostNeed
    not_predicted: tuple[str, ...]
    not_reliable: tuple[str, ...]
    assumptions: tuple[str, ...]
    planned: Mapping[str, str]
    """What was rehearsed, by name, for people."""

    streamed: Streamed | None


@contextmanager
def environment_restored() -> Iterator[None]:
    """Restore os.environ afterwards: TrainingArguments writes to it."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def read_arguments(request: PlanRequest) -> Arguments:
    """Make the TrainingArguments of a request. They ask the card what it can do.

    Raises:
        PlanError: transformers refuses them, or no card can be simulated here.
    """
    _make_ready(request.device)
    with environment_restored(), in_world(World(device=request.device)):
        return arguments_of(request.source)


@environment_restored()
def watch(request: PlanRequest, loaded: Callable[[int], None] = lambda _: None) -> Watched:
    """Rehearse the run, and keep what one rank allocates and frees.

    Args:
        request: the run.
        loaded: gets the bytes on the fullest card when the model is there, before any step.

    Raises:
        PlanError: the input is wrong.
        NotPredicted: the planner cannot predict this run.
    """
    request = resolved(request)
    os.environ.update(request.environment)
    world = _world_of(request)
    _make_ready(request.device, world.num_cards)
    forget_accelerate()
    replace_again(getattr(request.source, "replaced", ()))
    with tempfile.TemporaryDirectory() as folder, in_world(world) as tracker:
        args = arguments_of(request.source)
        refusals.refuse_arguments(args, request.device)
        rollout.check_card(args, request.card)
        strategy, streaming = strategy_of(request, args), Streaming(request)
        with strategy.around(tracker):
            rehearsed = _built(request, streaming, tracker, folder)
            loaded(max(tracker.allocated_bytes.values(), default=0))
            notes = _run(rehearsed, strategy, streaming, tracker)
        if tracker.masks_pick_all:
            rehearsed.assumptions.append(
                "a mask, as in x[mask], is counted as if it selects everything: the worst case"
            )
        rehearsed.assumptions.extend(tracker.assumed)
        if _drops_layers(rehearsed.trainer.model):
            rehearsed.assumptions.append("LayerDrop leaves out no layer: the worst case")
        trace = tracker.trace()
        parameters = [*rehearsed.trainer.model.parameters()]
        planned = planned_of(request, rehearsed.trainer, args)
    if request.num_nodes > 1:
        rehearsed.assumptions.append(
            f"{request.gpus_per_node} GPUs in each of {request.num_nodes} nodes"
        )
    return Watched(
        trace=trace,
        num_gpus=request.num_gpus,
        num_parameters=_num_elements(parameters),
        num_trainable_parameters=_num_elements(each for each in parameters if each.requires_grad),
        host=HostNeed(
            tensor_bytes=trace.host_peak_bytes,
            pinned_bytes=tracker.host.pinned_bytes,
            num_ranks=request.gpus_per_node,
            until_resume_bytes=peak_until_resume(trace.host_peaks),
        ),
        not_predicted=strategy.not_predicted,
        not_reliable=(
            *notes,
            *strategy.not_reliable,
            *_left_out(request),
            *_not_watched(tracker),
        ),
        assumptions=tuple(rehearsed.assumptions),
        planned=planned,
        streamed=streaming.figures(rehearsed.trainer),
    )


def _built(request: PlanRequest, streaming: Streaming, tracker: Tracker, folder: str) -> Rehearsed:
    """Build the Trainer, and refuse what cannot be rehearsed."""
    progress.step("building the model")
    rehearsed = told_in_one_line(
        lambda: rehearsal_of(request.source, request.has_padding, folder, streaming)
    )
    trainer = rehearsed.trainer
    tracker.has_padding = rehearsed.has_padding
    trainer.args.max_steps = request.num_steps
    refusals.refuse_trainer(trainer)
    if isinstance(request.source, TrainerSource):
        refusals.refuse_divided(trainer.model)
    refusals.refuse_model(trainer.model)
    tracker.vocabulary = _vocabulary_of(trainer.model)
    return rehearsed


def _run(
    rehearsed: Rehearsed, strategy: Strategy, streaming: Streaming, tracker: Tracker
) -> list[str]:
    """Run the Trainer; return which figures are less reliable because of it."""
    trainer = rehearsed.trainer
    states = eight_bit.stand_in(trainer)
    strategy.prepare(trainer)
    streaming.count(trainer)
    progress.step("rehearsing the training")
    told_in_one_line(lambda: rehearse(rehearsed, tracker))
    if (fsdp := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
        rehearsed.assumptions.append(refusals.fsdp_in_force(fsdp))
    return [eight_bit.PAGED] if states is not None and states.is_paged else []


def _world_of(request: PlanRequest) -> World:
    source = request.source
    num_cards = num_cards_of(source.device_map) if isinstance(source, TrainerSource) else 1
    world = World(
        device=request.device,
        has_padding=request.has_padding is True,
        packed_sequences=request.packed_sequences,
        num_cards=num_cards,
    )
    if request.card is None:
        return world
    return replace(
        world,
        capability=request.card.capability,
        memory_bytes=request.card.capacity_bytes,
        num_multiprocessors=request.card.num_multiprocessors,
    )


def _make_ready(device: str, num_cards: int = 1) -> None:
    """Let fake tensors on this type of device have gradients, in this process and for good."""
    if device == "cuda":
        progress.step("compiling a fake CUDA device")
        try:
            how = fake_cuda.install_once()
        except fake_cuda.NoFakeCuda as error:
            raise PlanError(str(error)) from error
        if how != "compiled" and num_cards > 1:
            raise NotPredicted(
                "a model spread over several cards where no C++ compiler is found (g++, or the one"
                " that CXX names)"
            )


def _not_watched(tracker: Tracker) -> list[str]:
    if not tracker.not_watched:
        return []
    return [
        f"these versions have no {', '.join(tracker.not_watched)}, by which the planner learns what"
        " is kept and freed: a figure may be off, and an issue here would help"
    ]


def _left_out(request: PlanRequest) -> list[str]:
    source = request.source
    if not isinstance(source, TrainerSource):
        return []
    if not source.left_out:
        return [*source.unread]
    return [
        *source.unread,
        "attributes of the Trainer that cannot be pickled were left out: "
        f"{', '.join(source.left_out)}",
    ]


def _vocabulary_of(model: torch.nn.Module) -> int:
    """Return the size of the model's output layer; -1 if it has none of two dimensions."""
    get_head = getattr(model, "get_output_embeddings", None)
    weight = getattr(get_head() if get_head is not None else None, "weight", None)
    shape: list[int] = [*getattr(weight, "ds_shape", getattr(weight, "shape", ()))]
    return shape[0] if len(shape) == 2 else -1


def _drops_layers(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers leaves out layers by chance, as speech models do."""
    config = getattr(model, "config", None)
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, None) for name in names)


def _num_elements(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Count the elements of whole parameters, also where this rank packs or divides them."""
    noted = ("quantised_numel", "ds_numel", "whole_numel")
    return sum(
        int(next((getattr(each, name) for name in noted if hasattr(each, name)), each.numel()))
        for each in parameters
    )
