"""Read a model's config as transformers does, and build the model. Imports torch."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_plugins.planner.plan import RUN_IT, NotPredicted, PlanError
from trainer_plugins.planner.rehearse.refusals import first_line
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.planner.tried import is_transformers_4

# quantisation follows once the model is built; no other files
_LEFT_OUT = ("quantization_config", "configuration_files")

# keys of an adapter_config.json that do not concern training
_OF_AN_ADAPTERS_FILE = ("peft_version", "auto_mapping", "inference_mode")

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


def load_model(
    source: ConfigSource, num_parts: int = 1, *, is_streamed: bool = False
) -> tuple[Any, list[str]]:
    """Load the model of a config by `from_pretrained`, from weights without bytes.

    Tensor parallelism divides it among `num_parts` cards; a streamed base stays in main memory.
    Also returns the assumptions made.
    """
    assumptions: list[str] = []
    try:
        config = config_of(source.config)
        dtype = dtype_of(source, config, assumptions)
        model = _load(source, config, dtype, num_parts, is_streamed)
    except (PlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config can be wrong in any way, and raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        raise PlanError(f"transformers cannot build the model of this config: {why}") from error
    model.config.name_or_path = source.config.get("_name_or_path", "")
    if source.config.get("tie_word_embeddings") is False:
        untie(model)
    if source.peft is not None and source.trainer is None:
        adapter = adapter_of(source.peft)
        import peft

        if source.quantisation is not None and source.prepares_kbit:
            model = peft.prepare_model_for_kbit_training(model, source.kbit_checkpoints)
            assumptions.append(
                "PEFT's prepare_model_for_kbit_training prepares the model: it casts the rest"
                f" to float32, with use_gradient_checkpointing={source.kbit_checkpoints}; see"
                " --no-prepare-kbit"
            )
        model = peft.get_peft_model(model, adapter)
    if is_streamed and source.quantisation is not None:
        assumptions.append(
            'the quantised base is loaded to main memory (device_map="cpu"); loaded onto the'
            " card it must fit there once"
        )
    return model, assumptions


def _load(
    source: ConfigSource, config: Any, dtype: torch.dtype, num_parts: int, is_streamed: bool
) -> Any:
    import transformers

    options: dict[str, Any] = {"dtype": dtype}
    if is_streamed:
        options["device_map"] = "cpu"
    elif source.trainer not in (None, "orpo", "cpo") and os.environ.get("WORLD_SIZE", "1") == "1":
        options["device_map"] = "auto"  # trl/trainer/utils.py, create_model_from_path
    if given := source.config.get("quantization_config"):
        options["quantization_config"] = _read_quantisation(given)
    if source.quantisation is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**source.quantisation)
    if num_parts > 1:
        options |= {"tp_plan": "auto", "tp_size": num_parts}
    kind, part = class_and_config(source, config)
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        return kind.from_pretrained(folder, config=part, **options)


def _read_quantisation(given: Any) -> Any:
    """Return the quantisation of a base whose config says that it is quantised already.

    A bitsandbytes checkpoint is as large as the weights it quantises; gpt-oss decodes mxfp4 to
    train.
    """
    import transformers

    method = given.get("quant_method")
    if given.get("load_in_4bit") or given.get("load_in_8bit"):
        return transformers.BitsAndBytesConfig.from_dict(dict(given))
    raise NotPredicted(
        f"a {method} checkpoint from its config alone: {RUN_IT}, or drop quantization_config and"
        " approximate it with --load-in-4bit or --load-in-8bit"
    )


def config_of(given: Mapping[str, object]) -> Any:
    """Read a config as `AutoConfig.from_pretrained` reads a config.json."""
    import transformers

    kind = given.get("model_type")
    if kind is None:
        raise PlanError("the config is not a model's config.json: it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} has no model_type {kind!r}")
    kept = {name: value for name, value in given.items() if name not in _LEFT_OUT}
    with tempfile.TemporaryDirectory() as folder:
        # write a torch dtype as in a config.json
        text = json.dumps(kept, default=lambda value: str(value).removeprefix("torch."))
        Path(folder, "config.json").write_text(text)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.name_or_path = given.get("_name_or_path", "")
    return config


def _class_of(config: Any, kind: object, num_labels: int | None) -> Any:
    """Return the class in `architectures` if it can be trained, else the usual one."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    classifiers = transformers.AutoModelForSequenceClassification._model_mapping
    named = _find_class(config, kind)
    is_classifier = named is not None and named.__name__.endswith("Classification")
    if num_labels is not None and not is_classifier and type(config) in classifiers:
        return classifiers[type(config)]
    if named is not None and "For" in named.__name__:
        return named
    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM)
    if config.is_encoder_decoder:
        autos = (AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    elif not getattr(config, "is_decoder", False):  # BERT has one class of each kind
        autos = (AutoModelForMaskedLM, AutoModelForCausalLM)
    for auto in (*autos, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise NotPredicted(f"{config.model_type} without `architectures` in its config")


def _find_class(config: Any, kind: object) -> Any:
    """Return the class in `architectures`; None for the usual one."""
    import transformers

    names = getattr(config, "architectures", None) or []
    if not names:
        return None
    spelt = f"the config's architectures is {json.dumps(names)}"
    found: Any = getattr(transformers, names[0], None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise PlanError(
            f"{spelt}: transformers {transformers.__version__} has no such model. Without"
            f" architectures, we plan the usual class of model_type {kind!r}"
        )
    if found.config_class is None or isinstance(_part_of(config, found), found.config_class):
        return found
    if found.config_class.model_type == kind:  # read as another type: not the run's class
        return None
    raise PlanError(
        f"{spelt}, a class of the model_type {found.config_class.model_type!r}, and its model_type "
        f"is {kind!r}: one of the two belongs to another model"
    )


def _part_of(config: Any, model: Any) -> Any:
    """Return the part of a config that a model class takes, such as the text's; else all of it."""
    from transformers import PretrainedConfig

    parts = (each for each in vars(config).values() if isinstance(each, PretrainedConfig))
    wanted = model.config_class or PretrainedConfig
    return next((each for each in (config, *parts) if isinstance(each, wanted)), config)


def class_and_config(source: ConfigSource, config: Any) -> tuple[Any, Any]:
    """Return the class of the run's model, and the part of the config that it takes."""
    from transformers import AutoModelForSequenceClassification

    if source.trainer == "reward":
        config.num_labels, config.architectures = 1, None
        known = AutoModelForSequenceClassification._model_mapping
        if type(config) not in known:
            raise NotPredicted(f"a reward model of {config.model_type}, which has no classifier")
        return known[type(config)], config
    if source.num_labels is not None:
        config.num_labels = source.num_labels
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a classifier needs one for several rows
    kind = _class_of(config, source.config["model_type"], source.num_labels)
    return kind, _part_of(config, kind)


def untie(model: Any) -> None:
    """Give the head its own weights if the class overrides the config, as T5's does."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    for name, module in model.named_modules():
        if module is head:  # transformers 5 keeps a table of tied weights
            getattr(model, "all_tied_weights_keys", {}).pop(f"{name}.weight", None)


def dtype_of(source: ConfigSource, config: object, assumptions: list[str]) -> torch.dtype:
    """Return the dtype of the loaded weights, and note it if the user did not choose it."""
    given = source.dtype
    if given is None and source.trainer is not None:  # trl/trainer/utils.py, create_model_from_path
        given = "float32"
        assumptions.append("weights are loaded in float32, as TRL does; see --dtype")
    is_unsaid = given is None
    if given in ("auto", None):
        given = str(getattr(config, "dtype", None) or "float32")
    if is_unsaid:
        # transformers 4 loads in float32 unless a dtype is given, and in float16 for bitsandbytes
        # (quantizers/quantizer_bnb_4bit.py, update_dtype)
        if is_transformers_4():
            is_quantised = source.quantisation or source.config.get("quantization_config")
            given = "float16" if is_quantised else "float32"
        assumptions.append(
            f"weights are loaded in {given.removeprefix('torch.')}, as from_pretrained does; "
            "see --dtype"
        )
    name = given.removeprefix("torch.")
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        where = "the config's dtype" if source.dtype is None else "--dtype"
        raise PlanError(f"{where} needs float32, bfloat16 or float16, got {given!r}")
    return dtype


def adapter_of(given: Mapping[str, object]) -> Any:
    """Return the config of a PEFT adapter; `given` is the content of its file."""
    try:
        import peft
    except ImportError as error:
        raise PlanError("adapters such as LoRA need peft: pip install peft") from error
    name = str(given.get("peft_type", "LORA")).upper()
    kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(name)
    if kind is None:
        raise PlanError(f"peft {peft.__version__} has no peft_type {name!r}")
    kept = {key: value for key, value in given.items() if key not in _OF_AN_ADAPTERS_FILE}
    return kind(**kept)
