"""Define PlanRequest: the run to predict, as a value that can be sent to the subprocess."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import PlanError

DEFAULT_SEQUENCE_LENGTH = 2048
TRL_LENGTH = 1024  # `max_length` of TRL's configs
DEFAULT_EVALUATION_BATCHES = 8
_MOST = 1 << 24  # of anything that is counted: no model takes rows of 10 million tokens
MOST_LAYERS = 1 << 12  # the deepest trained models have a few hundred
# config keys that count layers
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers",
)  # fmt: skip
# at least 1; an encoder or a decoder may have no layers
_COUNTS_OF_A_MODEL = LAYER_COUNTS[:2]

# named as TRL's own commands
ONLINE_TRAINERS = ("grpo", "rloo", "gmpo")  # they generate all rows of a step at once
TRL_TRAINERS = ("sft", "dpo", "kto", "reward", *ONLINE_TRAINERS, "orpo", "cpo", "tpo")

RESIDENT_LAYERS = 2  # of a streamed base: one computes while the next arrives
GPUS_PER_NODE = 8  # the default

# The first step creates the optimizer states, and the second is the first to start with them. Only
# in the third do blocks lie as an equal step left them: until then reserved memory grows.
OPTIMIZER_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """Describes a run by the config of its model and the lengths of its data."""

    config: Mapping[str, object]  # the content of a config.json
    # flags, or the pickled class and fields of TrainingArguments
    arguments: tuple[str, ...] | bytes
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    has_length: bool = False  # whether the user gave that length
    target_length: int | None = None  # tokens of an encoder-decoder's labels; None: as the rows
    dtype: str | None = None  # of the loaded weights; None: chosen by `from_pretrained`
    peft: Mapping[str, object] | None = None  # the content of an adapter_config.json
    # as given to `from_pretrained`; None: the config's
    quantisation: Mapping[str, object] | None = None
    prepares_kbit: bool = True  # whether `prepare_model_for_kbit_training` gets a quantised model
    num_evaluation_batches: int = DEFAULT_EVALUATION_BATCHES
    has_metrics: bool = False  # a `compute_metrics`, for which all outputs are kept
    num_labels: int | None = None  # classes of a classifier; None: as in the config
    trainer: str | None = None  # one of `TRL_TRAINERS`; None: transformers' own
    images_per_row: int | None = None  # for a vision-language model; None: one
    # height and width; None: as the config says, or a guess
    image_size: tuple[int, int] | None = None
    sound_seconds: float | None = None  # audio in each row, for a model that takes samples

    @property
    def asks_for_pictures(self) -> bool:
        """Return whether the user gave the number or the size of pictures."""
        return self.images_per_row is not None or self.image_size is not None

    @property
    def kbit_checkpoints(self) -> bool:
        """Return whether PEFT switches checkpointing on while it prepares a quantised base.

        By default it does, regardless of the TrainingArguments; a flag that the user typed
        overrides it.
        """
        return str(self.find_flag("gradient_checkpointing")).lower() not in ("false", "0", "no")

    @property
    def deepspeed(self) -> object:
        """Return the arguments' DeepSpeed setting: path, text or mapping; None if there is none."""
        if isinstance(self.arguments, tuple):
            return self.find_flag("deepspeed")
        return pickle.loads(self.arguments)[1].get("deepspeed")

    def find_flag(self, name: str) -> str | None:
        """Return the text of a TrainingArguments flag; None if it is not on the command line."""
        flags = self.arguments if isinstance(self.arguments, tuple) else ()
        found = None  # If a flag is given twice, the last one counts.
        for flag, following in pairwise((*flags, "")):
            spelt, equals, value = flag.partition("=")
            if spelt.startswith("--") and spelt[2:].replace("-", "_") == name:
                found = value if equals else following
        return found

    def __post_init__(self) -> None:
        _check_layers(self.config)
        if self.trainer is not None:
            self._check_trainer()
        for flag, least, number in (
            ("--seq-length", 1, self.sequence_length),
            ("--target-length", 1, self.target_length),
            ("--sound-seconds", 0, self.sound_seconds),
            ("--images-per-row", 0, self.images_per_row),
            ("--num-labels", 1, self.num_labels),
            ("--eval-batches", 1, self.num_evaluation_batches),
        ):
            if number is not None and not number >= least:
                raise PlanError(f"{flag} must be at least {least}, got {number:,}")
            if number is not None and number > _MOST:
                raise PlanError(f"{flag} must be at most {_MOST:,}, got {number:,}")

    def _check_trainer(self) -> None:
        if self.trainer not in TRL_TRAINERS:
            raise PlanError(f"--trainer is one of {', '.join(TRL_TRAINERS)}, got {self.trainer!r}")
        if self.num_labels is not None or self.sound_seconds is not None or self.asks_for_pictures:
            raise PlanError("--trainer takes no labels, images or audio by flags: use plan_run")


def _check_layers(config: Mapping[str, object], inside: str = "") -> None:
    """Refuse an implausible number of layers in a model or in a part of it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(value, f"{inside}{name}.")
        if name not in LAYER_COUNTS or not isinstance(value, (int, float)):
            continue
        least = 1 if name in _COUNTS_OF_A_MODEL else 0
        if not least <= value <= MOST_LAYERS:
            raise PlanError(
                f"the config's {inside}{name} is {value:,}: a number from {least} to "
                f"{MOST_LAYERS:,} is expected"
            )


class Replaced(NamedTuple):
    """Names a function, a method or a class, and its replacement."""

    module: str
    path: str  # `name`, or `Class.name`
    instead: tuple[str, str]  # the module and the qualified name of the replacement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSource:
    """Holds the user's Trainer and its batches, pickled with shapes instead of tensors."""

    trainer: bytes
    batch: bytes
    evaluation_batch: bytes | None = None
    num_evaluation_batches: int = 0
    left_out: tuple[str, ...] = ()  # attributes of the Trainer that cannot be pickled
    unread: tuple[str, ...] = ()  # rows of its data sets that were not read, in words
    device_map: Mapping[str, int] = field(default_factory=dict)  # the card of each part
    replaced: tuple[Replaced, ...] = ()  # patches of Liger, made before the Trainer was built


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Describes one run whose memory is to be predicted."""

    source: ConfigSource | TrainerSource
    card: Card | None = None  # None: predict the memory only, not whether it fits
    host: HostLimits = field(default_factory=HostLimits)  # the main memory of a machine
    allocator: str = ""  # the allocator settings, as in PYTORCH_ALLOC_CONF
    num_gpus: int = 1  # cards that train together; 0: as in the launch file
    num_nodes: int = 0  # machines with equal numbers of cards; 0 if unknown
    environment: Mapping[str, str] = field(default_factory=dict)  # exported for accelerate
    # the config of the Trainer's own launch, with each "auto" left as it is
    deepspeed: dict[str, object] | None = None
    launch_file: str | None = None  # the path of accelerate's config file
    has_padding: bool | None = None  # of batches; None: if they have more than one row
    proposes: bool = False  # whether to search for changes that fit, if the run does not
    resident_layers: int | None = None  # of a streamed base, kept on the card
    streams_embeddings: bool = False  # whether embeddings and head are streamed too

    @property
    def uses_deepspeed(self) -> bool:
        """Return whether the arguments or the launcher ask for DeepSpeed."""
        of_arguments = isinstance(self.source, ConfigSource) and self.source.deepspeed
        is_exported = self.environment.get("ACCELERATE_USE_DEEPSPEED") == "true"
        return self.deepspeed is not None or is_exported or bool(of_arguments)


def default_length(trainer: str | None) -> int:
    """Return the default tokens of a row: TRL's own limit if it cuts rows, else 2048."""
    cuts = trainer is not None and trainer not in ONLINE_TRAINERS
    return TRL_LENGTH if cuts else DEFAULT_SEQUENCE_LENGTH


def nodes_of(num_gpus: int, most_in_each: int = GPUS_PER_NODE) -> int:
    """Return the fewest nodes that share the cards evenly, with at most `most_in_each` each."""
    return num_gpus // max(count for count in range(1, most_in_each + 1) if num_gpus % count == 0)


def fields_of(args: Any) -> dict[str, Any]:
    """Return the fields from which a dataclass of arguments can be rebuilt."""
    given = {each.name: getattr(args, each.name) for each in fields(args) if each.init}
    if given.get("steps_per_generation"):  # TRL accepts only one of the two, and derives the other.
        given.pop("generation_batch_size", None)
    return given
