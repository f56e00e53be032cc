"""Programs that know nothing of us, and settings that are read at the start: new processes on the card."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.card.shared import CARD, ON_A_CARD, python
from trainer_plugins.record.timeline import Remark, Sample, from_line
from trainer_plugins.units import MIB

pytestmark = ON_A_CARD

SCRIPT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, attn_implementation="eager", **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 4096, (192, 128))]
args = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=64, max_steps=3, save_strategy="no",
    report_to="none", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
if len(sys.argv) > 2:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[2]) / total_bytes)
trainer.train()
segments = torch.cuda.memory_snapshot()
found = {
    "callbacks": [type(each).__name__ for each in trainer.callback_handler.callbacks],
    "device": str(args.device),
    "steps": trainer.state.global_step,
    "is_expandable": sorted({each["is_expandable"] for each in segments}),
    "most_reserved": torch.cuda.max_memory_reserved(),
    "folder": args.output_dir,
    "timeline": open(args.output_dir + "/_trainer_plugins/memory/rank-0.jsonl").read().splitlines(),
}
print("FOUND" + json.dumps(found))
"""


def executed(folder: Path, *words: object) -> dict[str, Any]:
    (folder / "train.py").write_text(SCRIPT)
    options, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    call = ["-m", "trainer_plugins", "exec", *options, "--", sys.executable, "train.py"]
    done = python(*call, *arguments, cwd=folder)
    assert "FOUND" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    found["entries"] = [read[1] for line in found["timeline"] if (read := from_line(line.encode()))]
    found["stderr"] = done.stderr
    return found


def test_a_script_that_knows_nothing_of_us_gets_the_callbacks(tmp_path) -> None:
    found = executed(tmp_path, "--preset", "memory_safe", "--", "out-memory-safe")
    assert (found["device"], found["steps"]) == (CARD, 3)
    assert {
        "StrategyInForce", "Preflight", "MemoryWatchdog", "CudaCacheCallback",
        "EvalGenerateCleanup", "EvaluationGuard", "KVCacheGuard", "OOMReporter",
    } <= set(found["callbacks"])  # fmt: skip
    assert "SurviveOOM" not in found["callbacks"]
    # A preset with guards sets expandable segments, and says so.
    assert "expandable_segments:True" in found["stderr"]
    assert found["is_expandable"] == [True]
    samples = [each for each in found["entries"] if isinstance(each, Sample)]
    assert [each.moment for each in samples] == ["begin", "train", "train", "train", "end"]
    assert {each.reading.device for each in samples} == {CARD}
    assert max(each.reading.peak_allocated_bytes for each in samples) <= found["most_reserved"]
    assert found["most_reserved"] > 3 * 128 * MIB


@pytest.mark.numbers
def test_a_script_with_a_batch_that_is_too_large_finishes(tmp_path) -> None:
    limit_bytes = 256 * MIB
    words = ("--preset", "survive", "--", "out-survive", limit_bytes)
    found = executed(tmp_path, *words)
    assert (found["device"], found["steps"]) == (CARD, 3)
    assert "SurviveOOM" in found["callbacks"]
    assert 0 < found["most_reserved"] <= limit_bytes
    codes = {each.finding.code for each in found["entries"] if isinstance(each, Remark)}
    assert codes & {"out-of-memory-survived", "out-of-memory-foreseen"}


SETTINGS = """
import json, os, sys
import torch
if len(sys.argv) > 1:
    held = torch.zeros(1, device="cuda")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[1]
from trainer_plugins.allocator.in_force import check, read_in_force
kept = []
for _ in range(8):
    kept.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda"))
segments = [each for each in torch.cuda.memory_snapshot() if each["total_size"] > 2 << 20]
in_force = read_in_force()
print("FOUND" + json.dumps({
    "device": str(kept[-1].device),
    "finding": str(check()),
    "value": in_force.value("expandable_segments"),
    "segments": [[each["is_expandable"], each["total_size"]] for each in segments],
    "reserved": torch.cuda.memory_reserved(),
}))
"""


def settings(folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    done = python("-c", SETTINGS, *arguments, cwd=folder, **variables)
    assert "FOUND" in done.stdout, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    assert found["device"] == CARD
    return found


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_that_were_there_at_the_start_are_in_force(tmp_path, name: str) -> None:
    found = settings(tmp_path, **{name: "expandable_segments:True"})
    assert found["finding"] == "None"
    assert found["value"] is True
    # One segment that grew eight times, in pages of 20 MiB; without it each would be its own.
    ((is_expandable, num_bytes),) = found["segments"]
    assert is_expandable is True
    assert num_bytes == 240 * MIB


def test_settings_that_came_too_late_are_said(tmp_path) -> None:
    found = settings(tmp_path, "expandable_segments:True")
    assert "before it was set" in found["finding"]
    assert "expandable_segments:True" in found["finding"]
    assert found["value"] in (False, None)
    assert found["segments"] == [[False, 30 * MIB]] * 8
