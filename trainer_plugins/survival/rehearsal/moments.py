"""Moments: the worst of each moment of a run, computed by the Trainer's own methods."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Seq2SeqTrainer

from trainer_plugins.callbacks._run import callback_of
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.longest import LongestRows
from trainer_plugins.planner.kind import text_of
from trainer_plugins.survival.attempt.attempt import Card, DidNotFit, attempt
from trainer_plugins.survival.exact.gathers import Gathers
from trainer_plugins.survival.exact.layouts import Packed, Rows, find_layout
from trainer_plugins.survival.exact.shares import IndivisibleError
from trainer_plugins.survival.limit.limit import SLACK, cells, predicted_peak
from trainer_plugins.survival.limit.optimizer_states import has_step_hooks, inner_optimizer
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.ranks.alone import Ranks
from trainer_plugins.survival.rehearsal.kept import Kept
from trainer_plugins.survival.rehearsal.report import RunMoment
from trainer_plugins.units import size
from trainer_plugins.upkeep.kept_outputs import kept_bytes
from trainer_plugins.upkeep.post_mortem import first_line

FOLDER = ".trainer_plugins_rehearsal"  # in `output_dir`, removed again

T = TypeVar("T")

_DEFAULT_LENGTH = 20  # of `generate` (transformers, GenerationConfig)

_NUM_SEEN = 64  # how many rows are read of a data set of `datasets` that can only be iterated


class LeftOut(Exception):  # noqa: N818 - it is no error
    """Says why a moment is not rehearsed."""


class NoBatch(Exception):  # noqa: N818 - the user's rows raise it
    """Says why the longest rows make no batch; the ranks know before one of them computes."""


class Moments:
    """Computes the worst of each moment of one run, on this rank or with the others."""

    def __init__(self, trainer: HfTrainer, ranks: Ranks, kept: Kept, card: Card) -> None:
        self._trainer, self._ranks, self._kept, self.card = trainer, ranks, kept, card
        self._device = trainer.args.device
        self.what = ""  # what the moment computes, in words

    def of_run(self, saves: bool) -> Iterator[tuple[RunMoment, Callable[[], str]]]:
        """Give the moments that this run has; each returns what did not fit, empty if all did."""
        args = self._trainer.args
        yield "optimizer step", self.optimizer_step
        if text_of(args.eval_strategy) != "no" or args.eval_on_start:
            yield "evaluation", self.evaluation
        yield "training", self.training
        if saves and text_of(args.save_strategy) != "no":
            yield "save", self.save
            if not args.save_only_model:
                yield "resume", self.resume

    def optimizer_step(self) -> str:
        """Take one step of the real optimizer, without gradients; its states stay on the card."""
        optimizer = inner_optimizer(self._trainer.optimizer)
        self.what = f"{type(optimizer).__name__} over all gradients"
        if self._trainer.is_deepspeed_enabled:
            raise LeftOut("a step of ZeRO cannot be undone")
        if has_step_hooks(optimizer):
            raise LeftOut("the optimizer has step hooks, which would count it")
        try:
            outcome = attempt(partial(_step, optimizer))
        finally:
            for parameter in self._ranks.bare.parameters():
                parameter.grad = None
            self._kept.restore_weights()
        return _failure(outcome)

    def training(self) -> str:
        """Compute the longest rows, forward and backward, on top of all gradients and states."""
        trainer = self._trainer
        if callback_of(trainer, SurvivalMemo) is not None:
            raise LeftOut("survive_oom does it at its first micro-batch, and divides the rest")
        if trainer.is_deepspeed_enabled and self.card.read() is None:
            raise LeftOut(
                "ZeRO has to predict what fits, and nothing counts the memory of its device"
            )
        loader = trainer.callback_handler.train_dataloader
        rows = self._longest(loader, trainer._train_batch_size)
        num = self._ranks.lowest(len(rows))
        self.what += f" ({cells(rows.batch(num))} tokens)"
        self._ranks.prepare(partial(self._tiny, rows))
        num_fit = self._ranks.most(lambda model, n: self._pass(model, rows.batch(int(n))), num, 1)
        if num_fit == num:
            return ""
        return f"{num_fit} of them fit at once" if num_fit else "not even one row fits"

    def evaluation(self) -> str:
        """Evaluate the longest rows, on top of the outputs that the loop will have kept by then."""
        trainer = self._trainer
        sets = trainer.eval_dataset
        names = [*sets] if isinstance(sets, dict) else [None]
        for name in names:
            loader = trainer.get_eval_dataloader(name)
            rows = self._longest(loader, trainer.args.eval_batch_size)
            if failure := self._evaluate(rows, _num_batches(loader)):
                return failure
        return ""

    def save(self) -> str:
        """Write a checkpoint, with all that ranks gather for it; `clean_up` removes it."""
        trainer = self._trainer
        self.what = "a checkpoint, which is removed again"
        trainer.args.output_dir = self._folder
        trainer.args.push_to_hub = False
        return _failure(self._tried(partial(trainer._save_checkpoint, trainer.model, None)))

    def resume(self) -> str:
        """Load that checkpoint, without the states that a new process would not have yet."""
        trainer = self._trainer
        checkpoint = os.path.join(self._folder, f"checkpoint-{trainer.state.global_step}")
        self.what = "that checkpoint"
        if self._ranks.forward_is_shared:
            raise LeftOut("what a load has changed cannot be undone under FSDP2 and ZeRO")
        if not os.path.isdir(checkpoint):
            raise LeftOut("there is no checkpoint on this machine")
        self._kept.drop_states()
        return _failure(attempt(partial(self._load, checkpoint)))

    @property
    def is_shared(self) -> bool:
        return self._ranks.forward_is_shared

    def peak_bytes(self) -> int | None:
        reading = self.card.read()
        return None if reading is None else reading.peak_allocated_bytes

    def clean_up(self) -> None:
        if self._trainer.args.local_process_index == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> str:
        folder = self._trainer.args.output_dir
        return folder if os.path.basename(folder) == FOLDER else os.path.join(folder, FOLDER)

    def _tried(self, work: Callable[[], T]) -> T | DidNotFit:
        return work() if self._ranks.forward_is_shared else attempt(work)

    def _longest(self, loader: Any, num: int) -> LongestRows:
        seen, rows, error = "of the data", None, ""
        dataset: Any = getattr(loader, "dataset", None)
        try:
            if not hasattr(dataset, "__len__") and hasattr(dataset, "take"):
                dataset, seen = list(dataset.take(_NUM_SEEN)), f"of the first {_NUM_SEEN} that come"
            collate = getattr(loader, "collate_fn", None)
            rows = LongestRows(dataset, collate, num, self._trainer.model)
            if rows:
                rows.batch(len(rows))
        except Exception as raised:  # noqa: BLE001 - the user's data set and collator
            error = first_line(raised)
        self.what = "the longest rows"
        if self._ranks.on_any(bool(error)):
            raise NoBatch(error or "another rank cannot make a batch of them")
        if self._ranks.on_any(not rows) or rows is None:
            raise LeftOut(f"{type(dataset).__name__} cannot be asked for single rows")
        many = f"the {len(rows)} longest rows" if len(rows) > 1 else "the longest row"
        self.what = f"{many} {seen}"
        return rows

    def _tiny(self, rows: LongestRows) -> None:
        batch = rows.batch(1)
        with suppress(IndivisibleError):
            batch = find_layout((Packed(), Rows()), batch).probe(batch, 1)
        self._pass(self._ranks.bare, batch)

    def _pass(self, model: nn.Module, batch: Any) -> None:
        trainer, gathers = self._trainer, Gathers(self._trainer)
        with gathers.apart(), gathers.held():
            _, num_items = trainer.get_batch_samples(iter([batch]), 1, self._device)
            trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
            trainer.training_step(model, batch, num_items)

    def _evaluate(self, rows: LongestRows, num_batches: int) -> str:
        args = self._trainer.args
        if self.is_shared and (too_much := self._foreseen(rows)):
            return too_much
        self.card.reset_peak()
        before = self.card.read()
        outputs = self._tried(partial(self._predicted, rows, len(rows)))
        after = self.card.read()
        if isinstance(outputs, DidNotFit):
            return outputs.first_line
        batch_bytes = args.world_size * kept_bytes(outputs)
        del outputs
        if before is None or after is None or not batch_bytes or args.batch_eval_metrics:
            return ""
        # transformers, evaluation_loop: each batch joins those before in a new tensor.
        num_kept = min(args.eval_accumulation_steps or num_batches, num_batches)
        joined_bytes = (num_kept + 1) * batch_bytes if args.eval_do_concat_batches else 0
        computed_bytes = after.peak_allocated_bytes - before.allocated_bytes
        self.what += f" and the outputs of {num_kept} batches ({size(num_kept * batch_bytes)})"
        held = ((num_kept - 1) * batch_bytes, max(joined_bytes, computed_bytes))
        return _failure(attempt(partial(self._hold, held)))

    def _foreseen(self, rows: LongestRows) -> str:
        """Predict from 1 and 2 rows that a batch will not fit: its failure could not be undone."""
        peaks, before = [], self.card.read()
        for num in (1, 2) if before is not None and len(rows) > 2 else ():
            self.card.reset_peak()
            self._predicted(rows, num)
            peaks.append((num, self.peak_bytes() or 0))
        needed_bytes = int(predicted_peak(peaks, len(rows)))
        room_bytes = before.total_bytes - before.non_torch_bytes if before is not None else 0
        if not self._ranks.on_any(needed_bytes > (1 - SLACK) * room_bytes):
            return ""
        return f"predicted from 1 and 2 rows: {size(needed_bytes)} here, and a rank has no room"

    def _predicted(self, rows: LongestRows, num: int) -> tuple[Any, Any]:
        trainer, gathers = self._trainer, Gathers(self._trainer)
        model = trainer._wrap_model(trainer.model, training=False)
        model.eval()
        loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        options = {} if loss_only else _full_length(trainer)
        with gathers.apart(), gathers.held():
            _, logits, labels = trainer.prediction_step(
                model, rows.batch(num), loss_only, **options
            )
        if options and num == len(rows):
            self.what += f", each generating {max(options.values())} tokens"
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return logits, labels

    def _hold(self, sizes: tuple[int, ...]) -> None:
        held = [torch.empty(each, dtype=torch.uint8, device=self._device) for each in sizes]
        del held

    def _load(self, checkpoint: str) -> None:
        trainer = self._trainer
        if all(p.requires_grad for p in trainer.model.parameters()):
            trainer._load_from_checkpoint(checkpoint)
        trainer._load_optimizer_and_scheduler(checkpoint)
        trainer._load_scaler(checkpoint)


def _step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(optimizer)  # `step` of the instance may be wrapped, and count


def _full_length(trainer: HfTrainer) -> dict[str, int]:
    """Return the options that let an evaluation generate as many tokens as it may, if it does."""
    if not isinstance(trainer, Seq2SeqTrainer) or not trainer.args.predict_with_generate:
        return {}
    args = trainer.args
    config = trainer.model.generation_config
    beams = {"num_beams": args.generation_num_beams} if args.generation_num_beams else {}
    if args.generation_max_length is None and (num := config.max_new_tokens) is not None:
        return {"max_new_tokens": num, "min_new_tokens": num, **beams}
    num = args.generation_max_length or config.max_length or _DEFAULT_LENGTH
    return {"max_length": num, "min_length": num, **beams}


def _failure(outcome: object) -> str:
    return outcome.first_line if isinstance(outcome, DidNotFit) else ""


def _num_batches(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # it can only be iterated
        return 1
