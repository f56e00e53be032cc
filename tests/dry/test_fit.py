"""`exec --fit`: the command is planned on the dry card, gets arguments that fit, and is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import processes
from tests.distributed.launched import environment
from tests.dry.scripts import ROOT, plan_of

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_SCRIPT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

torch.manual_seed(0)
rows = []
for number in range(16):
    ids = torch.randint(0, 32000, (128 + 8 * number,))
    rows.append({"input_ids": ids, "labels": ids.clone().index_fill_(0, torch.arange(number), -100)})

def padded(batch):
    pad = lambda name, value: torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], True, value)
    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids > 0).long()}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=32000))
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=padded)
trainer.train()
trainer.save_model("end")
print("trained", args.per_device_train_batch_size, args.gradient_accumulation_steps,
      args.gradient_checkpointing, args.per_device_eval_batch_size, trainer.state.global_step)
"""
_FLAGS = (
    *("--output_dir", "out", "--per_device_train_batch_size", "8", "--max_steps", "2"),
    *("--save_strategy", "no", "--report_to", "none", "--logging_strategy", "no"),
)
_CARD = "1200MiB"


def _typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return processes.run(
        [sys.executable, *words],
        cwd=folder,
        environ={**environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        fresh="the dry card is loaded by a start of Python",
    )


def _fitted(folder: Path, *words: str, flags: tuple[str, ...] = _FLAGS):
    command = (sys.executable, "train.py", *flags)
    return _typed(folder, "-m", "trainer_plugins", "exec", "--fit", *words, "--", *command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_SCRIPT)
    return tmp_path


def test_a_run_that_does_not_fit_trains_the_same_in_smaller_pieces(folder: Path) -> None:
    as_given = plan_of(folder, "--gpu", _CARD, command=("--", sys.executable, "train.py", *_FLAGS))
    assert as_given.fits is False
    asked = _fitted(folder, "--fit=ask", "--gpu", _CARD)
    assert asked.returncode == 0, asked.stderr[-3000:]
    line, flags = asked.stdout.splitlines()
    assert line.startswith("trainer-plugins exec --fit: 4 rows x 2: "), asked.stdout
    assert "--per_device_train_batch_size 4" in flags
    assert not (folder / "end").exists()
    whole = _typed(folder, "train.py", *_FLAGS)
    assert "trained 8 1 False 8 2" in whole.stdout, whole.stderr[-2000:]
    expected = load_file(folder / "end" / "model.safetensors")

    done = _fitted(folder, "--gpu", _CARD)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("trainer-plugins exec --")]
    assert said[0].startswith("trainer-plugins exec --fit: 4 rows x 2: "), said
    assert "trained 4 2 False 8 2" in done.stdout
    for name, tensor in load_file(folder / "end" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_what_fits_stays_as_it_is_and_what_cannot_is_not_started(folder: Path) -> None:
    done = _fitted(folder, "--gpu", "24GiB")
    assert "exec --fit: it fits as it is, 2" in done.stderr
    assert "trained 8 1 False 8 2" in done.stdout

    done = _fitted(folder, "--fit=ask", "--gpu", "24GiB")
    assert done.stdout.startswith("trainer-plugins exec --fit: it fits as it is, 2")
    assert "trained" not in done.stdout

    done = _fitted(folder, "--fit=ask", "--gpu", "600MiB")
    assert done.returncode == 3
    assert "nothing fits that keeps the result" in done.stderr
    assert "nothing was started" in done.stderr
    assert "trained" not in done.stdout

    done = _fitted(folder, "--gpu", "24GiB", "--may", "rows")
    assert done.returncode == 2
    assert "--may is precision, optim, peft or length, got rows; nothing was started" in done.stderr


def test_an_evaluation_that_does_not_fit_takes_fewer_rows(folder: Path) -> None:
    flags = (*_FLAGS, "--per_device_train_batch_size", "1", "--eval_strategy", "epoch")
    done = _fitted(folder, "--gpu", _CARD, flags=(*flags, "--per_device_eval_batch_size", "16"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rows at once in the evaluation" in done.stderr
    words = next(line for line in done.stdout.splitlines() if line.startswith("trained")).split()
    assert words[1:4] == ["1", "1", "False"]
    assert int(words[4]) in (4, 8)
    assert json.loads((folder / "end" / "config.json").read_text())["vocab_size"] == 32000


def test_an_adapter_is_trained_where_it_was_allowed_by_name(folder: Path) -> None:
    """The states of all weights do not fit, whatever else is changed."""
    script = folder / "train.py"
    script.write_text(script.read_text().replace("hidden_size=32", "hidden_size=512"))
    one_row = (*_FLAGS, "--per_device_train_batch_size", "1")
    done = _fitted(folder, "--gpu", "900MiB", "--may", "peft", flags=one_row)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exec --fit: LoRA: " in done.stderr
    assert "trained 1 1 False 8 2" in done.stdout
    saved = load_file(folder / "end" / "adapter_model.safetensors")
    assert any(each.abs().sum() for name, each in saved.items() if "lora_B" in name)
    assert not (folder / "end" / "model.safetensors").exists()
