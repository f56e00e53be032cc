"""Look at somebody's Trainer: its longest batch, its arguments, its model.

It is left as it was. Imports torch.
"""

import contextlib
import itertools
import os
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse import ship
from trainer_plugins.planner.request import PlanRequest, TrainerSource

_MOST_ROWS_READ = 20_000
_COUNTED = (
    "input_ids",
    "labels",
    "input_values",
    "input_features",
    "pixel_values",
    "attention_mask",
)
_PROMPTS = ("prompt_ids", "prompt_input_ids")
_ANSWERS = ("chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids")
_SIMGPU = "simgpu"


def request_of(
    trainer: Any, card: Card | None, allocator: str, num_gpus: int | None, has_padding: bool | None
) -> PlanRequest:
    """Gather what a prediction needs.

    Raises:
        PlanError: there is no data to find a batch in, or something cannot be sent to another
            process.
        NotPredicted: its model is spread over several cards.
    """
    if getattr(trainer, "is_model_parallel", False):
        raise NotPredicted("a model spread over several devices (hf_device_map)")
    if trainer.model is None:
        raise PlanError("the Trainer has no model yet: give it one in place of model_init")
    args = trainer.args
    device = args.device.type if args.device.type == _SIMGPU else "cuda"
    rows = args.per_device_train_batch_size
    with _undisturbed(trainer):
        batch, is_padded = _longest_batch(trainer, trainer.train_dataset, rows, "train_dataset")
        evaluation, num_batches = None, 0
        evaluates = (
            str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" or args.do_eval
        )
        if evaluates and trainer.eval_dataset is not None:
            dataset = trainer.eval_dataset
            if isinstance(dataset, dict):
                dataset = max(dataset.values(), key=_length)
            evaluation, _ = _longest_batch(
                trainer, dataset, args.per_device_eval_batch_size, "eval_dataset"
            )
            num_batches = max(1, -(-_length(dataset) // args.per_device_eval_batch_size))
        try:
            sent, left_out = ship.dumps_trainer(trainer)
            source = TrainerSource(
                trainer=sent,
                batch=ship.dumps(batch),
                evaluation_batch=ship.dumps(evaluation) if evaluation is not None else None,
                num_evaluation_batches=num_batches,
                left_out=left_out,
            )
        except (pickle.PicklingError, RecursionError) as error:
            raise PlanError(f"the Trainer cannot be sent to another process: {error}") from error
    if has_padding is None:
        has_padding = is_padded
    return PlanRequest(
        source=source,
        device=device,
        card=card if card is not None else _card_here(args.device),
        allocator=allocator,
        num_gpus=num_gpus or max(1, args.world_size),
        num_nodes=_num_nodes(num_gpus or max(1, args.world_size)),
        environment=_exported(),
        deepspeed=_deepspeed(trainer),
        has_padding=has_padding,
        is_packed=_is_packed(batch),
    )


def _num_nodes(num_gpus: int) -> int:
    """Machines, where a launcher has said how many of these processes each of them has; else 0."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_told = os.environ.get("WORLD_SIZE") == str(num_gpus) and local.isdigit() and int(local)
    return num_gpus // int(local) if is_told and not num_gpus % int(local) else 0


def _exported() -> dict[str, str]:
    """What the launcher of this process has exported for accelerate."""
    if "WORLD_SIZE" not in os.environ:
        return {}
    wanted = ("FSDP_", "ACCELERATE_USE_FSDP")
    return {name: value for name, value in os.environ.items() if name.startswith(wanted)}


def _deepspeed(trainer: Any) -> dict[str, Any] | None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return plugin.deepspeed_config if plugin is not None else None


def _card_here(device: torch.device) -> Card | None:
    """The card that the Trainer runs on, where there is one."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return None
    properties = module.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if device.type == _SIMGPU:
        return Card(
            name=_SIMGPU,
            capacity_bytes=properties.total_memory,
            capability=capability,
            context_bytes=0,
            context_source="it has none",
        )
    return Card(name=properties.name, capacity_bytes=properties.total_memory, capability=capability)


@contextlib.contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """Datasets and collators may draw random numbers; the run draws the same ones afterwards.

    And the Trainer notes which columns its model takes, when it is first asked.
    """
    columns = trainer._signature_columns
    states = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        trainer._signature_columns = columns
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _longest_batch(trainer: Any, dataset: Any, rows: int, name: str) -> tuple[Any, bool]:
    """The longest rows of a dataset together, through the Trainer's collator: the worst that a sampler can draw.

    And whether there is padding, in this batch or where one of its rows is a short one.
    """
    if dataset is None:
        raise PlanError(
            f"the Trainer has no {name}, in which its longest batch would be looked for"
        )
    columns_removed = trainer.args.remove_unused_columns
    if columns_removed and type(dataset).__module__.startswith("datasets."):
        dataset = trainer._remove_unused_columns(dataset, description="planning")
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        count = min(len(dataset), _MOST_ROWS_READ)
        lengths = [(_size(dataset[index]), index) for index in range(count)]
        lengths.sort(reverse=True)
        chosen, shortest = (
            [dataset[index] for _, index in lengths[:rows]],
            dataset[lengths[-1][1]] if lengths else None,
        )
    else:
        read = [*itertools.islice(iter(dataset), max(rows, min(_MOST_ROWS_READ, 50 * rows)))]
        read.sort(key=_size, reverse=True)
        chosen, shortest = read[:rows], read[-1] if read else None
    if not chosen:
        raise PlanError(f"the {name} is empty")
    chosen = list(
        itertools.islice(itertools.cycle(chosen), rows)
    )  # a small dataset may be all there is to look at
    collator = trainer.data_collator
    if columns_removed and not type(dataset).__module__.startswith("datasets."):
        collator = trainer._get_collator_with_removed_columns(collator, description="planning")
    batch = collator(chosen)
    return batch, _is_padded(batch) or (rows > 1 and _is_padded(collator([*chosen[1:], shortest])))


def _size(row: Any) -> int:
    """The tokens of a row, and of its label; of preference data those of the prompt and the longer answer."""
    if not hasattr(row, "get"):
        return 0
    answers = [len(row[name]) for name in _ANSWERS if row.get(name) is not None]
    if answers:
        return max(answers) + sum(len(row[name]) for name in _PROMPTS if row.get(name) is not None)
    lengths = (row.get(name) for name in _COUNTED)
    return sum(
        value.numel() if isinstance(value, torch.Tensor) else len(value)
        for value in lengths
        if value is not None
        and hasattr(value, "__len__")
        and not (isinstance(value, torch.Tensor) and value.ndim == 0)
    )


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(dataset, "__len__") else 1


def _is_padded(batch: Any) -> bool:
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def _is_packed(batch: Any) -> bool:
    positions = batch.get("position_ids") if hasattr(batch, "get") else None
    if (
        not isinstance(positions, torch.Tensor) or positions.ndim != 2
    ):  # three: time, height and width of a picture
        return False
    return bool((positions.diff(dim=-1) != 1).any())
