"""Kinds of faults that the fifth set of texts showed (fresh5/index.txt), told in our own words."""

import json
from typing import Any

import pytest

from tests.explain.stated import explained

BLUE, PLAIN = "\x1b[34m", "\x1b[39m"
FULL = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 8.00 GiB of"
    " which 100.00 MiB is free. Including non-PyTorch memory, this process has 7.80 GiB memory in"
    " use. Of the allocated memory 7.40 GiB is allocated by PyTorch, and 20.00 MiB is reserved by"
    " PyTorch but unallocated."
)
SITE = r"c:\envs\one\lib\site-packages"
CODE = "try:\n    loss.backward()\nexcept torch.cuda.OutOfMemoryError: print('CUDA out of memory.')"
# The signature that IPython prints names what a model may keep, and nothing here keeps it.
FORWARD = [
    f"{BLUE}OutOfMemoryError{PLAIN}      Traceback (most recent call last)",
    f"Cell {BLUE}In[4], line 2{PLAIN}\n      1 for batch in rows:\n----> 2     model(**batch)",
    rf"File {BLUE}{SITE}\transformers\models\opt\modeling_opt.py:348{PLAIN}, in"
    " OPTDecoderLayer.forward(self, hidden_states, past_key_value, use_cache)\n"
    f"    347 past_key_value = None\n--> 348 hidden = self.activation_fn(hidden)\n",
    f"{BLUE}OutOfMemoryError{PLAIN}: {FULL}",
]
RICH = (
    "╭──────────── Traceback (most recent call last) ────────────╮\n"
    "│ /site-packages/torch/optim/adamw.py:151 in _init_group     │\n"
    "│ ❱ 151      state['exp_avg'] = torch.zeros_like(p)          │\n"
    f"╰────────────────────────────────────────────────────────────╯\nOutOfMemoryError: {FULL}"
)


def notebook(*outputs: dict[str, Any]) -> dict[str, Any]:
    """Make a file of Jupyter: a cell of words, and one of code that has printed `outputs`."""
    words = {"cell_type": "markdown", "source": ["Fewer rows, if you are out of memory"]}
    code = {"cell_type": "code", "source": CODE.splitlines(True), "outputs": list(outputs)}
    return {"cells": [words, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def error(traceback: list[str], evalue: str = FULL) -> dict[str, Any]:
    return {"output_type": "error", "ename": "E", "evalue": evalue, "traceback": traceback}


BAR = {"output_type": "stream", "name": "stderr", "text": ["  0%|  | 0/9\n", "  1%|  | 1/9\n"]}
SHOWN = {"output_type": "display_data", "data": {"text/html": ["<pre>"], "text/plain": [RICH]}}


@pytest.mark.parametrize("indent", [1, None])  # of Jupyter, and of Kaggle
@pytest.mark.parametrize(
    ("output", "code", "place"),
    [
        (error(FORWARD), "capacity", "modeling_opt.py"),
        (SHOWN, "optimizer-state", "adamw.py"),
        (error([]), "capacity", ""),
    ],
)
def test_a_notebook_is_read_by_what_its_cells_have_printed(
    output: dict[str, Any], code: str, place: str, indent: int | None
) -> None:
    answer = explained(json.dumps(notebook(BAR, output), indent=indent))

    assert answer.causes[0].code == code
    assert answer.numbers is not None
    assert [each.file.endswith(place) for each in answer.numbers.frames[:1]] == [True] * bool(place)


def test_a_notebook_whose_end_is_missing_is_read_too() -> None:
    book = notebook(error(FORWARD))
    book["cells"] += notebook(BAR)["cells"]
    whole = json.dumps(book, indent=1)

    cause = explained(whole[: whole.rindex("1/9")]).causes[0]

    assert cause.code == "capacity"
    assert "In[4]:2" in str(cause.evidence)


@pytest.mark.parametrize("outputs", [(), (BAR,), (error(["NameError: model"]),)])
def test_the_code_of_a_notebook_is_no_oom(outputs: tuple[dict[str, Any], ...]) -> None:
    answer = explained(json.dumps(notebook(*outputs)))

    assert answer.causes == ()


def test_a_log_that_prints_json_is_no_notebook() -> None:
    log = json.dumps(notebook(BAR)) + f"\ntorch.OutOfMemoryError: {FULL}"
    assert explained("epoch 1\n" + log).causes[0].code == "capacity"


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        ('{"msg":"writer: failed: write run.wandb: no space left on device"}', "a disk is full"),
        ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "a kernel"),
    ],
)
def test_another_fault_is_called_by_its_name(words: str, summary: str) -> None:
    (cause,) = explained(words).causes

    assert cause.code == "not-an-oom"
    assert summary in cause.summary
