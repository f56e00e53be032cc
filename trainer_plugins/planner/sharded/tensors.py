"""Divide the tensors of a model among cards: `tp_size`. Imports torch.

transformers' own tensor parallelism does it (transformers/distributed), as `from_pretrained` does
with `DistributedConfig(tp_size=N, tp_plan="auto")`: after the model is made, and before its weights
are read. All cards compute the same rows, each with its part of the weights.
"""

import contextlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.fsdp import refuse_optimizers
from trainer_plugins.planner.sharded.fsdp2 import meshes_have_values, on_real_tensors
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike


class TensorParallel:
    """Divides the weights of most layers among cards, which all compute the same rows."""

    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...] = (
        "tensor parallelism: transformers' own; checked on simulated cards, and not by us on a GPU",
    )

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        with as_first_rank(self._request, tracker) as stack:
            for each in meshes_have_values():
                stack.enter_context(each)
            for owner, name, replaced in (
                (dist, "init_device_mesh", on_real_tensors(init_device_mesh)),
                (torch.accelerator, "set_device_index", lambda _: None),
            ):
                stack.enter_context(patch.object(owner, name, replaced))
            yield

    def prepare(self, trainer: TrainerLike) -> None:
        refuse_optimizers(trainer, "tensor parallelism")


def said_of(num_cards: int) -> str:
    """Return what a plan assumes of a run whose model is divided."""
    return (
        f"the model is loaded with distributed_config=DistributedConfig(tp_size={num_cards}, "
        'tp_plan="auto"), by which transformers divides it'
    )


@contextlib.contextmanager
def built_as_loaded() -> Iterator[None]:
    """Build a model as `from_pretrained` does: without bytes, and with no weights tied yet.

    Raises:
        NotPredicted: this transformers does not divide a model after it is made.
    """
    try:
        from transformers import initialization
        from transformers.distributed import mixin  # noqa: F401 - it divides
    except ImportError as error:
        raise NotPredicted("tensor parallelism with this transformers: it is with 5.23") from error
    with torch.device("meta"), initialization.no_tie_weights():
        yield


def divided(model: Any, num_cards: int, card: torch.device) -> Any:
    """Divide a model without bytes, and put the part of the first rank on the card.

    Args:
        model: a model of transformers as `built_as_loaded` makes it.
        num_cards: among how many cards.
        card: this rank's.
    """
    from transformers.distributed import DistributedConfig

    with _disable_current_modes():
        asked = DistributedConfig(tp_size=num_cards, tp_plan="auto")
        config, _, meshes = model.prepare_distribute_model(asked)
        model = model.maybe_distribute_model(model, config, meshes)
    # as from_pretrained does with weights that it does not find in the files
    model._move_missing_keys_from_meta_to_device(set(model.state_dict()), {"": card}, None, None)
    model.tie_weights(recompute_mapping=False)
    return model


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse adapters of layers whose input is divided, where PEFT takes a part for the whole.

    Raises:
        PlanError: the run fails in its first forward.
    """
    for name, part in model.named_modules():
        weight = getattr(part, "weight", None)
        if not isinstance(part, torch.nn.Linear) or not isinstance(weight, DTensor):
            continue
        if weight.shape[-1] != part.in_features:
            raise PlanError(
                f"tensor parallelism: the run fails in its first forward, at {name}. PEFT "
                f"{version('peft')} makes it for {part.in_features} of {weight.shape[-1]} inputs; "
                "leave out layers whose input is divided, as o_proj and down_proj (target_modules)"
            )


def num_parts(model: torch.nn.Module) -> int:
    """Return among how many cards transformers has divided the tensors of a model."""
    return getattr(model, "_tp_size", None) or 1


def gather(states: Mapping[str, torch.Tensor]) -> None:
    """Gather whole weights on the card one by one, and in main memory all, as each rank does."""
    from transformers.distributed.tensor_parallel import gather_state_dict_for_save

    gather_state_dict_for_save(dict(states), {}, None, 1)
