"""Make transformers' own Trainer, and its batches, from a config and flags. Imports torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse.arguments import rehearsed_arguments
from trainer_plugins.planner.rehearse.model_of_config import load_model
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER, first_line
from trainer_plugins.planner.rehearse.rehearsal import Batch, Build, Rehearsed
from trainer_plugins.planner.request import MOST_ROWS, ConfigSource
from trainer_plugins.wrapped import base_model

_BY_A_TRAINER = (
    "a Trainer trains it, and lets the outputs go once it has the loss: a loop of your own that"
    " keeps them holds the logits too, and plan -- COMMAND runs it"
)
PADDED = "batches have padding (the worse case); see --no-padding"
_POSITIONS = "batches have position_ids, without which DeepSpeed divides no rows (sp_size)"

PICTURE_MODELS = (
    "llava",
    "paligemma",
    "gemma3",
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)  # by model_type; `pictures.py` says how each gets them


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Holds the shape of a row of each input or label; a label of a whole row has none."""

    floats: dict[str, tuple[int, ...]]
    tokens: dict[str, tuple[int, ...]]
    said: list[str] = field(default_factory=list)


def rehearsed(source: ConfigSource, build: Build) -> Rehearsed:
    """Make the Trainer of a config, with its model on the card or where it is streamed from."""
    import transformers

    args, has_padding = build.args, build.has_padding
    rows = args.per_device_train_batch_size
    check_rows(args)
    num_parts = build.kind.sizes.get("tp_size", 1)
    model, assumptions = load_model(source, num_parts, is_streamed=build.streaming is not None)
    assumptions.append(_BY_A_TRAINER)
    if has_padding is None:
        has_padding = rows > 1
        if has_padding:
            assumptions.append(PADDED)
    generates = getattr(args, "predict_with_generate", False)
    trainer_class = transformers.Seq2SeqTrainer if generates else transformers.Trainer
    batches = batches_of(model, rows, source)
    assumptions += batches.said
    try:
        trainer = trainer_class(
            model=model,
            args=rehearsed_arguments(args, build.folder),
            train_dataset=[0] * rows,
            compute_metrics=(lambda *_, **__: {}) if generates or source.has_metrics else None,
            preprocess_logits_for_metrics=_argmax if source.keeps_argmax else None,
        )
    except ValueError as error:
        raise PlanError(first_line(error)) from error
    make_batch = batches.make
    if getattr(getattr(trainer.accelerator, "parallelism_config", None), "sp_size", 1) > 1:
        make_batch = _with_positions(make_batch)
        assumptions.append(_POSITIONS)
    of_evaluation = batches_of(model, args.per_device_eval_batch_size, source)
    return Rehearsed(
        trainer=trainer,
        make_batch=make_batch,
        make_evaluation_batch=of_evaluation.make if build.kind.evaluates else None,
        num_evaluation_batches=source.num_evaluation_batches,
        has_padding=has_padding,
        assumptions=assumptions,
    )


def _argmax(logits: Any, _: object) -> torch.Tensor:
    first: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(-1)


def check_rows(args: HfArguments) -> None:
    """Refuse batches without rows, or with too many."""
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if not 1 <= (number := getattr(args, name)) <= MOST_ROWS:
            raise PlanError(f"{name} is a number of rows from 1 to {MOST_ROWS:,}, got {number:,}")


@dataclass(frozen=True, slots=True)
class Batches:
    """Holds what makes the batches that a collator would make."""

    make: Callable[[], Batch]
    said: tuple[str, ...]  # what was assumed


def batches_of(model: Any, rows: int, source: ConfigSource) -> Batches:
    """Return what makes batches of this number of rows, as a collator would."""
    inner = base_model(model)
    length, pictures = source.sequence_length, None
    if inner.config.model_type in PICTURE_MODELS or source.asks_for_pictures:
        from trainer_plugins.planner.rehearse.pictures import pictures_of

        pictures = pictures_of(inner, source)
        sizes = _Sizes({}, {**_tokens(length), "labels": (length,)})
    elif source.sound_seconds is not None:
        from trainer_plugins.planner.rehearse.sounds import sounds_of, writes

        sounds = sounds_of(inner, source)
        labels = {"labels": (sounds.num_labels,)} if writes(inner) else _labels(inner, source)
        samples = (sounds.num_samples,)
        tokens = {"attention_mask": samples, **labels}
        sizes = _Sizes({inner.main_input_name: samples}, tokens, [sounds.said])
    else:
        sizes = _sizes_of(inner, length)
        sizes.tokens.update(_labels(inner, source))
    if "input_ids" in sizes.tokens:
        _check_positions(inner, length)
    if inner.config.is_encoder_decoder:
        sizes.said.extend(_set_what_labels_need(inner.config))

    def make() -> Batch:
        made: Batch = {name: torch.zeros(rows, *shape) for name, shape in sizes.floats.items()}
        for name, shape in sizes.tokens.items():
            made[name] = torch.full((rows, *shape), 1 if shape else 0, dtype=torch.long)
        if pictures is not None:
            pictures.add_to(made, rows)
        return made

    if pictures is None:
        return Batches(make, tuple(sizes.said))
    return Batches(make, (*sizes.said, pictures.said))


def _tokens(length: int) -> dict[str, tuple[int, ...]]:
    return {"input_ids": (length,), "attention_mask": (length,)}


def _sizes_of(model: Any, length: int) -> _Sizes:
    """Return the sizes of a model's inputs, without its labels."""
    config, takes = model.config, getattr(model, "main_input_name", "input_ids")
    if takes == "input_ids":
        return _Sizes({}, _tokens(length))
    side = getattr(config, "image_size", None)
    if takes == "pixel_values" and isinstance(side, int):
        picture = (getattr(config, "num_channels", 3), side, side)
        numbers = " x ".join(map(str, picture))
        said = f"a picture has {numbers} numbers (image_size of the config)"
        return _Sizes({takes: picture}, {}, [said])
    bins = getattr(config, "num_mel_bins", None)
    frames = getattr(config, "max_source_positions", None)
    if takes == "input_features" and isinstance(bins, int) and isinstance(frames, int):
        sound = (bins, 2 * frames)  # transformers/models/whisper: a convolution halves them
        said = f"a sound has {bins} x {2 * frames} numbers (max_source_positions of the config)"
        return _Sizes({takes: sound}, {}, [said])
    from trainer_plugins.planner.rehearse.sounds import takes_samples

    instead = "give --sound-seconds, or " if takes_samples(model) else ""
    raise NotPredicted(
        f"{type(model).__name__} from a config alone, which takes {takes} of a size that its "
        f"config does not give: {instead}{GIVE_A_TRAINER}"
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
    raise NotPredicted(f"{name} from a config alone: {GIVE_A_TRAINER}")


def _set_what_labels_need(config: Any) -> list[str]:
    """Set the ids that turn labels into the decoder's inputs, where a config has none; say so."""
    missing = [
        name
        for name in ("decoder_start_token_id", "pad_token_id")
        if getattr(config, name, None) is None
    ]
    for name in missing:
        setattr(config, name, 0)
    return [
        f"the config has no {name}, which most encoder-decoders need to train: the plan uses 0, "
        "which changes no size; set it before the run"
        for name in missing
    ]


def _check_positions(model: torch.nn.Module, length: int) -> None:
    """Refuse rows that are longer than a table of learned positions, of what takes tokens."""
    tables = ("position_embeddings", "embed_positions", "wpe")
    others = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if getattr(module, "main_input_name", "input_ids") != "input_ids"  # of pictures, of sounds
    )
    for name, module in model.named_modules():
        if not name.endswith(tables) or name.startswith(others):
            continue
        if not isinstance(module, torch.nn.Embedding) or "Sinus" in type(module).__name__:
            continue
        if length > module.num_embeddings:
            raise PlanError(
                f"a row has {length:,} tokens (--seq-length), and the model has positions for "
                f"{module.num_embeddings:,} ({name})"
            )


def _with_positions(make: Callable[[], Batch]) -> Callable[[], Batch]:
    """Let batches also have the position of each token."""

    def made() -> Batch:
        batch = make()
        tokens: Any = batch["input_ids"]
        return {**batch, "position_ids": torch.ones_like(tokens)}

    return made
