"""A part of a batch is what the collator would have made of those examples."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.survival.failing import padded, ragged_rows
from trainer_plugins.survival.exact.layouts import Packed, Pairs, Rows
from trainer_plugins.survival.exact.shares import IndivisibleError


def same(ours: dict, theirs: dict) -> bool:
    def equal(a, b) -> bool:
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))

    return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in theirs)


def test_packed() -> None:
    rows = [{"input_ids": row["input_ids"].tolist()} for row in ragged_rows(5)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate(rows)

    assert Packed().count(batch) == 5
    assert same(Packed().take(batch, 1, 4), collate(rows[1:4]))


def test_rows_with_lists_and_flags() -> None:
    batch: dict = {**padded(ragged_rows(4)), "names": ["a", "b", "c", "d"], "use_cache": False}

    part = Rows().take(batch, 1, 3)

    assert (part["names"], part["use_cache"]) == (["b", "c"], False)
    assert torch.equal(part["input_ids"], batch["input_ids"][1:3])


def test_pairs() -> None:
    batch = {"input_ids": torch.arange(6)[:, None], "margin": torch.arange(3)}

    assert Pairs().count(batch) == 3
    assert same(
        Pairs().take(batch, 1, 3),
        {"input_ids": torch.tensor([[1], [2], [4], [5]]), "margin": torch.tensor([1, 2])},
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_probe_begins_where_a_row_is_like_no_other(side: str) -> None:
    """Prompts of unequal lengths, two answers to each: all rows differ in what is kept of them."""
    rows = [
        torch.cat([torch.full((prompt,), 7), torch.arange(20) % 3 + answer])
        for answer in (8, 30)
        for prompt in (40, 90)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    batch["position_ids"] = torch.arange(110)[None]

    probe = Pairs().probe(batch, 2)

    begin = [40, 90, 40, 90] if side == "right" else [90] * 4
    assert probe["position_ids"].tolist() == [list(range(b, b + 16)) for b in begin]
    assert len(probe["input_ids"].unique(dim=0)) == 2
    assert (probe["input_ids"] > 7).all()
    assert probe["attention_mask"][1].all()
    short = Pairs().probe({name: value[..., :92] for name, value in batch.items()}, 2)
    assert short["input_ids"].shape == (4, 16)


def test_labels_of_a_decoder_go_by_its_mask() -> None:
    tokens, mask = torch.full((2, 5), 7), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    encoder = {"input_ids": tokens[:, :4], "attention_mask": torch.ones(2, 4).long()}
    decoder = {"decoder_attention_mask": mask, "labels": tokens}

    probe = Rows().probe({**encoder, **decoder}, 2)

    # a third of what is shown, and the token that is hidden now
    assert probe["labels"].tolist() == [[7, -100, 7, -100, -100], [7, 7, 7, 7, 7]]
    assert probe["decoder_attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_a_packed_row_with_more_than_one_row_of_something_else() -> None:
    batch = DataCollatorWithFlattening()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])

    with pytest.raises(IndivisibleError, match=r"`pixel_values` has the shape \[2, 3, 8, 8\]"):
        Packed().count({**batch, "pixel_values": torch.zeros(2, 3, 8, 8)})
