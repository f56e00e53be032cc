"""Change a run that was described by a config and flags, in one respect each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.entry import flags_in
from trainer_plugins.planner.plan import Category, PlanError
from trainer_plugins.planner.request import RESIDENT_LAYERS, ConfigSource, PlanRequest

_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
_LORA = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}


@dataclass(frozen=True, slots=True)
class Switch:
    """Describes one thing to change in a run, besides its rows."""

    words: str  # what a proposal calls it
    price: str  # what it costs; `{time}` stands for the time that copies take
    flags: str  # what to add to the plan's command; `{length}` stands for the new length of rows
    turn: Callable[[PlanRequest], PlanRequest]
    # at most, as a fraction; empty if unknown
    frees: Mapping[Category, float] = field(default_factory=dict)


def as_flags(arguments: Mapping[str, object]) -> str:
    """Write TrainingArguments as flags, in one line."""
    return " ".join(f"--{name} {value}" for name, value in arguments.items())


def with_flags(run: PlanRequest, **changed: object) -> PlanRequest:
    """Change TrainingArguments, by their names."""
    source = source_of(run)
    assert isinstance(source.arguments, tuple)
    # of a flag given twice, the last one counts
    flags = [text for name, value in changed.items() for text in (f"--{name}", str(value))]
    return replace(run, source=replace(source, arguments=(*source.arguments, *flags)))


def of_flags(words: str, price: str, **changed: object) -> Switch:
    """Make a switch that changes TrainingArguments."""
    return Switch(words, price, as_flags(changed), lambda run: with_flags(run, **changed))


def _of_training(
    words: str, advised: Advice, frees: Mapping[Category, float], price: str = ""
) -> Switch:
    """Make the switch of a remedy that is a flag of TrainingArguments."""
    flags = advised.flag(Door.TRAINER)
    changed = flags_in(flags)

    def turn(run: PlanRequest) -> PlanRequest:
        return with_flags(run, **changed)

    return Switch(words, price or advised.price, flags, turn, frees)


def with_adapter(run: PlanRequest) -> PlanRequest:
    """Train LoRA adapters instead of the weights."""
    source = source_of(run)
    if source.peft is not None:
        raise PlanError("this run already trains an adapter")
    return replace(run, source=replace(source, peft=_LORA))


def with_base_in_4_bits(run: PlanRequest) -> PlanRequest:
    """Train LoRA adapters, those of the run if it has some, on a base in 4 bits."""
    source = source_of(run)
    return replace(run, source=replace(source, peft=source.peft or _LORA, quantisation=_NF4))


def not_prepared(run: PlanRequest) -> PlanRequest:
    """Leave what is not quantised in its dtype: PEFT's preparation makes it float32."""
    return replace(run, source=replace(source_of(run), prepares_kbit=False))


def with_base_streamed(run: PlanRequest) -> PlanRequest:
    """Keep the frozen base in main memory, except for a few layers."""
    if run.resident_layers is not None:
        raise PlanError("this run already streams its base")
    if source_of(run).peft is None:
        raise PlanError(
            "this run trains all its weights, and only a frozen base is streamed: see lora"
        )
    return replace(run, resident_layers=RESIDENT_LAYERS)


def half_as_long(run: PlanRequest) -> PlanRequest:
    """Cut rows and labels at half of their length."""
    source = source_of(run)
    target = source.target_length
    halved = replace(
        source,
        sequence_length=half_length(source),
        target_length=max(1, target // 2) if target is not None else None,
    )
    return replace(run, source=halved)


def half_length(source: ConfigSource) -> int:
    """Return half of the length of rows."""
    return max(1, source.sequence_length // 2)


def source_of(run: PlanRequest) -> ConfigSource:
    """Return the config and the flags of a run that has them."""
    assert isinstance(run.source, ConfigSource)
    return run.source


_OF_A_BATCH: Mapping[Category, float] = {"activations": 1.0, "logits and loss": 1.0}
_OF_WEIGHTS: Mapping[Category, float] = {
    **_OF_A_BATCH,
    "gradients": 1.0,
    "optimizer states": 1.0,
}  # what an adapter, which has few weights to train, can free

CHECKPOINTING = _of_training("checkpointing", advice.CHECKPOINTING, {"activations": 1.0})
FUSED_OPTIMIZER = _of_training(
    "fused optimizer", advice.FUSED_ADAMW, {"activations": 1.0}, "the same optimizer in one kernel"
)
EIGHT_BIT_OPTIMIZER = _of_training(
    "8-bit optimizer", advice.EIGHT_BIT_ADAMW, {"optimizer states": 0.75}
)
FUSED_LOSS = _of_training("fused loss", advice.LIGER, _OF_A_BATCH)
HALF_LENGTH = Switch(
    "half the length",
    "rows are cut at {length} tokens",
    advice.SHORTER_ROWS.flag(Door.PLAN, length="{length}"),
    half_as_long,
    _OF_A_BATCH,
)
ADAPTER = Switch(
    "LoRA", advice.ADAPTER.price, advice.ADAPTER.flag(Door.PLAN), with_adapter, _OF_WEIGHTS
)
STREAMED_BASE = Switch(
    "base streamed",
    "the same training; the base comes over the bus, {time}",
    advice.STREAM_BASE.flag(Door.PLAN, layers=RESIDENT_LAYERS),
    with_base_streamed,
    {"frozen weights": 1.0},
)
BASE_IN_4_BITS = Switch(
    "base in 4 bits",
    "the base is rounded to 4 bits, needs bitsandbytes",
    advice.FOUR_BITS.flag(Door.PLAN),
    with_base_in_4_bits,
    {**_OF_WEIGHTS, "weights": 0.75, "frozen weights": 0.75},
)
QLORA = replace(
    BASE_IN_4_BITS,
    words="QLoRA",
    price=advice.FOUR_BITS.price,
    flags=f"{ADAPTER.flags} {BASE_IN_4_BITS.flags}",
)
UNPREPARED = Switch(
    "no preparation by PEFT",
    "what is not quantised computes in 16 bits, the norms too",
    advice.UNPREPARED.flag(Door.PLAN),
    not_prepared,
    {**_OF_A_BATCH, "frozen weights": 0.5},
)
