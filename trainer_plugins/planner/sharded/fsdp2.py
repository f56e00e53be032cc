"""Run FSDP2 by torch's own `fully_shard`, on tensors without bytes."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.one_card import bare_optimizer
from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.sharded.ranks import (
    Ranks,
    address,
    addresses_are,
    makes_buffers,
    refuse_optimizers,
)
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.tried import is_transformers_4

# transformers/integrations/fsdp.py, is_fsdp_enabled: if both are true, only the first rank of a
# node loads the weights.
_ONE_LOADS = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_TRUE = ("1", "true", "yes", "y", "on", "t")
_PARTS_OF_A_CARD = 2


class Fsdp(Ranks):
    """Divides weights, gradients and optimizer states among the cards; gathers them by layer."""

    name: ClassVar[str]

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        self._tracker, self._num_local = tracker, tracker.host.ranks
        # transformers 5 reads the files in every rank nevertheless (transformers#43749)
        if is_transformers_4() and all(
            os.environ.get(name, "").lower() in _TRUE for name in _ONE_LOADS
        ):
            tracker.host.ranks = 1

    def prepare(self, trainer: HfTrainer) -> None:
        refuse_optimizers(trainer, self.name)
        self._tracker.host.ranks = self._num_local


class Fsdp2(Fsdp):
    """Runs fully_shard, which keeps each parameter by itself."""

    name = "FSDP2"
    not_reliable: tuple[str, ...] = (
        "FSDP2: torch's own fully_shard gathers and reduces; checked on CPU, not on a GPU",
    )

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        super().patch(patches, tracker)
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
            makes_buffers(patches, tracker, module, name)
        _gradients_are_known(patches, tracker)
        meshes_have_values(patches)
        _parameters_have_addresses(patches)

    def save(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Make the states of the model and the optimizer, as accelerate's fsdp_utils.py does."""
        from torch.distributed.checkpoint import state_dict

        options = _options(trainer)
        with tracker.host.in_ranks(ranks_that_keep(trainer, tracker)), tracker.during("save"):
            state_dict.get_model_state_dict(trainer.model, options=options)
            if not trainer.args.save_only_model:
                optimizer = bare_optimizer(trainer) or ()
                state_dict.get_optimizer_state_dict(trainer.model, optimizer, options=options)

    def resume(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Divide the saved states of the optimizer among the ranks, as load_fsdp_optimizer does."""
        from torch.distributed.checkpoint import state_dict

        model, optimizer, options = trainer.model, bare_optimizer(trainer) or (), _options(trainer)
        with tracker.host.in_ranks(ranks_that_keep(trainer, tracker)):
            with tracker.during("save"):  # instead of a file
                loaded = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
            with tracker.during("resume"):
                state_dict.set_optimizer_state_dict(model, optimizer, loaded, options=options)


class ContextParallel(Fsdp2):
    """Divides the tokens of each row among cards too: accelerate's `cp_size`.

    Of each row a card has two parts, one from either end. The first card needs the most: it looks
    for half of its queries in the keys of others, and puts what it finds into a copy
    (torch.distributed.tensor.experimental).
    """

    not_reliable = (
        *Fsdp2.not_reliable,
        "context parallelism: torch's own ring of flash attention; checked on simulated cards, and "
        "not by us on a GPU",
    )

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        super().patch(patches, tracker)

        def divided(
            divide: Callable[..., object],
            accelerator: Any,
            buffers: list[torch.Tensor],
            buffer_seq_dims: list[int],
            **more: Any,
        ) -> object:
            for tensor, dim in zip(buffers, buffer_seq_dims, strict=True):
                _check_length(tensor.shape[dim], accelerator.parallelism_config.cp_size)
            return divide(accelerator, buffers, buffer_seq_dims, **more)

        patches.wrap(Accelerator, "maybe_context_parallel", divided)


def _check_length(length: int, num_cards: int) -> None:
    """Refuse rows that torch divides without a balance, or not at all."""
    parts = _PARTS_OF_A_CARD * num_cards
    if length % parts:
        raise NotPredicted(
            f"context parallelism of rows of {length} tokens, which are not {parts} equal parts: "
            f"pad them (pad_to_multiple_of {parts})"
        )


def _gradients_are_known(patches: Patches, tracker: Tracker) -> None:
    """Tag gradients that are not reduced yet: they are full, and no parameter holds them."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def told(
        original: Callable[..., object], group: Any, *args: object, **kwargs: object
    ) -> object:
        result = original(group, *args, **kwargs)
        for parameter in group.fsdp_params:
            full = getattr(parameter, "_unsharded_param", None)
            waiting = getattr(parameter, "unsharded_accumulated_grad", None)
            tracker.tag((waiting, getattr(full, "grad", None)), "gradients")
        return result

    patches.wrap(FSDPParamGroup, "post_backward", told)


def meshes_have_values(patches: Patches) -> None:
    """Make each DeviceMesh with real values: it is a table of ranks, which it reads."""
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed import _state_dict_utils
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    patches.surround(_fsdp_init, "init_device_mesh", _disable_current_modes)
    patches.surround(ParallelismConfig, "build_device_mesh", _disable_current_modes)
    patches.surround(DeviceMesh, "__getitem__", _disable_current_modes)
    # where a share begins is read from a tensor: unknown, it would be the second row
    patches.surround(
        _state_dict_utils, "compute_local_shape_and_global_offset", _disable_current_modes
    )


def _parameters_have_addresses(patches: Patches) -> None:
    """Give fake parameters an address where accelerate finds a sharded one by it.

    Elsewhere none must be found: code that finds one copies bytes, and there are none.
    """
    from accelerate import accelerator as module

    no_address = torch.Tensor.data_ptr
    patches.surround(Accelerator, "_prepare_fsdp2", lambda: addresses_are(address))
    patches.surround(module, "fsdp2_prepare_model", lambda: addresses_are(no_address))


def ranks_that_keep(trainer: HfTrainer, tracker: Tracker) -> int:
    """Return how many ranks of a node keep a gathered state: one with FULL_STATE_DICT."""
    return 1 if keeps_full_states(trainer) else tracker.host.ranks


def keeps_full_states(trainer: HfTrainer) -> bool:
    """Return whether a checkpoint holds full tensors (FULL_STATE_DICT)."""
    return "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def _options(trainer: HfTrainer) -> Any:
    from accelerate.utils.fsdp_utils import _prepare_sd_options

    return _prepare_sd_options(trainer.accelerator.state.fsdp_plugin)
