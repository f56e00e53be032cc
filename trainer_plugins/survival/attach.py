"""survive_oom: attach to a Trainer, by a call or as the callback SurviveOOM; detach again."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import Trainer

from trainer_plugins.callbacks._run import (
    Method,
    RunCallback,
    callback_of,
    calling_trainer,
    wrap_once,
)
from trainer_plugins.callbacks.stream_base import StreamBase
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.patched import Patches
from trainer_plugins.survival.engine import Engine
from trainer_plugins.survival.exact.finality import holds_here
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.exact.own_loss import Delegation
from trainer_plugins.survival.limit.ladder import RESIDENT_LAYERS, RUNGS, STREAM, descend
from trainer_plugins.survival.memo import SurvivalMemo, memo_of
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.refusals import refusals
from trainer_plugins.survival.training_run import Attached
from trainer_plugins.survival.words import report_not_attached

logger = logging.getLogger(__name__)


class Survival:
    """Lets a Trainer survive until `detach` is called, or until its `with` block ends."""

    def __init__(self, trainer: Trainer, engine: Engine | None) -> None:
        self._trainer, self._engine = trainer, engine
        if engine is not None:
            engine.attach()
            if trainer.is_in_train:  # else it signs when training begins
                memo_of(trainer).roll_call.sign()

    def detach(self) -> None:
        """Restore the methods, remove the callback, switch off what was switched on; only once."""
        if self._engine is None:
            return
        self._engine.detach()
        self._engine = None
        memo: SurvivalMemo | None = self._trainer.pop_callback(SurvivalMemo)
        if memo is None:
            return
        memo.roll_call.leave()
        for rung in memo.rungs:
            descend(rung, self._trainer.model)

    def __enter__(self) -> "Survival":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def survive_oom(
    trainer: Trainer,
    *,
    min_micro_batch: int = 1,
    ladder: Sequence[str] = RUNGS,
    plan_first: bool = True,
    rows_at_once: int = 0,
    on_refusal: str = "error",
    vouch_for_loss: bool = False,
) -> Survival:
    """Let a Trainer finish its step with the exact gradient when a micro-batch does not fit.

    The micro-batch is divided and computed piece by piece; what a backward pass had finished when
    it failed is kept. Optimizer steps, effective batch and learning rates stay as they are, nothing
    is repeated or left out, and the size that fits is remembered, even in checkpoints. If
    everything fits it costs nothing. Call it before `trainer.train()`.

    Args:
        trainer: a `Trainer`, `Seq2SeqTrainer`, one of sentence-transformers, or TRL's SFT, DPO,
            KTO, ORPO, CPO, GKD, Reward, GRPO or RLOO trainer; in one process, under DDP, FSDP2
            and DeepSpeed ZeRO.
        min_micro_batch: examples (rows, pairs, packed sequences) below which nothing is divided.
        ladder: what to switch on, in order, when even the smallest piece does not fit:
            "checkpointing"; "offload", with which activations wait in main memory (not under FSDP2
            and ZeRO-3); and only if you name it "stream", with which the frozen base waits there
            (see `stream_base`).
        plan_first: compute the longest rows before step 1, to know in advance how many fit at once.
            It leaves no trace.
        rows_at_once: compute no more at once than this many of the longest rows (of
            `per_device_train_batch_size`), from the first step on, instead of `plan_first`; 0
            leaves it to `plan_first` and to what fits.
        on_refusal: what to do if the result would not be exact, or is not known to be: "error"
            raises, "warn" logs it once and leaves training as it is.
        vouch_for_loss: you say that a loss of your own (`compute_loss`, `compute_loss_func`, a
            `forward`, a hook) is a sum or a mean over examples. Which of them is measured before
            the first division; if it is neither, nothing is divided.

    Returns:
        What detaches again, as a context manager too.

    Raises:
        ValueError: a bad argument, or a Trainer that cannot be helped, with every reason. Nothing
            is changed then.
    """
    check_options(min_micro_batch, ladder, on_refusal, rows_at_once)
    wrap_once("train", Survival, _instead_of_the_finder)
    family = family_of(trainer, is_vouched=vouch_for_loss)
    reasons = refusals(trainer, family)
    if not holds_here():
        reasons.append("a trial showed that this torch finishes no gradients one by one: report it")
    if not isinstance(family, Family):
        reasons.append(family.words)
    if isinstance(family, Family) and not reasons:
        compute_loss: Callable[..., Any] = trainer.compute_loss
        if family.delegated_to is not None:
            compute_loss = Delegation(trainer, compute_loss, family.delegated_to)
        attached = Attached(
            trainer=trainer,
            family=family,
            kind=kind_of(trainer),
            min_micro_batch=min_micro_batch,
            ladder=tuple(ladder),
            plan_first=plan_first,
            rows_at_once=rows_at_once,
            is_strict=on_refusal == "error",
            is_vouched=vouch_for_loss,
            compute_loss=compute_loss,
            backward=trainer.accelerator.backward,
            prediction_step=trainer.prediction_step,
        )
        return Survival(trainer, Engine(attached))
    if on_refusal == "error":
        raise ValueError(f"survive_oom cannot help this run: {'; '.join(reasons)}")
    SurvivalMemo().remark(trainer.args, 0, report_not_attached(reasons))
    return Survival(trainer, None)


def check_options(
    min_micro_batch: int, ladder: Sequence[str], on_refusal: str, rows_at_once: int = 0
) -> None:
    """Check the options of `survive_oom`; a bad one raises ValueError."""
    if min_micro_batch < 1:
        raise ValueError(f"min_micro_batch counts examples, 1 or more, got {min_micro_batch}")
    if rows_at_once < 0:
        raise ValueError(f"rows_at_once counts rows, 0 for as many as fit, got {rows_at_once}")
    if isinstance(ladder, str) or not {*ladder} <= {*RUNGS, STREAM}:
        raise ValueError(f"ladder is a tuple of names out of {(*RUNGS, STREAM)}, got {ladder!r}")
    if on_refusal not in ("error", "warn"):
        raise ValueError(f"on_refusal is 'error' or 'warn', got {on_refusal!r}")


class SurviveOOM(RunCallback):
    """Attaches `survive_oom` when training begins, unless that was done by hand.

    It costs what `survive_oom` costs: microseconds a micro-batch if everything fits.

    Args:
        min_micro_batch: as for `survive_oom`.
        ladder: as for `survive_oom`. With "stream" a frozen base that does not fit when the Trainer
            moves it to the card is streamed then.
        plan_first: as for `survive_oom`.
        rows_at_once: as for `survive_oom`.
        on_refusal: "warn" logs once why a run cannot be helped and leaves it as it is; "error" ends
            it before step 1.
        vouch_for_loss: as for `survive_oom`.

    Raises:
        ValueError: a bad argument.
    """

    def __init__(
        self,
        min_micro_batch: int = 1,
        ladder: Sequence[str] = RUNGS,
        plan_first: bool = True,
        rows_at_once: int = 0,
        on_refusal: str = "warn",
        vouch_for_loss: bool = False,
    ) -> None:
        super().__init__()
        check_options(min_micro_batch, ladder, on_refusal, rows_at_once)
        wrap_once("train", Survival, _instead_of_the_finder)
        # Streams a base that does not fit when the Trainer moves it.
        self.stream_base = StreamBase(RESIDENT_LAYERS, when="needed") if STREAM in ladder else None
        self.attach = partial(
            survive_oom,
            min_micro_batch=min_micro_batch,
            ladder=tuple(ladder),
            plan_first=plan_first,
            rows_at_once=rows_at_once,
            on_refusal=on_refusal,
            vouch_for_loss=vouch_for_loss,
        )

    def on_train_begin(self, args: HfArguments, state: HfState, *_: object, **__: object) -> None:
        if self.is_second(state):
            return
        trainer = calling_trainer()
        if trainer is None:
            logger.warning(
                "SurviveOOM does nothing in this run: it was not called by a transformers.Trainer"
            )
        elif callback_of(trainer, SurvivalMemo) is None and not args.auto_find_batch_size:
            self.attach(trainer)


def _instead_of_the_finder(train: Method) -> Method:
    """Leave the batch size to survival where it helps: transformers' finder would restart."""

    def call(self: Trainer, *args: object, **kwargs: object) -> object:
        if not self.args.auto_find_batch_size:
            return train(self, *args, **kwargs)
        survival = callback_of(self, SurviveOOM)
        if survival is not None and callback_of(self, SurvivalMemo) is None:
            survival.attach(self)
        if callback_of(self, SurvivalMemo) is None:  # it cannot help, and has said why
            return train(self, *args, **kwargs)
        logger.warning(
            "survival takes the place of auto_find_batch_size in this training: a micro-batch that"
            " does not fit is divided, and batch, steps and schedule stay"
        )
        with Patches() as patches:
            patches.set(self.args, "auto_find_batch_size", False)
            return train(self, *args, **kwargs)

    return call
