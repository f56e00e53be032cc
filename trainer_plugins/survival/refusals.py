"""Refusals: which Trainers cannot be helped, and why.

Asked at attach, and again when the optimizer exists.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from trainer_plugins.survival.exact.losses import bare_model
from trainer_plugins.survival.exact.modules import coupled_modules
from trainer_plugins.survival.ranks.ddp import finishes_here


def refusals(trainer: Trainer) -> list[str]:
    """Every reason why out-of-memory errors of this Trainer cannot be survived; empty where they can.

    Its loss is judged apart, by `losses.py`.
    """
    return [reason for find in _REFUSALS for reason in find(trainer)]


def _parallel(trainer: Trainer) -> Iterator[str]:
    accelerator, args = trainer.accelerator, trainer.args
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if trainer.is_deepspeed_enabled:
        from trainer_plugins.survival.ranks.deepspeed_refusals import unsupported

        yield from unsupported(trainer)
    elif trainer.is_fsdp_enabled:
        from trainer_plugins.survival.ranks.fsdp2 import refusals_of_fsdp

        yield from refusals_of_fsdp(trainer)
    elif kind.startswith("MULTI_"):
        yield from _ddp(trainer)
    elif kind != "NO":
        yield f"several processes ({kind}) are not supported yet"
    if args.n_gpu > 1:
        yield f"nn.DataParallel over {args.n_gpu} cards is not supported: start one process a card, or show it one card"
    if trainer.is_model_parallel:
        yield "a model spread over several cards is not supported yet"
    if getattr(accelerator, "parallelism_config", None) is not None or getattr(
        trainer.model, "_tp_size", None
    ):
        yield "tensor, context and sequence parallelism are not supported: every rank would have to divide alike"


def _ddp(trainer: Trainer) -> Iterator[str]:
    model: Any = trainer.model_wrapped
    is_wrapped = (
        model is not trainer.model
    )  # at the first micro-batch; at attach there is what it will be made with
    if is_wrapped and not isinstance(model, DistributedDataParallel):
        yield f"several processes with {type(model).__name__} around the model, and not DistributedDataParallel"
        return
    made_with: Any = model if is_wrapped else trainer.accelerator.ddp_handler
    if getattr(made_with, "static_graph", False):
        yield "DDP with static_graph learns the first backward pass by heart, and those of pieces are others"
    if getattr(made_with, "gradient_as_bucket_view", False):
        yield "DDP with gradient_as_bucket_view: one counter for all gradients of a bucket hides which are final"
    if str(getattr(made_with, "comm_hook", "no")) != "no" or (is_wrapped and model._comm_hooks):
        yield "a communication hook of DDP may itself not fit: its bucket is never sent then, and the others wait"
    if is_wrapped and (model.mixed_precision is not None or model._delay_all_reduce_params):
        yield "DDP's own mixed_precision and delayed all-reduce keep state that an exception leaves half done"
    if is_wrapped and model._use_python_reducer:
        yield "DDP's python reducer (torch._dynamo.config.optimize_ddp) sends the gradients of each piece"
    if is_wrapped and model._join_config.enable:
        yield "DDP.join (join_uneven_inputs) counts forward passes, and pieces are more of them"
    if trainer.args.label_smoothing_factor and type(trainer).__module__.startswith("trl."):
        yield "with label_smoothing_factor TRL calls the model twice for a micro-batch, and DDP with it"
    if not finishes_here():
        yield "DDP of this version of torch cannot be finished in pieces, tried just now: please report it"


def _compiled(trainer: Trainer) -> Iterator[str]:
    plugin = getattr(trainer.accelerator.state, "dynamo_plugin", None)
    backend = str(getattr(plugin, "backend", "NO")).rpartition(".")[2]
    is_compiled = any(
        hasattr(m, "_orig_mod") or m._compiled_call_impl is not None
        for m in trainer.model.modules()
    )
    if trainer.args.torch_compile or backend != "NO" or is_compiled:
        yield "torch.compile compiles anew for every size of a piece, and keeps buffers of its own: turn it off"


def _consumed_gradients(trainer: Trainer) -> Iterator[str]:
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optim or "layerwise" in optim:
        yield f"optim={optim} applies gradients inside the backward: weights would have moved when a piece is retried"
    if name := next((n for n, p in trainer.model.named_parameters() if _takes_gradient(p)), None):
        yield f"a hook takes the gradient of `{name}` inside the backward: it would see those of pieces"
    if name := next((n for n, p in trainer.model.named_parameters() if p._backward_hooks), None):
        yield f"a hook changes the gradient of `{name}`: it would see those of pieces"


def _takes_gradient(parameter: nn.Parameter) -> bool:
    hooks: Any = parameter._post_accumulate_grad_hooks
    # DeepSpeed's add what they take to what is there already: they are meant for several
    # micro-batches in a window.
    return any(not hook.__module__.startswith("deepspeed.") for hook in (hooks or {}).values())


def _coupled_rows(trainer: Trainer) -> Iterator[str]:
    yield from coupled_modules(trainer.model)
    config: Any = getattr(bare_model(trainer.model), "config", None)
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    if any(getattr(c, "output_router_logits", False) for c in configs) or getattr(
        trainer, "aux_loss_enabled", False
    ):
        yield "the router's auxiliary loss is no sum over rows: set output_router_logits=False in the model's config"


def _rivals(trainer: Trainer) -> Iterator[str]:
    if trainer.args.auto_find_batch_size:
        yield "auto_find_batch_size restarts training where this would give up: take one of the two"
    if getattr(trainer.args, "activation_offloading", False):
        yield "activation_offloading counts tensors from forward to backward, and a failed attempt upsets the count"


_REFUSALS: tuple[Callable[[Trainer], Iterator[str]], ...] = (
    *(_parallel, _compiled, _consumed_gradients, _coupled_rows, _rivals),
)
