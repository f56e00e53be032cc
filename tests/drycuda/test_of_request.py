"""A plan that has no command, on the dry card: of a config, and of a Trainer in a process of its own."""

import json
import os
from pathlib import Path

import pytest

from tests.drycuda.scripts import ROOT, place, start_python, typed
from trainer_plugins.planner.plan import MemoryPlan

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

NOTEBOOK = """
import sys
import contextlib
import dataclasses
import functools
import threading
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

lock, log = threading.Lock(), open("log", "w")

@dataclasses.dataclass
class Factor:
    number: int = dataclasses.field(default=2)

class Twice(Trainer):
    factor = Factor()

    @functools.cached_property
    def times(self):
        return self.factor.number

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        if self.is_logged:
            with lock:
                log.write("a step")
        with contextlib.suppress(OSError):
            open("written", "w").close()
        made = model(**inputs)
        loss = self.times * made.loss
        return (loss, made) if return_outputs else loss

args = TrainingArguments(
    "out", per_device_train_batch_size=3, eval_strategy="epoch", save_strategy="no",
    report_to="none", gradient_checkpointing=True,
)
trainer = Twice(
    model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=Padding()
)
trainer.is_logged, trainer.log = False, log
with open("plan.json", "w") as file:
    file.write(plan_run(trainer, gpu="24GiB").to_json())
print(trainer.state.global_step, sum(each.numel() for each in model.parameters()))
"""


def planned(folder: Path, *words: str, code: int = 0, **environ: str) -> MemoryPlan:
    flags = ("--per_device_train_batch_size", "2", "--bf16", "True", "--seq-length", "300")
    done = typed(folder, "--model", "model", *flags, *words, "--json", **environ)
    assert done.returncode == code, done.stderr[-2000:]
    return MemoryPlan.from_json(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return place(tmp_path_factory.mktemp("user"))


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
    dry = planned(folder, *words)
    assert dry.num_gpus == 4
    assert "only rank 0 of 4 ran; the other ranks are assumed to behave like it" in dry.assumptions
    assert dry.planned["strategy"] == "DeepSpeed ZeRO-2"
    assert {"save", "resume"} <= {*dry.moments}, "a second run found the checkpoint of the first"
    states = dry.breakdown.get("optimizer states", 0)
    assert states < 12 * dry.num_trainable_parameters / 3, "a rank has a quarter of them"


def test_what_would_fit_is_proposed_and_fits(folder: Path) -> None:
    fits = planned(folder, "--gpu", "24GiB")
    assert fits.planned["command"].startswith("trainer-plugins plan --model model")
    eight = ("--per_device_train_batch_size", "8", "--gpu", "2000MiB")
    tight = planned(folder, *eight, code=3)
    assert (tight.fits, tight.fits_card) == (False, False)
    first = tight.proposals[0]
    assert planned(folder, *eight, *first.flags.split()).fits is True


def test_a_trainer_of_a_notebook_is_run_on_the_dry_card(folder: Path) -> None:
    """Its classes are those of the cell, its batch is its own, and it stays as it was.

    It is run in a fork, which stands behind a wall: a file that its loss writes is not there.
    """
    (folder / "cell.py").write_text(NOTEBOOK)
    done = start_python(folder, "cell.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("0 ")
    assert not (folder / "written").exists()
    dry = MemoryPlan.from_json((folder / "plan.json").read_text())
    assert dry.planned["adapter"] == "LORA, r=8"
    assert dry.planned["batch"].startswith("3 rows x 1 accumulation step x 1 GPU")
    assert {"backward", "evaluation"} <= dry.moments.keys()
    assert dry.num_parameters == int(done.stdout.split()[-1])
    assert "attributes of the Trainer that cannot be pickled were left out: log" in dry.not_reliable


def test_where_a_fork_is_not_safe_a_new_python_gives_the_same_answer(folder: Path) -> None:
    """A thread runs in each Python of this site, and a process with threads must not be forked."""
    site = folder / "site"
    site.mkdir()
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    (site / "sitecustomize.py").write_text(f"import threading, time\n{thread}\n")
    path = os.pathsep.join((str(site), str(ROOT)))
    words = ("--gpu", "24GiB", "--save_strategy", "no")
    threaded, forked = planned(folder, *words, PYTHONPATH=path), planned(folder, *words)
    assert threaded.moments == forked.moments
