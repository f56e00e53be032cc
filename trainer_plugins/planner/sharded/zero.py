"""Run ZeRO-1, 2 and 3 by DeepSpeed's own engine, as one rank of many, on tensors without bytes."""

import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trainer_plugins.hf_trainer import HfArguments, HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.one_card import copy_to_host
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import Ranks
from trainer_plugins.planner.sharded.zero_config import refuse_batches, refuse_config
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.tracing.values import Values


class Zero(Ranks):
    """Divides optimizer states, gradients and weights into parts, one for each rank."""

    not_reliable: tuple[str, ...] = (
        "ZeRO: DeepSpeed's own engine runs on tensors without bytes; checked against the same "
        "engine with bytes on CPU, not on a GPU",
        "ZeRO, reserved: a freed block counts as free at once, even if another stream reads it",
    )

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        from trainer_plugins.planner.sharded.zero_checkpoint import why_not_resumed

        os.environ.update(_exported(self.request))
        with super().around(tracker):
            yield
            if not self._engines or self._engines[-1].global_steps < self.request.num_steps:
                raise NotPredicted(
                    "DeepSpeed: in this run no engine takes the steps of the Trainer"
                )
            if (left_out := why_not_resumed(self._engines[-1])) is not None:
                self.not_predicted += (left_out,)

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        from trainer_plugins.planner.sharded.zero_engine import run_without_bytes

        self._engines = run_without_bytes(patches, tracker)

    def save(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Gather the weights, unless the settings forbid it, and copy them to the host.

        The settings do not forbid it for an adapter under ZeRO-3, of which all layers are gathered,
        and only what trains is copied (transformers/trainer.py, save_model).
        """
        engine: Any = trainer.model_wrapped
        with tracker.during("save"):
            states = trainer.model.state_dict()
            if (
                hasattr(trainer.model, "get_base_model")
                and engine.zero_optimization_partition_weights()
            ):
                states = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
            else:
                with contextlib.suppress(ValueError):
                    states = trainer.accelerator.get_state_dict(engine)
            copy_to_host(states)

    def resume(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Save the states of this rank, and read them as in a new process."""
        from trainer_plugins.planner.sharded.zero_checkpoint import save_and_resume

        save_and_resume(trainer, tracker)


class Ulysses(Zero):
    """Divides the tokens of each row among cards too: accelerate's `sp_size`.

    DeepSpeed (runtime/sequence_parallel/ulysses_sp.py) gathers the batches of these cards, which
    compute one after the other together. Around each attention they exchange tokens for heads.
    """

    not_reliable = (
        *Zero.not_reliable,
        "sequence parallelism: DeepSpeed's own exchange of heads for tokens; checked on simulated "
        "cards, not on a GPU",
    )

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        with Patches() as patches:
            # they are kept for the process: the next prediction is another run
            own = ALL_ATTENTION_FUNCTIONS._local_mapping
            patches.set(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {**own})
            patches.set(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", None)
            patches.set(parallel_state_sp, "_SEQUENCE_DATA_PARALLEL_GROUP", None)
            refilled = _refilled(tracker.values)
            patches.wrap(UlyssesSPDataLoaderAdapter, "refill", refilled)
            with super().around(tracker):
                yield


def _refilled(values: Values) -> Callable[..., None]:
    """Let the rows of other ranks be as long as those of this one: their lengths are not sent."""

    def refilled(refill: Callable[..., None], adapter: Any) -> None:
        asked = values.asked
        if not isinstance(adapter.iter, _Counted):
            adapter.iter = _Counted(adapter.iter, values)
        try:
            refill(adapter)
        finally:
            values.asked = asked

    return refilled


class _Counted:
    """Passes batches on, and lets a count that is not known be the length of the last one."""

    def __init__(self, batches: Iterator[Any], values: Values) -> None:
        self._batches, self._values = batches, values

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._values.asked = replace(self._values.asked, count=batch["input_ids"].shape[1])
        return batch


def _exported(request: PlanRequest) -> dict[str, str]:
    """Return what `accelerate launch` exports for DeepSpeed: prepare_deepspeed_cmd_env."""
    if request.deepspeed is None:
        return {}
    config = base64.urlsafe_b64encode(json.dumps(request.deepspeed).encode()).decode()
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": config}


def zero_strategy(
    config: dict[str, Any], request: PlanRequest, args: HfArguments, divides_rows: bool
) -> Zero:
    """Check a DeepSpeed config, and return its strategy. The Trainer resolves "auto" later."""
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "planning for DeepSpeed needs the package deepspeed, whose engine runs here"
        ) from error
    if request.device != "cuda":
        raise NotPredicted("DeepSpeed on the simulated card, which it does not support")
    refuse_config(config)
    if request.deepspeed is None:  # accelerate completes the batches of a launcher's config
        refuse_batches(config, args)
    return Ulysses(request) if divides_rows else Zero(request)
