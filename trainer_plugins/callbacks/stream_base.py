"""StreamBase: streams a run's frozen base, starting before the model moves to the GPU."""

import logging
import traceback
from collections.abc import Callable
from functools import partial

from torch import nn

from trainer_plugins.callbacks._run import Method, RunCallback, calling_trainer, wrap_once
from trainer_plugins.hf_trainer import HfArguments, HfTrainer
from trainer_plugins.oom import classify
from trainer_plugins.streaming.attach import refusals, report_begin
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.upkeep.agreement import any_rank
from trainer_plugins.upkeep.stack import frames_above

logger = logging.getLogger(__name__)


class StreamBase(RunCallback):
    """Streams the frozen base of a LoRA or QLoRA run, as `stream_base` does.

    >>> callback = StreamBase(when="needed")  # Trainer(..., callbacks=[callback])

    Pass it to a Trainer in `callbacks=[...]`: it then acts before the Trainer moves its model to
    the GPU, so the base need not fit there. Load the model to main memory (`device_map="cpu"` for a
    quantised one). After training the base is still streamed, for evaluating, saving and merging;
    `model.cpu()` ends that.

    Cost: that of `stream_base`. The first of these callbacks in a process wraps one method of
    `transformers.Trainer`.

    Args:
        resident_layers: as for `stream_base`.
        with_embeddings: as for `stream_base`.
        allow_generation: as for `stream_base`.
        when: "always", or "needed": only if the model does not fit on some rank's GPU when the
            Trainer moves it there. `SurviveOOM` can stream later: `ladder=(..., "stream")`.
        on_refusal: if a run cannot be streamed, "warn" logs why and goes on; "error" raises.

    Raises:
        ValueError: a bad argument, or a refused run with `on_refusal="error"`.
    """

    def __init__(
        self,
        resident_layers: int = 2,
        with_embeddings: bool = False,
        allow_generation: bool = False,
        when: str = "always",
        on_refusal: str = "warn",
    ) -> None:
        super().__init__()
        if resident_layers < 1:
            raise ValueError(f"resident_layers counts layers, 1 or more, got {resident_layers}")
        if when not in ("always", "needed"):
            raise ValueError(f"when is 'always' or 'needed', got {when!r}")
        if on_refusal not in ("warn", "error"):
            raise ValueError(f"on_refusal is 'warn' or 'error', got {on_refusal!r}")
        self._resident_layers, self._with_embeddings = resident_layers, with_embeddings
        self._allow_generation = allow_generation
        self._warned = ""
        self._is_asked, self._is_strict = when == "always", on_refusal == "error"
        # The Trainer has no event before it moves its model.
        wrap_once("_move_model_to_device", StreamBase, _ask_to_move)

    @property
    def asked_to_stream(self) -> tuple[int, bool] | None:
        """Return the resident layers and whether embeddings are streamed; None: only if needed."""
        return (self._resident_layers, self._with_embeddings) if self._is_asked else None

    def on_init_end(self, *_: object, **__: object) -> None:
        """Stream a model that is on its card already: quantised, or moved by your code."""
        trainer = calling_trainer()
        if self._is_asked and trainer is not None and stream_of(trainer.model) is None:
            self._stream(trainer, trainer.model)

    run_begins = on_init_end

    def move(self, trainer: HfTrainer, model: nn.Module, as_trainer: Callable[[], object]) -> None:
        """Move a model to a Trainer's card, streaming it if that is requested or needed."""
        if stream_of(model) is not None:
            return
        why = "" if self._is_asked else _try_to_move(as_trainer, trainer.args)
        if (self._is_asked or why) and not self._stream(trainer, model, why):
            as_trainer()

    def _stream(self, trainer: HfTrainer, model: nn.Module, why: str = "") -> Stream | None:
        reasons = refusals(trainer, model, self._resident_layers, self._allow_generation)
        if reasons:
            message = f"the base of this run cannot be streamed: {'; '.join(reasons)}"
            if self._is_strict:
                raise ValueError(message)
            if message != self._warned:  # each training asks again
                logger.warning(message)
            self._warned = message
            return None
        stream = Stream(model, trainer.args.device, self._resident_layers, self._with_embeddings)
        with self.harmless():
            self.remark(trainer.args, 0, report_begin(stream, why))
        return stream


def _try_to_move(move: Callable[[], object], args: HfArguments) -> str:
    """Move a model. If any rank runs out of memory, return the error's first line."""
    why = ""
    try:
        move()
    except RuntimeError as error:
        if classify(error) is None:
            raise
        why = str(error).strip().partition("\n")[0]
        traceback.clear_frames(error.__traceback__)
    is_any_full = any_rank(why != "", args.ddp_timeout, if_unknown=False)
    return why or ("another rank ran out of memory" if is_any_full else "")


def _ask_to_move(method: Method, trainer: HfTrainer, model: nn.Module, device: object) -> object:
    move = partial(method, trainer, model, device)
    callback = _stream_base_of(trainer)
    if callback is None:
        return move()
    callback.move(trainer, model, move)
    return None


def _stream_base_of(trainer: HfTrainer) -> StreamBase | None:
    """Return the `StreamBase` of a Trainer, including one still in its constructor's arguments."""
    handler = getattr(trainer, "callback_handler", None)
    lists = [handler.callbacks] if handler is not None else _find_constructor_lists()
    # `SurviveOOM` has its own.
    found = (getattr(each, "stream_base", each) for one in lists for each in one)
    return next((each for each in found if isinstance(each, StreamBase)), None)


def _find_constructor_lists() -> list[list[object]]:
    frames = (frame for frame in frames_above() if frame.f_code.co_name == "__init__")
    given = (
        frame.f_locals.get("callbacks")
        for frame in frames
        if "callbacks" in (*frame.f_code.co_varnames, *frame.f_code.co_cellvars)
    )
    return [one for one in given if isinstance(one, list)]
