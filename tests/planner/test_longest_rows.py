"""A plan, a check and survival look at the longest row of a data set, wherever it stands."""

from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from tests.models import tiny_llama
from trainer_plugins import MemoryPlan
from trainer_plugins.drycuda.predict import predict_one
from trainer_plugins.longest import longest_rows
from trainer_plugins.planner.rehearse.gather import longest_batch, request_of

NUM_ROWS, AT, SHORT, LONG = 30_000, 25_000, 4, 200


def row(index: int) -> dict[str, list[int]]:
    tokens = [1] * (LONG if index == AT else SHORT)
    return {"input_ids": tokens, "labels": tokens}


class OneByOne(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return row(index)


ROWS = [row(index) for index in range(NUM_ROWS)]
TABLE = Dataset.from_list(ROWS)
NUMBERS = Dataset.from_dict({"number": range(NUM_ROWS)})


def pad(rows):
    tokens = [torch.as_tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"input_ids": padded, "labels": padded}


def trainer_of(folder, dataset, **arguments) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=False,
        **arguments,
    )
    return Trainer(model=tiny_llama(), args=args, train_dataset=dataset, data_collator=pad)


@pytest.mark.parametrize(
    ("dataset", "at"),
    [
        (ROWS, AT),
        (OneByOne(), AT),
        (TABLE, AT),
        (TABLE.with_format("torch"), AT),
        (TABLE.select(range(NUM_ROWS - 1, -1, -1)), NUM_ROWS - 1 - AT),
        (NUMBERS.with_transform(lambda batch: {
            name: [row(number)[name] for number in batch["number"]]
            for name in ("input_ids", "labels")
        }), AT),
    ],
    ids=["list", "fetched", "table", "formatted", "backwards", "made when it is read"],
)  # fmt: skip
def test_the_longest_row_is_found_wherever_it_stands(tmp_path, dataset, at: int) -> None:
    batch: Any = longest_batch(trainer_of(tmp_path, dataset, remove_unused_columns=False))[0]
    assert batch["input_ids"].shape == (2, LONG)
    assert longest_rows(dataset, 1) == [at]


@pytest.mark.parametrize("others", [{}, {"labels": 1}], ids=["raw", "with a label"])
def test_rows_that_the_collator_turns_into_tokens_are_measured_as_it_makes_them(
    tmp_path, others
) -> None:
    """As processors of images and text do: a row itself does not tell how long it will be."""
    rows = [{"number": number, **others} for number in range(64)]
    trainer = trainer_of(tmp_path, rows, remove_unused_columns=False)

    def tokenize(raw):
        return pad([{"input_ids": [1] * (LONG if one["number"] == 50 else SHORT)} for one in raw])

    trainer.data_collator = tokenize
    batch, unsure = longest_batch(trainer)
    assert (batch["input_ids"].shape, unsure) == ((2, LONG), "")

    def tokenize_pairs(raw):
        assert len(raw) == 2, "these are pairs"
        return tokenize(raw)

    trainer.data_collator = tokenize_pairs
    _, unsure = longest_batch(trainer)
    assert "the collator failed on a single one: AssertionError: these are pairs" in unsure


@pytest.mark.all
def test_a_plan_names_the_data_set_that_it_could_not_read_whole(tmp_path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    plan = predict_one(request_of(trainer_of(tmp_path, stream), None, "", None))
    assert isinstance(plan, MemoryPlan)
    told = "train_dataset (IterableDataset) has no length, and its first 100 were read"
    assert any(told in line for line in plan.not_reliable)


@pytest.mark.all
def test_columns_that_only_the_trainers_own_loader_reads(tmp_path) -> None:
    """As sentence-transformers does: rows are texts, and its collator makes tokens of them."""

    class OfTexts(Trainer):
        def get_train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(texts, 2, collate_fn=self.data_collator)

    words = ["a" * (LONG if index == 70 else SHORT) for index in range(100)]
    texts = Dataset.from_dict({"anchor": words})
    usual = trainer_of(tmp_path, [row(AT), row(0)])
    own = OfTexts(
        usual.model,
        usual.args,
        lambda rows: pad([{"input_ids": [*each["anchor"].encode()]} for each in rows]),
        train_dataset=texts,
    )
    batch: Any = longest_batch(own)[0]
    assert batch["input_ids"].shape == (2, LONG)
    plans = [predict_one(request_of(each, None, "", None)) for each in (usual, own)]
    own.train()
    assert plans[1].moments == plans[0].moments
