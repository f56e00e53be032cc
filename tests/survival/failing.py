"""What the tests of survival share: small runs, errors at a chosen allocation, and what a run is made of."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests import rounding
from tests.events import at
from tests.models import QUIET, tiny_llama
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.survival.ranks.alone import Together
from trainer_plugins.upkeep.agreement import Agreement

TERMS = rounding.terms_of(num_layers=2, width=64)  # of tiny_llama and models of its size
LEARNING_RATE = 1e-3


def ragged_rows(num_rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """6 to 16 tokens a row, so that a mean over tokens is none over rows."""
    dice = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, 17, (num_rows,), generator=dice).tolist()
    return [{"input_ids": torch.randint(1, 127, (length,), generator=dice)} for length in lengths]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 0, -100),
        "attention_mask": (ids != 0).long(),
    }


def packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Lay rows behind one another: one row, whose positions begin again."""
    ids = torch.cat([row["input_ids"] for row in rows])[None]
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def small_trainer(
    tmp_path, model=None, trainer_class=Trainer, args_class=TrainingArguments, *, steps=2, **kwargs
):
    """On the CPU, in float64: two micro-batches of four rows make a step."""
    into_trainer = {
        name: kwargs.pop(name)
        for name in (
            "train_dataset",
            "eval_dataset",
            "data_collator",
            "optimizers",
            "compute_loss_func",
            "compute_metrics",
        )
        if name in kwargs
    }
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 1,
        "use_cpu": True,
        "remove_unused_columns": False,
        **QUIET,
        **kwargs,
    }
    return trainer_class(
        model=model if model is not None else tiny_llama().double(),
        args=args_class(**settings),
        **{"train_dataset": ragged_rows(), "data_collator": padded, **into_trainer},
    )


def with_norm(make, **config):
    """A tiny Llama in float64 whose last norm something else is made of."""
    model = tiny_llama(**config)
    model.model.norm = make(model.model.norm)
    return model.double()


class Recentred(nn.Module):
    """Subtracts the mean of the micro-batch while it trains, else a running one, which is no buffer of any name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean = torch.zeros(size)

    def forward(self, hidden):
        if not self.training:
            return hidden - self.mean
        mean = hidden.mean((0, 1))
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        return hidden - mean


class Allocations(TorchDispatchMode):
    """Counts the operations that return something new, and lets chosen ones fail as they would on a full card."""

    def __init__(self) -> None:
        super().__init__()
        self.num = self.num_failed = 0
        self.fail_at: list[int] = []
        self.error: Exception | None = None
        """Which error; torch's own where it is None."""

    def begin(self, fail_at: list[int]) -> None:
        self.num, self.fail_at = 0, fail_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if returns_something_new(func):
            self.num += 1
            if self.num in self.fail_at:
                self.fail_at.remove(self.num)
                self.num_failed += 1
                raise self.error or torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate 2.00 MiB for number {self.num}."
                )
        return result


@contextlib.contextmanager
def votes_fit():
    """Let no vote fail, and no exchange of ranks that vote: these take some bytes of the CPU."""

    def apart(function):
        def called(*args, **kwargs):
            with _disable_current_modes():
                return function(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (Agreement, "highest_of"),
            (Together, "_gather"),
            (Together, "_reduce"),
        ):
            stack.enter_context(patch.object(owner, name, apart(getattr(owner, name))))
        yield


@cache
def returns_something_new(func) -> bool:
    """A number read from a tensor is none, nor is what ranks exchange, which is there already."""
    new = any(
        returned.alias_info is None and "Tensor" in str(returned.type)
        for returned in func._schema.returns
    )
    return new and func.namespace != "c10d"


@contextlib.contextmanager
def numpy_draws_by(kind: type[np.random.BitGenerator]) -> Iterator[None]:
    """Let `numpy.random` draw by a generator of another kind than its own."""
    numpys: Any = np.random
    before = numpys.get_bit_generator()
    numpys.set_bit_generator(kind(7))
    try:
        yield
    finally:
        numpys.set_bit_generator(before)


class Gradients(TrainerCallback):
    """What each optimizer step was made of."""

    def __init__(self, kept: list) -> None:
        self.kept = kept

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append(
            [None if p.grad is None else p.grad.detach().cpu().clone() for p in model.parameters()]
        )


class Counted:
    """Counts the allocations of each micro-batch of a training.

    `fail_at`: for the n-th micro-batch, the allocations that fail in it.
    """

    def __init__(self, trainer: Trainer, fail_at: dict[int, list[int]] | None = None) -> None:
        self.trainer, self.fail_at = trainer, fail_at or {}
        self.allocations = Allocations()
        self.num_allocations: list[int] = []
        self._planned: list[int] = []
        self._training_step = trainer.training_step
        self._prepare_inputs = trainer._prepare_inputs
        trainer.training_step, trainer._prepare_inputs = self.training_step, self.prepare_inputs

    def training_step(self, *args, **kwargs):
        self._planned = list(self.fail_at.get(len(self.num_allocations), []))
        self.allocations.begin(self._planned)
        try:
            return self._training_step(*args, **kwargs)
        finally:
            self.num_allocations.append(self.allocations.num)
            self.allocations.begin([])

    def prepare_inputs(self, *args, **kwargs):
        """Counted from behind here: the batch is on the device, and completions are generated."""
        self.allocations.begin([])
        inputs = self._prepare_inputs(*args, **kwargs)
        self.allocations.begin(self._planned)
        return inputs


class Run(Counted):
    """One training, and what it was made of."""

    def __init__(
        self, trainer: Trainer, fail_at: dict[int, list[int]] | None = None, error=None, **train
    ) -> None:
        super().__init__(trainer, fail_at)
        self.allocations.error = error
        self.gradients: list[list[torch.Tensor | None]] = []
        trainer.add_callback(Gradients(self.gradients))
        with self.allocations:
            trainer.train(**train)
        self.weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    @property
    def logged(self) -> list[dict[str, float]]:
        return logged_by(self.trainer)


def logged_by(trainer: Trainer) -> list[dict[str, float]]:
    """What a Trainer logged, except times and what survival adds."""
    untold = ["runtime", "per_second", "out_of_memory", "_time", "memory/"]
    return [
        {k: v for k, v in logs.items() if not any(u in k for u in untold)}
        for logs in trainer.state.log_history
    ]


def numbers_off_by(ours: list[dict], theirs: list[dict]) -> float:
    """The largest difference of what was logged, relative to 1 or the number."""
    assert [list(logs) for logs in ours] == [list(logs) for logs in theirs]
    pairs = [(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in b]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs if isinstance(b, float | int))


def survive(make, where: dict[int, Any], error=None, **options) -> tuple[Run, Run]:
    """The run as it is, and the same where micro-batches fail and are survived.

    They fail at a fraction of their allocations. Some fail at several: then one may be above 1.
    """
    whole = Run(make())
    trainer = make()
    survive_oom(trainer, **options)
    fail_at = {
        n: [max(1, int(whole.num_allocations[n] * part)) for part in np.atleast_1d(parts)]
        for n, parts in where.items()
    }
    survived = Run(trainer, fail_at, error)
    assert survived.allocations.num_failed == sum(map(len, fail_at.values()))
    return whole, survived


def refuse(trainer: Trainer, why: str, fail_at=None, error=torch.OutOfMemoryError, **options):
    """Attach survival to a training that then ends by an error with these words."""
    survive_oom(trainer, **options)
    with pytest.raises(error, match=why):
        Run(trainer, fail_at)


def know_limit(trainer: Trainer, limit: float, event: str = "train_begin") -> None:
    """Let so many tokens be known to fit, as after a resume."""
    trainer.add_callback(at(event, lambda _: setattr(memo_of(trainer), "limit", limit)))


def off_by(ours: list, theirs: list) -> float:
    """The largest difference over all parameters, relative to the largest number of each."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.isfinite().all()
            if (largest := float(other.abs().max())) > 0:
                worst = max(worst, float((mine - other).abs().max()) / largest)
    return worst


def off_by_steps(ours: list[list], theirs: list[list]) -> float:
    return max(off_by(a, b) for a, b in zip(ours, theirs, strict=True))


def gradients_off_by(ours: Run, theirs: Run) -> float:
    return off_by_steps(ours.gradients, theirs.gradients)


def gradients_by_rounding(
    ours: list[list], theirs: list[list], num_terms: int = TERMS, dtype: torch.dtype = torch.float32
) -> float:
    """How far the gradients of each step are apart, as a fraction of what rounding to a dtype may do until there."""
    return max(
        off_by(a, b) / rounding.of_gradients(num_terms, [LEARNING_RATE] * step, dtype)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True))
    )


def weights_by_rounding(
    ours: list, theirs: list, steps: int, num_terms: int = TERMS, dtype: torch.dtype = torch.float32
) -> float:
    """The same of weights, after so many steps of AdamW."""
    rates = [LEARNING_RATE] * steps
    return max(
        rounding.after_adam(a, b, rates, num_terms, dtype)
        for a, b in zip(ours, theirs, strict=True)
    )
