"""Every class of transformers that takes a loss: exact, or refused by name; none is wrong in silence."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.survival.classes.judge import class_names, outcome_of
from tests.survival.classes.table import read_table, table_version

NUM_SHARDS = 16
RUN, NUM_RUNS = map(int, os.environ.get("CLASS_SHARDS", "0/1").split("/"))
TABLE = read_table()
PAGE = Path(__file__).parents[2] / "docs" / "survival.md"
IS_PINNED = version("transformers") == table_version()
KINDS = (
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "BertForMaskedLM",
    "ViTForImageClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
    "Wav2Vec2ForCTC",
    "CLIPForImageClassification",
)
"""One of each kind: on every run, in seconds."""

ONCE_WRONG = (
    "BioGptForTokenClassification",
    "XLMRobertaXLForTokenClassification",
    "YosoForTokenClassification",
    "MraForTokenClassification",
    "FunnelForTokenClassification",
    "BartForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "NllbMoeForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration",
    "ResNetForImageClassification",
)


@pytest.fixture(autouse=True, scope="module")
def _thaw():
    yield
    gc.unfreeze()


def look(names, folder) -> None:
    """None is wrong, whatever the version; of the version that the docs are of, each is as they say."""
    outcomes = {
        name: outcome for name in names if (outcome := outcome_of(name, folder)) is not None
    }
    gc.collect()

    assert not {name: outcome for name, outcome in outcomes.items() if outcome.kind == "wrong"}
    assert any(outcome.kind == "exact" for outcome in outcomes.values())
    if IS_PINNED:
        told = {name: TABLE[name] for name in outcomes if name in TABLE}
        assert {name: outcomes[name] for name in told} == told


def test_one_of_each_kind(tmp_path) -> None:
    look(sorted({*KINDS} & {*class_names()}), tmp_path)


@pytest.mark.all
def test_each_that_was_ever_wrong(tmp_path) -> None:
    look(sorted({*ONCE_WRONG} & {*class_names()}), tmp_path)


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize("shard", range(RUN, NUM_SHARDS, NUM_RUNS))
def test_every_class(tmp_path, shard: int) -> None:
    look(class_names()[shard::NUM_SHARDS], tmp_path)


@pytest.mark.skipif(not IS_PINNED, reason="the table is of another version of transformers")
def test_the_table_is_of_these_classes_and_has_none_that_is_wrong() -> None:
    assert set(TABLE) <= set(class_names())
    assert "wrong" not in {outcome.kind for outcome in TABLE.values()}


def test_the_page_has_the_counts_of_the_table() -> None:
    kinds = [outcome.kind for outcome in TABLE.values()]
    num_refused = kinds.count("refused") + kinds.count("refused when measured")
    counts = (
        f"Of the {len(TABLE)} model classes of transformers {table_version().rpartition('.')[0]} "
        f"that compute a loss, {kinds.count('exact')} are exact, {num_refused} are refused and "
        f"{kinds.count('not tried')} were not tried."
    )
    assert counts in " ".join(PAGE.read_text().split())
