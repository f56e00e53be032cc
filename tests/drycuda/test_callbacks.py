"""Our callbacks on CUDA's own code: what they ask of the card. What they do there, tests/card shows."""

import json
from typing import Any

import pytest

from tests.drycuda.scripts import start_python
from trainer_plugins.units import GIB

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
import trainer_plugins
from trainer_plugins.inside.process import counters

sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))
rows = [{"input_ids": torch.arange(256), "labels": torch.arange(256)} for _ in range(128)]
if sys.argv[1] != "none":
    trainer_plugins.attach(sys.argv[1])

class Count(TrainerCallback):
    seen = []

    def on_step_begin(self, args, state, control, **_):
        if state.global_step in (8, 24):
            self.seen.append(counters())

args = TrainingArguments(
    "out", per_device_train_batch_size=2, max_steps=32, eval_strategy="steps", eval_steps=32,
    save_strategy="no", bf16=True, report_to="none", logging_steps=100, disable_tqdm=True,
)
trainer = Trainer(
    model=model, args=args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Count()]
)
names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
found = {"callbacks": names, "device": str(args.device)}
trainer.train()
before, after = Count.seen
found["calls"] = {name: after[name] - before.get(name, 0) for name in after}
found["calls"] = {name: number for name, number in found["calls"].items() if number}
written = Path(args.output_dir, "_trainer_plugins")
found["files"] = {
    str(path.relative_to(written)): path.read_text() for path in written.rglob("*.json*")
}
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def run(cuda_build, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("callbacks")
    (folder / "train.py").write_text(SCRIPT)

    def of(preset: str) -> Any:
        words = ["-m", "trainer_plugins.drycuda", "--gpu", "24GiB", "train.py", preset]
        done = start_python(folder, *words)
        assert "FOUND" in done.stdout, done.stderr[-2000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
        return json.loads(line.removeprefix("FOUND"))

    return of


@pytest.fixture(scope="module")
def alone(run) -> dict[str, int]:
    found = run("none")
    assert found["device"] == "cuda:0"
    calls: dict[str, int] = found["calls"]
    assert calls["kernels"] > 16 * 100
    assert calls["cudaStreamSynchronize"] > 0, "the Trainer's own"
    return calls


@pytest.mark.parametrize("preset", ["memory_safe", "survive"])
def test_a_step_makes_no_call_of_cuda_more(run, alone: dict[str, int], preset: str) -> None:
    """Neither a synchronisation nor a copy nor a kernel: what they read, torch's allocator has counted."""
    found = run(preset)
    assert {"StrategyInForce", "MemoryWatchdog", "OOMReporter"} <= set(found["callbacks"])
    assert found["calls"] == alone
    (timeline,) = (text for name, text in found["files"].items() if name == "memory/rank-0.jsonl")
    readings = [json.loads(line) for line in timeline.splitlines()]
    sizes = [each for each in readings if "total_bytes" in each]
    assert sizes
    assert {each["total_bytes"] for each in sizes} == {24 * GIB}
