"""MemoryArguments beside TrainingArguments, on a command line and in a YAML file."""

import inspect
import pkgutil
from dataclasses import dataclass, fields, replace

import pytest
from transformers import HfArgumentParser, TrainingArguments

from trainer_plugins import CudaCacheCallback, MemoryArguments, MemoryWatchdog, callbacks_from_args
from trainer_plugins.plug_in.options import _TARGETS


def test_beside_the_trainers_own(tmp_path, make_trainer) -> None:
    parser = HfArgumentParser((TrainingArguments, MemoryArguments))

    training, memory = parser.parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --memory_warn_fraction 0.8 --memory-stop --memory_release_every_steps 4".split()
    )
    callbacks = callbacks_from_args(memory)
    trainer = make_trainer(*callbacks, max_steps=2)
    trainer.train()

    assert training.output_dir == str(tmp_path)
    _, _, _, cache, *_, watchdog, _ = callbacks
    assert isinstance(cache, CudaCacheCallback)
    assert cache.interval == 4
    assert isinstance(watchdog, MemoryWatchdog)
    assert watchdog.stop
    assert watchdog.budget.warn_fraction == 0.8
    assert "Release it if any rank caches this fraction" in parser.format_help()


def test_in_a_yaml_file_of_trl(tmp_path) -> None:
    trl = pytest.importorskip("trl")
    config = tmp_path / "config.yaml"
    config.write_text(
        "output_dir: runs\nmemory_preset: observe\nmemory_act_fraction: 1\nmemory_stop: true\n"
    )
    parser = trl.TrlParser((TrainingArguments, MemoryArguments))

    _, memory = parser.parse_args_and_config(["--config", str(config), "--memory_every_steps", "5"])
    _, _, watchdog, _ = callbacks_from_args(memory)

    assert (watchdog.every_steps, watchdog.budget.act_fraction, watchdog.stop) == (5, 1, True)


def test_a_bad_value_is_refused_by_the_parser_of_anybody(tmp_path) -> None:
    parser = HfArgumentParser(MemoryArguments)

    with pytest.raises(ValueError, match=r"0\.99 and 0\.97"):
        parser.parse_args_into_dataclasses(["--memory_warn_fraction", "0.99"])
    with pytest.raises(ValueError, match=r"Did you mean observe\?"):
        parser.parse_args_into_dataclasses(["--memory_preset", "observer"])


def test_it_can_be_inherited() -> None:
    @dataclass
    class ScriptArguments(MemoryArguments):
        dataset: str = "mine"

    assert len(callbacks_from_args(ScriptArguments(memory_preset="observe"))) == 4


def test_the_defaults_are_those_of_the_callbacks() -> None:
    for option in fields(MemoryArguments):
        if option.name == "memory_stream_base":
            assert option.default == "no"  # there is no StreamBase then
        elif option.name in _TARGETS:
            dotted, parameter = _TARGETS[option.name]
            assert (
                inspect.signature(pkgutil.resolve_name(dotted)).parameters[parameter].default
                == option.default
            ), option.name


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_every_steps": 0},
        {"memory_logits_to": "disk"},
        {"memory_warn_fraction": 0.0},
        {"memory_warn_fraction": 0.98},
        {"memory_act_fraction": 1.01},
        {"memory_release_every_steps": 0},
        {"memory_min_reclaimable_fraction": -0.1},
        {"memory_min_reclaimable_fraction": 1.1},
    ],
)
def test_what_a_callback_would_refuse_is_refused_before(bad) -> None:
    with pytest.raises(ValueError, match="got"):
        MemoryArguments(**bad)

    later = MemoryArguments()
    ((name, value),) = bad.items()
    setattr(later, name, value)
    with pytest.raises(ValueError, match="got"):
        callbacks_from_args(later)


def test_numbers_for_prometheus_on_request(tmp_path) -> None:
    parser = HfArgumentParser(MemoryArguments)
    (memory,) = parser.parse_args_into_dataclasses(["--memory_prometheus_dir", str(tmp_path)])

    _, _, watchdog, _ = callbacks_from_args(replace(memory, memory_preset="observe"))
    assert watchdog.prometheus_dir == tmp_path
    with pytest.raises(ValueError, match="type str, got 3"):
        MemoryArguments(memory_prometheus_dir=3)  # type: ignore[arg-type]
