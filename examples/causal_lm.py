"""Train a causal language model with the preset `memory_safe`, on the CPU or a card.

python examples/causal_lm.py
trainer-plugins report runs/causal_lm
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import trainer_plugins


def main(output_dir: str = "runs/causal_lm") -> None:
    """Train for 20 steps, evaluate twice, and leave a memory timeline."""
    trainer_plugins.attach("memory_safe")  # every Trainer built from here on
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    tokens = torch.randint(1, 512, (72, 64), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=20,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, args, train_dataset=rows[:64], eval_dataset=rows[64:])
    trainer.train()
    peaks = [log["memory/peak_gib"] for log in trainer.state.log_history if "loss" in log]
    print(f"peak memory in the logs: {max(peaks):.4f} GiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
