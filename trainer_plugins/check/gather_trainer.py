"""Gather the facts of a Trainer that is about to train, without changing it. Imports torch."""

import copy
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import fields, replace
from typing import Any

import psutil
import torch
from torch import nn

from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.check.facts import (
    CardFacts,
    DataFacts,
    Facts,
    ModelFacts,
    ModelShape,
    Notes,
    OtherModel,
    RunSettings,
    folder_of,
    predicts_tokens,
)
from trainer_plugins.check.gather_here import (
    disk_free_bytes,
    folder_trouble,
    main_memory,
    owner_of,
    read_environment,
)
from trainer_plugins.checkpointing import is_checkpointing
from trainer_plugins.devices import Device
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.launch.in_force import strategy_of
from trainer_plugins.longest import Lengths, has_rows, lengths_of
from trainer_plugins.planner.rehearse.gather import keep_undisturbed
from trainer_plugins.reading import MemoryReading
from trainer_plugins.upkeep.holders import root_modules, storage_of
from trainer_plugins.watch.memory_watch import own_pids
from trainer_plugins.wrapped import base_model, local_tensor, tensors_in

logger = logging.getLogger(__name__)

_SECONDS = 1.0  # time limit for reading rows one by one if no column holds their lengths
_MOST_MASKS = 64


def gather_trainer(
    trainer: HfTrainer, model: nn.Module, optimizer: object, device: Device
) -> Facts:
    """Read a Trainer when training begins, in up to a second; the model has no wrappers."""
    notes = Notes()
    reading, is_card = device.read(), device.name != "cpu"
    kind = device.name.split(":")[0]
    card = notes.try_read("the card", None, _card, device, reading) if is_card else None
    run = notes.try_read("the arguments", RunSettings(), _run, trainer, optimizer)
    data = notes.try_read("the data", DataFacts(), _data, trainer, model, run)
    facts = Facts(
        cards=(card,) if card is not None else (),
        no_cards="" if is_card else "training runs on the CPU",
        own_pids=frozenset(own_pids()),
        device_bytes=reading.total_bytes,
        capability=card.capability if card is not None else None,
        device_free_bytes=reading.free_bytes + (reading.cached_bytes if is_card else 0),
        main=notes.try_read("main memory", None, main_memory),
        **notes.try_read("the environment", dict[str, Any](), read_environment, os.environ),
        run=run,
        model=notes.try_read("the model", ModelFacts(), _model, trainer, model, optimizer, kind),
        data=data,
        accumulation=notes.try_read(
            "the loss", None, judge_accumulation, trainer, data.batch_names
        ),
    )
    return replace(facts, failed=tuple(notes.failed))


def _card(device: Device, reading: MemoryReading) -> CardFacts:
    kind = torch.device(device.name)
    properties = torch.get_device_module(kind.type).get_device_properties(kind.index)
    me = psutil.Process()
    peers = own_pids() - {me.pid, *(child.pid for child in me.children(recursive=True))}
    processes = device.processes()
    owners = None
    if processes is not None:
        owners = tuple(owner_of(each, is_peer=each.pid in peers) for each in processes)
    return CardFacts(
        uuid=device.name,
        name=str(getattr(properties, "name", device.name)),
        reading=reading,
        owners=owners,
        capability=(properties.major, properties.minor) if kind.type == "cuda" else None,
    )


def _run(trainer: HfTrainer, optimizer: object) -> RunSettings:
    args: Any = trainer.args
    values = {each.name: getattr(args, each.name, None) for each in fields(args)}
    callbacks = trainer.callback_handler.callbacks
    asked = [each.logits_to for each in callbacks if type(each).__name__ == "EvaluationGuard"]
    return RunSettings(
        values=values,
        has_metrics=trainer.compute_metrics is not None,
        reduces_logits=trainer.preprocess_logits_for_metrics is not None,
        logits_to=next(filter(None, asked), ""),
        num_cards=args.n_gpu,
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
        strategy=strategy_of(trainer.model_wrapped, optimizer, args),
        gathers_on_save=_gathers_on_save(trainer.accelerator.state),
        folder_trouble=folder_trouble(folder_of(values)) if args.should_save else "",
        disk_free_bytes=disk_free_bytes(folder_of(values)),
    )


def _gathers_on_save(state: Any) -> str:
    """Return the setting that gathers all weights on the first rank for a save; empty if none."""
    zero, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    settings = {} if zero is None else zero.deepspeed_config.get("zero_optimization") or {}
    key = "stage3_gather_16bit_weights_on_model_save"
    if settings.get(key) is True:
        return f"ZeRO-3 with {key}"
    if fsdp is not None and "FULL_STATE_DICT" in str(fsdp.state_dict_type):
        return "FSDP with FULL_STATE_DICT"
    return ""


def _model(trainer: HfTrainer, model: nn.Module, optimizer: object, device_type: str) -> ModelFacts:
    base: Any = base_model(model)
    trainable, frozen, homes = Counter[str](), Counter[str](), Counter[str]()
    expert_bytes = 0
    for name, parameter in model.named_parameters():
        local = _local(parameter)
        if parameter.dim() > 2 and parameter.is_floating_point() and "experts" in name.split("."):
            expert_bytes += local.nbytes
        dtype = str(parameter.dtype).removeprefix("torch.")
        (trainable if parameter.requires_grad else frozen)[dtype] += local.nbytes
        homes[local.device.type] += local.nbytes
    config: Any = getattr(base, "config", None)
    is_live = is_checkpointing(model)
    inner: Any = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
    states = tensors_in(getattr(inner, "state", None))
    return ModelFacts(
        shape=ModelShape.read(config.to_dict()) if hasattr(config, "to_dict") else None,
        predicts_tokens=predicts_tokens(type(base).__name__),
        makes_no_logits=_has_fused_loss(trainer, base),
        trainable_bytes=trainable,
        frozen_bytes=frozen,
        expert_bytes=expert_bytes,
        homes=homes,
        others=tuple(_others(trainer, model, device_type)),
        is_checkpointing=is_live,
        is_cut_off=_is_cut_off(model, base),
        attention=str(getattr(config, "_attn_implementation", None) or ""),
        takes_sdpa=bool(getattr(base, "_supports_sdpa", False)),
        uses_cache=getattr(config, "use_cache", False) is True and not is_live,
        optimizer=_optimizer_name(inner),
        optimizer_state_bytes=sum(each.nbytes for each in states),
        stray_bytes=_stray_bytes(trainer, model, inner),
    )


def _optimizer_name(optimizer: object) -> str:
    """Name the optimizer's class and package: bitsandbytes uses the same class names."""
    package, name = type(optimizer).__module__.split(".")[0], type(optimizer).__name__
    return name if package == "torch" else f"{package}.{name}"


def _is_cut_off(model: nn.Module, base: Any) -> bool:
    """Return whether checkpointing is reentrant, and none of its inputs needs a gradient."""
    live = (each for each in model.modules() if getattr(each, "gradient_checkpointing", False))
    function = getattr(next(live, None), "_gradient_checkpointing_func", None)
    if getattr(function, "keywords", {}).get("use_reentrant") is not True:
        return False
    embeddings: Any = base.get_input_embeddings() if hasattr(base, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    return not (weight is None or weight.requires_grad or embeddings._forward_hooks)


def _has_fused_loss(trainer: HfTrainer, base: nn.Module) -> bool:
    """Return whether the loss avoids full logits: by Liger, or TRL's fused head."""
    # trl/trainer/utils.py, add_fused_lm_head, replaces the model's forward.
    code = getattr(vars(base).get("forward"), "__code__", None)
    return trainer.args.use_liger_kernel or (code is not None and "fused" in code.co_name)


def _others(trainer: HfTrainer, model: nn.Module, device_type: str) -> Iterator[OtherModel]:
    """Find other live models of the same architecture that have their own storages."""
    inside = {id(module) for each in (model, trainer.model_wrapped) for module in each.modules()}
    own = _storages(model, device_type)
    shapes = Counter(tuple(each.shape) for each in model.parameters())
    for root in root_modules():
        if id(root) in inside or any(id(each) in inside for each in root.modules()):
            continue
        # Tied weights, wrappers and adapters share storages, so they are not second copies.
        there = _storages(root, device_type).items()
        others = {address: num_bytes for address, num_bytes in there if address not in own}
        alike = Counter(tuple(each.shape) for each in root.parameters()) & shapes
        if others and alike.total() * 2 >= shapes.total():
            names = [f"trainer.{name}" for name, value in vars(trainer).items() if value is root]
            outside = "something outside the Trainer (a variable, a callback, an earlier Trainer)"
            yield OtherModel(
                name=type(root).__name__,
                holder=names[0] if names else outside,
                num_bytes=sum(others.values()),
            )


def _storages(module: nn.Module, device_type: str) -> dict[int, int]:
    found = (storage_of(_local(each), device_type) for each in module.parameters())
    return dict(storage for storage in found if storage is not None)


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor: of a DTensor, or of a ZeRO-3 parameter."""
    shard = getattr(tensor, "ds_tensor", None)
    return shard if shard is not None else local_tensor(tensor)


def _stray_bytes(trainer: HfTrainer, model: nn.Module, optimizer: Any) -> int:
    """Return the size of tensors that only the optimizer has; 0 if anything is sharded."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return 0
    own = {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())
    return sum(each.nbytes for group in groups for each in group["params"] if id(each) not in own)


def _data(trainer: HfTrainer, model: nn.Module, run: RunSettings) -> DataFacts:
    found = _evaluation(trainer, model, run)
    loader = trainer.callback_handler.train_dataloader
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if not has_rows(dataset):
        return replace(found, unseen=f"{type(dataset).__name__} cannot be asked for single rows")
    with keep_undisturbed(trainer):
        read = _lengths(dataset)
        lengths = dict(zip(read.rows.tolist(), read.tokens.tolist(), strict=True))
        masks = [_mask_of(dataset[index]) for index in list(lengths)[:_MOST_MASKS]]
        pads = sum(mask.count(0) for mask in masks)
        if pads:  # then the lengths include padding
            lengths = {index: sum(mask) for index, mask in enumerate(masks) if mask}
        longest = sorted(lengths, key=lambda index: -lengths[index])[: run.rows]
        batch, error = _collate(model, dataset, collate, longest)
        longest_target = _longest_target(model, read)
    inner = getattr(collate, "data_collator", collate)
    return replace(
        found,
        lengths=tuple(lengths.values()),
        num_rows=len(dataset),
        pads_in_rows=pads,
        is_packed=getattr(inner, "padding_free", False) is True
        or "Flattening" in type(inner).__name__,
        batch_bytes=sum(each.nbytes for each in tensors_in(batch)),
        batch_names=tuple(batch) if isinstance(batch, Mapping) else None,
        collator_error=error,
        longest_target=longest_target,
    )


def _evaluation(trainer: HfTrainer, model: nn.Module, run: RunSettings) -> DataFacts:
    dataset = trainer.eval_dataset
    if isinstance(dataset, Mapping):
        sized = [each for each in dataset.values() if isinstance(each, Sized)]
        dataset = max(sized, key=len, default=None)
    if not run.evaluates or not has_rows(dataset):
        return DataFacts()
    with keep_undisturbed(trainer):
        longest = _longest_target(model, _lengths(dataset))
    return DataFacts(longest_evaluation=longest, num_evaluation_rows=len(dataset))


def _lengths(dataset: Any) -> Lengths:
    """Return the lengths of rows; none if rows have no tokens, as with images."""
    first = lengths_of([dataset[0]] if len(dataset) else [])
    return lengths_of(dataset, _SECONDS) if first.tokens.any() else lengths_of([])


def _longest_target(model: nn.Module, lengths: Lengths) -> int:
    """Return the most tokens of a row that get logits: in an encoder-decoder, of its labels."""
    config = getattr(base_model(model), "config", None)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    tokens = lengths.columns.get("labels", ()) if is_encoder_decoder else lengths.tokens
    return int(max(tokens, default=0))


def _mask_of(row: object) -> list[int]:
    mask = row.get("attention_mask") if isinstance(row, Mapping) else None
    values = mask.flatten().tolist() if isinstance(mask, torch.Tensor) else mask
    return [int(value) for value in values] if isinstance(values, (list, tuple)) else []


def _collate(
    model: nn.Module, dataset: Any, collate: Any, indices: list[int]
) -> tuple[object, str]:
    """Return a batch of these rows, or the collator's error."""
    if collate is None or not indices:
        return None, ""
    try:  # the collator is copied, since it may keep a generator; a model that it keeps is not
        collate = copy.deepcopy(collate, {id(module): module for module in model.modules()})
        return collate([dataset[index] for index in indices]), ""
    except Exception as error:
        logger.debug("the collator failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
