"""Trains a PlanRequest on the dry card, in a process of its own: WALL REQUEST.

Usually a server has forked it, which has imported torch over the dry libraries and touched no card.
Only the weights and vLLM are replaced by stand-ins. `from_pretrained` loads the model, and
bitsandbytes, Triton and DeepSpeed are the installed ones.
"""

import ctypes
import json
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainer_plugins.inside import observe, start
from trainer_plugins.namespaces import build_wall
from trainer_plugins.planner.launched import complete_launch
from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.rehearse import from_config, from_loop, from_trainer, rollout
from trainer_plugins.planner.rehearse.arguments import arguments_of, copy_arguments
from trainer_plugins.planner.rehearse.planned import describe_run
from trainer_plugins.planner.rehearse.refusals import (
    make_plan_error,
    refuse_divided,
    refuse_trainer,
)
from trainer_plugins.planner.rehearse.rehearsal import Batch, Build, Rehearsed, loader
from trainer_plugins.planner.rehearse.streamed import Streaming
from trainer_plugins.planner.request import OPTIMIZER_STEPS, PlanRequest, TrainerSource

_NO_END = 1 << 30

if __name__ != "__main__":  # in the server: build a table of transformers once for all forks
    with suppress(ImportError):  # transformers 4 has none
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def main(wall: str, path: str) -> None:
    """Attach to this run's cards, go behind the wall, and train a pickled request."""
    libraries = ctypes.CDLL(None)
    libraries.scriptedNvmlFollow(os.environ["TRAINER_PLUGINS_NVML_SCRIPT"].encode())
    if asked := json.loads(wall):
        real = map(Path, asked["real"])
        build_wall(Path(asked["scratch"]), real, has_network=asked["network"])
    else:
        libraries.drywall_read()
    start.begin()
    train_request(path)


def train_request(path: str) -> None:
    """Train a pickled request; the process ends once all is measured.

    If that is impossible, the reason is written next to the request.
    """
    request: PlanRequest = pickle.loads(Path(path).read_bytes())
    try:
        _train(request)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        refused = make_plan_error(error)
        told = [not isinstance(refused, NotPredicted), refused.args[0]]
        Path(path).with_name("refused-plan").write_text(json.dumps(told))
        raise SystemExit(1) from error


def _train(request: PlanRequest) -> None:
    request = _launch(request)
    source, args = request.source, arguments_of(request.source)
    if isinstance(source, TrainerSource) and request.deepspeed and not args.deepspeed:
        args.deepspeed = request.deepspeed
    streaming = Streaming(request) if request.resident_layers is not None else None
    build = Build(copy_arguments(args), request.has_padding, streaming)
    rehearsed = _rehearse(request, build)
    trainer = rehearsed.trainer
    refuse_trainer(trainer)
    if isinstance(source, TrainerSource):
        refuse_divided(trainer.model)
    if streaming is not None:
        streaming.count(trainer)
        observe.about["streamed"] = lambda: streaming.figures(trainer)
    observe.about |= {
        "planned": describe_run(request, trainer, args),
        "notes": rehearsed.assumptions,
    }
    if rehearsed.evaluation_batch is not None:
        mine: Any = trainer.args  # they request no evaluation: there was no data set
        mine.eval_strategy, mine.eval_steps, trainer.eval_dataset = "steps", _NO_END, [0]
    _give_batches(rehearsed, request)
    trainer.train()


def _launch(request: PlanRequest) -> PlanRequest:
    """Make this process rank 0 of those that a launcher would start."""
    request = complete_launch(request)
    os.environ.update(request.environment)
    if request.num_gpus > 1 or request.uses_deepspeed:  # otherwise it looks for its ranks by MPI
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE=str(request.num_gpus),
            LOCAL_WORLD_SIZE=str(request.num_gpus // request.num_nodes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )
    return request


def _rehearse(request: PlanRequest, build: Build) -> Rehearsed:
    source = request.source
    if isinstance(source, TrainerSource):
        return from_trainer.rehearse(source, build)
    make = from_config.rehearse if source.trainer is None else from_loop.rehearse
    if build.streaming is None:
        return make(source, build)
    with build.streaming.instead_of_moving():
        rehearsed = make(source, build)
    build.streaming.begin(rehearsed.trainer)
    return rehearsed


def _give_batches(rehearsed: Rehearsed, request: PlanRequest) -> None:
    trainer: Any = rehearsed.trainer  # mypy forbids replacing methods
    num_batches = (OPTIMIZER_STEPS + 1) * trainer.args.gradient_accumulation_steps
    batch, evaluation = rehearsed.batch, rehearsed.evaluation_batch
    if rehearsed.has_padding:
        _pad(batch, evaluation)
    trainer.get_train_dataloader = lambda: loader(trainer, batch, num_batches)
    if evaluation is not None:
        number = request.source.num_evaluation_batches
        trainer.get_eval_dataloader = lambda *_, **__: loader(trainer, evaluation, number)
    if rollout.generates(trainer):
        rollout.prepare(trainer, request.card)


def _pad(*batches: Batch | None) -> None:
    """Make the first row one token shorter than the others; prompts keep their own lengths."""
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor):
            mask[0, -1] = 0


if __name__ == "__main__":
    main(*sys.argv[1:])
