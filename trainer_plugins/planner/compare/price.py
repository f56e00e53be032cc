"""Estimate how much longer a step takes with changes, as a multiple, from a card's figures.

A step takes the time of its computation, or of its concurrent transfers if that is longer. Nothing
is measured; docs/plan_search.md compares these multiples with measured ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer_plugins import checkpointing
from trainer_plugins.planner.cards import Speed
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.request import LAYER_COUNTS, ONLINE_TRAINERS, PlanRequest
from trainer_plugins.strategy import reduces_each_time

_REACHED = 0.4  # of peak FLOPS: Llama 3 had 38 to 43 % (arXiv:2407.21783, table 4)
_BYTES = 2  # of a weight or a gradient in transit
_BYTES_IN_4_BITS = 0.55  # NF4 and its scales
_DECODING_BYTES = 4.5  # reads half a byte, writes two, reads those two again
_STEP_BYTES = 28  # AdamW reads four 4-byte numbers per weight and writes three
# DeepSpeed's AdamW takes 2.4 s for 8 billion weights (ZeRO-Offload, arXiv:2101.06840, table 4).
_BYTES_PER_SECOND_OF_CPU = 94e9
_ONLY_COMPUTES = Speed(1e-6, *[float("inf")] * 3)  # compute-bound, so the ratio holds for any card

_IN_4_BITS = {switches.QLORA.words, switches.BASE_IN_4_BITS.words}
_ADAPTERS = {switches.ADAPTER.words, *_IN_4_BITS}
_OVER_A_BUS = {switches.OFFLOADED_ACTIVATIONS.words, switches.REDUCED_EACH_TIME.words, *_IN_4_BITS}


class Step(NamedTuple):
    """Describes a step of a run: numbers of weights, tokens and cards."""

    weights: int
    trained: int
    rows: int  # of an optimizer step, on one card
    checkpoints: bool
    idle: int = 0  # weights of experts that a token skips
    tokens: int = 1  # in a row
    layers: int = 0
    width: int = 0
    num_gpus: int = 1
    speed: Speed | None = None  # None if the card or the sequence length is unknown
    offloads: bool = False  # the inputs of layers (offloaded activations)
    reduces_each_time: bool = False
    in_4_bits: bool = False
    launch: str = ""  # in words

    def times(self, changes: Sequence[Switch], now: int, then: int) -> float | None:
        """Return the step time with `changes` and `then` rows at once, relative to the run now.

        None if it depends on a card that is unknown.
        """
        speed = self.speed
        if speed is None:
            over_a_bus = (each.subject == "launch" or each.words in _OVER_A_BUS for each in changes)
            if not changes or any(over_a_bus):
                return None
            speed = _ONLY_COMPUTES
        return self.apply(changes)._seconds(then, speed) / self._seconds(now, speed)

    def apply(self, changes: Sequence[Switch]) -> "Step":
        words = {each.words for each in changes}
        offloads = self.offloads or switches.OFFLOADED_ACTIVATIONS.words in words
        return self._replace(
            trained=0 if words & _ADAPTERS else self.trained,
            checkpoints=self.checkpoints or offloads or switches.CHECKPOINTING.words in words,
            offloads=offloads,
            reduces_each_time=self.reduces_each_time or switches.REDUCED_EACH_TIME.words in words,
            in_4_bits=self.in_4_bits or bool(words & _IN_4_BITS),
            launch=next((each.words for each in changes if each.subject == "launch"), self.launch),
        )

    def _seconds(self, rows: int, speed: Speed) -> float:
        """Estimate the time of a step with this many rows at once."""
        tokens, computed = rows * self.tokens, max(1, self.weights - self.idle)
        # The backward pass computes the gradients of the inputs and of the trained weights.
        passes = 2 + self.trained / self.weights + self.checkpoints
        scores = 2 * self.tokens * self.width * self.layers  # per token; half are masked
        operations = tokens * (passes * 2 * computed + (3 + self.checkpoints) * scores)
        computing = operations / (speed.teraflops * 1e12 * _REACHED)
        if self.in_4_bits:
            computing += passes * _DECODING_BYTES * self.weights / speed.memory
        reading = passes * _BYTES * computed / speed.memory
        links, once = self._between_cards()
        here = max(computing, reading, self._hidden(tokens) / speed.bus)
        if "offload" in self.launch:  # not hidden: DeepSpeed's overlap was not measured
            here += _BYTES * (2 * self.weights + self.trained) / self.num_gpus / speed.bus
        each, last = max(here, links / speed.link), max(here, (links + once) / speed.link)
        return (self.rows / rows - 1) * each + last + self._updating(speed)

    def _hidden(self, tokens: int) -> float:
        """Return the bytes that cross the bus while a micro-batch is computed."""
        moved = 2 * _BYTES * tokens * self.layers * self.width if self.offloads else 0.0
        if self.launch == switches.STREAMED_BASE.words:
            return moved + 2 * self.weights * (_BYTES_IN_4_BITS if self.in_4_bits else _BYTES)
        return moved

    def _between_cards(self) -> tuple[float, float]:
        """Return the bytes between cards in each micro-batch, and the extra ones in the last."""
        gradients = _BYTES * self.trained
        if self.num_gpus == 1:
            return 0.0, 0.0
        if not ("FSDP" in self.launch or "ZeRO-3" in self.launch):
            return 0.0, 2.0 * gradients
        gathered = 2.0 * _BYTES * self.weights
        if self.reduces_each_time or "ZeRO-3" in self.launch:
            return gathered + gradients, 0.0
        return gathered, gradients

    def _updating(self, speed: Speed) -> float:
        moved = _STEP_BYTES * self.trained
        if "offload" in self.launch:
            return moved / _BYTES_PER_SECOND_OF_CPU
        is_divided = "FSDP" in self.launch or "ZeRO" in self.launch
        return moved / (self.num_gpus if is_divided else 1) / speed.memory


def step_of(run: PlanRequest, arguments: Mapping[str, Any], plan: MemoryPlan) -> Step | None:
    """Describe the step of a config's run; None if it generates, which takes most of the time."""
    source = switches.source_of(run)
    if source.trainer in ONLINE_TRAINERS:
        return None
    found: Any = source.config.get("text_config") or source.config
    layers = max((n for name in LAYER_COUNTS if isinstance(n := found.get(name), int)), default=0)
    experts, hidden = switches.experts_in(found), found.get("hidden_size") or 0
    skipped = experts - found.get("num_experts_per_tok", experts)
    width = found.get("moe_intermediate_size") or found.get("intermediate_size") or 0
    has_tokens = "length" in plan.planned
    strategy, file = plan.planned["strategy"], plan.planned.get("launch file", "")
    is_streamed = run.resident_layers is not None
    return Step(
        weights=max(1, plan.num_parameters),
        idle=int(layers * skipped * 3 * hidden * width),
        trained=plan.num_trainable_parameters,
        tokens=source.sequence_length if has_tokens else 1,
        rows=arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"],
        layers=layers,
        width=hidden or found.get("d_model") or 0,
        num_gpus=plan.num_gpus,
        speed=run.card.speed if run.card and has_tokens else None,
        checkpoints=plan.planned["checkpointing"] != "off",
        offloads="offload" in checkpointing.options(arguments),
        reduces_each_time=reduces_each_time(arguments["accelerator_config"]),
        in_4_bits="4 bits" in plan.planned.get("quantised", ""),
        launch=switches.STREAMED_BASE.words if is_streamed else f"{strategy} {file}",
    )
