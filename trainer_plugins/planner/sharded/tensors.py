"""Divide the tensors of a model among cards (`tp_size`) by transformers/distributed."""

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.sharded.fsdp2 import meshes_have_values
from trainer_plugins.planner.sharded.ranks import Ranks, refuse_optimizers
from trainer_plugins.planner.tracing.trace import Tracker


class TensorParallel(Ranks):
    """Divides the weights of most layers among cards, which all compute the same rows."""

    not_reliable = (
        "tensor parallelism: transformers' own; checked on simulated cards, and not by us on a GPU",
    )

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        meshes_have_values(patches)
        patches.surround(dist, "init_device_mesh", _disable_current_modes)
        patches.set(torch.accelerator, "set_device_index", lambda _: None)

    def prepare(self, trainer: HfTrainer) -> None:
        refuse_optimizers(trainer, "tensor parallelism")

    def save(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Gather full weights on the card one by one, and all in main memory, as each rank does."""
        from transformers.distributed.tensor_parallel import gather_state_dict_for_save

        with tracker.during("save"):
            gather_state_dict_for_save(dict(trainer.model.state_dict()), {}, None, 1)


def said_of(num_cards: int) -> str:
    """Return what a plan assumes of a run whose model is divided."""
    return (
        f"the model is loaded with distributed_config=DistributedConfig(tp_size={num_cards}, "
        'tp_plan="auto"), with which transformers divides it'
    )


@contextlib.contextmanager
def built_as_loaded() -> Iterator[None]:
    """Build a model as `from_pretrained` does: without bytes, and with no weights tied yet."""
    try:
        from transformers import initialization
        from transformers.distributed import mixin  # noqa: F401 - it divides
    except ImportError as error:
        raise NotPredicted("tensor parallelism with this transformers; it needs 5.23") from error
    with torch.device("meta"), initialization.no_tie_weights():
        yield


def divided(model: Any, num_cards: int, card: torch.device) -> Any:
    """Divide a model of `built_as_loaded`, and put the part of the first rank on its card."""
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
    """Refuse adapters of layers whose input is divided, where PEFT takes a part for the whole."""
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
