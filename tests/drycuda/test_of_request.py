"""A plan that has no command, on the dry card: of a config, and of a Trainer in a process of its own."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.drycuda.scripts import ROOT, place, typed
from tests.processes import run
from trainer_plugins.drycuda.cuda_build import site_with_cuda
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

NOTEBOOK = """
import sys
import contextlib
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trainer_plugins import plan_run

sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
rows = [
    {"input_ids": torch.randint(0, 1000, (number,)), "labels": torch.randint(0, 1000, (number,))}
    for number in range(64, 257, 32)
]

class Padding:
    def __call__(self, batch):
        pad = lambda name: torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], True, 0)
        ids = pad("input_ids")
        return {"input_ids": ids, "labels": pad("labels"), "attention_mask": (ids > 0).long()}

class Twice(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        with contextlib.suppress(OSError):
            open("written", "w").close()
        made = model(**inputs)
        return (2 * made.loss, made) if return_outputs else 2 * made.loss

args = TrainingArguments(
    "out", per_device_train_batch_size=3, eval_strategy="epoch", save_strategy="no",
    report_to="none", gradient_checkpointing=True,
)
trainer = Twice(
    model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=Padding()
)
for dry in (False, True):
    with open(f"{dry}.json", "w") as file:
        file.write(plan_run(trainer, gpu="24GiB", dry=dry).to_json())
print(trainer.state.global_step, torch.initial_seed())
"""


def planned(folder: Path, *words: str, code: int = 0, **environ: str) -> MemoryPlan:
    flags = ("--per_device_train_batch_size", "2", "--bf16", "True", "--seq-length", "300")
    done = typed(folder, "--model", "model", *flags, *words, "--json", **environ)
    assert done.returncode == code, done.stderr[-2000:]
    return MemoryPlan.from_json(done.stdout)


def allocated(plan: MemoryPlan) -> dict[str, int]:
    """The peaks that both engines have; a run that loads and resumes begins elsewhere in each."""
    return {
        moment: peak.allocated_bytes
        for moment, peak in plan.moments.items()
        if moment not in ("load", "resume")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return place(tmp_path_factory.mktemp("user"))


def test_both_engines_give_a_config_the_same_bytes(cuda_build, folder: Path) -> None:
    evaluates = ("--eval_strategy", "epoch", "--gpu", "80GiB")
    fake = planned(folder, *evaluates, "--engine", "fake")
    dry = planned(folder, *evaluates, "--engine", "dry")
    assert fake.planned["engine"] == "fake tensors"
    assert dry.planned["engine"] == "dry card"
    assert "+cu" in dry.versions["torch"]
    assert allocated(fake).keys() == allocated(dry).keys() >= {"backward", "evaluation", "save"}
    for moment, num_bytes in allocated(dry).items():
        assert allocated(fake)[moment] == pytest.approx(num_bytes, abs=4 * MIB), moment
    assert allocated(fake)["backward"] == allocated(dry)["backward"]
    assert dry.reserved_peak_bytes == pytest.approx(fake.reserved_peak_bytes, rel=0.01)


def test_text_is_generated_before_a_step_learns_from_it(folder: Path) -> None:
    words = ("--trainer", "grpo", "--per_device_train_batch_size", "8", "--gpu", "80GiB")
    dry = planned(folder, *words, "--max_completion_length", "20", "--save_strategy", "no")
    assert dry.planned["trainer"] == "TRL's GRPOTrainer"
    states = dry.moments["optimizer step"].allocated_bytes
    assert dry.moments["generation"].allocated_bytes < states, "gradients are gone by then"


def test_what_a_reference_computes_before_the_training_is_no_load(folder: Path) -> None:
    words = ("--trainer", "dpo", "--precompute_ref_log_probs", "True", "--save_strategy", "no")
    dry = planned(folder, *words, "--gpu", "80GiB")
    weights = 4 * dry.num_parameters
    assert weights <= dry.moments["load"].allocated_bytes < 1.5 * weights


def test_ranks_of_a_launch_file_are_rank_0_alone(folder: Path) -> None:
    launch = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2},
    }
    (folder / "zero2.json").write_text(json.dumps(launch))
    words = ("--accelerate-config", "zero2.json", "--gpu", "80GiB")
    dry = planned(folder, *words, "--engine", "dry")
    assert dry.num_gpus == 4
    assert "rank 0 of 4 ran alone, the other ranks are taken to be like it" in dry.assumptions
    assert dry.planned["strategy"] == "DeepSpeed ZeRO-2"
    assert {"save", "resume"} <= {*dry.moments}, "a second run found the checkpoint of the first"
    states = dry.breakdown.get("optimizer states", 0)
    assert states < 12 * dry.num_trainable_parameters / 3, "a rank has a quarter of them"


def test_ranks_by_the_hundred_wait_for_nobody(folder: Path) -> None:
    """Beyond 128 of them NCCL has several roots, which torch lets wait for each other."""
    words = ("--num-gpus", "200", "--gpu", "80GiB", "--save_strategy", "no", "--engine", "dry")
    assert planned(folder, *words).num_gpus == 200


def test_where_torch_is_built_for_cuda_it_answers_by_itself(folder: Path) -> None:
    """And tries there what would fit: fake tensors are not asked, their libraries are not there."""
    path = os.pathsep.join((str(ROOT), str(site_with_cuda())))
    fits = planned(folder, "--gpu", "24GiB", PYTHONPATH=path)
    assert fits.planned["engine"] == "dry card"
    assert fits.planned["command"].startswith("trainer-plugins plan --model model")
    tight = planned(folder, "--gpu", "1400MiB", code=3, PYTHONPATH=path)
    assert tight.planned["engine"] == "dry card"
    assert tight.failed_request_bytes
    assert tight.allocated_peak_bytes == fits.allocated_peak_bytes
    assert [each.flags for each in tight.proposals] or tight.tried_without_success


def test_a_trainer_of_a_notebook_is_run_on_the_dry_card(folder: Path) -> None:
    """Its classes are those of the cell, its batch is its own, and it stays as it was.

    It is run in a fork, which stands behind a wall: a file that its loss writes is not there.
    """
    (folder / "cell.py").write_text(NOTEBOOK)
    done = run(
        [sys.executable, "cell.py"],
        cwd=folder,
        environ={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        fresh="the dry card is loaded by a start of Python",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("0 ")
    assert not (folder / "written").exists()
    fake, dry = (
        MemoryPlan.from_json((folder / f"{name}.json").read_text()) for name in ("False", "True")
    )
    assert dry.planned["adapter"] == "LORA, r=8"
    assert allocated(fake).keys() == allocated(dry).keys()
    for moment, num_bytes in allocated(dry).items():
        assert allocated(fake)[moment] == pytest.approx(num_bytes, abs=MIB // 4), moment


def test_where_a_fork_is_not_safe_a_new_python_gives_the_same_answer(folder: Path) -> None:
    """A thread runs in each Python of this site, and a process with threads must not be forked."""
    site = folder / "site"
    site.mkdir()
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    (site / "sitecustomize.py").write_text(f"import threading, time\n{thread}\n")
    path = os.pathsep.join((str(site), str(ROOT)))
    words = ("--engine", "dry", "--gpu", "24GiB", "--save_strategy", "no")
    threaded, forked = planned(folder, *words, PYTHONPATH=path), planned(folder, *words)
    assert threaded.moments == forked.moments


def test_what_has_no_dry_run_is_refused_in_one_line(folder: Path) -> None:
    words = ("--engine", "dry", "--lora-r", "8", "--stream-base", "2", "--gpu", "24GiB")
    done = typed(folder, "--model", "model", *words)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("not predicted: a streamed base on the dry card")
    done = typed(folder, "--model", "model", "--engine", "magic", "--gpu", "24GiB")
    assert "--engine is auto, fake or dry, got 'magic'" in done.stderr
