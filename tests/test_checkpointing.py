"""transformers 5.23 renames checkpointing: we print the installed name, read both, and cause no warning."""

import shlex
import warnings
from collections.abc import Iterator

import pytest
from transformers import HfArgumentParser, TrainingArguments

from tests.explain.stated import explained
from tests.explain.test_text import FULL, QLORA, TRAINER
from tests.models import tiny_llama
from tests.planner.test_plans import tiny
from trainer_plugins import advice, checkpointing
from trainer_plugins.advice import Door
from trainer_plugins.planner.compare.switches import change_flags
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.options import RunOptions
from trainer_plugins.planner.rehearse.arguments import arguments_of

NAMES = ("gradient_checkpointing", "activation_checkpointing")


@pytest.fixture(autouse=True)
def no_old_name_is_used() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient_checkpointing", category=FutureWarning)
        yield


def parsed(flags: str) -> TrainingArguments:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(shlex.split(flags))
    return args


@pytest.mark.parametrize("entry", [advice.CHECKPOINTING, advice.OFFLOADED_ACTIVATIONS])
def test_the_flags_that_we_print_are_those_of_this_transformers(entry: advice.Advice) -> None:
    args = parsed(entry.flag(Door.TRAINER))
    typed = eval(f"dict({entry.flag(Door.ARGUMENTS)})")

    assert checkpointing.is_asked(args)
    assert checkpointing.is_asked(args.to_dict())
    assert checkpointing.options(args) == checkpointing.options(TrainingArguments(**typed))
    assert bool(checkpointing.options(args)) is (entry is advice.OFFLOADED_ACTIVATIONS)


def test_a_value_that_was_set_later_is_the_one_that_the_trainer_reads() -> None:
    args = TrainingArguments(use_cpu=True)
    assert not checkpointing.is_asked(args)
    setattr(args, checkpointing.NAME, True)
    assert checkpointing.is_asked(args)


@pytest.mark.parametrize("how", [{}, {"use_reentrant": False}, {"every_n_layers": 2}])
def test_a_model_is_switched_on_and_off(how: dict[str, object]) -> None:
    model = tiny_llama()
    if "every_n_layers" in how and not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("not yet in this transformers")
    checkpointing.switch_on(model, how)
    assert checkpointing.is_checkpointing(model)
    checkpointing.switch_off(model)
    assert not checkpointing.is_checkpointing(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_reads_both_names_and_a_change_of_ours_wins(name: str) -> None:
    spellings = ((f"--{name}", "True"), (f"--{name.replace('_', '-')}=True",), {name: True})
    for given in spellings:
        request = request_of(tiny(), RunOptions(training_args=given))
        assert checkpointing.is_asked(arguments_of(request.source))
        if isinstance(given, tuple):
            changed = change_flags(request, **{checkpointing.NAME: False})
            assert not checkpointing.is_asked(arguments_of(changed.source))


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_shows_it_is_not_told_to_switch_it_on(name: str) -> None:
    log = QLORA.replace("gradient_checkpointing", name).format(model="a/b", trainer=TRAINER)
    answer = explained(log + FULL)
    said = " ".join(each.do for each in answer.remedies)
    assert "--gradient_checkpointing True" in said, "in the command of the plan"
    assert not [each for each in answer.remedies if each.do == "--gradient_checkpointing True"]
