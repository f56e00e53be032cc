"""Turn user input into a PlanRequest: a config, flags or arguments, and the name of a card."""

import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from trainer_plugins.allocator.variables import read_text
from trainer_plugins.checkpointing import spell
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.planner.calibrate import add_measured_context
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.options import RunOptions
from trainer_plugins.planner.plan import RUN_IT, NotPredicted, PlanError
from trainer_plugins.planner.public_models import find_config
from trainer_plugins.planner.request import (
    TRL_TRAINERS,
    ConfigSource,
    PlanRequest,
    default_length,
    fields_of,
)

_CONFIG = "config.json"
_HEAD = re.compile(r"(For[A-Z]\w+|LMHeadModel|Model)$")
_OF_A_TRAINER = (
    "training_args", "seq_length", "target_length", "padding", "dtype", "peft_config",
    "quantization_config", "prepare_kbit", "accelerate_config",
)  # fmt: skip
"""Options for a config, which a Trainer already has."""

_COUNTS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "eval_accumulation_steps",
)


def request_of(trainer_or_config: object, run: RunOptions) -> PlanRequest:
    """Build the request of a run from a Trainer before training, or from a model's config."""
    if run.num_gpus is not None and run.num_gpus < 1:
        raise PlanError(f"--num-gpus must be at least 1, got {run.num_gpus}")
    if hasattr(trainer_or_config, "training_step"):
        request = _request_of_trainer(trainer_or_config, run)
    else:
        request = _request_of_config(trainer_or_config, run)
    try:
        host = HostLimits.read(run.host_memory, run.pinned_memory, request.host.total_bytes)
    except ValueError as error:
        raise PlanError(str(error)) from error
    request = replace(request, host=host)
    if run.calibration and request.card is not None:
        return replace(request, card=add_measured_context(request.card))
    return request


def _request_of_trainer(trainer: object, run: RunOptions) -> PlanRequest:
    for name in _OF_A_TRAINER:
        if getattr(run, name) is not None:
            raise PlanError(
                f"with a Trainer you cannot pass {name}: the plan takes its arguments, longest"
                " rows, model and launch as they are"
            )
    from trainer_plugins.planner.rehearse import gather

    card = card_of(run.gpu) if run.gpu is not None else None
    return gather.request_of(trainer, card, _settings(run), run.num_gpus)


def _request_of_config(given: object, run: RunOptions) -> PlanRequest:
    file, length = run.accelerate_config, run.seq_length
    usual = getattr(run.training_args, "max_length", None) or default_length(run.trainer)
    arguments = arguments_to_send(run.training_args)
    if run.stream_embeddings and run.stream_base is None:
        raise PlanError("--stream-embeddings needs --stream-base")
    config = _change_config(_config(given, run.from_hub), run)
    peft, quantisation = _fields(run.peft_config), _quantisation(run, config)
    if (peft or {}).get("use_dora") and (quantisation or config.get("quantization_config")):
        raise NotPredicted(f"DoRA on a quantised base, which it dequantises: {RUN_IT}")
    return PlanRequest(
        card=card_of(run.gpu) if run.gpu is not None else None,
        source=ConfigSource(
            config=config,
            arguments=arguments,
            sequence_length=usual if length is None else length,
            has_length=length is not None,
            target_length=run.target_length,
            dtype=run.dtype,
            peft=peft,
            quantisation=quantisation,
            prepares_kbit=run.prepare_kbit is not False,
            num_evaluation_batches=run.eval_batches,
            has_metrics=run.metrics,
            num_labels=run.num_labels,
            trainer=_trainer_of(run),
            images_per_row=run.images_per_row,
            image_size=_image_size(run.image_size),
            sound_seconds=run.sound_seconds,
        ),
        allocator=_settings(run),
        num_gpus=run.num_gpus or 0,
        launch_file=os.fspath(file) if file is not None else None,
        has_padding=run.padding,
        resident_layers=run.stream_base,
        streams_embeddings=run.stream_embeddings,
    )


def _check_flags(flags: Iterable[str]) -> None:
    """Refuse impossible numbers before torch is imported."""
    for flag, text in pairwise((*(part for each in flags for part in each.split("=", 1)), "")):
        name = flag.removeprefix("--").replace("-", "_")
        try:
            number = float(text)
        except ValueError:
            continue
        if flag.startswith("--") and not isfinite(number):
            raise PlanError(f"{flag} needs a finite number, got {text}")
        if name in _COUNTS and number < 1:
            raise PlanError(f"{flag} must be at least 1, got {text}")


def _quantisation(run: RunOptions, config: Mapping[str, object]) -> dict[str, object] | None:
    """Check the quantisation of the base, as far as that works without torch."""
    fields, of_config = _fields(run.quantization_config), config.get("quantization_config")
    if fields is None:
        if run.prepare_kbit is not None and not of_config:
            raise PlanError("--prepare-kbit needs a quantised base: see --load-in-4bit")
        return None
    if of_config:
        raise PlanError("the config has a quantization_config already: drop the flag")
    if bool(fields.get("load_in_4bit")) == bool(fields.get("load_in_8bit")):
        raise PlanError("--load-in-4bit and --load-in-8bit both quantise the base: choose one")
    strays = [name for name in fields if name.startswith("bnb_4bit_")]
    if run.load_in_8bit and strays:  # a BitsAndBytesConfig has them all
        raise PlanError(f"--{strays[0].replace('_', '-')} needs --load-in-4bit")
    return fields


def _settings(run: RunOptions) -> str:
    return read_text(os.environ) if run.allocator is None else run.allocator


def read_config(given: str | os.PathLike[str], from_hub: bool = False) -> dict[str, object]:
    """Read a config.json from its path, its folder, or by the model's name on the hub."""
    path = Path(given)
    if not path.exists():
        found = _config_on_hub(os.fspath(given), from_hub)
        if isinstance(found, dict):
            return found
        path = found
    file = path / _CONFIG if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(
            f"no model config at {path}: {error.strerror}. Name a file or folder on disk, or a"
            " model on the hub, as org/name"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{file} is not a model config: it holds no mapping")
    return content


def _config_on_hub(name: str, from_hub: bool) -> Path | dict[str, object]:
    """Find a model's config.json in the hub's cache, else its shape; `from_hub` downloads it."""
    if from_hub:  # Otherwise each request also asks for a list of agents, to describe itself.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    try:
        if from_hub:
            return Path(hf_hub_download(name, _CONFIG))
        # Not `local_files_only`: once the hub is imported, that asks for the list too.
        if isinstance(found := try_to_load_from_cache(name, _CONFIG), str):
            return Path(found)
    except (OSError, ValueError) as error:
        if from_hub:
            one_line = " ".join(str(error).split())
            reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else one_line
            raise PlanError(f"cannot download the config of {name}: {reason}") from error
    if (public := find_config(name)) is not None:
        return public
    raise PlanError(
        f"no model config at {name}, and the cache {constants.HF_HUB_CACHE} has no model of"
        f" that name. Name a file or folder on disk, or download just the model's {_CONFIG}"
        " with --from-hub"
    )


def _config(given: object, from_hub: bool) -> dict[str, object]:
    if to_dict := getattr(given, "to_dict", None):
        return dict(to_dict())
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (str, os.PathLike)):
        return read_config(given, from_hub)
    raise PlanError(f"a plan needs a Trainer or a model config, got {type(given).__name__}")


def _change_config(config: dict[str, object], run: RunOptions) -> dict[str, object]:
    """Return the config with the run's attention and head."""
    if run.attn_implementation is not None:
        config = {**config, "_attn_implementation": run.attn_implementation}
    if run.head is None:
        return config
    named = config.get("architectures")
    base = str(named[0]) if isinstance(named, list) and named else ""
    kind = _HEAD.sub("", base)
    if not kind:
        raise PlanError("--head needs a config that names its class (architectures)")
    return {**config, "architectures": [f"{kind}For{run.head.removeprefix('For')}"]}


def arguments_to_send(given: Any) -> bytes | tuple[str, ...]:
    """Return flags as they are; pickle the class and the fields of TrainingArguments."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        from transformers import Seq2SeqTrainingArguments

        kind, fields = Seq2SeqTrainingArguments, {spell(name): given[name] for name in given}
    elif isinstance(given, Sequence):
        _check_flags(given)
        return tuple(spell(word) if word.startswith("--") else word for word in given)
    else:
        kind, fields = type(given), fields_of(given)
    _check_flags(f"--{name}={value}" for name, value in fields.items())
    return pickle.dumps((kind, fields))


def _trainer_of(run: RunOptions) -> str | None:
    """Return the TRL Trainer given by name, or implied by the class of the arguments."""
    name = type(run.training_args).__name__
    of_config = name.removesuffix("Config").lower() if name.endswith("Config") else ""
    return run.trainer or (of_config if of_config in TRL_TRAINERS else None)


def _image_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.IGNORECASE)
    if sides is None:
        raise PlanError(f"--image-size is a height and a width, as in 448x672, got {text!r}")
    return int(sides[1]), int(sides[2])


def _fields(given: Any) -> dict[str, object] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return dict(given)
    return {name: value for name, value in given.to_dict().items() if value is not None}
