"""Restore the user's Trainer in this process, with its model on the card. Imports torch."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from trainer_plugins.planner.rehearse import rollout, ship
from trainer_plugins.planner.rehearse.liger import replace_again
from trainer_plugins.planner.rehearse.rehearsal import Build, Rehearsed, other_models
from trainer_plugins.planner.rehearse.spread import spread
from trainer_plugins.planner.request import TrainerSource
from trainer_plugins.wrapped import base_model


def rehearse(source: TrainerSource, build: Build) -> Rehearsed:
    """Restore a Trainer and its batches."""
    replace_again(source.replaced)
    sent = ship.loads(source.trainer)
    if "bitsandbytes" in sys.modules:
        for part in sent["model"].modules():
            _give_its_own_weight(part)
    trainer = _revive(sent, source.device_map, build)
    evaluation = ship.loads(source.evaluation_batch) if source.evaluation_batch else None
    return Rehearsed(trainer, ship.loads(source.batch), evaluation)


def _revive(sent: dict[str, Any], device_map: Mapping[str, int], build: Build) -> Any:
    """Restore the user's Trainer, and rebuild everything tied to a process or a device."""
    import transformers
    from transformers.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback,
        TrainerControl,
        TrainerState,
    )
    from transformers.trainer_utils import TrainerMemoryTracker

    args = build.args
    for module in (sent["model"], *sent["others"].values()):
        _register_recorded_outputs(module)
    trainer = sent["class"].__new__(sent["class"])
    vars(trainer).update(sent["others"])
    trainer.args, trainer.model, trainer.deepspeed = args, sent["model"], None
    trainer.compute_metrics = (lambda *_, **__: {}) if sent["has_metrics"] else None
    trainer.train_dataset, trainer.eval_dataset = [0], None
    trainer.data_collator = transformers.default_data_collator
    trainer.model_init = trainer.hp_search_backend = None
    trainer._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
    trainer.create_accelerator_and_postprocess()
    args._setup_devices  # noqa: B018 - reading it sets up the devices
    trainer.optimizer, trainer.lr_scheduler = sent["optimizer"], None
    trainer._created_lr_scheduler = False
    if rollout.generates(trainer):
        trainer.log_completions = False
        if "trl.distributed" in sys.modules:  # an older TRL is refused later
            backend: Any = sys.modules["trl.distributed"]
            trainer._dist = backend.DistributedBackend(trainer.accelerator)
    if build.streaming is not None:
        build.streaming.begin(trainer)
    if device_map:
        spread(trainer.model, device_map, args.device.type)
        args._n_gpu = 1  # as in the Trainer's constructor
    elif getattr(trainer.model, "is_quantized", False):  # transformers refuses to move it
        torch.nn.Module.to(trainer.model, args.device)
        base_model(trainer.model).hf_device_map = {"": args.device}
    elif trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, args.device)
    for module in other_models(trainer):
        if vars(module).pop("_is_accelerate_prepared", False):  # set in the user's process
            trainer.accelerator.prepare_model(module, evaluation_mode=True)
        module.to(args.device)
    trainer.model_wrapped = trainer.model
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], trainer.model, None, None, None
    )
    trainer.control, trainer.state = TrainerControl(), TrainerState()
    trainer._train_batch_size = args.train_batch_size
    return trainer


def _register_recorded_outputs(model: object) -> None:
    """Register a model's recordable outputs, as its constructor would."""
    from transformers import modeling_utils

    recorded = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {})
    for part in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, modeling_utils.PreTrainedModel):
            dict.__setitem__(recorded, str(part.__class__), part._can_record_outputs)


def _give_its_own_weight(part: torch.nn.Module) -> None:
    """Restore the weight class of a bitsandbytes layer, whose weight was sent as a plain tensor."""
    bnb: Any = sys.modules["bitsandbytes"]
    if isinstance(part, bnb.nn.Linear4bit):
        known: Mapping[str, Any] = vars(part.weight)
        part.weight = bnb.nn.Params4bit(
            part.weight.data,
            requires_grad=False,
            quant_state=part.quant_state,
            quant_type=known.get("quant_type", "nf4"),
            compress_statistics=known.get("compress_statistics", True),
            quant_storage=part.weight.dtype,
            bnb_quantized=part.quant_state is not None,
            module=part,
        )
    elif isinstance(part, bnb.nn.Linear8bitLt) and part.weight.dtype == torch.int8:
        scales = torch.empty(part.weight.shape[0])
        part.weight = bnb.nn.Int8Params(
            part.weight.data,
            requires_grad=False,
            has_fp16_weights=False,
            CB=part.weight.data,
            SCB=scales,
        )
