"""Case: one rank's out-of-memory error, with the numbers that the rules of causes use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Allocation, Numbers, ShownBy
from trainer_plugins.explain.text.excerpt import Excerpt, LogLine
from trainer_plugins.explain.text.text_facts import TextFacts, gather
from trainer_plugins.oom import OutOfMemory
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.oom_record import Alive, LiveModel, OomRecord
from trainer_plugins.record.shown import Frame
from trainer_plugins.record.timeline import Entry, Sample
from trainer_plugins.units import GIB, size

WARM_UP_STEPS = 2
_LARGEST_COUNT = 1 << 20  # of rows, steps, workers; looking for divisors of more would take hours
_LIBRARIES = (
    "transformers/", "torch/", "accelerate/", "peft/", "trl/", "deepspeed/", "safetensors/",
    "trainer_plugins/", "copy.py",
)  # fmt: skip
# Optimizer states as a multiple of the trained parameters; the default is Adam's two states.
_STATE_FACTOR = {"adafactor": 0.0, "sgd": 0.0, "lion": 1.0, "rmsprop": 1.0, "adagrad": 1.0}

_NOT_COUNTED = Alive(category_bytes={}, hidden_bytes=0, module_bytes={}, models=(), largest=())

# The sources of numbers that the error does not state; all others come from the live tensors.
_SHOWN_BY: Mapping[str, ShownBy] = {
    **dict.fromkeys(("foreign_bytes", "others_bytes"), "reading"),
    **dict.fromkeys(("num_rows", "num_tokens"), "batch"),
    **dict.fromkeys(("num_heads", "num_words", "logits_bytes"), "config"),
    "num_eval_rows": "arguments",
    **dict.fromkeys(("bytes_a_step", "risen_bytes", "first_step", "last_step"), "timeline"),
    **dict.fromkeys(("highest_peak_bytes", "num_earlier_steps"), "timeline"),
    "needed_bytes": "message",
    **dict.fromkeys(
        ("host_free_bytes", "host_total_bytes", "shm_free_bytes", "shm_total_bytes"), "main memory"
    ),
}


@dataclass(frozen=True)
class Case:
    """Joins a record with the earlier readings of its rank; sizes in bytes."""

    record: OomRecord
    entries: Sequence[Entry] = ()  # the timeline of this rank in this run, oldest first

    @cached_property
    def text(self) -> TextFacts:
        """Return the facts of the error's text, completed by the reading after it."""
        lines = ["Traceback (most recent call last):"]
        for frame in self.record.frames:
            folder = "site-packages/" if frame.file.startswith(_LIBRARIES) else ""
            lines.append(f'  File "{folder}{frame.file}", line {frame.line}, in {frame.function}')
            lines += [f"    {frame.code}"] if frame.code else []
        oom = _complete(self.record.error, self.record.reading)
        excerpt = tuple(LogLine("", each) for each in (*lines, oom.text))
        return gather(Excerpt(oom, excerpt, at=len(lines)), oom)

    @property
    def asked_bytes(self) -> int:
        """Return the size of the failed request; 0 if the error does not say."""
        return self.text.asked_bytes or 0

    @property
    def total_bytes(self) -> int:
        """Return the memory of the card; 0 if unknown."""
        return self.text.total_bytes or 0

    @property
    def free_bytes(self) -> int:
        return self.text.free_bytes or 0

    @property
    def live_bytes(self) -> int:
        """Return the allocated memory of this process."""
        return self.text.live_bytes or 0

    @property
    def unused_bytes(self) -> int:
        """Return the memory that the allocator holds outside tensors."""
        return self.text.unused_bytes or 0

    @property
    def outside_bytes(self) -> int:
        """Return the memory neither free nor torch's: context, libraries, other processes."""
        return max(0, self.total_bytes - self.free_bytes - self.live_bytes - self.unused_bytes)

    @cached_property
    def numbers(self) -> Numbers:
        """Return the numbers of the error and of the reading after it."""
        record, reading = self.record, self.record.reading
        index = record.run.device.rpartition(":")[2]
        return replace(
            self.text.numbers,
            others_bytes=self.outside_bytes if self.total_bytes else None,
            rank=record.rank,
            card=int(index) if index.isdecimal() else record.error.device,
            card_name=record.run.card,
            call=record.call,
            moment=record.moment,
            part=record.part,
            step=record.step,
            peak_allocated_bytes=None if reading is None else reading.peak_allocated_bytes,
            categories={} if record.alive is None else record.alive.all_bytes,
            allocations=tuple(
                Allocation(
                    num_bytes=each.num_bytes,
                    requested_bytes=each.num_bytes,
                    place=each.holder,
                    shape=each.shape,
                )
                for each in self.alive.largest[:10]
            ),
            frames=record.frames[::-1],
            processes=record.processes or (),
        )

    def find_source(self, name: str) -> ShownBy:
        """Return the record's source of a number in the evidence."""
        name = "total_bytes" if name == "capacity_bytes" else name
        if hasattr(self.record.error, name):
            return "reading" if getattr(self.record.error, name) is None else "message"
        if name == "foreign_bytes" and any(each.is_own for each in self.record.processes or ()):
            return "processes"
        return _SHOWN_BY.get(name, "live tensors")

    @property
    def alive(self) -> Alive:
        """Return the live tensors; none if they were not counted."""
        return self.record.alive or _NOT_COUNTED

    @property
    def samples(self) -> list[Sample]:
        samples = (each for each in self.entries if isinstance(each, Sample))
        return [each for each in samples if each.moment == "train"]

    @property
    def live_after_steps(self) -> list[tuple[int, int]]:
        """Return steps and the live memory after each, without those that create the states."""
        steps = [(each.step, each.reading.allocated_bytes) for each in self.samples]
        return steps[WARM_UP_STEPS:]

    @property
    def risen_bytes(self) -> int:
        """Return how much the live memory grew from the first to the last of these steps."""
        steps = self.live_after_steps
        return steps[-1][1] - steps[0][1] if steps else 0

    @property
    def highest_peak_bytes(self) -> int:
        """Return the highest peak of a step before it; 0 if none is known."""
        return max((each.reading.peak_allocated_bytes for each in self.samples), default=0)

    @property
    def own_frames(self) -> list[Frame]:
        """Return the frames in the user's code, the innermost last."""
        return [each for each in self.record.frames if not each.file.startswith(_LIBRARIES)]

    @property
    def is_first_step(self) -> bool:
        """Return whether the run failed before it completed an optimizer step."""
        return self.record.step == self.record.run.step

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Return rows and length of the batch; None if it has no input_ids or labels."""
        for name in ("input_ids", "labels", "decoder_input_ids"):
            shape = self.record.batch.get(name)
            if shape is not None and len(shape.shape) == 2:
                return shape.shape[0], shape.shape[1]
        return None

    def argument(self, name: str, default: int) -> int:
        """Return a count of the TrainingArguments; the default if the value is implausible."""
        value = self.record.run.arguments.get(name)
        return value if type(value) is int and 0 <= value <= _LARGEST_COUNT else default

    def config(self, name: str) -> int:
        """Return a number of the model's config, or of its text part; 0 if it has none."""
        config = self.record.run.model_config
        text = config.get("text_config")
        found = (config.get(name), text.get(name) if isinstance(text, dict) else None)
        return next((value for value in found if isinstance(value, int)), 0)

    def category(self, name: str) -> int:
        """Return the live bytes of a category."""
        return self.alive.category_bytes.get(name, 0)

    @property
    def kept_logits_bytes(self) -> int:
        """Return the bytes of outputs that an evaluation keeps; 0 if they are few."""
        vocabulary = self.config("vocab_size")
        kept = sum(
            each.num_bytes
            for each in self.alive.largest
            if "EvalLoopContainer" in each.holder
            or (vocabulary and each.shape[-1:] == (vocabulary,) and len(each.shape) == 3)
        )
        return kept if kept > 0.1 * self.live_bytes else 0

    @property
    def kept_tensors(self) -> list[tuple[str, str]]:
        """Return unowned tensors and their holders; the larger kind, graphs or not, first."""
        tensors = [
            (f"{size(each.num_bytes)} {list(each.shape)}", each.holder)
            for each in self.alive.largest
        ]
        graphs = [
            (f"a graph that ends in {list(each.shape)}", each.holder) for each in self.alive.graphs
        ]
        of_graphs = self.alive.hidden_bytes + self.category("activation")
        return graphs + tensors if of_graphs > self.category("other") else tensors + graphs

    @property
    def second_models(self) -> list[LiveModel]:
        """Return the models that the run uses besides the trained one, the largest first."""
        trainer = self.record.run.trainer
        of_trainer = re.compile(rf"\b{re.escape(trainer)}\.(?!model\b|model_wrapped\b)\w+$")
        models = self.alive.models if trainer else ()
        return [each for each in models if of_trainer.search(each.holder)]

    @property
    def fixed_bytes(self) -> int:
        """Return the memory that stays from step to step, as far as it existed."""
        return sum(map(self.category, ("parameter", "buffer", "gradient", "optimizer")))

    @property
    def trained_bytes(self) -> int:
        """Return the size of the trainable parameters (estimated from gradients if present)."""
        return self.category("gradient") or self.category("parameter")

    @property
    def state_bytes(self) -> int:
        """Return the size of the optimizer's states for the trained parameters."""
        return int(self._state_factor * self.trained_bytes)

    @property
    def to_come_bytes(self) -> int:
        """Return the memory that training still adds to `fixed`: missing gradients and states."""
        trained = self.trained_bytes
        if not self.is_first_step:
            trained = self.category("optimizer") // 2 or trained
        missing = max(0, trained - self.category("gradient"))
        if self.is_first_step and self.record.part != "optimizer":
            missing += int(self._state_factor * trained)
        return missing

    @property
    def _state_factor(self) -> float:
        name = str(self.record.run.arguments.get("optim", "adamw_torch"))
        factor = next((f for known, f in _STATE_FACTOR.items() if known in name), 2.0)
        return factor / 4 if "8bit" in name else factor

    @property
    def room_bytes(self) -> int:
        """Return the largest share of the card for this process, less a twentieth."""
        return int(0.95 * (self.total_bytes - self.outside_bytes))

    @property
    def is_expandable(self) -> bool:
        option = advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT).partition("=")[2]
        return any(option in text for text in self.record.run.allocator.values())

    @property
    def foreign_bytes(self) -> int:
        """Return the memory of other processes, as far as it is certain; 0 if it may be our own."""
        listed = self.record.processes or ()
        if any(each.is_own for each in listed):
            return sum(each.used_bytes or 0 for each in listed if not each.is_own)
        named = sum(used for pid, used in self.record.error.process_bytes if pid is not None)
        may_be_ours = max(min(2 * GIB, self.total_bytes // 4), 0.15 * self.total_bytes)
        return max(named, self.outside_bytes if self.outside_bytes > may_be_ours else 0)


def _complete(error: OutOfMemory, reading: MemoryReading | None) -> OutOfMemory:
    """Add a reading's figures to an error whose message lacks them."""
    if reading is None:
        return error
    free, live, unused = error.free_bytes, error.allocated_bytes, error.unused_bytes
    if unused is None and error.reserved_bytes is None:
        unused = max(0, reading.cached_bytes)
    return replace(
        error,
        total_bytes=error.total_bytes or reading.total_bytes,
        free_bytes=reading.free_bytes if free is None else free,
        allocated_bytes=reading.allocated_bytes if live is None else live,
        unused_bytes=unused,
    )
