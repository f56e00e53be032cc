"""Stream the frozen base of the rehearsed model, as `StreamBase` does in the run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import BUS_BYTES_PER_SECOND, PlanError, Streamed
from trainer_plugins.planner.request import RESIDENT_LAYERS, PlanRequest, TrainerSource
from trainer_plugins.streaming.attach import refusals
from trainer_plugins.streaming.stream import Stream, stream_of


class Streaming:
    """Streams the base of a request's Trainer, and counts its copies."""

    def __init__(self, request: PlanRequest) -> None:
        self._resident_layers = request.resident_layers or RESIDENT_LAYERS
        self._with_embeddings = request.streams_embeddings
        # StreamBase has already refused a Trainer that generates, unless generation was allowed
        self._allows_generation = isinstance(request.source, TrainerSource)
        self._copied_bytes: list[int] = []

    @contextlib.contextmanager
    def instead_of_moving(self) -> Iterator[None]:
        """Make a Trainer that is built inside stream its model instead of moving it to the card."""
        with Patches() as patches:
            move = "_move_model_to_device"
            patches.set(Trainer, move, lambda trainer, model, _: self._stream(trainer, model))
            yield

    def begin(self, trainer: Any) -> None:
        """Stream the model of a Trainer, unless it streams already."""
        if stream_of(trainer.model) is None:
            self._stream(trainer, trainer.model)

    def _stream(self, trainer: Any, model: torch.nn.Module) -> None:
        reasons = refusals(trainer, model, self._resident_layers, self._allows_generation)
        if reasons:
            raise PlanError(f"the base of this run cannot be streamed: {'; '.join(reasons)}")
        Stream(model, trainer.args.device, self._resident_layers, self._with_embeddings)

    def count(self, trainer: HfTrainer) -> None:
        """Count the bytes that each micro-step copies."""
        stream = stream_of(trainer.model)
        if stream is None:
            return

        def step(train: Callable[..., object], *args: object, **kwargs: object) -> object:
            before = stream.fetched_bytes
            loss = train(*args, **kwargs)
            self._copied_bytes.append(stream.fetched_bytes - before)
            return loss

        Patches().wrap(trainer, "training_step", step)

    def figures(self, trainer: HfTrainer) -> Streamed | None:
        """Return the figures of the streamed base, with the smallest copy of any micro-batch."""
        stream = stream_of(trainer.model)
        if stream is None:
            return None
        copied_bytes = min(self._copied_bytes, default=0)
        of_a_step = trainer.args.gradient_accumulation_steps * copied_bytes
        return Streamed(
            num_layers=stream.num_layers,
            resident_layers=stream.resident_layers,
            num_bytes=stream.num_bytes,
            copied_bytes_per_micro_batch=copied_bytes,
            copied_bytes_per_step=of_a_step,
            copy_seconds_per_step=of_a_step / BUS_BYTES_PER_SECOND,
        )
