"""docs/oom_now.md on the simulated card: a script that died, and three commands that leave it as it is."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import environment

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = LlamaForCausalLM(LlamaConfig.from_pretrained("model"))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 8192, (128, 128))]
Trainer(model=model, args=args, train_dataset=rows).train()
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FLAGS = (
    *("--output_dir", "runs/mine", "--max_steps", "2", "--save_strategy", "no"),
    *("--report_to", "none", "--dataloader_pin_memory", "False"),
    *("--per_device_train_batch_size", "64"),
)
ON_CARD = ("-m", "trainer_plugins.testing.simgpu", "--capacity", "600MiB", "train.py", *FLAGS)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    return folder


def typed(place: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return processes.run([str(word) for word in command], cwd=place, environ=environment())


@pytest.mark.all
def test_from_a_dead_run_to_one_that_ends(place: Path) -> None:
    ours = Path(sys.executable).with_name("trainer-plugins")
    assert ours.exists() or shutil.which("trainer-plugins")
    died = typed(place, sys.executable, *ON_CARD)
    assert died.returncode == 1
    (place / "train.log").write_text(died.stdout + died.stderr)

    why = typed(place, ours, "explain", "train.log")
    assert why.returncode == 0, why.stderr
    assert re.match(r"Cause  .*\[\w+: (capacity|logits-loss)\]", why.stdout), why.stdout
    assert "\nTry    " in why.stdout

    model = ("--model", "model", "--seq-length", "128", "--gpu", "1GiB", "--timeout", "500")
    fits = typed(place, ours, "plan", *model, *FLAGS, "--json")
    assert fits.returncode == 3, fits.stderr
    best = json.loads(fits.stdout)["proposals"][0]
    assert best["micro_batch"] * best["accumulation_steps"] == 64
    assert best["price"] == "the same training in smaller steps"

    lives = typed(place, ours, "exec", "--preset", "survive", "--", sys.executable, *ON_CARD)
    assert lives.returncode == 0, lives.stderr[-3000:]
    assert "train_loss" in lives.stdout
    report = typed(place, ours, "report", "runs/mine")
    assert "divided_micro_batches" in report.stdout
    assert "1 rank of LlamaForCausalLM on simgpu" in report.stdout
    assert (place / "train.py").read_text() == SCRIPT


@pytest.mark.all
def test_a_run_under_a_preset_is_explained_by_what_it_recorded(place: Path) -> None:
    ours = Path(sys.executable).with_name("trainer-plugins")
    flags = [word.replace("runs/mine", "runs/recorded") for word in ON_CARD]
    died = typed(place, ours, "exec", "--", sys.executable, *flags)
    assert died.returncode == 1
    assert "trainer-plugins explain runs/recorded" in died.stderr

    why = typed(place, ours, "explain", "runs/recorded", "--json")
    assert why.returncode == 0, why.stderr
    said = json.loads(why.stdout)
    remedy = said["remedies"][0]
    assert remedy["grade"] == "predicted", said
    assert re.search(
        r"of 600\.0 MiB, [\d.]+ MiB less: it fits, with [\d.]+ MiB to spare; the effective"
        r" batch size stays 64",
        remedy["effect"],
    )
    assert remedy["price"] == "the same training in smaller steps"
    assert any(fact.startswith("the plan of the run as it was: ") for fact in said["facts"])
    assert "Ctrl-C: answer without it" in why.stderr
    graded = {each["do"].split()[0]: each["grade"] for each in said["remedies"]}
    assert graded["trainer-plugins"] == "predicted"  # it cuts at the same rows
    assert graded["--use_liger_kernel"] == "predicted"  # fetched for it, and not installed
    do = remedy["do"].split()
    assert do[0] == "--per_device_train_batch_size"
    lives = typed(place, sys.executable, *flags, *do)  # of a flag given twice the last one counts
    assert lives.returncode == 0, lives.stderr[-3000:]
