"""Real texts of public issues come in; what their threads settled comes out first."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

import trainer_plugins
from trainer_plugins.explain.text import explain_text

CORPUS = Path(__file__).parent / "corpus"
PAGE = Path(trainer_plugins.__file__).parent.parent / "docs" / "explain.md"


class Text(NamedTuple):
    half: str
    is_decided: bool
    file: str
    codes: list[str]


def texts() -> list[Text]:
    lines = (CORPUS / "index.txt").read_text().splitlines()
    fields = [line.split() for line in lines if not line.startswith("#")]
    return [
        Text(half, says == "y", file, codes.split(",")) for half, says, file, codes, _ in fields
    ]


# What their threads settled is not in these texts.
BEYOND_THE_TEXT = {
    "karpathy-nanogpt-236.txt",  # a checkpoint that is still held
    "openmoss-moss-328.txt",  # WSL's limit, behind the driver's bare words
    "huggingface-autotrain-advanced-737.txt",  # somebody else on a ROCm card
    "optuna-optuna-5931.txt",  # trials that are not named
    "huggingface-notebooks-101.txt",
}


@pytest.mark.parametrize("text", texts(), ids=lambda text: text.file)
def test_a_real_text_gets_its_cause(text: Text) -> None:
    answer = explain_text((CORPUS / text.file).read_text(), text.file)
    first = answer.causes[0]

    assert (first.code in text.codes) is (text.file not in BEYOND_THE_TEXT)
    assert (first.grade == "certain") is not bool(first.doubt)  # a guess says what is open
    assert first.evidence
    assert answer.remedies
    assert answer.remedies[0].cause == first.code


def test_what_the_page_counts_is_there() -> None:
    everything = texts()
    assert {text.file for text in everything} == {
        path.name for path in CORPUS.glob("*.txt") if path.name != "index.txt"
    }
    assert not BEYOND_THE_TEXT & {text.file for text in everything if text.is_decided}
    for half in ("seen", "unseen", "later", "mended"):
        some = [text for text in everything if text.half == half]
        decided = sum(text.is_decided for text in some)
        assert re.search(rf"^{half} +{len(some)} .+ {decided} ", PAGE.read_text(), re.M), half
