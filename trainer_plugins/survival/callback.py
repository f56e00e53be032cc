"""SurviveOOM: attach `survive_oom` as a callback, by the preset `survive` or `callbacks=[...]`."""

import logging
from collections.abc import Sequence
from functools import partial

from trainer_plugins.callbacks._run import RunCallback, callback_of, calling_trainer
from trainer_plugins.callbacks.stream_base import StreamBase
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.survival.attach import check_options, survive_oom
from trainer_plugins.survival.limit.ladder import RESIDENT_LAYERS, RUNGS, STREAM
from trainer_plugins.survival.memo import SurvivalMemo

logger = logging.getLogger(__name__)


class SurviveOOM(RunCallback):
    """Attaches `survive_oom` when training begins, unless that was done by hand.

    It costs what `survive_oom` costs: microseconds a micro-batch if everything fits.

    Args:
        min_micro_batch: as for `survive_oom`.
        ladder: as for `survive_oom`. With "stream" a frozen base that does not fit when the Trainer
            moves it to the card is streamed then.
        plan_first: as for `survive_oom`.
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
        on_refusal: str = "warn",
        vouch_for_loss: bool = False,
    ) -> None:
        super().__init__()
        check_options(min_micro_batch, ladder, on_refusal)
        # Streams a base that does not fit when the Trainer moves it.
        self.stream_base = StreamBase(RESIDENT_LAYERS, when="needed") if STREAM in ladder else None
        self._attach = partial(
            survive_oom,
            min_micro_batch=min_micro_batch,
            ladder=tuple(ladder),
            plan_first=plan_first,
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
        elif callback_of(trainer, SurvivalMemo) is None:
            self._attach(trainer)
