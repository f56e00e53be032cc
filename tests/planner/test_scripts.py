"""What a script defines goes into its plan, however the script is started; and the script runs once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from trainer_plugins import MemoryPlan

SCRIPT = """
import dataclasses, enum, functools, os
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trainer_plugins import plan_run

with open("begun", "a") as begun:
    begun.write("x")
WIDTH = 1 << 24
handle = open(os.devnull)  # which no process can send to another


class Kind(enum.Enum):
    SUM = "sum"


@dataclasses.dataclass
class Arguments(TrainingArguments):
    width: int = WIDTH
    kinds: list = dataclasses.field(default_factory=lambda: [Kind.SUM])


class Own(LlamaForCausalLM):
    scale = 2.0

    @functools.cached_property
    def doubled(self):
        return self.scale * 2

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        outputs.loss = outputs.loss * self.doubled
        return outputs


def penalty(width, device):
    if width < 0:
        handle.write("never")
    return torch.zeros(width, device=device)


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        assert self.args.kinds == [Kind.SUM] and isinstance(model, Own)
        self.kept = penalty(self.args.width, self.args.device)
        return super().compute_loss(model, inputs, return_outputs, **kwargs) + self.kept.sum()


def main():
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=4)
    rows = [{"input_ids": torch.ones(16, dtype=torch.long), "labels": torch.ones(16, dtype=torch.long)}] * 8
    arguments = Arguments(output_dir="out", report_to="none", save_strategy="no")
    plan = plan_run(OwnTrainer(model=Own(config), args=arguments, train_dataset=rows))
    with open("plan.json", "w") as file:
        file.write(plan.to_json())

"""
CALLED = {"guarded": 'if __name__ == "__main__":\n    main()\n', "plain": "main()\n"}
CELLS = """
import types
main = types.ModuleType("__main__")  # what a notebook's kernel puts there: no file, no source
import sys
sys.modules["__main__"] = main
for cell in open("cells").read().split("\\n\\n\\n"):
    exec(compile(cell, "<ipython-input>", "exec"), vars(main))
"""


def started(folder: Path, how: str) -> subprocess.CompletedProcess:
    code = SCRIPT + CALLED.get(how, CALLED["plain"])
    name = "cells" if how == "notebook" else "own_script.py"
    (folder / name).write_text(code)
    (folder / "kernel.py").write_text(CELLS)
    arguments = {"module": ["-m", "own_script"], "stdin": ["-"], "notebook": ["kernel.py"]}.get(
        how, ["own_script.py"]
    )
    with (folder / name).open() as text:
        return processes.run(
            [sys.executable, *arguments],
            stdin=text if how == "stdin" else subprocess.DEVNULL,
            cwd=folder,
            environ={**os.environ, "HF_HUB_OFFLINE": "1"},
            fresh="Python itself reads it" if how == "stdin" else "",
        )


@pytest.mark.all(unless=lambda how: how == "notebook")
@pytest.mark.parametrize("how", ["guarded", "plain", "module", "stdin", "notebook"])
def test_classes_of_a_script_are_planned(tmp_path, how):
    done = started(tmp_path, how)

    assert done.returncode == 0, done.stderr[-3000:]
    plan = MemoryPlan.from_json((tmp_path / "plan.json").read_text())
    (kept,) = {tensor.num_bytes for tensor in plan.top_tensors if tensor.shape == (1 << 24,)}
    assert kept == 4 << 24
    assert plan.allocated_peak_bytes > kept
    assert (tmp_path / "begun").read_text() == "x"
