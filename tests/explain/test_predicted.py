"""A log that shows its run gets the first remedy with which the run fits, planned in seconds."""

import io
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer_plugins.cli import app
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.log import explain_log
from trainer_plugins.units import GIB

COMMAND = (
    "python train.py --model_name_or_path {model} --max_length 1024"
    " --per_device_train_batch_size 16 --bf16 True"
)
LORA = f"{COMMAND} --use_peft --lora_r 8"
OOM = (
    '\n  File "/v/site-packages/transformers/trainer.py", line 36, in training_step\n'
    "    loss = self.compute_loss(model, inputs)\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total"
    " capacity of {gib:.2f} GiB of which 0.31 GiB is free. Including non-PyTorch memory, this"
    " process has {gib:.2f} GiB memory in use. Of the allocated memory 3.00 GiB is allocated by"
    " PyTorch, and 354.65 MiB is reserved by PyTorch but unallocated.\n"
)


def explained(command: str, gib: float, predicts: bool = True) -> Explanation:
    text = command + OOM.format(gib=gib)
    return explain_log(io.BytesIO(text.encode()), "a test", predicts)


def planned(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert done.exit_code in (0, 3), done.output
    value: dict[str, object] = json.loads(done.stdout)
    return value


def test_the_first_remedy_makes_the_run_fit_as_its_plan_says() -> None:
    said = explained(LORA.format(model="HuggingFaceTB/SmolLM2-135M"), 12)
    first, *others = said.remedies
    assert (first.grade, first.fits) == ("predicted", True)
    assert any("the plan of what the text shows" in each for each in said.facts)
    rows = int(first.flags["per_device_train_batch_size"])
    assert rows < 16
    assert rows * int(first.flags["gradient_accumulation_steps"]) == 16

    words = shlex.split(next(one.do for one in others if one.do.startswith("trainer-plugins plan")))
    whole = planned(*words[2:], *shlex.split(first.do))
    assert first.predicted_peak_bytes == whole["smallest_card_bytes"]
    assert whole["fits"] is True
    assert any("this package lists" in each for each in whole["assumptions"])  # type: ignore[attr-defined]


def test_what_is_not_enough_is_offered_only_together() -> None:
    command = LORA.format(model="HuggingFaceTB/SmolLM2-360M").replace("size 16", "size 2")
    command = command.replace("_length 1024", "_length 2048")
    rows, checkpoints = "--per_device_train_batch_size 1", "--gradient_checkpointing True"
    assert explained(command, 4.0, predicts=False).remedies[0].do.startswith(rows)
    together, *others = explained(command, 4.0).remedies
    assert together.do.startswith(rows)
    assert together.do.endswith(checkpoints)
    assert not any(each.flags for each in others)
    too_small, *others = explained(command, 1.9).remedies
    assert too_small.do.startswith("trainer-plugins plan --model")
    assert not any(each.flags for each in others)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (LORA.format(model="HuggingFaceTB/SmolLM2-135M"), "needs less memory"),  # than 79 GiB
        (LORA.format(model="my/model"), ""),
        (LORA.format(model="Qwen/Qwen2.5-VL-7B-Instruct"), ""),
        # Neither full training nor an adapter.
        ("model_name: Qwen/Qwen2.5-7B\nmax_length: 1024\nper_device_train_batch_size: 16", ""),
        (LORA.format(model="Qwen/Qwen2.5-7B") + " --deepspeed my.json", ""),
        (
            "llamafactory-cli train; finetuning_type: lora\n"
            + LORA.format(model="Qwen/Qwen2.5-7B"),
            "",
        ),
        (LORA.format(model="Qwen/Qwen2.5-7B").replace("--max_length 1024", ""), ""),
    ],
)
def test_another_run_than_the_one_that_died_is_not_planned(command: str, why: str) -> None:
    said = explained(command, 79.1)
    assert "predicted" not in {each.grade for each in said.remedies}
    assert [each for each in said.unknown if "the effect of the remedies" in each and why] == [
        each for each in said.unknown if why and why in each
    ]
    assert bool(why) is any("the effect of the remedies" in each for each in said.unknown)


def test_no_predict_plans_nothing(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LORA.format(model="HuggingFaceTB/SmolLM2-135M") + OOM.format(gib=12 * GIB / GIB))
    done = CliRunner().invoke(app, ["explain", str(log), "--no-predict"])
    assert "planning" not in done.stderr
    assert "Peaks at" not in done.stdout
