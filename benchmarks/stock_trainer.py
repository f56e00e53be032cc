"""Train as fms-acceleration's benchmark does without its own kernels, with transformers' Trainer.

    python -m trainer_plugins.drycuda --gpu a100-80gb -m benchmarks.stock_trainer lora 4

With the versions of the source before this environment's (transformers 4.48.1, PEFT 0.13.2,
accelerate 1.0.1; installed by `pip install --no-deps --target`), it prints the figures compared in
benchmarks/results/fms_acceleration.txt. SDPA replaces flash-attn's package.
"""

import json
import sys
import tempfile
from typing import Any

import peft
import torch
import transformers

from benchmarks.published import FOLDER

LENGTH = 4096


def load(kind: str) -> Any:
    """Build Mistral-7B in bf16 on the card; with adapters if `kind` is lora."""
    written = json.loads((FOLDER / "configs" / "mistral-7b-v0.1.json").read_text())
    config = transformers.AutoConfig.for_model(**written)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if kind != "lora":
        return model
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = peft.LoraConfig(
        r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, adapter)
    adapted.enable_input_require_grads()
    return adapted


def main(kind: str, num_rows: int) -> None:
    """Train three steps; print the counters that the source sums up."""
    model = load(kind)
    ones = torch.ones(LENGTH, dtype=torch.long)
    row = {"input_ids": ones, "attention_mask": ones, "labels": ones}
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=num_rows,
        max_steps=3,
        gradient_checkpointing=True,
        weight_decay=0.01,
        adam_epsilon=1e-4,
        optim="adamw_torch",
        save_strategy="no",
        report_to=[],
        skip_memory_metrics=False,
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row] * (3 * num_rows),
        data_collator=transformers.default_data_collator,
    )
    metrics = trainer.train().metrics
    moments = ("before_init_mem_gpu", "train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta")
    print(
        f"{kind} {num_rows} rows: peak {sum(metrics[name] for name in moments)},"
        f" reserved {torch.cuda.max_memory_reserved()},"
        f" retries {torch.cuda.memory_stats()['num_alloc_retries']}"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
