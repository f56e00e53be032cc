"""Refusals: explains which Trainers are unsupported; checked at attach and at each begin."""

from collections.abc import Iterator
from typing import Any

import torch

from trainer_plugins.accumulation.modules import find_coupled_modules
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.users_code import names_in
from trainer_plugins.survival.exact.coupled import Seam
from trainer_plugins.survival.exact.finality import hooks_of_gradients
from trainer_plugins.survival.exact.losses import Family, NoFamily
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.upkeep.stack import code_of
from trainer_plugins.wrapped import base_model, compiles

_NOT_TWICE = (
    "its loss compares rows, so all rows pass once before the pieces, and under FSDP a rank that "
    "runs out of memory there would leave the others waiting: use DDP or DeepSpeed ZeRO"
)


def refusals(trainer: HfTrainer, family: Family | NoFamily) -> list[str]:
    """List why this Trainer cannot survive OOM errors; `family` is that of its loss."""
    reasons = [
        *_parallel(trainer),
        *_judge_compiled(trainer),
        *_judge_consumed_gradients(trainer),
        *_judge_coupled_rows(trainer),
        *_step_without_compute_loss(trainer),
        *_rivals(trainer),
    ]
    if isinstance(family, NoFamily):
        reasons.append(family.words)
    elif isinstance(family.coupling, Seam):
        if not kind_of(trainer).passes_twice:
            reasons.append(_NOT_TWICE)
        if compiles(trainer.model):
            reasons.append("its loss compares rows, and compiled code cannot pass them in pieces")
    return reasons


def _parallel(trainer: HfTrainer) -> Iterator[str]:
    yield from kind_of(trainer).refusals(trainer)
    if trainer.args.n_gpu > 1:
        num = trainer.args.n_gpu
        yield f"nn.DataParallel over {num} cards is not supported: start one process per card"
    if trainer.is_model_parallel:
        yield "a model spread over several cards is not supported yet"
    tp_size = getattr(trainer.model, "_tp_size", None)
    if tp_size or trainer.accelerator.parallelism_config is not None:
        yield "tensor, context and sequence parallelism are not supported"


def _judge_compiled(trainer: HfTrainer) -> Iterator[str]:
    plugin = trainer.accelerator.state.dynamo_plugin
    if not compiles(trainer.model):
        return
    if trainer.args.world_size > 1:
        yield "torch.compile with several processes is not supported yet: turn it off"
    if plugin.mode in ("reduce-overhead", "max-autotune"):
        yield (
            f"torch.compile with mode={plugin.mode!r} keeps the memory of CUDA graphs: use the "
            "default, or max-autotune-no-cudagraphs"
        )
    if torch._dynamo.config.compiled_autograd:
        yield "compiled_autograd hides which gradients a failed backward pass has finished"


def _judge_consumed_gradients(trainer: HfTrainer) -> Iterator[str]:
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optim or "layerwise" in optim:
        yield f"optim={optim} applies gradients inside the backward pass, and a retry repeats that"
    yield from hooks_of_gradients(trainer.model)


def _judge_coupled_rows(trainer: HfTrainer) -> Iterator[str]:
    yield from find_coupled_modules(trainer.model)
    config: Any = getattr(base_model(trainer.model), "config", None)
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    has_router_loss = any(getattr(c, "output_router_logits", False) for c in configs)
    if has_router_loss or getattr(trainer, "aux_loss_enabled", False):
        yield "the router's auxiliary loss is not a sum over rows: set output_router_logits=False"


def _step_without_compute_loss(trainer: HfTrainer) -> Iterator[str]:
    """Refuse a `training_step` that computes its own loss, as TRL's online DPO does."""
    names = _names_in(type(trainer), "training_step")
    if "backward" in names and "compute_loss" not in names:
        owner = next(c for c in type(trainer).__mro__ if "training_step" in vars(c))
        name = f"{owner.__name__}.training_step"
        yield (
            f"{name} never calls compute_loss, so no part of its loss can be computed alone;"
            " survival can split a step that calls compute_loss and accelerator.backward, as"
            " GRPO's does"
        )


def _names_in(kind: type, method: str) -> set[str]:
    found: set[str] = set()
    waiting, followed = [method], {method}
    while waiting:
        name = waiting.pop()
        for owner in (c for c in kind.__mro__ if name in vars(c)):
            if owner.__module__.startswith("transformers."):
                if name == "training_step":
                    found.add("compute_loss")
                break
            code = code_of(vars(owner)[name])
            names = {*names_in(code)} if code is not None else set[str]()
            found |= names
            waiting += names - followed
            followed |= names
            if name not in names:  # it calls no `super()`
                break
    return found


def _rivals(trainer: HfTrainer) -> Iterator[str]:
    if trainer.args.auto_find_batch_size and trainer.is_in_train:
        yield (
            "auto_find_batch_size is already active, and restarts training after an OOM: call"
            " survive_oom before train(), or pass SurviveOOM to the Trainer before"
        )
    if getattr(trainer.args, "activation_offloading", False):
        yield "a failed attempt upsets the counts of activation_offloading: turn it off"
