"""The command `trainer-plugins plan` of a model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import TrainingArguments

from tests.models import SMALL_GPT2
from tests.schemas import read_answer
from trainer_plugins.cli import app
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.plan_text import verdict
from trainer_plugins.units import MIB

CONFIGS = Path(__file__).parent / "configs"
CHECKPOINTING = (
    *("--gradient-checkpointing", "True"),
    *("--gradient-checkpointing-kwargs", '{"use_reentrant": false}'),
)
QWEN_LORA = [
    *("--model", str(CONFIGS / "qwen2.5-7b.json")),
    *("--lora-r", "128", "--seq-length", "1024", "--gpu", "16GiB", "--dtype", "bf16"),
]


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


@pytest.mark.all
def test_a_run_that_does_not_fit_is_exit_code_3_and_says_what_would(tmp_path: Path):
    config = json.loads((CONFIGS / "qwen2.5-7b.json").read_text())
    config |= {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    place = ("--model", str(tmp_path), "--gpu", "8GiB,sm_90")
    rows = ("--per-device-train-batch-size", "2")
    done = plan(*QWEN_LORA, *place, *rows, *CHECKPOINTING, "--json")
    assert done.exit_code == 3, done.output
    assert read_answer(done.stdout, "plan")["margin_bytes"] < 0
    found = MemoryPlan.from_json(done.stdout)
    assert found.fits is False
    assert found.fails_on_less is not None
    assert found.versions["torch"]
    assert any("padding" in line for line in found.assumptions)
    assert found.planned["batch"].startswith("2 rows x 1 accumulation step x 1 GPU")
    assert "--lora-r 128" in found.planned["command"]
    assert found.proposals or found.tried_without_success
    for each in found.proposals:
        assert each.micro_batch * each.accumulation_steps == 2, "the effective batch is kept"
        assert each.margin_bytes >= 0.046 * each.reserved_peak_bytes
        assert each.price
    assert found.num_trainable_parameters == 128 * 6 * (
        (3584 + 3584) * 2 + (3584 + 512) * 2 + (3584 + 18944) * 3
    )  # r of each linear layer: what goes in, and what comes out


@pytest.mark.all
def test_the_report_for_people(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_GPT2))
    asked = ("--model", str(tmp_path), "--seq-length", "64", "--gpu", "t4")
    done = plan(*asked, "--eval_strategy", "epoch", "--verbose")
    assert done.exit_code == 0, done.output
    for words in (
        "Fits on t4 (14.56 GiB)",
        "nvidia-smi",
        "optimizer states",
        "evaluation",
        "Planned: model GPT2LMHeadModel",
        "Known error",
    ):
        assert words in done.output


def test_the_answer_is_few_lines_and_its_first_change_makes_the_run_fit(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_GPT2, "vocab_size": 4096}))
    asked = ("--model", str(tmp_path), "--seq-length", "64", "--per_device_train_batch_size", "16")
    done = plan(*asked, "--gpu", "594MiB")
    assert done.exit_code == 3, done.output
    first, planned, peak, change, flags, accuracy, more = done.stdout.splitlines()
    assert first.startswith("Does not fit on 594MiB: ")
    assert first.endswith("short, in the backward pass")
    assert planned.startswith(
        "Planned   batch 16 rows x 1 accumulation step x 1 GPU = 16 rows per step; length"
    )
    assert "card kernels of rtx4060 (sm_89), guessed from its size" in planned
    assert re.match(
        r"Peak      .* MiB logits and loss, .*; the run needs a card with at least [\d.]+ MiB$",
        peak,
    )
    assert re.match(
        r"Try       \d rows? x \d+ accumulation steps?: [\d.]+ MiB to spare. Cost: the same tr",
        change,
    )
    assert re.match(r"Accuracy  allocated within ", accuracy)
    assert re.match(r"More      \d assumptions(, \d suggestions?)?: --verbose", more)
    again = plan(*asked, "--gpu", "594MiB", *flags.split())
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "/no/such/place"], "no model config at /no/such/place"),
        ([*QWEN_LORA, "--num-gpus", "0"], "--num-gpus must be at least 1, got 0"),
        ([*QWEN_LORA, "--gpu", "gtx"], "unknown GPU 'gtx'"),
        ([*QWEN_LORA, "--peft-config", "adapter.json"], "both name an adapter to train"),
        (["--model", __file__], "is not JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], line: str):
    done = plan(*arguments)
    assert done.exit_code == 2
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_weights_that_do_not_fit_alone_are_said(tmp_path: Path):
    wide = {"n_embd": 256, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_GPT2, **wide}))
    done = plan("--model", str(tmp_path), "--seq-length", "8", "--gpu", "513MiB")
    assert done.exit_code == 3, done.output
    assert re.search(
        r"The loaded model alone takes [\d.]+ MiB: a smaller batch cannot help", done.stdout
    )


@pytest.mark.all
@pytest.mark.skipif(
    not hasattr(TrainingArguments, "activation_checkpointing"),
    reason="this transformers cannot move checkpoints to main memory",
)
def test_main_memory_has_a_verdict_of_its_own(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_GPT2))
    asked = ("--model", str(tmp_path), "--seq-length", "64", "--gpu", "t4")
    offload = ("--activation_checkpointing", "True", "--activation_checkpointing_kwargs")
    done = plan(*asked, *offload, '{"offload": true}', "--host-memory", "2MiB", "--json")
    assert done.exit_code == 3, done.output
    found = MemoryPlan.from_json(done.stdout)
    assert verdict(found).startswith("Does not fit in main memory. It fits on t4 (14.56 GiB): ")
    assert (found.fits, found.fits_card) == (False, True)
    assert found.host_shortage is not None
    assert "of main memory, but has 2.0 MiB" in found.host_shortage
    assert found.host_bytes_per_node > found.host_process_bytes_per_node > 500 * MIB
    # save_on_cpu pins each layer's input, in a block of a power of two
    assert found.host_pinned_bytes_per_node > 0
    assert plan(*asked, "--pinned-memory", "lots").exit_code == 2
    short = replace(found, fits=False, host_shortage=None, failed_request_bytes=512)
    in_pieces = replace(short, smallest_card_bytes=None)
    assert "t4 (14.56 GiB): no contiguous 2.0 MiB free, in the" in verdict(in_pieces)


def test_a_search_looks_at_main_memory_too(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_GPT2))
    done = plan(*("--model", str(tmp_path), "--seq-length", "64", "--gpu", "t4", "--search"),
                "--per_device_train_batch_size", "1", "--host-memory", "2MiB")  # fmt: skip
    assert done.exit_code == 3, done.output
    assert done.stdout.startswith("Nothing fits in main memory, not even the smallest micro-batch")
    assert "with checkpointing, 64 tokens: main memory is short" in done.stderr


@pytest.mark.all
def test_what_a_card_has_to_spare_is_without_the_cache_that_it_releases(tmp_path: Path):
    """What a card without a limit reserves is more than a full one: that is no shortage."""
    wide = {"n_embd": 512, "n_layer": 4}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_GPT2, **wide}))
    asked = ("--model", str(tmp_path), "--seq-length", "8", "--optim", "adafactor", "--json")
    whole = MemoryPlan.from_json(plan(*asked, "--gpu", "24GiB,sm_80").stdout)
    least, held = whole.smallest_card_bytes, whole.nvidia_smi_peak_bytes
    assert least is not None
    assert held - least > 4 * MIB
    done = plan(*asked, "--gpu", f"{(least + held) // 2 // MIB}MiB,sm_80")
    found = MemoryPlan.from_json(done.stdout)
    assert (done.exit_code, found.fits) == (0, True)
    assert 0 <= (found.margin_bytes or -1) < held - least
    assert re.search(r": \d+\.\d MiB to spare, in the ", verdict(found))
