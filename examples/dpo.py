"""Train adapters with TRL's DPOTrainer; a micro-batch that does not fit is survived.

python examples/dpo.py
"""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from trainer_plugins import protect


def main(output_dir: str = "runs/dpo") -> None:
    """Train on preferences for 5 steps; nothing is downloaded."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    rows = Dataset.from_list(
        [
            {"prompt": f"{number} + 1 =", "chosen": f" {number + 1}", "rejected": " no idea"}
            for number in range(64)
        ]
    )
    trainer = DPOTrainer(
        LlamaForCausalLM(config),
        args=DPOConfig(
            output_dir=output_dir,
            max_steps=5,
            per_device_train_batch_size=4,
            max_length=64,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    protect(trainer, preset="survive")  # one Trainer that is already built
    trainer.train()
    margins = [log["rewards/margins"] for log in trainer.state.log_history if "loss" in log]
    print(f"margin of rewards: {margins[0]:.4f} -> {margins[-1]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
