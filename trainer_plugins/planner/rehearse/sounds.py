"""Make the sounds of a speech model that was built from a config. Imports torch."""

from dataclasses import dataclass
from typing import Any

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import ConfigSource

_SAMPLES_A_SECOND = 16_000  # as in the feature extractors of transformers
_LABELS_A_SECOND = 15  # letters of fast speech; a guess


@dataclass(frozen=True, slots=True)
class Sounds:
    """Describes the sounds of a run, and the texts that belong to them."""

    num_samples: int
    num_labels: int  # the labels of a row, if the model writes down what it hears
    said: str


def sounds_of(model: Any, source: ConfigSource) -> Sounds:
    """Return the sounds of a run that says how long they are."""
    seconds = source.sound_seconds or 0.0
    if not takes_samples(model):
        raise PlanError(
            "--sound-seconds is for models that take the samples of a sound (input_values), and "
            f"not for {type(model).__name__}"
        )
    samples = max(1, round(seconds * _SAMPLES_A_SECOND))
    labels = source.target_length or max(1, round(seconds * _LABELS_A_SECOND))
    said = (
        f"each row has {seconds:g} s of sound, {samples:,} samples ({_SAMPLES_A_SECOND:,} a second)"
    )
    if writes(model):
        why = "" if source.target_length else f" ({_LABELS_A_SECOND} a second: a guess)"
        said += f", and {labels:,} labels{why}; see --target-length"
    return Sounds(samples, labels, said)


def takes_samples(model: Any) -> bool:
    """Return whether a model takes sounds of any length, as numbers one after another."""
    takes = getattr(model, "main_input_name", "")
    return takes == "input_values" and not hasattr(model.config, "num_mel_bins")


def writes(model: Any) -> bool:
    """Return whether a model's labels are a text."""
    return bool(model.config.is_encoder_decoder) or type(model).__name__.endswith("ForCTC")
