"""Shortens a training while keeping what determines memory: a few of the longest rows.

Other requests of a program to its Trainer, such as an evaluation before training, are short too.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer, TrainerCallback

from trainer_plugins.longest import has_rows, lengths_as_collated
from trainer_plugins.patched import Patches

_MOST_EVALUATED_BATCHES = 16
_MOST_GENERATED_BATCHES = 2
_HAVE_NO_ORDER = ("torch.", "transformers.")
"""Their samplers may return any row first."""


class OnceInTheEnd(TrainerCallback):  # type: ignore[misc]
    """Makes an evaluation and a save follow the last step, whatever other callbacks request."""

    def __init__(self, *, evaluates: bool, saves: bool) -> None:
        self._evaluates, self._saves = evaluates, saves

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request both once; this callback runs last."""
        is_last = state.global_step == args.max_steps
        control.should_evaluate = is_last and self._evaluates
        control.should_save = is_last and self._saves
        if is_last:
            self._evaluates = self._saves = False  # resuming also ends with a step

    def do_what_is_left(self, trainer: Any) -> None:
        """Evaluate and save, unless a last step already requested it."""
        if self._evaluates:
            trainer.evaluate()
        if self._saves:
            trainer._save_checkpoint(trainer.model, trial=None)
        self._evaluates = self._saves = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cancel all requests."""
        control.should_evaluate = control.should_save = False


def evaluate_few_rows(notes: list[str]) -> None:
    """Make every evaluation and prediction take only the first rows, and note that."""

    def load_evaluation(load: Callable[..., Any], trainer: Any, eval_dataset: Any = None) -> Any:
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        data = trainer.eval_dataset[data] if isinstance(data, str) else data
        return load(trainer, _first(trainer.args, data, notes))

    def load_test(load: Callable[..., Any], trainer: Any, test_dataset: Any) -> Any:
        return load(trainer, _first(trainer.args, test_dataset, notes))

    def forgive_metrics(loop: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with Patches() as patches:
            patches.wrap(trainer, "compute_metrics", functools.partial(_forgive, trainer, notes))
            return loop(trainer, *args, **kwargs)

    Patches().wrap(Trainer, "evaluation_loop", forgive_metrics)
    Patches().wrap(Trainer, "get_eval_dataloader", load_evaluation)
    Patches().wrap(Trainer, "get_test_dataloader", load_test)


def _forgive(trainer: Any, notes: list[str], compute: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute metrics, and record an error as a note: it may come from meaningless outputs."""
    try:
        return compute(*args, **kwargs)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        notes.append(f"compute_metrics failed, perhaps on the meaningless outputs: {words}")
        best = trainer.args.metric_for_best_model
        return {best.removeprefix("eval_"): 0.0} if best else {}


def prepare_trial(trainer: Any, trial: Any) -> None:
    """Apply the arguments of a search's trial, and create its model, before `train` would."""
    kind = type(trainer)
    kind._hp_search_setup(trainer, trial)
    trainer._train_batch_size = trainer.args.train_batch_size
    trainer.model = kind.call_model_init(trainer, trial)
    trainer._hp_search_setup = lambda _: None
    trainer.call_model_init = lambda *_: trainer.model


def take_the_longest_rows(trainer: Any, notes: list[str]) -> None:
    """Make every batch the longest rows of the data set, if its order may be changed."""
    if "get_train_dataloader" in vars(trainer):
        return  # `of_request` provides the batches
    if getattr(vars(trainer).get("_get_train_sampler"), "func", None) is _keep_order:
        del trainer._get_train_sampler  # of an earlier training
    sampler = trainer._get_train_sampler()
    if sampler is not None and not type(sampler).__module__.startswith(_HAVE_NO_ORDER):
        notes.append(f"{type(trainer).__name__} chose the rows, perhaps not the longest")
        return
    rows = trainer._train_batch_size
    if not has_rows(trainer.train_dataset) or len(trainer.train_dataset) == 0:
        notes.append("the rows are the first ones of the stream, perhaps not the longest")
        return
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    lengths, why_unsure = lengths_as_collated(trainer.train_dataset, collate)
    chosen = lengths.longest_with_padding(rows)
    num_read, num_rows = len(lengths.rows), lengths.num_rows
    if num_read < num_rows:
        why_unsure = f"only {num_read:,} of {num_rows:,} rows were read, spread evenly"
    if why_unsure:
        notes.append(f"perhaps not the longest rows: {why_unsure}")
    num = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    batch = (chosen * rows)[:rows]
    order = batch * (num * trainer.args.world_size)
    trainer._get_train_sampler = functools.partial(_keep_order, order)


def _keep_order(order: list[int], *_: object) -> list[int]:
    return order


def _first(args: Any, data: Any, notes: list[str]) -> Any:
    generates = getattr(args, "predict_with_generate", False)
    batches = _MOST_GENERATED_BATCHES if generates else _MOST_EVALUATED_BATCHES
    # As many rows as with the original batch size: outputs of all of them may be kept.
    given = getattr(args, "rows_of_evaluation", args.per_device_eval_batch_size)
    num = (
        batches * args.eval_batch_size * args.world_size * given // args.per_device_eval_batch_size
    )
    if data is None:
        return None
    if not hasattr(data, "__len__"):
        notes.append(f"an evaluation of the first {num:,} rows")
        return data.take(num) if hasattr(data, "take") else _First(data, num)
    if len(data) <= num:
        return data
    notes.append(
        f"an evaluation of {num:,} of {len(data):,} rows: outputs that it keeps grow with them"
    )
    return data.select(range(num)) if hasattr(data, "select") else Subset(data, range(num))


class _First(IterableDataset[Any]):
    def __init__(self, data: Any, num: int) -> None:
        self._data, self._num = data, num

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._data), self._num)
