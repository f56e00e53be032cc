"""Close the loop of `exec --fit`: runs that die on a dry card, and finish there with it.

    python -m benchmarks.fit [NAME...]

Each is a small model that really trains, on torch's own CUDA build with numbers (`drycuda
--numbers`): on a card of 80 GiB; on a small one, where it must die of torch's OutOfMemoryError; and
there under `exec --fit`, where it must finish with the weights of the first, to rounding.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
LAUNCHES = {"one card": "", "DDP": "", "FSDP2": "--fsdp full_shard --fsdp_config fsdp.json"}
_FSDP2 = '{"version": 2, "reshard_after_forward": true, "state_dict_type": "FULL_STATE_DICT"}'
_USUAL = "--output_dir out --max_steps 2 --report_to none --logging_strategy no --save_strategy no"
_CONSTANT = "--lr_scheduler_type constant"  # a linear one has ended in the checkpoint
_BEFORE = f"--output_dir before --use_cpu True --max_steps 1 --save_strategy epoch {_CONSTANT}"
_DIED = re.compile(r"OutOfMemoryError: .* Tried to allocate ([\d.]+ \w+)")
_SAID = re.compile(r"exec --fit: (.*?)(?:: [\d.]+ \w+ to spare.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """Describes a run: its script's words, its flags, and the card on which it dies."""

    flags: str
    card: str
    words: str = ""


CASES = {
    "batch": Case("--per_device_train_batch_size 8", "1200MiB"),
    "batch, accumulated": Case(
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 1", "1200MiB"
    ),
    "batch, adapters": Case("--per_device_train_batch_size 8", "1200MiB", "lora"),
    "long row": Case("--per_device_train_batch_size 4", "1200MiB", "long"),
    "long row alone": Case("--per_device_train_batch_size 1", "720MiB", "deep"),
    "evaluation": Case(
        "--per_device_train_batch_size 1 --per_device_eval_batch_size 16 --eval_strategy epoch",
        "1200MiB",
    ),
    "generation": Case(
        "--per_device_train_batch_size 1 --per_device_eval_batch_size 16 --eval_strategy epoch"
        " --predict_with_generate True --generation_max_length 64",
        "1000MiB",
        "t5",
    ),
    "batch, and it saves": Case(
        "--per_device_train_batch_size 8 --save_strategy steps --save_steps 1", "1200MiB"
    ),
    "batch, Adafactor": Case("--per_device_train_batch_size 8 --optim adafactor", "1100MiB"),
    "batch, resumed": Case(
        f"--per_device_train_batch_size 8 --resume_from_checkpoint before/checkpoint-1 {_CONSTANT}",
        "1200MiB",
    ),
    "batch, little room": Case("--per_device_train_batch_size 8", "900MiB"),
}

SCRIPT = """
import dataclasses, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, HfArgumentParser
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

kind, *words = sys.argv[1:]
torch.manual_seed(0)
lengths = [128 + 8 * number for number in range(16)]
if kind == "long":
    lengths = [40] * 15 + [700]
elif kind == "deep":
    lengths = [1024] * 16
rows = []
for number, length in enumerate(lengths):
    ids = torch.randint(3, 32000, (length,))
    labels = ids.clone().index_fill_(0, torch.arange(number), -100)
    rows.append({"input_ids": ids, "labels": labels})

def padded(batch):
    def pad(name, value):
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in batch], True, value)

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids > 0).long()}

args, = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
if kind == "t5":
    config = AutoConfig.for_model("t5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        vocab_size=32000, decoder_start_token_id=0, dropout_rate=0.0)
    model = AutoModelForSeq2SeqLM.from_config(config)
else:
    layers = 24 if kind == "deep" else 2
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=64,
        intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=4000 if kind == "deep" else 32000))
if kind == "deep":
    for row in rows:
        row["input_ids"] %= 4000
        row["labels"] = row["input_ids"]
if kind == "lora":
    import peft
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
trainer = Seq2SeqTrainer(
    model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=padded)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model("end")
"""


def _run(
    folder: Path, case: Case, launch: str, card: str, fit: bool = False
) -> "subprocess.CompletedProcess[str]":
    launcher = [sys.executable] if launch == "one card" else ["torchrun", "--nproc_per_node", "2"]
    command = [*launcher, "train.py", case.words or "llama"]
    command += f"{_USUAL} {case.flags} {LAUNCHES[launch]}".split()
    if fit:
        command = ["trainer-plugins", "exec", "--fit", "--", *command]
    number = "1" if launch == "one card" else "2"
    dry = ["-m", "trainer_plugins.drycuda", "--numbers", "--gpu", card]
    return subprocess.run(
        [sys.executable, *dry, "--num-gpus", number, "--", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in (folder / "end").glob("*.safetensors"):
        found |= load_file(file)
        file.unlink()
    return found


def _closed(case: Case, launch: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "fsdp.json").write_text(_FSDP2)
        if "before" in case.flags:
            words = f"llama {_USUAL} {_BEFORE}".split()
            subprocess.run([sys.executable, "train.py", *words], cwd=folder, check=True)
        whole = _run(folder, case, launch, "80GiB")
        expected = _weights(folder)
        if not expected:
            return f"fails on a large card: {whole.stderr[-300:]}"
        died = _DIED.search(_run(folder, case, launch, case.card).stderr)
        if died is None:
            return f"does not die on {case.card}"
        fitted = _run(folder, case, launch, case.card, fit=True)
        said = _SAID.findall(fitted.stderr)
        found = _weights(folder)
        if not found:
            return f"dies for {died[1]}; not with --fit: {' / '.join(said)} {fitted.stderr[-300:]}"
        furthest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        return f"dies for {died[1]}; --fit: {said[0] if said else '?'}; furthest {furthest:.1e}"


def _lines(wanted: list[str]) -> Iterator[str]:
    for name, case in CASES.items():
        for launch in LAUNCHES:
            if not wanted or any(f"{name}, {launch}".startswith(word) for word in wanted):
                yield f"{name}, {launch}: {_closed(case, launch)}"


if __name__ == "__main__":
    for line in _lines(sys.argv[1:]):
        print(line, flush=True)
