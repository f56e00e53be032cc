"""Read the config of a model as transformers does, and choose the class of the model.

Imports torch.
"""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse import refusals
from trainer_plugins.planner.rehearse.failures import first_line
from trainer_plugins.planner.rehearse.wrong_values import wrong_value

_LEFT_OUT = ("quantization_config", "configuration_files")
"""Quantisation comes after the model is built; and there are no other files."""

_SOUND: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attn_implementation": "sdpa",
    "_attn_implementation": "sdpa",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "id2label": {"0": "no", "1": "yes"},
    "num_labels": 2,
    "quantization_config": {"load_in_4bit": True, "load_in_8bit": False},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "text_config": {},
    "vision_config": {},
    "audio_config": {},
}
"""Values of a sound config.json, where the config of a class has none."""

_ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "deberta",
    "deberta-v2",
    "xlm-roberta",
    "modernbert",
)


def config_of(fields: Mapping[str, object]) -> Any:
    """Read a config as `AutoConfig.from_pretrained` reads a config.json.

    Raises:
        PlanError: it is not the config of a model that transformers knows, or a value is wrong.
        NotPredicted: the memory of its attention's kernel is not known here.
    """
    import transformers

    kind = fields.get("model_type")
    if kind is None:
        raise PlanError("the config has no model_type: it is not the config.json of a model")
    if not isinstance(kind, str):
        raise PlanError(
            f'the config\'s model_type is {json.dumps(kind)}: a text is expected, as in "llama"'
        )
    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} knows no model_type {kind!r}")
    refusals.refuse_attention(
        fields.get("attn_implementation") or fields.get("_attn_implementation")
    )
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(kept, default=_text_of))
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.name_or_path = fields.get("_name_or_path", "")
    return config


def _text_of(value: object) -> str:
    """Write a dtype of torch as a config.json has it."""
    return str(value).removeprefix("torch.")


def said_of_config(fields: Mapping[str, object], error: BaseException) -> str:
    """Say which value of a config has led to an error, or what the error says."""
    import transformers

    kind, sound = transformers.CONFIG_MAPPING[fields["model_type"]], dict(_SOUND)
    with suppress(Exception):  # some classes have no config of their own accord
        sound |= {name: value for name, value in kind().to_dict().items() if value is not None}
    # transformers 5 checks the kinds of a config's fields, which may take more than the default
    checked = {each.name for each in fields_of(kind)} if is_dataclass(kind) else set()
    found = wrong_value(fields, sound, error, checked - _SOUND.keys())
    why = f"its {found}" if found else f"{type(error).__name__}: {first_line(error)}"
    return f"no model can be built from the config: {why}"


def class_of(config: Any, kind: object, num_labels: int | None) -> Any:
    """Return the class that `architectures` names if it can be trained, else the usual one.

    Args:
        config: as it was read.
        kind: the `model_type` that the file has; transformers reads some as another.
        num_labels: the classes of a classifier, if one is asked for.

    Raises:
        PlanError: `architectures` names no class of transformers, or one of other models.
        NotPredicted: transformers trains no such model to write a text.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    classifiers = transformers.AutoModelForSequenceClassification._model_mapping
    named = _named(config, kind)
    is_classifier = named is not None and named.__name__.endswith("Classification")
    if num_labels is not None and not is_classifier and type(config) in classifiers:
        return classifiers[type(config)]
    if named is not None and "For" in named.__name__:
        return named
    autos: tuple[Any, ...] = (
        (AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
        if config.is_encoder_decoder
        else (AutoModelForCausalLM, AutoModelForMaskedLM)
    )
    if (
        not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
        and config.model_type in _ENCODERS
    ):
        autos = (AutoModelForMaskedLM,)
    for auto in (*autos, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise NotPredicted(f"{config.model_type} without `architectures` in its config")


def _named(config: Any, kind: object) -> Any:
    """Return the class that `architectures` names; None if it leaves the class to the usual."""
    import transformers

    names = getattr(config, "architectures", None) or []
    if not names:
        return None
    spelt = f"the config's architectures is {json.dumps(names)}"
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise PlanError(f'{spelt}: a list of texts is expected, as in ["LlamaForCausalLM"]')
    found: Any = getattr(transformers, names[0], None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise PlanError(
            f"{spelt}: transformers {transformers.__version__} has no model of that name. Without "
            f"architectures, the usual class of the model_type {kind!r} is planned"
        )
    if found.config_class is None or isinstance(part_of(config, found), found.config_class):
        return found
    if found.config_class.model_type == kind:  # read as another: the class named is not the run's
        return None
    raise PlanError(
        f"{spelt}, a class of the model_type {found.config_class.model_type!r}, and its model_type "
        f"is {kind!r}: one of the two is another model's"
    )


def part_of(config: Any, model: Any) -> Any:
    """Return the part of a config of which a class of models is made, as the text's; or all."""
    from transformers import PreTrainedConfig

    parts = (each for each in vars(config).values() if isinstance(each, PreTrainedConfig))
    wanted = model.config_class or PreTrainedConfig
    return next((each for each in (config, *parts) if isinstance(each, wanted)), config)
