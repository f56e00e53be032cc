"""Change a run that was described by a config and flags, in one respect each."""

from collections.abc import Mapping
from dataclasses import replace

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import RESIDENT_LAYERS, ConfigSource, PlanRequest

LORA = "--lora-r 16 --lora-target all-linear"
"""The flags for what `with_adapter` does."""

IN_4_BITS = "--load-in-4bit --bnb-4bit-quant-type nf4 --bnb-4bit-compute-dtype bfloat16"
"""The flags for what `with_base_in_4_bits` does."""

STREAM = f"--stream-base {RESIDENT_LAYERS}"
"""The flag for what `with_base_streamed` does."""

NOT_PREPARED = "--no-prepare-kbit"
"""The flag for what `not_prepared` does."""

_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
_LORA = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}


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


def with_adapter(run: PlanRequest) -> PlanRequest:
    """Train LoRA adapters in place of the weights.

    Raises:
        PlanError: the run already trains an adapter.
    """
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
    """Keep the frozen base in main memory, but for a few layers.

    Raises:
        PlanError: the run already does so, or trains all its weights.
    """
    if run.resident_layers is not None:
        raise PlanError("this run already streams its base")
    if source_of(run).peft is None:
        raise PlanError("this run trains all its weights, and a frozen base is streamed: see lora")
    return replace(run, resident_layers=RESIDENT_LAYERS)


def half_as_long(run: PlanRequest) -> PlanRequest:
    """Cut rows and labels at half of their length."""
    source = source_of(run)
    target = source.target_length
    return replace(
        run,
        source=replace(
            source,
            sequence_length=max(1, source.sequence_length // 2),
            target_length=max(1, target // 2) if target is not None else None,
        ),
    )


def source_of(run: PlanRequest) -> ConfigSource:
    """Return the config and the flags of a run that has them."""
    assert isinstance(run.source, ConfigSource)
    return run.source
