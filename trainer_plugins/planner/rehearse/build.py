"""Make the Trainer that is rehearsed: from a config and flags, or from the user's own Trainer."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.pretend import fused_head, optimizers, quantised, triton
from trainer_plugins.planner.rehearse import rollout, ship
from trainer_plugins.planner.rehearse.arguments import arguments_of, rehearsed_arguments
from trainer_plugins.planner.rehearse.batches import batches_of, with_positions
from trainer_plugins.planner.rehearse.failures import first_line
from trainer_plugins.planner.rehearse.gather import longest_batch
from trainer_plugins.planner.rehearse.loops import Loop, loop_of, make
from trainer_plugins.planner.rehearse.model_of_config import adapter_of, model_of
from trainer_plugins.planner.rehearse.numbers import asked_of, copied
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER
from trainer_plugins.planner.rehearse.rehearsal import Rehearsed, other_models
from trainer_plugins.planner.rehearse.spread import spread
from trainer_plugins.planner.rehearse.streamed import LOADED_TO_MAIN_MEMORY, Streaming
from trainer_plugins.planner.request import MOST_ROWS, ConfigSource, TrainerSource
from trainer_plugins.planner.sharded.strategies import sizes_of
from trainer_plugins.planner.trainer import Arguments, optimizer_name, text_of

_POSITIONS = "batches have position_ids, without which DeepSpeed divides no rows (sp_size)"
_PADDED = "batches have padding, which is the worse case; see --no-padding"


def rehearsal_of(
    source: ConfigSource | TrainerSource,
    has_padding: bool | None,
    output_dir: str,
    streaming: Streaming,
) -> Rehearsed:
    """Make the Trainer of a request, with its model on the card, and its batches.

    Raises:
        PlanError: the input is wrong.
        NotPredicted: the planner cannot predict this model.
    """
    args = arguments_of(source)
    if getattr(args, "use_liger_kernel", False):
        triton.kernels_do_nothing()
    optimizers.let_it_be_imported(optimizer_name(args), getattr(args, "optim_args", None) or "")
    if isinstance(source, TrainerSource):
        rehearsed = _of_trainer(source, args, has_padding, output_dir, streaming)
    else:
        home = torch.device("cpu") if streaming.is_asked else args.device
        with streaming.instead_of_moving():
            rehearsed = _of_config(source, args, has_padding, output_dir, home)
        streaming.begin(rehearsed.trainer)
    if getattr(args, "use_liger_kernel", False) or getattr(source, "replaced", ()):
        rehearsed.assumptions.append(_said_of_liger(rehearsed.trainer.model))
    if streaming.is_asked and quantised.bits_of(rehearsed.trainer.model):
        rehearsed.assumptions.append(LOADED_TO_MAIN_MEMORY)
    return rehearsed


def _said_of_liger(model: torch.nn.Module) -> str:
    from liger_kernel.transformers import monkey_patch

    name = f"Liger {version('liger-kernel')}"
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"{name} has nothing for models of the type {kind}: they are planned as without it"
    return f"{name}: its own code says what its kernels keep; see docs/plan_kernels.md"


def _of_config(
    source: ConfigSource,
    args: Arguments,
    has_padding: bool | None,
    output_dir: str,
    home: torch.device,
) -> Rehearsed:
    import transformers

    rows = args.per_device_train_batch_size
    for name, number in (("train", rows), ("eval", args.per_device_eval_batch_size)):
        if not 1 <= number <= MOST_ROWS:
            raise PlanError(
                f"per_device_{name}_batch_size is a number of rows from 1 to {MOST_ROWS:,}, "
                f"got {number:,}"
            )
    if (loop := loop_of(source)) is not None:
        return _of_loop(
            loop, source, rehearsed_arguments(args, output_dir), has_padding, args, home
        )
    model, assumptions = model_of(source, home, sizes_of(os.environ, args).get("tp_size", 1))
    if has_padding is None:
        has_padding = rows > 1
        if has_padding:
            assumptions.append(_PADDED)
    generates = getattr(args, "predict_with_generate", False)
    trainer_class = transformers.Seq2SeqTrainer if generates else transformers.Trainer
    batches = batches_of(model, rows, source)
    assumptions += batches.said
    try:
        trainer = trainer_class(
            model=model,
            args=rehearsed_arguments(args, output_dir),
            train_dataset=[0] * rows,
            compute_metrics=(lambda *_, **__: {}) if generates or source.has_metrics else None,
        )
    except ValueError as error:
        raise PlanError(first_line(error)) from error
    make_batch = batches.make
    if getattr(getattr(trainer.accelerator, "parallelism_config", None), "sp_size", 1) > 1:
        make_batch = with_positions(make_batch)
        assumptions.append(_POSITIONS)
    evaluates = text_of(args.eval_strategy).lower() != "no" or args.do_eval
    of_evaluation = batches_of(model, args.per_device_eval_batch_size, source)
    return Rehearsed(
        trainer=trainer,
        make_batch=make_batch,
        make_evaluation_batch=of_evaluation.make if evaluates else None,
        num_evaluation_batches=source.num_evaluation_batches,
        saves=text_of(args.save_strategy).lower() != "no",
        resumes=not args.save_only_model,
        has_padding=has_padding,
        assumptions=assumptions,
        asked=batches.asked,
    )


def _of_loop(
    loop: Loop,
    source: ConfigSource,
    args: Any,
    has_padding: bool | None,
    given: Arguments,
    home: torch.device,
) -> Rehearsed:
    """Make a Trainer of TRL's from a config. It trains, and saves; it does not evaluate."""
    if text_of(given.eval_strategy).lower() != "no" or given.do_eval:
        raise NotPredicted(f"an evaluation with --trainer {source.trainer}: {GIVE_A_TRAINER}")
    if args.device.type == "cuda":
        fused_head.kernels_take_nothing()
    adapter = adapter_of(source.peft) if source.peft is not None else None
    model, assumptions = model_of(source, home)
    models = iter([model])  # the one that is trained is built once
    trainer, said = make(
        loop, source, args, lambda: next(models, None) or model_of(source, home)[0], adapter
    )
    if has_padding is None:
        said.append(_PADDED)
    batch = longest_batch(trainer).batch
    return Rehearsed(
        trainer=trainer,
        make_batch=lambda: copied(batch),
        make_evaluation_batch=None,
        num_evaluation_batches=0,
        saves=text_of(given.save_strategy).lower() != "no",
        resumes=not given.save_only_model,
        has_padding=has_padding is not False,
        assumptions=[*assumptions, *said],
    )


def _of_trainer(
    source: TrainerSource,
    args: Arguments,
    has_padding: bool | None,
    output_dir: str,
    streaming: Streaming,
) -> Rehearsed:
    if b"bitsandbytes" in source.trainer:  # its layers are unpickled by name
        quantised.stand_in_for_bitsandbytes()
    sent = ship.loads(source.trainer)
    args_here = rehearsed_arguments(args, output_dir)
    trainer = _revived(sent, args_here, source.device_map, streaming)
    if trainer.args.device.type == "cuda":
        fused_head.kernels_take_nothing()
    batch = ship.loads(source.batch)
    evaluation = ship.loads(source.evaluation_batch) if source.evaluation_batch else None
    return Rehearsed(
        trainer=trainer,
        make_batch=lambda: copied(batch),
        make_evaluation_batch=(lambda: copied(evaluation)) if evaluation is not None else None,
        num_evaluation_batches=source.num_evaluation_batches,
        saves=text_of(args.save_strategy).lower() != "no",
        resumes=not args.save_only_model,
        has_padding=bool(has_padding),
        assumptions=[],
        asked=asked_of(batch),
    )


def _revived(
    sent: dict[str, Any], args: Any, device_map: Mapping[str, int], streaming: Streaming
) -> Any:
    """Restore the user's Trainer; make anew what belongs to a process or a device."""
    import transformers
    from transformers.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback,
        TrainerControl,
        TrainerState,
    )
    from transformers.trainer_utils import TrainerMemoryTracker

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
    trainer.optimizer, trainer.lr_scheduler, trainer._created_lr_scheduler = (
        sent["optimizer"],
        None,
        False,
    )
    if rollout.generates(trainer):
        rollout.revive(trainer)
    streaming.begin(trainer)
    if device_map:
        spread(trainer.model, device_map, args.device.type)
        args._n_gpu = 1  # as the Trainer's constructor says
    elif quantised.bits_of(trainer.model):
        quantised.place(trainer.model, args.device)
    elif trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, args.device)
    for module in other_models(trainer):
        _place(module, trainer)
    trainer.model_wrapped = trainer.model
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], trainer.model, None, None, None
    )
    trainer.control, trainer.state = TrainerControl(), TrainerState()
    trainer._train_batch_size = args.train_batch_size
    return trainer


def _register_recorded_outputs(model: object) -> None:
    """Register the outputs of a model that can be recorded, as its constructor would.

    transformers does that in the model's constructor, which is not run here.
    """
    from transformers import modeling_utils

    recorded = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {})
    for part in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, modeling_utils.PreTrainedModel):
            dict.__setitem__(recorded, str(part.__class__), part._can_record_outputs)


def _place(module: torch.nn.Module, trainer: Any) -> None:
    """Move a model to the card, and let accelerate prepare it if it was prepared before."""
    if vars(module).pop("_is_accelerate_prepared", False):
        trainer.accelerator.prepare_model(module, evaluation_mode=True)
    module.to(trainer.args.device)
