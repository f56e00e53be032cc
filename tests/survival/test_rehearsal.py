"""The longest rows are computed before step 1: nothing fails in training then, and nothing else is different."""

import copy
import gc
import json
import logging
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import Trainer

from tests.models import tiny_llama
from tests.survival.failing import (
    Gradients,
    gradients_by_rounding,
    know_limit,
    off_by,
    off_by_steps,
    padded,
    small_trainer,
    weights_by_rounding,
)
from trainer_plugins import survive_oom
from trainer_plugins.longest import longest_rows
from trainer_plugins.record.timeline import Remark, read_timeline
from trainer_plugins.survival.attempt.attempt import card_of
from trainer_plugins.survival.limit.limit import read_allowed_bytes
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.units import MIB

LARGE = 256


@pytest.fixture(autouse=True)
def _rehearsals_are_heard(caplog) -> None:
    caplog.set_level(logging.INFO, "trainer_plugins")


def test_a_limit_of_the_process_is_all_that_it_may_use(simgpu) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, 0)
    module = torch.get_device_module(device)
    reading = card_of(device).read()
    assert reading is not None
    assert read_allowed_bytes(reading, device) == reading.total_bytes
    module.set_per_process_memory_fraction(0.25, device)
    try:
        assert read_allowed_bytes(reading, device) == reading.total_bytes // 4
    finally:
        module.set_per_process_memory_fraction(1.0, device)


def rows(num_rows: int = 256) -> list[dict[str, torch.Tensor]]:
    """16 to 64 tokens each. The longest are where no first micro-batch is."""
    dice = torch.Generator().manual_seed(3)
    lengths = torch.randint(16, 65, (num_rows,), generator=dice).sort().values.tolist()
    return [{"input_ids": torch.randint(1, 127, (length,), generator=dice)} for length in lengths]


def drawing(examples):
    """A collator that masks, with every generator there is, as those of masked language models do."""
    batch = padded(examples)
    for _ in range(random.randint(1, 4)):
        batch["input_ids"][np.random.randint(len(examples)), torch.randint(0, 8, ())] = 5
    return batch


class Trained:
    """Four steps of twice 32 rows."""

    def __init__(
        self, folder, simgpu, mib: int, attach=True, limit=None, model=None, resume=None, **kwargs
    ) -> None:
        gc.collect()
        torch.accelerator.empty_cache()
        simgpu.set_capacity(mib * MIB)
        options = {
            name: kwargs.pop(name)
            for name in ("plan_first", "ladder", "min_micro_batch")
            if name in kwargs
        }
        self.trainer = small_trainer(
            folder, tiny_llama(**(model or {})), steps=4, use_cpu=False, per_device_train_batch_size=32,
            **{"train_dataset": rows(), "data_collator": padded, **kwargs},
        )  # fmt: skip
        if attach:
            survive_oom(self.trainer, **options)
        if limit is not None:
            know_limit(self.trainer, limit, "step_begin")
        self.gradients: list[list] = []
        self.trainer.add_callback(Gradients(self.gradients))
        self.trainer.train(resume_from_checkpoint=resume)
        self.weights = [parameter.detach().cpu() for parameter in self.trainer.model.parameters()]
        file = folder / "_trainer_plugins" / "memory" / "rank-0.jsonl"
        entries = read_timeline(file) if file.exists() else []
        self.findings = [entry.finding for entry in entries if isinstance(entry, Remark)]

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]

    @property
    def limit(self) -> float:
        return memo_of(self.trainer).limit

    @property
    def losses(self) -> list[float]:
        return [logs["loss"] for logs in self.trainer.state.log_history if "loss" in logs]


@pytest.mark.all(unless=lambda mib: mib == 10)
@pytest.mark.parametrize("mib", [12, 10, 8])
def test_nothing_fails_in_training_on_a_card_that_is_too_small(tmp_path, simgpu, mib: int) -> None:
    reactive = Trained(tmp_path / "reactive", simgpu, mib, plan_first=False)
    small = Trained(tmp_path / "small", simgpu, mib)
    large = Trained(tmp_path / "large", simgpu, LARGE, attach=False)

    assert "out-of-memory-survived" in reactive.codes
    assert small.codes == ["out-of-memory-foreseen", "micro-batches-divided"]
    assert gradients_by_rounding(small.gradients, large.gradients) <= 1
    assert weights_by_rounding(small.weights, large.weights, steps=4) <= 1


DROPOUT = {"model": {"attention_dropout": 0.2}, "data_collator": drawing}


class CountsPasses(Trainer):
    """It warms up with its passes, which a buffer, an attribute and the Trainer count."""

    def __init__(self, model, **kwargs) -> None:
        model.register_buffer("num_passes", torch.zeros((), dtype=torch.long))
        model.lm_head.num_passes, self.num_prepared = 0, 0
        model.register_forward_pre_hook(lambda module, _: module.num_passes.add_(1) and None)
        model.lm_head.register_forward_hook(self.warm_up)
        super().__init__(model, **kwargs)

    @staticmethod
    def warm_up(module, args, output):
        module.num_passes += 1
        return output * min(1.0, module.num_passes / 20)

    def _prepare_inputs(self, inputs):
        self.num_prepared += 1
        return super()._prepare_inputs(inputs)


OF_A_MODULE = random.Random(1)


def spoilt_by_a_closure():
    dice, generator = random.Random(2), torch.Generator().manual_seed(3)

    def spoilt(row):
        ids = row["input_ids"].clone()
        ids[torch.randint(0, 8, (2,), generator=generator)] = 1 + dice.randrange(9)
        ids[0] = 1 + OF_A_MODULE.randrange(9)
        return {"input_ids": ids}

    return spoilt


class Augmented(torch.utils.data.Dataset):
    """Draws other augmentations each time, from generators of its own, and counts."""

    def __init__(self) -> None:
        self.rows, self.numpy = rows(), np.random.default_rng(4)
        self.transforms, self.num_drawn = {"first": [spoilt_by_a_closure()]}, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        self.num_drawn += 1
        row = self.transforms["first"][0](self.rows[index])
        row["input_ids"][1] = 1 + (self.numpy.integers(9) + self.num_drawn) % 9
        return row


def test_it_leaves_no_trace_where_everything_fits(tmp_path, simgpu, caplog) -> None:
    def make():
        OF_A_MODULE.seed(1)
        own = torch.utils.data.Subset(Augmented(), range(250))
        return {**DROPOUT, "trainer_class": CountsPasses, "train_dataset": own}

    rehearsed = Trained(tmp_path / "rehearsed", simgpu, LARGE, **make())
    assert rehearsed.trainer.model.num_passes == rehearsed.trainer.model.lm_head.num_passes == 8
    assert rehearsed.trainer.num_prepared == 8
    assert (
        caplog.text.count("in 1 forward and backward passes")
        == caplog.text.count("they fit at once")
        == 1
    )
    alone = Trained(tmp_path / "alone", simgpu, LARGE, attach=False, **make())

    assert (
        off_by_steps(rehearsed.gradients, alone.gradients)
        == off_by(rehearsed.weights, alone.weights)
        == 0
    )
    assert rehearsed.losses == alone.losses
    assert rehearsed.codes == []


@pytest.mark.all
def test_nor_where_it_failed_on_the_way(tmp_path, simgpu) -> None:
    rehearsed = Trained(tmp_path / "rehearsed", simgpu, 8, **DROPOUT)
    assert rehearsed.codes == ["out-of-memory-foreseen", "micro-batches-divided"]
    knowing = Trained(
        tmp_path / "knowing", simgpu, 8, plan_first=False, limit=rehearsed.limit, **DROPOUT
    )

    assert knowing.codes == ["micro-batches-divided"]
    assert (
        off_by_steps(rehearsed.gradients, knowing.gradients)
        == off_by(rehearsed.weights, knowing.weights)
        == 0
    )
    assert rehearsed.losses == knowing.losses


@pytest.mark.parametrize("mib", [LARGE, 10])
@pytest.mark.all(but=1)
def test_a_resumed_run_knows_what_fits(tmp_path, simgpu, caplog, mib: int) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = Trained(tmp_path / "run", simgpu, mib, **saved)
    assert caplog.text.count("rehearsed the 32 longest rows") == 1
    caplog.clear()
    resumed = Trained(
        tmp_path / "run", simgpu, mib, resume=str(tmp_path / "run" / "checkpoint-2"), **saved
    )

    kept = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert kept["stateful_callbacks"]["SurvivalMemo"]["attributes"]["is_rehearsed"]
    assert "rehearsed" not in caplog.text
    assert resumed.limit == whole.limit
    assert off_by(resumed.weights, whole.weights) == 0


@pytest.mark.all
def test_where_one_row_does_not_fit_checkpointing_is_switched_on(tmp_path, simgpu) -> None:
    wide = {"vocab_size": 128, "num_hidden_layers": 12}
    small = Trained(tmp_path, simgpu, 7, model=wide, min_micro_batch=8)

    assert small.codes == ["out-of-memory-foreseen", "micro-batches-divided"]
    assert "fit at once, with checkpointing switched on" in small.findings[0].summary
    assert small.trainer.state.global_step == 4


class OneAfterTheOther(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.order = iter(self.rows * 9)

    def __getitem__(self, index):
        return next(self.order)


def test_rows_that_are_gone_once_drawn_are_not_rehearsed(tmp_path, simgpu, caplog) -> None:
    data = {"train_dataset": OneAfterTheOther()}
    Trained(tmp_path, simgpu, LARGE, **data)
    assert "nothing is rehearsed: rows come from a list_iterator, which cannot" in caplog.text


class Streamed(IterableDataset):
    def __iter__(self):
        yield from rows()


def test_what_is_streamed_is_not_looked_at(tmp_path, simgpu, caplog) -> None:
    small = Trained(tmp_path / "small", simgpu, 8, train_dataset=Streamed())
    large = Trained(tmp_path / "large", simgpu, LARGE, attach=False, train_dataset=Streamed())

    assert "nothing is rehearsed: Streamed cannot return single rows" in caplog.text
    assert set(small.codes) == {"out-of-memory-survived"}
    assert weights_by_rounding(small.weights, large.weights, steps=4) <= 1


class KeepsTheModel:
    """As the collator of sequence-to-sequence models does."""

    def __init__(self, model) -> None:
        self.model = model
        self.seen: list[int] = []

    def __call__(self, examples):
        self.seen.append(self.model.lm_head.weight.data_ptr())
        return padded(examples)

    def __deepcopy__(self, memo):
        other = KeepsTheModel(copy.deepcopy(self.model, memo))
        other.seen = self.seen
        return other


def test_the_model_that_a_collator_keeps_is_not_copied(tmp_path, simgpu, caplog) -> None:
    collator = KeepsTheModel(tiny_llama())
    trainer = small_trainer(
        tmp_path, collator.model, use_cpu=False, per_device_train_batch_size=32, train_dataset=rows(),
        data_collator=collator,
    )  # fmt: skip
    survive_oom(trainer)
    trainer.train()

    assert "rehearsed the 32 longest rows" in caplog.text
    assert set(collator.seen) == {trainer.model.lm_head.weight.data_ptr()}


class WithoutTheLast(Trainer):
    def _get_train_sampler(self, *_):
        return range(256)


def test_a_row_that_no_sampler_draws_may_be_none_to_train_on(tmp_path, simgpu, caplog) -> None:
    no_tokens = {"input_ids": torch.full((100,), 5000)}
    options = {"train_dataset": [*rows(), no_tokens], "trainer_class": WithoutTheLast}
    rehearsed = Trained(tmp_path / "rehearsed", simgpu, LARGE, **options)
    alone = Trained(tmp_path / "alone", simgpu, LARGE, attach=False, **options)

    assert "SurvivalMemo failed; training continues" in caplog.text
    assert off_by_steps(rehearsed.gradients, alone.gradients) == 0


def test_completions_are_not_generated_before_their_time(tmp_path, simgpu, caplog) -> None:
    pytest.importorskip("trl")
    from tests.survival.test_trl import grpo

    def losses(folder, attach: bool) -> list[float]:
        trainer = grpo(folder, use_cpu=False)
        if attach:
            survive_oom(trainer)
        trainer.train()
        return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]

    assert losses(tmp_path / "attached", True) == losses(tmp_path / "alone", False)
    assert "nothing is rehearsed: the length of completions is unknown" in caplog.text


LENGTHS = [3, 9, 1, 7, 5]
TABLE = Dataset.from_dict(
    {"input_ids": [[1] * n for n in LENGTHS], "position_ids": [[1] * 50 for n in LENGTHS]}
)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (TABLE, [1, 3, 2]),
        (TABLE.select([4, 3, 2]), [1, 0, 2]),
        (TABLE.remove_columns("input_ids").add_column("length", [5, 1, 1, 1, 9]), [4, 0, 1]),
        (TABLE.with_format("torch"), [1, 3, 2]),
        ([{"prompt_ids": [1] * n, "chosen_ids": [1]} for n in LENGTHS], [1, 3, 2]),
        ([torch.ones(3)] * 4, [0, 1, 0]),
        (Streamed(), []),
        ([], []),
    ],
    ids=["table", "some of it", "length", "formatted", "pairs", "no names", "stream", "empty"],
)
def test_the_longest_rows_and_the_shortest(dataset, expected: list[int]) -> None:
    assert longest_rows(dataset, 3) == expected
