"""Run ZeRO-1, 2 and 3 by DeepSpeed's own engine, as one rank of many, on tensors without bytes.

Imports torch.
"""

import base64
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.sharded.zero_config import refuse_batches, refuse_config
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import Arguments, TrainerLike


class Zero:
    """Divides optimizer states, gradients and weights into parts, one for each rank."""

    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...] = (
        "ZeRO: DeepSpeed's own engine runs on tensors without bytes; checked against the same "
        "engine with bytes on CPU, not on a GPU",
        "ZeRO, reserved: a freed block counts as free at once, even if another stream reads it",
    )

    def __init__(self, config: Mapping[str, Any], request: PlanRequest) -> None:
        self._request = request
        if config["zero_optimization"]["stage"] == 3:
            self.not_reliable += ("ZeRO-3, host: reading a checkpoint at load is not counted",)

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        from trainer_plugins.planner.sharded.zero_checkpoint import why_not_resumed
        from trainer_plugins.planner.sharded.zero_engine import engine_without_bytes

        os.environ.update(_exported(self._request))
        with (
            as_first_rank(self._request, tracker),
            engine_without_bytes(tracker) as engines,
        ):
            yield
            if not engines or engines[-1].global_steps < self._request.num_steps:
                raise NotPredicted(
                    "DeepSpeed: in this run no engine takes the steps of the Trainer"
                )
            if (left_out := why_not_resumed(engines[-1])) is not None:
                self.not_predicted += (left_out,)

    def prepare(self, trainer: TrainerLike) -> None:
        pass


def _exported(request: PlanRequest) -> dict[str, str]:
    """Return what `accelerate launch` exports for DeepSpeed.

    accelerate/utils/launch.py, prepare_deepspeed_cmd_env.
    """
    if request.deepspeed is None:
        return {}
    config = base64.urlsafe_b64encode(json.dumps(request.deepspeed).encode()).decode()
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": config}


def zero_strategy(
    config: dict[str, Any], request: PlanRequest, args: Arguments, divides_rows: bool
) -> Zero:
    """Check a DeepSpeed config, and return its strategy. The Trainer resolves "auto" later.

    Args:
        config: the content of the file, or what stands for it.
        request: the run.
        args: the arguments of the Trainer.
        divides_rows: whether cards share each row (sequence parallelism).

    Raises:
        PlanError: DeepSpeed does not know a key, or is not installed.
        NotPredicted: the config asks for what the planner cannot predict.
    """
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "planning for DeepSpeed needs the package deepspeed, whose engine runs here"
        ) from error
    if request.device != "cuda":
        raise NotPredicted("DeepSpeed on the simulated card, which it does not know")
    refuse_config(config)
    if request.deepspeed is None:  # accelerate completes the batches of a launcher's config
        refuse_batches(config, args)
    if divides_rows:
        from trainer_plugins.planner.sharded.sequence import Ulysses

        return Ulysses(config, request)
    return Zero(config, request)
