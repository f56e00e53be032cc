"""Rehearse the run of a request, and keep what one rank allocates and frees. Imports torch."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainer_plugins.accumulation import Accumulation
from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.launch.main_memory import HostNeed
from trainer_plugins.planner import progress
from trainer_plugins.planner.kind import Kind, kind_of, needs_flash_attn, planned_of
from trainer_plugins.planner.one_card import OneCard
from trainer_plugins.planner.plan import NotPredicted, PlanError, Streamed, peak_until_resume
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import (
    ANY_CARD,
    World,
    forget_accelerate,
    in_world,
)
from trainer_plugins.planner.rehearse import from_config, refusals
from trainer_plugins.planner.rehearse.arguments import arguments_of
from trainer_plugins.planner.rehearse.model_of_config import model_of
from trainer_plugins.planner.rehearse.refusals import told_in_one_line
from trainer_plugins.planner.rehearse.rehearsal import Build, Rehearsed, rehearse
from trainer_plugins.planner.request import ConfigSource, PlanRequest, TrainerSource, with_nodes
from trainer_plugins.planner.tracing.events import Trace
from trainer_plugins.planner.tracing.trace import Tracker

if TYPE_CHECKING:
    from trainer_plugins.planner.rehearse.streamed import Streaming


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
    planned: Mapping[str, str]  # what was rehearsed, by name, for people
    streamed: Streamed | None
    accumulation: Accumulation


@contextmanager
def environment_restored() -> Iterator[None]:
    """Restore os.environ afterwards: TrainingArguments writes to it."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def read_arguments(request: PlanRequest) -> HfArguments:
    """Make the TrainingArguments of a request. They ask the card what it can do."""
    _make_ready(request.device)
    with environment_restored(), in_world(World(device=request.device, has_flash_attn=False)):
        return arguments_of(request.source)


@environment_restored()
def watch(request: PlanRequest, loaded: Callable[[int], None] = lambda _: None) -> Watched:
    """Rehearse the run of a rank; `loaded` gets the bytes on the fullest card before any step."""
    request, source = _resolved(request), request.source
    os.environ.update(request.environment)
    world = _world_of(request)
    _make_ready(request.device, world.num_cards)
    forget_accelerate()
    if isinstance(source, TrainerSource) and source.replaced:
        from trainer_plugins.planner.pretend import triton
        from trainer_plugins.planner.rehearse.liger import replace_again

        triton.kernels_do_nothing()
        replace_again(source.replaced)
    with tempfile.TemporaryDirectory() as folder, in_world(world) as tracker:
        args = arguments_of(source)
        kind = kind_of(request, args)
        refusals.refuse_arguments(args, kind, request.card)
        strategy, streaming = _strategy_of(request, args, kind), _streaming_of(request, kind)
        with strategy.around(tracker):
            # a mapped file is given up where main memory is short, as it is if the card is it
            files = 0 if request.card is not None and request.card.is_unified else 1
            made = partial(model_of, shared=partial(tracker.host.in_ranks, files))
            build = Build(args, kind, request.has_padding, folder, streaming, made)
            rehearsed = _built(request, build, tracker)
            loaded(max(tracker.allocated_bytes.values(), default=0))
            notes = _run(rehearsed, build, strategy, tracker)
        trace = tracker.trace()
        parameters = [*rehearsed.trainer.model.parameters()]
        planned = planned_of(request, rehearsed.trainer, args, kind)
        accumulation = judge_accumulation(rehearsed.trainer)
    return Watched(
        trace=trace,
        num_gpus=request.num_gpus,
        num_parameters=_num_elements(parameters),
        num_trainable_parameters=_num_elements(each for each in parameters if each.requires_grad),
        host=HostNeed(
            tensor_bytes=max(trace.host_peaks.values(), default=0),
            pinned_bytes=tracker.host.pinned_bytes,
            num_ranks=request.gpus_per_node,
            until_resume_bytes=peak_until_resume(trace.host_peaks),
        ),
        not_predicted=strategy.not_predicted,
        not_reliable=(*notes, *strategy.not_reliable, *_left_out(request), *_not_watched(tracker)),
        assumptions=(*rehearsed.assumptions, *_assumed(request, rehearsed, tracker)),
        planned=planned,
        streamed=streaming.figures(rehearsed.trainer) if streaming is not None else None,
        accumulation=accumulation,
    )


def _resolved(request: PlanRequest) -> PlanRequest:
    """Complete a request by what a launcher does, if it has one."""
    if not request.is_launched:
        return with_nodes(request)
    from trainer_plugins.planner.sharded.launched import resolved

    return resolved(request)


def _strategy_of(request: PlanRequest, args: HfArguments, kind: Kind) -> OneCard:
    if kind.is_alone:
        return OneCard()
    from trainer_plugins.planner.sharded.strategies import strategy_of

    return strategy_of(request, args, kind)


def _streaming_of(request: PlanRequest, kind: Kind) -> "Streaming | None":
    if not kind.is_streamed:
        return None
    from trainer_plugins.planner.rehearse.streamed import Streaming

    return Streaming(request)


def _built(request: PlanRequest, build: Build, tracker: Tracker) -> Rehearsed:
    """Build the Trainer, and refuse what cannot be rehearsed."""
    progress.step("building the model")
    rehearsed = told_in_one_line(lambda: _rehearsal_of(request.source, build))
    trainer, kind = rehearsed.trainer, build.kind
    tracker.has_padding = rehearsed.has_padding
    tracker.has_packed_rows = rehearsed.has_packed_rows
    trainer.args.max_steps = request.num_steps
    refusals.refuse_trainer(trainer, kind)
    if isinstance(request.source, TrainerSource):
        refusals.refuse_divided(trainer.model)
    refusals.refuse_model(trainer.model, kind)
    tracker.vocabulary = _vocabulary_of(trainer.model)
    return rehearsed


def _rehearsal_of(source: ConfigSource | TrainerSource, build: Build) -> Rehearsed:
    """Make the Trainer of a source, with its model on the card, and its batches."""
    if not build.kind.is_alone:  # again as a rank: DeepSpeed's batch sizes depend on it
        build = replace(build, args=arguments_of(source))
    args, kind, streaming = build.args, build.kind, build.streaming
    if args.use_liger_kernel:
        from trainer_plugins.planner.pretend import triton

        triton.kernels_do_nothing()
    if kind.is_of_a_package:
        from trainer_plugins.planner.pretend import optimizers

        settings = getattr(args, "optim_args", None) or ""
        optimizers.let_it_be_imported(kind.optimizer, settings)
    if isinstance(source, TrainerSource):
        from trainer_plugins.planner.rehearse import from_trainer

        rehearsed = from_trainer.rehearsed(source, build)
    else:
        rehearsed = _from_config(source, build)
    if kind.has_liger:
        from trainer_plugins.planner.rehearse.liger import said_of_liger

        rehearsed.assumptions.append(said_of_liger(rehearsed.trainer.model))
    if streaming is not None:
        rehearsed.assumptions.extend(streaming.assumed(rehearsed.trainer.model))
    return rehearsed


def _from_config(source: ConfigSource, build: Build) -> Rehearsed:
    make = from_config.rehearsed
    if source.trainer is not None:
        from trainer_plugins.planner.rehearse import from_loop

        make = from_loop.rehearsed
    if build.streaming is None:
        return make(source, build)
    with build.streaming.instead_of_moving():
        rehearsed = make(source, build)
    build.streaming.begin(rehearsed.trainer)
    return rehearsed


def _run(rehearsed: Rehearsed, build: Build, strategy: OneCard, tracker: Tracker) -> list[str]:
    """Run the Trainer; return which figures are less reliable because of it."""
    trainer, kind, streaming = rehearsed.trainer, build.kind, build.streaming
    notes = []
    if kind.is_of_bitsandbytes:
        from trainer_plugins.planner.pretend import eight_bit

        states = eight_bit.stand_in(trainer, kind.optimizer)
        if states is not None and states.is_paged:
            notes.append(eight_bit.PAGED)
    strategy.prepare(trainer)
    if streaming is not None:
        streaming.count(trainer)
    progress.step("rehearsing the training")
    told_in_one_line(lambda: rehearse(rehearsed, kind, strategy, tracker))
    if (fsdp := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
        rehearsed.assumptions.append(refusals.fsdp_in_force(fsdp))
    return notes


def _assumed(request: PlanRequest, rehearsed: Rehearsed, tracker: Tracker) -> Iterator[str]:
    """Yield what was assumed about values that a rehearsal does not have, and about the launch."""
    if tracker.masks_pick_all:
        yield "a mask, as in x[mask], is counted as if it selects everything: the worst case"
    yield from tracker.assumed
    config = getattr(rehearsed.trainer.model, "config", None)
    # models of transformers that leave out layers by chance, as speech models do
    if any(getattr(config, f"{part}layerdrop", None) for part in ("", "encoder_", "decoder_")):
        yield "LayerDrop skips no layer: the worst case"
    if request.num_nodes > 1:
        yield f"{request.gpus_per_node} GPUs in each of {request.num_nodes} nodes"


def _world_of(request: PlanRequest) -> World:
    source = request.source
    device_map = source.device_map if isinstance(source, TrainerSource) else {}
    return World(
        device=request.device,
        card=request.card or ANY_CARD,
        has_padding=request.has_padding is True,
        packed_sequences=request.packed_sequences,
        num_cards=1 + max(device_map.values(), default=0),
        has_flash_attn=needs_flash_attn(source),
    )


def _make_ready(device: str, num_cards: int = 1) -> None:
    """Let fake tensors on this type of device have gradients, permanently in this process."""
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
        f"these versions have no {', '.join(tracker.not_watched)}, which the planner reads to know"
        " what is kept and freed: a figure may be off; please report it"
    ]


def _left_out(request: PlanRequest) -> list[str]:
    source = request.source
    if not isinstance(source, TrainerSource):
        return []
    lines = [*source.unread]
    if source.left_out:
        names = ", ".join(source.left_out)
        lines.append(f"attributes of the Trainer that cannot be pickled were left out: {names}")
    return lines


def _vocabulary_of(model: torch.nn.Module) -> int:
    """Return the size of the model's output layer; -1 if it has none of two dimensions."""
    get_head = getattr(model, "get_output_embeddings", None)
    weight = getattr(get_head() if get_head is not None else None, "weight", None)
    shape: list[int] = [*getattr(weight, "ds_shape", getattr(weight, "shape", ()))]
    return shape[0] if len(shape) == 2 else -1


def _num_elements(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Count the elements of full parameters, also where this rank packs or divides them."""
    noted = ("quantised_numel", "ds_numel", "whole_numel")
    return sum(
        int(next((getattr(each, name) for name in noted if hasattr(each, name)), each.numel()))
        for each in parameters
    )
