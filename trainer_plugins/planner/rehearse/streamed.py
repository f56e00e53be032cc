"""Stream the frozen base of the model that is rehearsed, as `StreamBase` does in the run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer

from trainer_plugins.planner.plan import PlanError, Streamed
from trainer_plugins.planner.pretend import quantised
from trainer_plugins.planner.request import PlanRequest, TrainerSource
from trainer_plugins.planner.trainer import TrainerLike
from trainer_plugins.streaming.attach import refusals
from trainer_plugins.streaming.stream import Stream, stream_of

LOADED_TO_MAIN_MEMORY = (
    'the quantised base is loaded to main memory (device_map="cpu"); loaded to the card it has to'
    " fit there once"
)


class Streaming:
    """Streams the base of the Trainer of a request, if the request says so, and counts its copies.

    Args:
        request: the run.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._resident_layers = request.resident_layers
        self._with_embeddings = request.streams_embeddings
        # a Trainer was refused when it was made, if nobody had asked for this by name
        self._allows_generation = isinstance(request.source, TrainerSource)
        self._copied_bytes: list[int] = []

    @property
    def is_asked(self) -> bool:
        """Return whether the base is to be streamed."""
        return self._resident_layers is not None

    @contextlib.contextmanager
    def instead_of_moving(self) -> Iterator[None]:
        """Let a Trainer that is made inside stream its model, where it would move it to the card.

        Raises:
            PlanError: the run cannot be streamed.
        """
        resident_layers = self._resident_layers
        if resident_layers is None:
            yield
            return

        def move(trainer: Any, model: torch.nn.Module, device: torch.device) -> None:
            self._stream(trainer, model, resident_layers)

        with patch.object(Trainer, "_move_model_to_device", move):
            yield

    def begin(self, trainer: Any) -> None:
        """Stream the model of a Trainer, unless that has happened, or was not asked for.

        Raises:
            PlanError: the run cannot be streamed.
        """
        if self._resident_layers is not None and stream_of(trainer.model) is None:
            self._stream(trainer, trainer.model, self._resident_layers)

    def _stream(self, trainer: Any, model: torch.nn.Module, resident_layers: int) -> None:
        reasons = refusals(trainer, model, resident_layers, self._allows_generation)
        if reasons:
            raise PlanError(f"the base of this run cannot be streamed: {'; '.join(reasons)}")
        quantised.tell_weights(model)
        Stream(model, trainer.args.device, resident_layers, self._with_embeddings)
        if quantised.bits_of(model):
            quantised.place(model, trainer.args.device)  # what is no parameter

    def count(self, trainer: TrainerLike) -> None:
        """Count what each micro-step of a Trainer copies that really runs."""
        stream = stream_of(trainer.model)
        if stream is None:
            return
        training_step: Callable[..., object] = trainer.training_step

        def step(*args: object, **kwargs: object) -> object:
            before = stream.fetched_bytes
            loss = training_step(*args, **kwargs)
            self._copied_bytes.append(stream.fetched_bytes - before)
            return loss

        trainer.training_step = step

    def figures(self, trainer: TrainerLike) -> Streamed | None:
        """Return how the base was streamed; None if it was not.

        The first micro-step also brings what then stays, and one that generates copies more: the
        least of all is that of each micro-step, those that were not rehearsed too.
        """
        stream = stream_of(trainer.model)
        if stream is None:
            return None
        streamed = Streamed(
            num_layers=stream.num_layers,
            resident_layers=stream.resident_layers,
            num_bytes=stream.num_bytes,
            copied_bytes_per_micro_batch=min(self._copied_bytes),
        )
        return streamed.with_step_of(trainer.args.gradient_accumulation_steps)
