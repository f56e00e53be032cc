"""What becomes of a class of transformers whose micro-batches do not fit: exact, refused by name, or not tried."""

import gc
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from tests.models import QUIET
from tests.survival.classes.batches import batch_for
from tests.survival.classes.tiny import tiny_model
from tests.survival.failing import Allocations, Gradients
from trainer_plugins import survive_oom
from trainer_plugins.survival.attach import Survival
from trainer_plugins.survival.exact.losses import VOUCH

TOLERANCE = 1e-5
"""Some models take a softmax or their loss in float32 whatever they are in; a wrong weight is off by percents."""

TOLERANCE_FLOAT32 = 1e-3
"""Of what does not compute in float64: it fills masks with a number that float32 has not."""

_LEAST = 1e-3
"""Of a parameter that gets a thousandth of the largest gradient, rounding is all there may be."""

_LARGEST = 30_000_000
_NOT_COMPUTED = "it cannot be computed by itself, from its tiny config"
_NO_NUMBERS = "its gradients are no numbers, from its tiny config"
_REFUSED = "survive_oom cannot help this run: "
_TAKES_A_LOSS = re.compile(r"label|start_positions|return_loss|future_values")
_NAMED_SO = re.compile(r"For[A-Z]|LMHeadModel$|DoubleHeadsModel$")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one class."""

    kind: str
    """`exact`, `refused`, `refused when measured`, `not tried`, or `wrong`."""

    why: str
    """The weight, the reason, or how far it was off, without names of the class."""


def class_names() -> list[str]:
    """Of the classes that may take a loss, as far as their names tell."""
    return [
        n
        for n in dir(transformers)
        if _NAMED_SO.search(n) and not n.startswith(("Auto", "TF", "Flax"))
    ]


def outcome_of(name: str, folder: Path) -> Outcome | None:
    """Train one step with labels that are ignored at padding and one with labels there, whole and survived.

    None for what is no model that takes a loss.
    """
    try:
        kind = getattr(transformers, name)
    except ImportError as error:
        return Outcome("not tried", _missing(error))
    if not (inspect.isclass(kind) and issubclass(kind, PreTrainedModel)):
        return None
    model_class: Any = kind
    if not any(
        _TAKES_A_LOSS.search(parameter)
        for parameter in inspect.signature(model_class.forward).parameters
    ):
        return None
    gc.collect()
    gc.freeze()  # what has been imported is not looked through at each failure
    try:
        model = tiny_model(model_class)
    except Exception as error:  # noqa: BLE001 - whatever a config that nobody wrote for this says
        return Outcome("not tried", _missing(error))
    if sum(p.numel() for p in model.parameters()) > _LARGEST:
        return Outcome("not tried", "its config cannot be made small")
    outcome = _trained(model, folder)
    if outcome.why in (_NOT_COMPUTED, _NO_NUMBERS):
        in_float32 = _trained(tiny_model(model_class).float(), folder)
        return outcome if in_float32.kind == "not tried" else in_float32
    return outcome


def _trained(model: nn.Module, folder: Path) -> Outcome:
    trainer, name = _Training(model, folder), type(model).__name__
    try:
        survive_oom(trainer.trainer, plan_first=False).detach()
    except ValueError as error:
        return Outcome("refused", _nameless(str(error).removeprefix(_REFUSED), name))
    try:
        trainer.feed()
        whole, nums = trainer.run()
    except Exception:  # noqa: BLE001 - the same
        return Outcome("not tried", _NOT_COMPUTED)
    if not all(g is None or g.isfinite().all() for step in whole for g in step):
        return Outcome("not tried", _NO_NUMBERS)
    return trainer.survived(whole, nums)


class _Training:
    """Two micro-batches, each a step that moves nothing, by the real Trainer."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model, self.name, self.num_collated = model, type(model).__name__, 0
        self.batches: list[dict[str, Any]] = []
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=0.0,
            optim="sgd",
            logging_strategy="no",
            use_cpu=True,
            remove_unused_columns=False,
            **QUIET,
        )
        rows: Any = list(range(8))
        self.trainer = Trainer(
            model=model, args=args, train_dataset=rows, data_collator=self._collate
        )

    def feed(self) -> None:
        dtype = next(self.model.parameters()).dtype
        self.batches = [
            {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in batch_for(self.model, labels_at_padding=there).items()
            }
            for there in (False, True)
        ]

    def run(self, *fail_at: int) -> tuple[list[list[torch.Tensor | None]], list[int]]:
        """The gradients of both steps, and how many allocations each had."""
        self.num_collated = 0
        trainer, allocations, nums = self.trainer, Allocations(), list[int]()
        gradients: list[list[torch.Tensor | None]] = []
        seen, training_step = Gradients(gradients), type(trainer).training_step

        def counted(*args, **kwargs):
            allocations.begin([fail_at[len(nums)]] if fail_at else [])
            try:
                return training_step(trainer, *args, **kwargs)
            finally:
                nums.append(allocations.num)
                allocations.begin([])

        trainer.training_step = counted
        trainer.add_callback(seen)
        try:
            with allocations:
                trainer.train()
        finally:
            trainer.remove_callback(seen)
        assert allocations.num_failed == len(fail_at)
        return gradients, nums

    def survived(self, whole: list[list[torch.Tensor | None]], nums: list[int]) -> Outcome:
        """The first micro-batch fails in its backward pass, the second in its forward pass or that of a piece."""
        with survive_oom(self.trainer, plan_first=False) as survival:
            weights = _Weights(survival)
            self.trainer.add_callback(weights)
            try:
                gradients, _ = self.run(max(1, int(0.8 * nums[0])), max(1, int(0.3 * nums[1])))
            except torch.OutOfMemoryError as error:
                why = re.search(r"survive_oom could not help: (.*)", str(error))
                return Outcome(
                    "refused when measured",
                    _nameless(why.group(1) if why else str(error), self.name),
                )
            except ValueError as error:
                return Outcome(
                    "refused when measured", _nameless(str(error).removeprefix(_REFUSED), self.name)
                )
            finally:
                self.trainer.remove_callback(weights)
            weight = weights.names[-1]
        worst = max(_off_by(ours, theirs) for ours, theirs in zip(gradients, whole, strict=True))
        is_float32 = next(self.model.parameters()).dtype is torch.float32
        weight += ", in float32" if is_float32 else ""
        return (
            Outcome("exact", weight)
            if worst <= (TOLERANCE_FLOAT32 if is_float32 else TOLERANCE)
            else Outcome("wrong", f"by {worst:.1e}, as {weight}")
        )

    def _collate(self, _: object) -> dict[str, Any]:
        self.num_collated += 1
        return dict(self.batches[(self.num_collated - 1) % 2])


class _Weights(TrainerCallback):
    """The weight by which the micro-batches of each step were divided."""

    def __init__(self, survival: Survival) -> None:
        assert survival._engine is not None
        self._engine, self.names = survival._engine, list[str]()

    def on_step_end(self, *_, **__) -> None:
        assert self._engine._run is not None
        self.names += [one[0].name for one in self._engine._run.certificate._weights.values()]


def _off_by(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    """For the parameter where it is most; a gradient of nothing but zeros is one that is not there."""
    tensors = []
    for a, b in zip(ours, theirs, strict=True):
        if (one := b if a is None else a) is not None:
            zeros = torch.zeros_like(one)
            tensors.append((zeros if a is None else a, zeros if b is None else b))
    largest = max(float(b.norm()) for _, b in tensors)
    return max(float((a - b).norm()) / max(float(b.norm()), _LEAST * largest) for a, b in tensors)


def _nameless(reason: str, name: str) -> str:
    """Without what each class has of its own, numbers that rounding decides, and what could be done instead."""
    reason = re.sub(rf"\b{name}\b", "its class", reason.replace(VOUCH, ""))
    reason = re.sub(r": measured on .*| for number \d+\.", "", reason)
    reason = re.sub(r"\(`[\w.]+`(, \w+)?\)|`[\w.]+` \(\w+\)|\(\w+Norm\w*\)|`[\w.]+`,?", "", reason)
    return reason.replace("  ", " ").replace(" ;", ";").strip()


def _missing(error: Exception) -> str:
    if library := re.search(r"requires the (\w+) library|No module named '(\w+)'", str(error)):
        return f"it needs {library.group(1) or library.group(2)}"
    return "no tiny config can be made by itself"
