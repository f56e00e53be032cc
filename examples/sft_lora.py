"""Fine-tune LoRA adapters with TRL's SFTTrainer; a micro-batch that does not fit is survived.

python examples/sft_lora.py
"""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trainer_plugins import survive_oom


def main(output_dir: str = "runs/sft_lora") -> None:
    """Train for 10 steps on built-in texts; nothing is downloaded."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    rows = Dataset.from_list([{"text": f"Row {number} has a text."} for number in range(64)])
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=output_dir,
            max_steps=10,
            per_device_train_batch_size=8,
            max_length=64,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    survive_oom(trainer)  # verifies on the first failure that pieces add up; costs nothing before
    trainer.train()
    trained = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)
    print(
        f"trained {trained:,} parameters of adapters, loss {trainer.state.log_history[0]['loss']}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
