"""Gather the facts of a run for run.json: arguments, model, strategy, versions, card, limits."""

import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.allocator.variables import NAMES, pick
from trainer_plugins.devices import Device
from trainer_plugins.launch.launcher import launch_of
from trainer_plugins.launch.masked import list_declared, mask_command, mask_fields, mask_text
from trainer_plugins.launch.place import place, read_versions
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.timeline import PROCESS
from trainer_plugins.strategy import Strategy

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FEWEST_NAMES = 2  # a part of a Hydra config with only one of them, such as `seed`, may be anything


def try_read(read: Callable[[], T], default: T) -> T:
    """Read one part of a record; if it fails, the others are still read."""
    try:
        return read()
    except Exception:
        logger.debug("a part of this run's record is missing", exc_info=True)
        return default


def restore_command(arguments: list[str], given: list[str]) -> list[str]:
    """Return a command line as typed after `python`: a module by its name, not its file.

    >>> restore_command(["/x/mine/train.py", "--bf16"], ["python3", "-m", "mine.train", "--bf16"])
    ['-m', 'mine.train', '--bf16']
    >>> restore_command(["train.py"], ["python", "-u", "train.py"])
    ['train.py']
    """
    program = given[-len(arguments) - 1 :]
    return [*program[:2], *arguments[1:]] if program[:1] == ["-m"] else arguments


def facts_of_process(
    device: Device | None, rank: int, world_size: int, time_seconds: float, step: int = 0
) -> RunFacts:
    """Gather the facts of a run that need no Trainer; `device` is None if it is unreadable."""
    name = "" if device is None else device.name
    properties: Any = try_read(lambda: _properties(name), None)
    allocator = pick(os.environ, (*NAMES, "CUDA_VISIBLE_DEVICES"))
    return RunFacts(
        process=PROCESS,
        time_seconds=time_seconds,
        step=step,
        rank=rank,
        world_size=world_size,
        command=mask_command(restore_command(sys.argv, sys.orig_argv)),
        launch=try_read(lambda: launch_of(os.environ), None),
        device=name,
        card=str(getattr(properties, "name", "")),
        capability=try_read(lambda: (int(properties.major), int(properties.minor)), None),
        device_bytes=0 if device is None else try_read(lambda: device.read().total_bytes, 0),
        driver=_driver(),
        versions={
            "python": platform.python_version(),
            "system": platform.platform(),
            **read_versions(),
            "torch build": f"CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        },
        allocator={name: mask_text(text) for name, text in allocator.items()},
        place=try_read(place, None),
    )


def facts_of_trainer(
    trainer: Any, device: Device | None, time_seconds: float, strategy: Strategy | None
) -> RunFacts:
    """Gather the facts of a run: of its process, its Trainer's model and its settings."""
    model, args, step = trainer.model, trainer.args, trainer.state.global_step
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return replace(
        facts_of_process(device, args.process_index, args.world_size, time_seconds, step),
        trainer=type(trainer).__name__,
        model=type(model).__name__,
        built_class=_built_class(base),
        model_config=try_read(lambda: _config(model), {}),
        adapter=try_read(lambda: _adapter(model), {}),
        dtype=str(getattr(base, "dtype", "")).removeprefix("torch."),
        arguments=try_read(lambda: mask_fields(args.to_dict(), list_declared(type(args))), {}),
        override=try_read(lambda: override_of(vars(args)), ""),
        num_rows_a_step=try_read(lambda: int(trainer.get_total_train_batch_size(args)), 0),
        num_evaluation_batches=try_read(lambda: _num_evaluation_batches(trainer), 0),
        has_metrics=trainer.compute_metrics is not None,
        accumulation=try_read(lambda: judge_accumulation(trainer), None),
        strategy=strategy,
    )


def _built_class(model: object) -> str:
    """Name the class of a model without the class that FSDP2 puts in front of it."""
    kinds = type(model).__mro__
    own = next((kind for kind in kinds if not kind.__module__.startswith("torch.")), kinds[0])
    return f"{own.__module__}.{own.__qualname__}"


def _config(model: object) -> dict[str, object]:
    config = getattr(model, "config", None)
    as_dict: dict[str, object] = getattr(config, "to_dict", dict)()
    if (attention := getattr(config, "_attn_implementation", None)) is not None:
        as_dict = {**as_dict, "attn_implementation": attention}  # to_dict() omits it
    # A config for text and images holds one of each.
    configs = [config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))]
    return mask_fields(as_dict, {name for each in configs for name in list_declared(type(each))})


def _adapter(model: Any) -> dict[str, object]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or len(configs) != 1:
        return {}
    (config,) = configs.values()
    fields = mask_fields(config.to_dict(), list_declared(type(config)))
    return {name: value for name, value in fields.items() if value is not None}


def _num_evaluation_batches(trainer: Any) -> int:
    dataset, rows = trainer.eval_dataset, trainer.args.per_device_eval_batch_size
    parts = dataset.values() if isinstance(dataset, dict) else (dataset,)
    ranks = max(1, trainer.args.world_size)
    return max((-(-len(part) // (rows * ranks)) for part in parts if part is not None), default=0)


def _properties(name: str) -> object:
    if not name or name == "cpu":
        return None
    device = torch.device(name)
    return torch.get_device_module(device.type).get_device_properties(device.index)


def _driver() -> str:
    with suppress(OSError):  # only Linux has it
        return mask_text(Path("/proc/driver/nvidia/version").read_text().splitlines()[0])
    return ""


def override_of(names: Collection[str]) -> str:
    """Return the prefix under which Hydra's job config has most of these names, if any."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return ""
    from omegaconf import OmegaConf

    job = module.HydraConfig.get()
    if job.output_subdir is None:
        return ""
    file = Path(job.runtime.output_dir, job.output_subdir, "config.yaml")
    config = OmegaConf.to_container(OmegaConf.load(file))
    counts = {prefix: len(part.keys() & set(names)) for prefix, part in _parts(config, "++")}
    prefix = max(counts, key=lambda each: counts[each], default="")
    return prefix if counts.get(prefix, 0) >= _FEWEST_NAMES else ""


def _parts(value: object, prefix: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    if isinstance(value, Mapping):
        yield prefix, value
        for name, inner in value.items():
            yield from _parts(inner, f"{prefix}{name}.")
