"""Scripts of users that the dry card runs, and what is typed."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests import processes
from tests.distributed.launched import environment
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.units import KIB, MIB

ROOT = Path(__file__).parent.parent.parent
WORKSPACES = {"24GiB": 2 * (8 * MIB + 128 * KIB), "80GiB": 2 * 32 * MIB}
"""Of cuBLAS on the usual card of a size: the thread of the backward pass has one too."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
TRAINS = """
import sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

rows = []
for number in range(64):
    ids = torch.randint(0, 1000, (16 * (1 + number % 32),))
    rows.append({"input_ids": ids, "labels": ids})

def padded(batch):
    pad = lambda name, value: torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], True, value)
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
args = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=4, num_train_epochs=90, logging_steps=1,
    gradient_accumulation_steps=int(sys.argv[3]) if len(sys.argv) > 3 else 1,
    eval_strategy="epoch", bf16=True, report_to="tensorboard", per_device_eval_batch_size=2,
)
Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows * 8, data_collator=padded).train()
print("the last line of the script")
"""


def place(folder: Path, script: str = TRAINS) -> Path:
    """Write the script, and a model of which only the config is there."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "train.py").write_text(script)
    return folder


def start_python(folder: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start Python with these words in a folder; it can load the dry card then."""
    return processes.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        environ={**environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environ},
        fresh="the dry card is loaded by a start of Python",
    )


def typed(folder: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Type `trainer-plugins plan` with these words in a folder."""
    return start_python(folder, "-m", "trainer_plugins", "plan", *words, **environ)


TRAIN = ("--", sys.executable, "train.py", "model", "out")


def plan_of(folder: Path, *words: object, command: tuple[str, ...] = TRAIN) -> MemoryPlan:
    """Return the plan of a command; it has an answer."""
    done = typed(folder, *words, "--json", *command)
    assert done.returncode in (0, 3), done.stderr[-3000:]
    plan = MemoryPlan.from_json(done.stdout)
    assert plan.versions["torch"].partition("+")[2].startswith("cu")
    return plan


def left_running(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a dry card of this folder."""
    left = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("TRAINER_PLUGINS_DRYCUDA", "").startswith(str(folder)):
                left.append(each)
    return left
