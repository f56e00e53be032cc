"""Build transformers' own Trainer, and its batches, from a config and flags. Imports torch."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse.model_of_config import load_model
from trainer_plugins.planner.rehearse.pictures import KINDS, Pictures, pictures_of
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER
from trainer_plugins.planner.rehearse.rehearsal import Batch, Build, Rehearsed, count_sharers
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.wrapped import base_model

_BY_A_TRAINER = (
    "a Trainer runs the training, and frees the outputs once it has the loss: a custom loop"
    " that keeps them also holds the logits; plan it with plan -- COMMAND"
)
PADDED = "batches have padding (the worse case); see --no-padding"
_POSITIONS = "batches have position_ids, without which DeepSpeed divides no rows (sp_size)"

_SAMPLES_A_SECOND = 16_000  # as in transformers' feature extractors
_LABELS_A_SECOND = 15  # letters of fast speech; a guess


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Holds the shape of a row of each input or label; a label of a whole row has none."""

    floats: dict[str, tuple[int, ...]]
    tokens: dict[str, tuple[int, ...]]
    said: list[str] = field(default_factory=list)  # the assumptions made
    pictures: Pictures | None = None

    def batch(self, rows: int) -> Batch:
        """Build a batch of this many rows, as a collator would."""
        made: Batch = {name: torch.zeros(rows, *shape) for name, shape in self.floats.items()}
        for name, shape in self.tokens.items():
            made[name] = torch.full((rows, *shape), 1 if shape else 0, dtype=torch.long)
        if self.pictures is not None:
            self.pictures.add_to(made, rows)
        return made


def rehearse(source: ConfigSource, build: Build) -> Rehearsed:
    """Build the Trainer of a config, with its model on the card, or in main memory to stream it."""
    import transformers

    args, has_padding = build.args, build.has_padding
    rows = args.per_device_train_batch_size
    is_streamed = build.streaming is not None
    given = getattr(args, "parallelism_config", None)  # else as accelerate reads it
    parts = given.tp_size if given else os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")
    model, assumptions = load_model(source, int(parts), is_streamed=is_streamed)
    assumptions.append(_BY_A_TRAINER)
    if has_padding is None:
        has_padding = rows > 1
        if has_padding:
            assumptions.append(PADDED)
    generates = getattr(args, "predict_with_generate", False)
    trainer_class = transformers.Seq2SeqTrainer if generates else transformers.Trainer
    inputs = _inputs_of(base_model(model), source)
    assumptions += inputs.said
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=[0] * rows,
        compute_metrics=(lambda *_, **__: {}) if generates or source.has_metrics else None,
    )
    if count_sharers(trainer, "sp") > 1:
        inputs.tokens["position_ids"] = inputs.tokens["input_ids"]
        assumptions.append(_POSITIONS)
    evaluated = inputs.batch(args.per_device_eval_batch_size) if args.do_eval else None
    return Rehearsed(
        trainer=trainer,
        batch=inputs.batch(rows),
        evaluation_batch=evaluated,
        has_padding=has_padding,
        assumptions=assumptions,
    )


def _inputs_of(model: Any, source: ConfigSource) -> _Inputs:
    """Return the inputs that a collator would build for a model."""
    length = source.sequence_length
    if model.config.model_type in KINDS or source.asks_for_pictures:
        pictures = pictures_of(model, source)
        tokens = {**_tokens(length), "labels": (length,)}
        inputs = _Inputs({}, tokens, [pictures.said], pictures)
    elif source.sound_seconds is not None:
        inputs = _make_sounds(model, source)
    else:
        inputs = _make_fixed_inputs(model, length)
        inputs.tokens.update(_labels(model, source))
    if "input_ids" in inputs.tokens:
        _check_positions(model, length)
    if model.config.is_encoder_decoder:
        inputs.said.extend(_set_what_labels_need(model.config))
    return inputs


def _tokens(length: int) -> dict[str, tuple[int, ...]]:
    return {"input_ids": (length,), "attention_mask": (length,)}


def _make_sounds(model: Any, source: ConfigSource) -> _Inputs:
    """Return audio of the run's length, and its labels."""
    seconds = source.sound_seconds or 0.0
    if not _takes_samples(model):
        raise PlanError(
            f"--sound-seconds does not apply to {type(model).__name__}, only to models that"
            " take audio samples (input_values)"
        )
    samples = max(1, round(seconds * _SAMPLES_A_SECOND))
    said = (
        f"each row has {seconds:g} s of sound, {samples:,} samples ({_SAMPLES_A_SECOND:,} a second)"
    )
    if model.config.is_encoder_decoder or type(model).__name__.endswith("ForCTC"):  # a text
        number = source.target_length or max(1, round(seconds * _LABELS_A_SECOND))
        why = "" if source.target_length else f" ({_LABELS_A_SECOND} a second: a guess)"
        said += f", and {number:,} labels{why}; see --target-length"
        labels: dict[str, tuple[int, ...]] = {"labels": (number,)}
    else:
        labels = _labels(model, source)
    tokens = {"attention_mask": (samples,), **labels}
    return _Inputs({model.main_input_name: (samples,)}, tokens, [said])


def _takes_samples(model: Any) -> bool:
    """Return whether a model takes raw audio samples of any length."""
    takes = getattr(model, "main_input_name", "")
    return takes == "input_values" and not hasattr(model.config, "num_mel_bins")


def _make_fixed_inputs(model: Any, length: int) -> _Inputs:
    """Return the inputs of a model whose config fixes their size, without its labels."""
    config, takes = model.config, getattr(model, "main_input_name", "input_ids")
    if takes == "input_ids":
        return _Inputs({}, _tokens(length))
    side = getattr(config, "image_size", None)
    if takes == "pixel_values" and isinstance(side, int):
        picture = (getattr(config, "num_channels", 3), side, side)
        numbers = " x ".join(map(str, picture))
        said = f"a picture has {numbers} numbers (image_size of the config)"
        return _Inputs({takes: picture}, {}, [said])
    bins = getattr(config, "num_mel_bins", None)
    frames = getattr(config, "max_source_positions", None)
    if takes == "input_features" and isinstance(bins, int) and isinstance(frames, int):
        sound = (bins, 2 * frames)  # transformers/models/whisper: a convolution halves the frames
        said = f"a sound has {bins} x {2 * frames} numbers (max_source_positions of the config)"
        return _Inputs({takes: sound}, {}, [said])
    instead = "give --sound-seconds, or " if _takes_samples(model) else ""
    raise NotPredicted(
        f"{type(model).__name__} from its config alone, which does not give the size of"
        f" {takes}: {instead}{GIVE_A_TRAINER}"
    )


def _labels(model: Any, source: ConfigSource) -> dict[str, tuple[int, ...]]:
    name, config, length = type(model).__name__, model.config, source.sequence_length
    if config.is_encoder_decoder:
        most = getattr(config, "max_target_positions", None) or length
        return {"labels": (source.target_length or min(length, most),)}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        return {"labels": (length,)}
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": ()}
    if name.endswith("ForQuestionAnswering"):
        return {"start_positions": (), "end_positions": ()}
    raise NotPredicted(f"{name} from its config alone: {GIVE_A_TRAINER}")


def _set_what_labels_need(config: Any) -> list[str]:
    """Set the token ids that shift labels into decoder inputs, if the config has none; say so."""
    names = ("decoder_start_token_id", "pad_token_id")
    missing = [name for name in names if getattr(config, name, None) is None]
    for name in missing:
        setattr(config, name, 0)
    return [
        f"the config has no {name}, which most encoder-decoders need to train: the plan uses 0, "
        "which changes no size; set it before the run"
        for name in missing
    ]


def _check_positions(model: torch.nn.Module, length: int) -> None:
    """Refuse rows longer than a table of learned positions for tokens."""
    tables = ("position_embeddings", "embed_positions", "wpe")
    others = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if getattr(module, "main_input_name", "input_ids") != "input_ids"  # pictures, sounds
    )
    for name, module in model.named_modules():
        if not name.endswith(tables) or name.startswith(others):
            continue
        if not isinstance(module, torch.nn.Embedding) or "Sinus" in type(module).__name__:
            continue
        if length > module.num_embeddings:
            raise PlanError(
                f"--seq-length {length:,} is more than the model's {module.num_embeddings:,}"
                f" positions ({name})"
            )
