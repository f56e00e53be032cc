"""What kind of run it is, is asked once."""

from dataclasses import replace

import pytest
from transformers import Seq2SeqTrainingArguments

from tests.planner.test_plans import request, tiny
from trainer_plugins.planner.kind import (
    Wrapper,
    cards_of_a_row,
    kind_of,
)


def kind(asked=None, **args):
    asked = request(tiny()) if asked is None else asked
    return kind_of(asked, Seq2SeqTrainingArguments("runs", use_cpu=True, **args))


@pytest.mark.parametrize(
    ("changed", "wrapper"),
    [
        ({}, Wrapper.ONE_CARD),
        ({"num_gpus": 2}, Wrapper.DDP),
        ({"environment": {"ACCELERATE_USE_FSDP": "true"}}, Wrapper.FSDP1),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}, "num_gpus": 2}, Wrapper.DEEPSPEED),
        (
            {
                "environment": {
                    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                    "PARALLELISM_CONFIG_TP_SIZE": "2",
                },
                "num_gpus": 2,
            },
            Wrapper.TENSOR_PARALLEL,
        ),
    ],
)
def test_the_launch_decides_what_divides_the_work(monkeypatch, changed, wrapper):
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    found = kind(replace(request(tiny()), **changed))
    assert found.wrapper is wrapper
    assert cards_of_a_row(found.sizes) == (2 if wrapper is Wrapper.TENSOR_PARALLEL else 1)


FACTS = (
    "evaluates",
    "saves",
    "is_quantised",
    "is_streamed",
    "trains_on_completions",
)


@pytest.mark.parametrize(
    ("args", "source", "true"),
    [
        ({"save_strategy": "no", "save_only_model": True}, {}, set()),
        ({}, {}, {"saves"}),
        ({"do_eval": True, "save_only_model": True}, {}, {"evaluates", "saves"}),
        (
            {"save_strategy": "no", "save_only_model": True, "optim": "paged_adamw_8bit"},
            {"quantisation": {"load_in_4bit": True}},
            {"is_quantised"},
        ),
    ],
)
def test_the_arguments_and_the_source_decide_about_the_rest(args, source, true):
    found = kind(request(tiny(), **source), **args)
    assert {name for name in FACTS if getattr(found, name)} == true
