"""What `exec --fit --may peft` has chosen reaches every kind of Trainer: an adapter is what learns."""

import json
import sys
from pathlib import Path

import pytest

from tests.test_exec import execute
from trainer_plugins.planner.compare.switches import LORA

pytestmark = [pytest.mark.slow, pytest.mark.all]
pytest.importorskip("peft")

_SCRIPT = """
import json
from pathlib import Path
import trl
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments
from tests.models import tiny_llama, token_rows
from tests.survival import test_trl

class Mine(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

def args(**more):
    return TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no", use_cpu=True,
                             per_device_train_batch_size=4, learning_rate=1e-2, **more)

def checkpointed():
    return args(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})

def classified():
    rows = [{**row, "labels": 1} for row in token_rows()]
    return Trainer(LlamaForSequenceClassification(tiny_llama(pad_token_id=0).config), args(), train_dataset=rows)

def has_one():
    return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))

rows = token_rows()
made = {
    "plain": lambda: Trainer(tiny_llama(), checkpointed(), train_dataset=rows),
    "subclass": lambda: Mine(model=tiny_llama(), args=args(), train_dataset=rows),
    "model_init": lambda: Trainer(args=args(), train_dataset=rows, model_init=lambda: tiny_llama()),
    "classes": classified,
    "has one": lambda: Trainer(has_one(), args(), train_dataset=rows),
    "other arguments": lambda: Trainer(tiny_llama(), args(warmup_steps=1), train_dataset=rows),
    "sft": lambda: test_trl.sft(Path("sft")),
    "dpo": lambda: test_trl.made(trl.DPOTrainer, trl.DPOConfig, Path("dpo"),
                                 tiny_llama(vocab_size=384, max_position_embeddings=512), test_trl.PREFERENCES),
    "reward": lambda: test_trl.reward(Path("reward")),
}
facts = {}
for name, make in made.items():
    trainer = make()
    before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    facts[name] = {
        "kind": type(trainer.model).__name__,
        "ranks": [each.r for each in getattr(trainer.model, "peft_config", {}).values()],
        "second": getattr(trainer, "ref_model", None) is not None,
        "moved": sorted(key for key in before if not before[key].equal(after[key])),
    }
Path("facts.json").write_text(json.dumps(facts))
"""


def test_what_is_trained_is_the_adapter(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (tmp_path / "train.py").write_text(_SCRIPT)
    chosen = {"planned": {"warmup_steps": 0}, "changed": {"peft_config": LORA}}
    environ = {"TRAINER_PLUGINS_ARGUMENTS": json.dumps(chosen)}
    done = execute("--", sys.executable, "train.py", cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr[-3000:]

    facts = json.loads((tmp_path / "facts.json").read_text())
    untouched = facts.pop("other arguments")
    assert untouched["kind"] == "LlamaForCausalLM", "not what was planned"
    assert "these TrainingArguments differ from the planned ones" in done.stderr
    assert facts["has one"].pop("ranks") == [2]
    kinds = {name: fact["kind"] for name, fact in facts.items()}
    assert kinds.pop("classes") == kinds.pop("reward") == "PeftModelForSequenceClassification"
    assert {*kinds.values()} - {"PeftModel"} == {"PeftModelForCausalLM"}, kinds
    assert not facts["dpo"]["second"], "the adapter is left out where the reference is asked"
    for name, fact in facts.items():
        assert fact.get("ranks", [16]) == [16], name
        assert any("lora_B" in each for each in fact["moved"]), name
        assert all("lora_" in each or "modules_to_save" in each for each in fact["moved"]), name
