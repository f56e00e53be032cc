"""EvaluationCallback: tells a callback when evaluations begin and end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import Event, Method, RunCallback, calling_trainer, wrap_once
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.upkeep.generation import inside_training


class EvaluationCallback(RunCallback):
    """Notifies a callback of every evaluation's end, even if a subclass of Trainer hides it."""

    # A subclass that overrides `evaluate` may not fire `on_evaluate` (open-unlearning's
    # FinetuneTrainer). Inside training we then take the next event for the end; outside, the return
    # of the wrapped method. Inside training the beginning arrives twice, from the event and from
    # the method, because other callbacks act in between.

    def reset(self) -> None:
        super().reset()
        self.is_end_due = False  # an evaluation has begun and not ended yet
        self.is_inside = False  # an `evaluate` of the Trainer is running

    def evaluation_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        """Handle the beginning of an evaluation; inside training this may be called twice."""

    def evaluation_ends(self, args: HfArguments, state: HfState, moment: str, event: Event) -> None:
        """Handle the end of any evaluation (`eval`) or prediction (`predict`)."""

    def on_init_end(self, *_: object, **__: object) -> None:
        _wrap_evaluate()

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        _wrap_evaluate()
        if args.eval_on_start:
            self._begin(args, state, event)

    def on_step_begin(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        self._settle(args, state, event)

    on_save = on_train_end = on_step_begin

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        if control.should_evaluate:
            self._begin(args, state, event)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        self._settle(args, state, event)
        if control.should_evaluate:
            self._begin(args, state, event)

    def on_evaluate(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        self._end(args, state, "eval", event)

    def on_predict(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        self._end(args, state, "predict", event)

    @contextmanager
    def evaluating(self, args: HfArguments, state: HfState, event: Event) -> Iterator[None]:
        self.is_inside = True
        self._begin(args, state, event)
        try:
            yield
        finally:
            self.is_inside = False

    def _begin(self, args: HfArguments, state: HfState, event: Event) -> None:
        self.is_end_due = True
        self.evaluation_begins(args, state, event)

    def _end(self, args: HfArguments, state: HfState, moment: str, event: Event) -> None:
        self.is_end_due = False
        self.evaluation_ends(args, state, moment, event)

    def _settle(self, args: HfArguments, state: HfState, event: Event) -> None:
        if self.is_end_due:
            self._end(args, state, "eval", event)


def _wrap_evaluate() -> None:
    classes = type(calling_trainer()).__mro__
    owner = next((each for each in classes if "evaluate" in vars(each)), Trainer)
    wrap_once("evaluate", EvaluationCallback, _tell_callbacks, owner)


def _tell_callbacks(evaluate: Method, trainer: HfTrainer, *args: Any, **kwargs: Any) -> object:
    callbacks = [
        each
        for each in trainer.callback_handler.callbacks
        if isinstance(each, EvaluationCallback) and not each.is_inside  # not by `super()`
    ]
    event = {"model": trainer.model, "optimizer": trainer.optimizer}
    with ExitStack() as stack:
        for each in callbacks:
            stack.enter_context(each.evaluating(trainer.args, trainer.state, event))
        metrics: object = evaluate(trainer, *args, **kwargs)
    for each in callbacks:
        # Inside training the next event marks the end. By now the callback may be gone.
        is_there = any(each is one for one in trainer.callback_handler.callbacks)
        if is_there and each.is_end_due and not inside_training():
            each.on_evaluate(trainer.args, trainer.state, trainer.control, **event)
    return metrics
