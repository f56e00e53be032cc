"""`exec --fit`: the command is planned on the dry card, gets arguments that fit, and is run."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.drycuda.scripts import start_python

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_SCRIPT = """
import os, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from trainer_plugins import OOMReporter

if "TRAINER_PLUGINS_DRYCUDA" in os.environ:
    assert "expandable_segments:True" in os.environ.values(), "not as exec will run it"

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
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=padded,
                  callbacks=[OOMReporter(snapshot=True)])
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


def _fitted(
    folder: Path,
    *words: str,
    script: tuple[str, ...] = ("train.py",),
    flags: tuple[str, ...] = _FLAGS,
):
    command = (sys.executable, *script, *flags)
    return start_python(folder, "-m", "trainer_plugins", "exec", "--fit", *words, "--", *command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_SCRIPT)
    return tmp_path


def test_a_run_that_does_not_fit_trains_the_same_in_smaller_pieces(folder: Path) -> None:
    """Accumulation would give this model a larger gradient, and the last batch that is dropped a step more."""
    script = folder / "train.py"
    bert = '"bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0'
    script.write_text(
        script.read_text().replace("ForCausalLM", "ForMaskedLM").replace('"llama"', bert)
    )
    flags: tuple[str, ...] = (*_FLAGS, "--max_steps", "-1", "--num_train_epochs", "1")
    flags += ("--dataloader_drop_last", "True")
    flags += ("--per_device_train_batch_size", "6", "--optim", "sgd", "--learning_rate", "1")
    on_card = ("-m", "trainer_plugins.testing.simgpu", "--capacity")
    whole = start_python(folder, *on_card, "8GiB", "train.py", *flags)
    assert "trained 6 1 False 8 2" in whole.stdout, whole.stderr[-2000:]
    expected = load_file(folder / "end" / "model.safetensors")

    done = _fitted(folder, "--gpu", "1000MiB", script=(*on_card, _CARD, "train.py"), flags=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("trainer-plugins exec --")]
    assert said[0].startswith("trainer-plugins exec --fit: 3 rows x 2 accumulation steps: "), said
    assert said[0].endswith("survival splits each micro-batch of 6, and keeps its gradient")
    assert "--preset survive --memory-rows-at-once 3 -- COMMAND" in said[1]
    assert "trained 6 1 False 8 2" in done.stdout
    for name, tensor in load_file(folder / "end" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_what_fits_stays_as_it_is_and_what_cannot_is_not_started(folder: Path) -> None:
    done = _fitted(folder, "--gpu", "24GiB")
    assert "exec --fit: the run fits as it is, with 2" in done.stderr
    assert "trained 8 1 False 8 2" in done.stdout

    done = _fitted(folder, "--fit=ask", "--gpu", "24GiB")
    assert done.stdout.startswith("trainer-plugins exec --fit: the run fits as it is, with 2")
    assert "trained" not in done.stdout

    done = _fitted(folder, "--fit=ask", "--gpu", "600MiB")
    assert done.returncode == 3
    assert "nothing that keeps the result fits: fewer rows at once: at least " in done.stderr
    assert "nothing was started" in done.stderr
    assert "add --preset survive" in done.stderr
    assert "gradient_checkpointing" not in done.stderr, "it frees less than what is missing"
    assert "trained" not in done.stdout

    done = _fitted(folder, "--preset", "survive", "--gpu", "600MiB")
    assert "; training starts under the preset survive" in done.stderr
    assert "trained 8 1 False 8 2" in done.stdout

    for words, why in (
        (("--may", "rows"), "--may is precision, optim, peft or length, got rows"),
        (("--preset", "observe"), "needs SurviveOOM, which is not in the preset observe"),
    ):
        done = _fitted(folder, "--gpu", "24GiB", *words)
        assert done.returncode == 2
        assert f"{why}; nothing was started" in done.stderr


def test_an_evaluation_that_does_not_fit_is_computed_in_parts(folder: Path) -> None:
    flags = (*_FLAGS, "--per_device_train_batch_size", "1", "--eval_strategy", "epoch")
    done = _fitted(folder, "--gpu", _CARD, flags=(*flags, "--per_device_eval_batch_size", "16"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rows at once during evaluation" in done.stderr
    assert "survival splits each evaluation batch, and keeps its metrics" in done.stderr
    assert "trained 1 1 False 16" in done.stdout
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
