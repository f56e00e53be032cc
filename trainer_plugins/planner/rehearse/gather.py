"""Build a request from the user's Trainer, which stays unchanged: batch, arguments, model."""

import contextlib
import itertools
import os
import pickle
import random
from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer_plugins.devices.host import HostDevice
from trainer_plugins.draws import keep_draws
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.longest import has_rows, lengths_as_collated, lengths_of
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse import rollout, ship
from trainer_plugins.planner.rehearse.liger import find_replaced_by_liger
from trainer_plugins.planner.rehearse.spread import device_map_of
from trainer_plugins.planner.request import PlanRequest, TrainerSource
from trainer_plugins.streaming.stream import stream_of

_MOST_STREAMED = 20_000  # rows read from a data set without a length
_SIMGPU = "simgpu"
_EXPORTED = (
    "FSDP_",
    "ACCELERATE_USE_FSDP",
    "PARALLELISM_CONFIG_",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)  # prefixes of a launcher's exports that the rehearsal needs


def request_of(
    trainer: Any, card: Card | None, allocator: str, num_gpus: int | None
) -> PlanRequest:
    """Build the request of a Trainer's run; `num_gpus` and `card` default to the Trainer's own."""
    if trainer.model is None:
        raise PlanError("the Trainer has no model yet: build it with model=, not with model_init=")
    args, device_map = trainer.args, device_map_of(trainer, num_gpus)
    if getattr(args, "use_cpu", False) and card is None and torch.accelerator.is_available():
        raise NotPredicted(
            "a run on the CPU (use_cpu) of a machine with a GPU: name the GPU to plan for"
        )
    num_gpus = 1 if device_map else num_gpus or max(1, args.world_size)
    with keep_undisturbed(trainer):
        batch, unread = longest_batch(trainer)
        evaluation, num_batches, unread_there = _evaluation_of(trainer)
        try:
            sent, left_out = ship.dumps_trainer(trainer)
            source = TrainerSource(
                trainer=sent,
                batch=pickle.dumps(batch),
                evaluation_batch=pickle.dumps(evaluation) if evaluation is not None else None,
                num_evaluation_batches=num_batches,
                left_out=left_out,
                unread=tuple(filter(None, (unread, unread_there))),
                device_map=device_map,
                replaced=find_replaced_by_liger(),
            )
        except (pickle.PicklingError, RecursionError) as error:
            raise PlanError(f"the Trainer cannot be pickled for its dry run: {error}") from error
    resident_layers, streams_embeddings = _read_stream(trainer)
    engine = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    here = _card_here(args.device) if card is None else None
    host = HostLimits(total_bytes=HostDevice().read().total_bytes) if here else HostLimits()
    return PlanRequest(
        source=source,
        card=card or here,
        host=host,
        allocator=allocator,
        num_gpus=num_gpus,
        num_nodes=_num_nodes(num_gpus),
        environment={
            name: value
            for name, value in os.environ.items()
            if "WORLD_SIZE" in os.environ and name.startswith(_EXPORTED)
        },
        deepspeed=engine.deepspeed_config if engine is not None else None,
        resident_layers=resident_layers,
        streams_embeddings=streams_embeddings,
    )


def _read_stream(trainer: Any) -> tuple[int | None, bool]:
    """Return how many layers of a streamed base stay on the card, and whether embeddings stream.

    On a CPU, where you plan for a card, `StreamBase` has not started yet.
    """
    stream = stream_of(trainer.model)
    if stream is not None:
        return stream.resident_layers, stream.with_embeddings
    if trainer.args.device.type != "cpu":
        return None, False
    callbacks = (getattr(each, "stream_base", each) for each in trainer.callback_handler.callbacks)
    asked = (getattr(each, "asked_to_stream", None) for each in callbacks)
    return next((each for each in asked if each is not None), (None, False))


def _evaluation_of(trainer: Any) -> tuple[object, int, str]:
    """Return an evaluation's longest batch, its number of batches, and a note on unread rows."""
    args, dataset = trainer.args, trainer.eval_dataset
    if not args.do_eval or dataset is None:
        return None, 0, ""
    if isinstance(dataset, dict):
        dataset = max(dataset.values(), key=_length)
    rows, name = args.per_device_eval_batch_size, "eval_dataset"
    if rollout.generates(trainer):
        batch, unread = _longest_prompts(dataset, rows, trainer.num_generations_eval, name)
    else:
        batch, unread = _longest_batch(trainer, dataset, rows, name)
    return batch, max(1, -(-_length(dataset) // rows)), unread


def _num_nodes(num_gpus: int) -> int:
    """Return the number of machines if a launcher exported the processes of each, else 0."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_told = os.environ.get("WORLD_SIZE") == str(num_gpus) and local.isdigit() and int(local)
    return num_gpus // int(local) if is_told and not num_gpus % int(local) else 0


def _card_here(device: torch.device) -> Card | None:
    """Return the card that the Trainer runs on, if there is one."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return None
    properties = module.get_device_properties(device)
    is_simulated = device.type == _SIMGPU
    card = Card(
        name=_SIMGPU if is_simulated else properties.name,
        capacity_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
    )
    if is_simulated:
        return replace(card, context_bytes=0, context_source="a simulated card has none")
    return card


@contextlib.contextmanager
def keep_undisturbed(trainer: Any) -> Iterator[None]:
    """Restore the random states, also those of its data, and the Trainer's columns afterwards."""
    of_process = torch.default_generator, random.getstate, np.random.get_state
    of_data = trainer.train_dataset, trainer.eval_dataset, trainer.data_collator
    columns = trainer._signature_columns
    try:
        with keep_draws(*of_process, *of_data):
            yield
    finally:
        trainer._signature_columns = columns


def longest_batch(trainer: Any, num_rows: int | None = None) -> tuple[Any, str]:
    """Return the worst training batch that a sampler can draw, or one of `num_rows` rows.

    The text is a note on unread rows; it is empty if all were read.
    """
    dataset, args = trainer.train_dataset, trainer.args
    if rollout.generates(trainer):  # nothing fixes the length of completions
        rows = rollout.rows_of_a_batch(args)
        return _longest_prompts(dataset, rows, trainer.num_generations, "train_dataset")
    num_rows = num_rows or args.per_device_train_batch_size
    return _longest_batch(trainer, dataset, num_rows, "train_dataset")


def _longest_batch(trainer: Any, dataset: Any, rows: int, name: str) -> tuple[object, str]:
    if dataset is None:
        raise PlanError(f"the Trainer has no {name}: a plan needs it to find the longest batch")
    collator = trainer.data_collator
    if type(dataset).__module__.startswith("datasets.") and has_rows(dataset):
        # If no column is a model input, the Trainer's own loader reads them.
        with contextlib.suppress(ValueError):
            dataset = trainer._remove_unused_columns(dataset, description="planning")
    else:  # As the Trainer does; a stream may not know its columns.
        collator = trainer._get_collator_with_removed_columns(collator, description="planning")
    chosen, unread = _longest_of(dataset, rows, name, 50 * rows, collator)
    return collator(chosen), unread


def _longest_of(
    dataset: Any, num: int, name: str, num_streamed: int, collate: Any = None
) -> tuple[list[Any], str]:
    """Return the `num` longest rows of a dataset (they may repeat), and a note on unread rows."""
    unread = ""
    if not has_rows(dataset):
        kind, stream = type(dataset).__name__, iter(dataset)
        dataset = [*itertools.islice(stream, min(_MOST_STREAMED, num_streamed))]
        if next(stream, None) is not None:
            unread = f"the {name} ({kind}) has no length, and its first {len(dataset):,} were read"
    if not len(dataset):
        raise PlanError(f"the {name} is empty")
    lengths, why = lengths_as_collated(dataset, collate) if collate else (lengths_of(dataset), "")
    unread = unread or why
    if len(lengths.rows) < lengths.num_rows:
        unread = (
            f"of the {lengths.num_rows:,} rows of the {name} ({type(dataset).__name__}) only"
            f" {len(lengths.rows):,} were read, spread evenly, since each must be fetched"
        )
    if unread:
        unread = f"the longest batch: {unread}; a longer row that comes later needs more"
    chosen = itertools.islice(itertools.cycle(lengths.longest(num)), num)
    return [dataset[index] for index in chosen], unread


def _longest_prompts(dataset: Any, rows: int, num_answers: int, name: str) -> tuple[object, str]:
    """Return the prompts generated at once: the longest, each repeated for its answers."""
    if isinstance(getattr(dataset, "column_names", None), list):
        known = [column for column in rollout.COLUMNS if column in dataset.column_names]
        dataset = dataset.select_columns(known)
    num_prompts = -(-rows // num_answers)
    found, unread = _longest_of(dataset, num_prompts, name, _MOST_STREAMED)
    prompts = [
        {column: row[column] for column in rollout.COLUMNS if column in row} for row in found
    ]
    return [row for row in prompts for _ in range(num_answers)][:rows], unread


def _length(dataset: object) -> int:
    return len(dataset) if isinstance(dataset, Sized) else 1
