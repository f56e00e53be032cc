"""TRL's SFTTrainer, with and without LoRA, under all four callbacks."""

import pytest
import torch

from tests.models import tiny_llama, token_rows
from tests.written import read_steps
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")


@pytest.mark.parametrize("lora", [False, True])
def test_all_four_in_sft(tmp_path, anywhere, lora: bool) -> None:
    from transformers import ByT5Tokenizer

    rows = datasets.Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()} for row in token_rows()]
    )
    args = trl.SFTConfig(
        str(tmp_path), max_steps=6, per_device_train_batch_size=2, report_to="none", disable_tqdm=True, bf16=False,
        eval_strategy="steps", eval_steps=3, gradient_checkpointing=True, dataloader_pin_memory=False,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    callbacks = [CudaCacheCallback(2), EvalGenerateCleanup(), KVCacheGuard(), MemoryWatchdog()]
    trainer = trl.SFTTrainer(
        tiny_llama(vocab_size=384),
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=ByT5Tokenizer(extra_ids=0),
        callbacks=callbacks,
        peft_config=peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        if lora
        else None,
    )
    trainer.train()

    assert type(trainer.model).__name__ == ("PeftModelForCausalLM" if lora else "LlamaForCausalLM")
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {anywhere}
    assert read_steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert read_steps(tmp_path, "eval") == [3, 6]
    assert "generate" not in vars(trainer.model)
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
