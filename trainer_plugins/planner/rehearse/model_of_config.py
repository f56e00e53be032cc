"""Build the model of a config. Imports torch."""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.pretend import quantised
from trainer_plugins.planner.rehearse import refusals
from trainer_plugins.planner.rehearse.failures import first_line
from trainer_plugins.planner.rehearse.model_config import (
    class_of,
    config_of,
    part_of,
    said_of_config,
)
from trainer_plugins.planner.rehearse.wrong_values import check_kinds
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.planner.sharded import tensors

_QUANTISED = "quantization_config"


def model_of(
    source: ConfigSource, card: torch.device | None = None, num_parts: int = 1
) -> tuple[torch.nn.Module, list[str]]:
    """Build a model from its config as `from_pretrained` leaves it.

    That is on the host, and a quantised or a divided one on the card; without a card nothing is
    quantised or divided.

    Args:
        source: the config, and what the user says of it.
        card: this rank's.
        num_parts: among how many cards its tensors are divided.

    Returns the model, and the choices that were made because the config leaves them open.

    Raises:
        PlanError: the config is wrong, or PEFT refuses its own.
        NotPredicted: the planner cannot predict such a model.
    """
    assumptions: list[str] = []
    try:
        config = config_of(source.config)
        dtype = _dtype(source, config, assumptions)
        if card is not None and num_parts > 1:
            with tensors.built_as_loaded():
                model = _built(source, config, dtype)
            model = tensors.divided(model, num_parts, card)
            assumptions.append(tensors.said_of(num_parts))
        else:
            model = _whole(source, config, dtype, card, assumptions)
    except PlanError:
        raise
    except Exception as error:  # a config may be wrong in any way, and raise anything
        raise PlanError(said_of_config(source.config, error)) from error
    if source.peft is not None and source.trainer is None:
        model = _with_peft(model, source.peft)
        tensors.check_adapters(model)
    return model, assumptions


def _whole(
    source: ConfigSource,
    config: Any,
    dtype: torch.dtype,
    card: torch.device | None,
    assumptions: list[str],
) -> torch.nn.Module:
    """Build a model that one card holds, quantised if it is to be."""
    is_quantised = card is not None and _quantisation_of(source)
    # `from_pretrained` quantises weight by weight: the whole base is never in main memory
    with torch.device("meta") if is_quantised else nullcontext():
        model: torch.nn.Module = _built(source, config, dtype)
    if source.config.get("tie_word_embeddings") is False:
        _untie(model)
    return model if card is None else _quantised(source, model, card, dtype, assumptions)


def _quantisation_of(source: ConfigSource) -> Any:
    """Return the fields of the quantisation: the user's, else the config's; None without one."""
    return source.quantisation or source.config.get(_QUANTISED)


def _built(source: ConfigSource, config: Any, dtype: torch.dtype) -> Any:
    """Build the model of the class that the run has."""
    from transformers import AutoModelForSequenceClassification

    if source.trainer == "reward":
        config.num_labels, config.architectures = 1, None
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    if source.num_labels is not None:
        config.num_labels = source.num_labels
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a classifier of several rows asks for one
    kind = class_of(config, source.config["model_type"], source.num_labels)
    return kind._from_config(part_of(config, kind), dtype=dtype)


def _quantised(
    source: ConfigSource,
    model: torch.nn.Module,
    card: torch.device,
    dtype: torch.dtype,
    assumptions: list[str],
) -> torch.nn.Module:
    """Load the model quantised and prepare it, if the config or the user says so."""
    fields = _quantisation_of(source)
    if not fields:
        return model
    import transformers

    config = transformers.BitsAndBytesConfig.from_dict(refusals.known_quantisation(model, fields))
    loaded: torch.nn.Module = quantised.quantise(
        model, config, card, dtype, source.quantisation is None
    )
    if config.load_in_8bit:
        assumptions.append("no activation is an outlier (llm_int8_threshold): each would be a copy")
    if source.peft is None or not source.prepares_kbit or source.trainer is not None:
        return loaded
    assumptions.append(
        "PEFT's prepare_model_for_kbit_training gets the model: it makes what is not quantised "
        "float32, and switches gradient checkpointing on; see --no-prepare-kbit"
    )
    prepared: torch.nn.Module = quantised.prepared(loaded)
    return prepared


def _untie(model: Any) -> None:
    """Give the head its own weights if the config's class has overruled the config, as T5's does.

    `from_pretrained` does so too (modeling_utils.py, tie_weights) if a checkpoint holds both, as
    that of T5 1.1 does.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    for name, module in model.named_modules():
        if module is head:  # transformers 5 keeps a table of tied weights
            getattr(model, "all_tied_weights_keys", {}).pop(f"{name}.weight", None)


def _dtype(source: ConfigSource, config: object, assumptions: list[str]) -> torch.dtype:
    import transformers

    given = source.dtype
    if given is None and source.trainer is not None:  # trl/trainer/utils.py, create_model_from_path
        given = "float32"
        assumptions.append("weights are loaded in float32, as TRL does; see --dtype")
    if given is None:
        # transformers 4 loads in float32 unless it is told otherwise, and in float16 what
        # bitsandbytes quantises (quantizers/quantizer_bnb_4bit.py, update_dtype)
        newer = int(transformers.__version__.partition(".")[0]) >= 5
        of_config = getattr(config, "dtype", None) if newer else None
        is_quantised = _quantisation_of(source)
        given = str(of_config or ("float16" if is_quantised and not newer else "float32"))
        assumptions.append(
            f"weights are loaded in {given.removeprefix('torch.')}, as from_pretrained does; "
            "see --dtype"
        )
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
    name = given.removeprefix("torch.")
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        where = "the config's dtype" if source.dtype is None else "--dtype"
        raise PlanError(f"{where} needs float32, bfloat16 or float16, got {given!r}")
    return dtype


def _with_peft(model: torch.nn.Module, fields: Mapping[str, object]) -> torch.nn.Module:
    config = adapter_of(fields)
    import peft

    try:
        adapted: torch.nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"peft refuses the adapter: {first_line(error)}") from error
    return adapted


def adapter_of(fields: Mapping[str, object]) -> Any:
    """Return the config of an adapter.

    Raises:
        PlanError: peft is missing, or refuses the fields.
    """
    try:
        import peft
    except ImportError as error:
        raise PlanError(
            "LoRA and other adapters need the package peft: pip install peft"
        ) from error
    kind = str(fields.get("peft_type", "LORA")).upper()
    mapping = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in mapping:
        raise PlanError(f"peft {peft.__version__} knows no peft_type {kind!r}")
    known = {field.name for field in dataclasses.fields(mapping[kind])}
    unknown = sorted(set(fields) - known - {"peft_version", "auto_mapping"})
    if unknown:
        raise PlanError(
            f"the adapter's config has keys that peft {peft.__version__} does not know: "
            f"{', '.join(unknown)}"
        )
    given = {
        name: value for name, value in fields.items() if name in known and name != "inference_mode"
    }
    check_kinds(mapping[kind], {name: value for name, value in given.items() if value is not None})
    try:
        return mapping[kind](**given)
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"peft refuses the adapter: {first_line(error)}") from error
