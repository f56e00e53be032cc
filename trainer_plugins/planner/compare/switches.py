"""Change one aspect of a run that is given by a config and flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_plugins import advice, checkpointing
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.entry import flags_in
from trainer_plugins.launch import configs
from trainer_plugins.planner.plan import Category, PlanError
from trainer_plugins.planner.request import (
    ONLINE_TRAINERS,
    RESIDENT_LAYERS,
    ConfigSource,
    PlanRequest,
)
from trainer_plugins.units import count_in_words

_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
LORA = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}


@dataclass(frozen=True, slots=True)
class Switch:
    """Describes one thing to change in a run, besides its rows."""

    words: str  # its name in a proposal
    price: str  # the cost in words; `{time}` stands for the time of the copies
    flags: str  # to add to the plan's command
    change: Callable[[PlanRequest], PlanRequest] | None = None  # None: the change is those flags
    # roughly which fraction of each category it frees; only a new plan says exactly
    frees: Mapping[Category, float] = field(default_factory=dict)
    subject: str = ""  # a run takes at most one switch of each subject
    # 0: same training; 1: rounded states; 2: an adapter; 3: on a rounded base; 4: other data
    changes_result: int = 0
    costs_time: bool = False  # only that: a multiple of the step time says it better
    in_the_run: str = ""  # for the run's script; empty: the same as `flags`
    with_trl: str = ""  # for TRL's scripts; empty: as for any script

    def turn(self, run: PlanRequest) -> PlanRequest:
        """Return the run with this change."""
        return self.change(run) if self.change else change_flags(run, **flags_in(self.flags))

    def spell(self, trainer: str | None) -> str:
        """Return the text to type in the run, with a Trainer of TRL or transformers' own."""
        return (self.with_trl if trainer else "") or self.in_the_run or self.flags


def write_flags(arguments: Mapping[str, object]) -> str:
    """Write TrainingArguments as flags on one line."""
    return " ".join(f"--{name} {value}" for name, value in arguments.items())


def change_flags(run: PlanRequest, **changed: object) -> PlanRequest:
    """Change TrainingArguments by name."""
    arguments = source_of(run).arguments
    assert isinstance(arguments, tuple)
    # If a flag is given twice, the last one counts.
    flags = [text for name, value in changed.items() for text in (f"--{name}", str(value))]
    return change_source(run, arguments=(*arguments, *flags))


def change_source(run: PlanRequest, **changed: Any) -> PlanRequest:
    """Change fields of the run's ConfigSource."""
    return replace(run, source=replace(source_of(run), **changed))


def add_adapter(run: PlanRequest) -> PlanRequest:
    """Train LoRA adapters instead of the weights."""
    if source_of(run).peft is not None:
        raise PlanError("this run already trains an adapter")
    return change_source(run, peft=LORA)


def stream_base(run: PlanRequest) -> PlanRequest:
    """Keep the frozen base in main memory, except for a few layers."""
    if run.resident_layers is not None:
        raise PlanError("this run already streams its base")
    if source_of(run).peft is None:
        raise PlanError(
            "only a frozen base can be streamed, and this run trains all its weights: add lora"
        )
    return replace(run, resident_layers=RESIDENT_LAYERS)


def half_as_long(run: PlanRequest) -> PlanRequest:
    """Halve the length of rows and labels."""
    length, target = source_of(run).sequence_length, source_of(run).target_length
    return change_source(
        run,
        sequence_length=max(1, length // 2),
        has_length=True,
        target_length=max(1, target // 2) if target is not None else None,
    )


def source_of(run: PlanRequest) -> ConfigSource:
    """Return the config and the flags of a run that has them."""
    assert isinstance(run.source, ConfigSource)
    return run.source


_PAUSE_CHECKPOINTING = ("dpo", "kto", *ONLINE_TRAINERS)
_OF_WEIGHTS: Mapping[Category, float] = {"gradients": 0.97, "optimizer states": 0.97}


def _make_switch(words: str, remedy: Advice, **more: Any) -> Switch:
    """Build the switch to a remedy, typed as an option of `plan`, else as a flag."""
    spellings, doors = remedy.spellings, (Door.PLAN, Door.TRAINER, Door.TRL)
    door = next(each for each in doors if each in spellings)
    made = Switch(words, remedy.price, remedy.flag(door))
    if door is Door.PLAN:  # the run itself has no such option
        in_code, with_trl = spellings.get(Door.CODE, ""), spellings.get(Door.TRL, "")
        made = replace(made, in_the_run=in_code, with_trl=with_trl)
    return replace(made, **more)


FUSED_LOSS = _make_switch(
    "fused loss", advice.LIGER, frees={"logits and loss": 0.95, "activations": 0.3}, subject="loss"
)
FUSED_OPTIMIZER = _make_switch(
    "fused optimizer",
    advice.FUSED_ADAMW,
    price="the same optimizer in one kernel",
    frees={"activations": 1.0},
    subject="optimizer",
)
CHECKPOINTING = _make_switch(
    "checkpointing",
    advice.CHECKPOINTING,
    frees={"activations": 0.85},
    subject="activations",
    costs_time=True,
)
OFFLOADED_ACTIVATIONS = _make_switch(
    "activations offloaded",
    advice.OFFLOADED_ACTIVATIONS,
    frees={"activations": 0.97},
    subject="activations",
    costs_time=True,
)
REDUCED_EACH_TIME = _make_switch(
    "gradients reduced each time",
    advice.REDUCED_EACH_TIME,
    frees={"gradients": 0.8},
    subject="gradients",
    costs_time=True,
)
EIGHT_BIT_OPTIMIZER = _make_switch(
    "8-bit optimizer",
    advice.EIGHT_BIT_ADAMW,
    frees={"optimizer states": 0.74},
    subject="optimizer",
    changes_result=1,
)
ADAPTER = _make_switch(
    "LoRA",
    advice.ADAPTER,
    change=add_adapter,
    frees=_OF_WEIGHTS,
    subject="adapter",
    changes_result=2,
)
ADAPTER_IN_SCRIPT = replace(ADAPTER, flags=advice.ADAPTER.flag(Door.CODE))
# On an H100, with the fastest bus, a step took 1.02 to 1.46 times as long
# (docs/internals/measured.md).
STREAMED_BASE = Switch(
    "base streamed",
    "the base crosses the bus, {time}",
    advice.STREAM_BASE.flag(Door.PLAN, layers=RESIDENT_LAYERS),
    stream_base,
    {"frozen weights": 0.9},
    subject="launch",
    costs_time=True,
    in_the_run="trainer-plugins exec --memory-stream-base always -- COMMAND",
)
BASE_IN_4_BITS = _make_switch(
    "base in 4 bits",
    advice.FOUR_BITS,
    price="the base is rounded to 4 bits, needs bitsandbytes",
    # with LoRA adapters, or the run's own
    change=lambda run: change_source(run, peft=source_of(run).peft or LORA, quantisation=_NF4),
    frees={**_OF_WEIGHTS, "weights": 0.7, "frozen weights": 0.7},
    subject="adapter",
    changes_result=3,
)
QLORA = replace(
    BASE_IN_4_BITS,
    in_the_run=f"{BASE_IN_4_BITS.in_the_run}, {ADAPTER.in_the_run}",
    with_trl=BASE_IN_4_BITS.with_trl + advice.ADAPTER.flag(Door.TRL).partition("True")[2],
    words="QLoRA",
    price=advice.FOUR_BITS.price,
    flags=f"{ADAPTER.flags} {BASE_IN_4_BITS.flags}",
)
UNPREPARED = _make_switch(
    "no preparation by PEFT",
    advice.UNPREPARED,
    price="everything not quantised computes in 16 bits, norms included",
    # PEFT's preparation casts everything that is not quantised to float32.
    change=lambda run: change_source(run, prepares_kbit=False),
    frees={"activations": 0.3, "logits and loss": 0.3, "frozen weights": 0.4},
    subject="preparation",
)
# Autocast rounds a frozen weight the same way in each step, except in norms and embeddings.
WEIGHTS_IN_BF16 = _make_switch(
    "weights in bfloat16",
    advice.HALF_PRECISION_WEIGHTS,
    change=lambda run: change_source(run, dtype="bfloat16"),
    frees=dict.fromkeys(("weights", "frozen weights", "gradients", "optimizer states"), 0.5),
    subject="dtype",
    changes_result=1,
    with_trl=advice.HALF_PRECISION_WEIGHTS.flag(Door.PLAN),
)
FROZEN_IN_BF16 = replace(
    WEIGHTS_IN_BF16,
    price="the frozen norms and embeddings are rounded too",
    frees={"frozen weights": 0.5, "autocast copies of weights": 1.0},
    changes_result=0,
)
SLEEPING_ENGINE = _make_switch(
    "vLLM sleeps", advice.SLEEP_MODE, frees={"vLLM": 1.0}, subject="engine"
)
BF16 = Switch(
    "bf16",
    "computed in bf16, which rounds more",
    "--bf16 True",
    subject="precision",
    changes_result=1,
)


def smaller_engine_share(share: float, freed: float) -> Switch:
    """Build the switch to a smaller share of the card for vLLM, which frees this fraction of it."""
    advised = advice.SMALLER_ENGINE_SHARE
    flag = advised.flag(Door.TRL, share=share)
    words = f"vLLM's share {share}"
    return Switch(words, advised.price, flag, frees={"vLLM": freed}, subject="engine")


def cut_at(length: int) -> Switch:
    """Build the switch that cuts TRL's rows at this many tokens."""
    price, flag = f"rows are cut at {length} tokens", f"--max_length {length}"
    return Switch("shorter rows", price, flag, subject="length", changes_result=4)


def eval_rows(rows: int) -> Switch:
    """Build the switch to smaller evaluation batches over the same number of rows."""
    words = f"{count_in_words(rows, 'row')} at once during evaluation"
    price = "more evaluation batches: a loss averaged over tokens moves slightly"

    def change(run: PlanRequest) -> PlanRequest:
        source = source_of(run)
        now = int(source.find_flag("per_device_eval_batch_size") or 8)  # 8 is the Trainer's default
        batches = -(-source.num_evaluation_batches * now // rows)
        run = change_source(run, num_evaluation_batches=batches)
        return change_flags(run, per_device_eval_batch_size=rows)

    flag = advice.SMALLER_EVAL_BATCH.flag(Door.TRAINER, rows=rows)
    return Switch(words, price, flag, change, subject="evaluation")


def experts_in(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer; 0 if it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[name] for name in names if config.get(name)), 0))


def can_offload_activations(trainer: str | None) -> bool:
    """Return whether checkpoints can be offloaded from the card.

    transformers has to support it, as 5.23 does. Some of TRL's Trainers pause checkpointing, then
    switch it on with arguments that torch's checkpoint refuses (1.16,
    disable_gradient_checkpointing).
    """
    return trainer not in _PAUSE_CHECKPOINTING and checkpointing.CAN_OFFLOAD


def make_launch_switch(
    words: str, price: str, name: str, of: Sequence[Category], share: float
) -> Switch:
    """Build the switch to one of our launch files, which frees a share of these categories."""
    path = str(configs.path(name))
    return Switch(
        words,
        price,
        f"--accelerate-config {path}",
        lambda run: replace(run, launch_file=path),
        dict.fromkeys(of, share),
        subject="launch",
        costs_time=True,
        in_the_run=f"accelerate launch --config_file {path}",
    )
