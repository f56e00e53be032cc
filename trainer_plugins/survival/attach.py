"""survive_oom: attaches survival to a Trainer, by a call or by the callback SurviveOOM."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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


class Survival(AbstractContextManager["Survival", None]):
    """Keeps a Trainer surviving OOMs until `detach` is called or its `with` block ends."""

    def __init__(self, trainer: Trainer, engine: Engine | None) -> None:
        self._trainer, self._engine = trainer, engine
        if engine is not None:
            engine.attach()
            if trainer.is_in_train:  # otherwise it signs when training begins
                memo_of(trainer).roll_call.sign()

    def detach(self) -> None:
        """Restore the methods, remove the callback, and switch off our rungs; only once."""
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

    survive_oom splits the micro-batch and computes it piece by piece, keeping whatever a failed
    backward pass had finished. Optimizer steps, effective batch size and learning rates stay the
    same, and no example is repeated or left out. It remembers the size that fits, even in
    checkpoints. If everything fits it costs nothing. Call it before `trainer.train()`:

        survive_oom(trainer)
        trainer.train()

    Args:
        trainer: a `Trainer`, `Seq2SeqTrainer`, one of sentence-transformers, or TRL's SFT, DPO,
            KTO, ORPO, CPO, GKD, Reward, GRPO or RLOO trainer; in one process, or under DDP, FSDP2
            or DeepSpeed ZeRO.
        min_micro_batch: the fewest examples (rows, pairs, packed sequences) in a piece.
        ladder: the measures to switch on, in order, when even the smallest piece does not fit:
            "checkpointing"; "offload", which keeps activations in main memory (not under FSDP2
            and ZeRO-3); and, only if you name it, "stream", which keeps the frozen base there
            (see `stream_base`).
        plan_first: compute the longest rows before step 1, to learn in advance how many fit at
            once. This leaves no trace.
        rows_at_once: instead of `plan_first`, compute at most this many of the longest rows (of
            `per_device_train_batch_size`) at once, from the first step on. 0 leaves the number to
            `plan_first` and to later failures.
        on_refusal: if the result would not be exact, or may not be, "error" raises; "warn" logs it
            once and leaves training as it is.
        vouch_for_loss: you assert that your own loss (`compute_loss`, `compute_loss_func`, a
            `forward`, a hook) is a sum or a mean over examples. Before the first split,
            survive_oom measures which of them it is; if it is neither, nothing is split.

    Returns:
        A handle with `detach()`, which is also a context manager.

    Raises:
        ValueError: a bad argument, or an unsupported Trainer; the message gives every reason.
            Nothing is changed then.
    """
    check_options(min_micro_batch, ladder, on_refusal, rows_at_once)
    wrap_once("train", Survival, _replace_finder)
    family = family_of(trainer, is_vouched=vouch_for_loss)
    reasons = refusals(trainer, family)
    if not holds_here():
        reasons.append(
            "a trial showed that this torch does not finish gradients one by one: please report it"
        )
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
    """Check the options of `survive_oom`. Raises ValueError for a bad one."""
    if min_micro_batch < 1:
        raise ValueError(f"min_micro_batch is a number from 1 on, got {min_micro_batch}")
    if rows_at_once < 0:
        raise ValueError(f"rows_at_once is 0 (as many as fit) or more, got {rows_at_once}")
    if isinstance(ladder, str) or not {*ladder} <= {*RUNGS, STREAM}:
        raise ValueError(f"ladder is a tuple of names from {(*RUNGS, STREAM)}, got {ladder!r}")
    if on_refusal not in ("error", "warn"):
        raise ValueError(f"on_refusal is 'error' or 'warn', got {on_refusal!r}")


class SurviveOOM(RunCallback):
    """Attaches `survive_oom` when training begins, unless you have called it already.

    >>> callback = SurviveOOM(on_refusal="error")  # Trainer(..., callbacks=[callback])

    It costs as much as `survive_oom`: microseconds per micro-batch if everything fits.

    Args:
        min_micro_batch: as for `survive_oom`.
        ladder: as for `survive_oom`. With "stream", a frozen base that does not fit when the
            Trainer moves it to the GPU is streamed from then on.
        plan_first: as for `survive_oom`.
        rows_at_once: as for `survive_oom`.
        on_refusal: if a run cannot be helped, "warn" logs why, once, and leaves it as it is;
            "error" ends it before step 1.
        vouch_for_loss: as for `survive_oom`.

    Raises:
        ValueError: a bad argument, or a refused run with `on_refusal="error"`.
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
        wrap_once("train", Survival, _replace_finder)
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


def _replace_finder(train: Method, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace transformers' batch-size finder, which would restart, where survival can help."""
    with Patches() as patches:
        if trainer.args.auto_find_batch_size:
            survival = callback_of(trainer, SurviveOOM)
            if survival is not None and callback_of(trainer, SurvivalMemo) is None:
                survival.attach(trainer)
            if callback_of(trainer, SurvivalMemo) is not None:  # else it has logged why
                logger.warning(
                    "survival replaces auto_find_batch_size in this training: it splits a"
                    " micro-batch that does not fit, and keeps batch, steps and schedule"
                )
                patches.set(trainer.args, "auto_find_batch_size", False)
        return train(trainer, *args, **kwargs)
