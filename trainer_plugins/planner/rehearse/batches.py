"""Make the batches of a model that was built from a config. Imports torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse.pictures import pictures_of
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER
from trainer_plugins.planner.rehearse.rehearsal import Batch
from trainer_plugins.planner.rehearse.sounds import Sounds, sounds_of, takes_samples, writes
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.planner.tracing.values import NOTHING, Asked
from trainer_plugins.wrapped import base_model

_Sizes = dict[str, tuple[int, ...]]
"""The shape of a row of each input or label, by name; a label of a whole row has none."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Holds what makes the batches that a collator would make."""

    make: Callable[[], Batch]
    said: tuple[str, ...]
    """What was taken for granted."""

    asked: Asked = NOTHING
    """What the model asks of the numbers in them."""


def batches_of(model: Any, rows: int, source: ConfigSource) -> Batches:
    """Return what makes the batches that a collator would make.

    Args:
        model: a model that was built from a config.
        rows: rows of each batch.
        source: the lengths of rows and labels.

    Raises:
        NotPredicted: the sizes of its inputs are not in its config.
        PlanError: the model has no positions for so many tokens, or takes no pictures or sounds of
            which a size is given.
    """
    inner = base_model(model)
    pictures = pictures_of(inner, source)
    sounds = sounds_of(inner, source)
    floats, tokens, said = _inputs(inner, source.sequence_length, pictures is not None, sounds)
    if "input_ids" in tokens:
        _check_positions(inner, source.sequence_length)
    if inner.config.is_encoder_decoder:
        said += _set_what_labels_need(inner.config)
    tokens |= {"labels": (source.sequence_length,)} if pictures else _labels(inner, source, sounds)

    def make() -> Batch:
        made: Batch = {name: torch.zeros(rows, *shape) for name, shape in floats.items()}
        for name, shape in tokens.items():
            value = 1 if shape else 0
            made[name] = torch.full((rows, *shape), value, dtype=torch.long)
        if pictures is not None:
            pictures.add_to(made, rows)
        return made

    if pictures is None:
        return Batches(make, tuple(said))
    return Batches(make, (*said, pictures.said), pictures.asked)


def with_positions(make: Callable[[], Batch]) -> Callable[[], Batch]:
    """Let batches also have the position of each token."""

    def made() -> Batch:
        batch = make()
        tokens: Any = batch["input_ids"]
        return {**batch, "position_ids": torch.ones_like(tokens)}

    return made


def _inputs(
    model: Any, length: int, is_text: bool, sounds: Sounds | None
) -> tuple[_Sizes, _Sizes, list[str]]:
    """Return the inputs that are numbers and those that are tokens, and where sizes are from."""
    config, takes = model.config, getattr(model, "main_input_name", "input_ids")
    if takes == "input_ids" or is_text:
        return {}, {"input_ids": (length,), "attention_mask": (length,)}, []
    if sounds is not None:
        return (
            {takes: (sounds.num_samples,)},
            {"attention_mask": (sounds.num_samples,)},
            [sounds.said],
        )
    side = getattr(config, "image_size", None)
    if takes == "pixel_values" and isinstance(side, int):
        picture = (getattr(config, "num_channels", 3), side, side)
        words = " x ".join(map(str, picture))
        return {takes: picture}, {}, [f"a picture has {words} numbers (image_size of the config)"]
    bins, frames = (
        getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions")
    )
    if takes == "input_features" and isinstance(bins, int) and isinstance(frames, int):
        sound = (bins, 2 * frames)  # transformers/models/whisper: a convolution halves them
        words = f"a sound has {bins} x {2 * frames} numbers (max_source_positions of the config)"
        return {takes: sound}, {}, [words]
    instead = "give --sound-seconds, or " if takes_samples(model) else ""
    raise NotPredicted(
        f"{type(model).__name__} from a config alone, which takes {takes} of a size that its "
        f"config does not say: {instead}{GIVE_A_TRAINER}"
    )


def _labels(model: Any, source: ConfigSource, sounds: Sounds | None) -> _Sizes:
    name, config, length = type(model).__name__, model.config, source.sequence_length
    if sounds is not None and writes(model):
        return {"labels": (sounds.num_labels,)}
    if config.is_encoder_decoder:
        most = getattr(config, "max_target_positions", None) or length
        return {"labels": (source.target_length or min(length, most),)}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        return {"labels": (length,)}
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": ()}
    if name.endswith("ForQuestionAnswering"):
        return {"start_positions": (), "end_positions": ()}
    raise NotPredicted(f"{name} from a config alone: {GIVE_A_TRAINER}")


def _set_what_labels_need(config: Any) -> list[str]:
    """Set the ids by which labels become the decoder's inputs, where a config has none; say so."""
    missing = [
        name
        for name in ("decoder_start_token_id", "pad_token_id")
        if getattr(config, name, None) is None
    ]
    for name in missing:
        setattr(config, name, 0)
    return [
        f"the config has no {name}, which most encoder-decoders need to train: 0 stands in its "
        "place, which changes no size; set it before the run"
        for name in missing
    ]


def _check_positions(model: torch.nn.Module, length: int) -> None:
    """Refuse rows that are longer than a table of learned positions, of what takes tokens."""
    names = ("position_embeddings", "embed_positions", "wpe")
    others = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if getattr(module, "main_input_name", "input_ids") != "input_ids"  # of pictures, of sounds
    )
    for name, module in model.named_modules():
        if not name.endswith(names) or not isinstance(module, torch.nn.Embedding):
            continue
        if name.startswith(others):
            continue
        if "Sinus" not in type(module).__name__ and length > module.num_embeddings:
            raise PlanError(
                f"a row has {length:,} tokens (--seq-length), and the model has positions for "
                f"{module.num_embeddings:,} ({name})"
            )
