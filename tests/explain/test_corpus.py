"""Real texts of public issues come in; what their threads settled comes out first."""

import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests.explain.stated import check_figures, explained
from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.advice.vendors import CUDA, VENDORS
from trainer_plugins.cli.as_json import plain

CORPUS = Path(__file__).parent / "corpus"
# Each set's first run, how many were right first, is its result: the rules had not seen them.
FIRST_RUN = {"fresh": 40, "fresh2": 40, "fresh3": 42, "fresh4": 41}
WHOLE_LOGS = {"fresh5": 49}  # its texts are not here
PAGE = Path(__file__).with_name("README.md")


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
    answer = explained((CORPUS / text.file).read_text(), text.file)
    first = answer.causes[0]

    assert (first.code in text.codes) is (text.file not in BEYOND_THE_TEXT)
    assert (first.grade == "certain") is not bool(first.doubt)  # a guess says what is open
    assert first.evidence
    assert answer.remedies
    assert answer.remedies[0].cause == first.code
    for each in answer.causes:
        check_figures(cast(dict[str, Any], plain(each)))


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


def fresh(folder: str) -> list[list[str]]:
    lines = (CORPUS.with_name(folder) / "index.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


WITHOUT_REMEDY = {
    "rocm-therock-2118.txt",  # a test's own limit
    "hiyouga-llamafactory-7275.txt",  # none is known for a Gaudi's generic failure
    # Errors of the program, and no OOM: there is nothing to say.
    "modelscope-ms-swift-5119.txt",
    "philipy1219-comfyui-taylorseer-22.txt",
    "tanhuajie-reason-rft-29.txt",
    "bytedance-seed-bagel-139.txt",
    "hiyouga-llamafactory-10224.txt",
    "sgl-project-sglang-9706.txt",
    # A time-out of NCCL, its segment that is gone: not for want of memory.
    "huggingface-open-r1-620.txt",
    "vllm-project-vllm-18831.txt",
}
PROCESSES = advice.LIST_PROCESSES.flag(Door.SHELL)


def words_of(vendor: str) -> set[str]:
    """What is typed for the cards of one maker."""
    one = next((each for each in VENDORS if each.name == vendor), CUDA)
    commands = (one.processes or PROCESSES, one.memory, one.visible, one.expandable)
    return {re.split("[ ,=]", words)[0] for words in commands if words}


@pytest.mark.parametrize(
    ("folder", "file", "vendor", "codes", "remedies"),
    [pytest.param(name, *each[1:5], id=each[1]) for name in FIRST_RUN for each in fresh(name)],
)
def test_a_text_of_today_gets_its_cause_and_a_remedy_for_its_card(
    folder: str, file: str, vendor: str, codes: str, remedies: str
) -> None:
    answer = explained((CORPUS.with_name(folder) / file).read_text(), file)
    first_two = [one.do for one in answer.remedies[:2]]
    typed = "\n".join(one.do for one in answer.remedies)
    makers = {"CUDA", *(each.name for each in VENDORS)}
    strange = set.union(*map(words_of, makers - {vendor})) - words_of(vendor)

    assert next((one.code for one in answer.causes), "none") in codes.split(",")
    assert any(re.search(remedies, do) for do in first_two) is (file not in WITHOUT_REMEDY)
    assert [word for word in strange if re.search(rf"(?<![\w-]){re.escape(word)}", typed)] == []


@pytest.mark.parametrize(("folder", "right"), [*FIRST_RUN.items(), *WHOLE_LOGS.items()])
def test_the_page_counts_the_fresh_texts(folder: str, right: int) -> None:
    files = [each[1] for each in fresh(folder)]
    num_decided = sum(each[0] == "y" for each in fresh(folder))
    row = rf"^{folder} +{len(files)} +{right} +{num_decided} "
    if folder in FIRST_RUN:
        there = CORPUS.with_name(folder).iterdir()
        assert sorted([*files, "index.txt"]) == sorted(path.name for path in there)
        row += f".* {len(files)}$"
    assert re.search(row, PAGE.read_text(), re.M)
