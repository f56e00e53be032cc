"""Run out of memory in an evaluation that keeps all logits, on a simulated card; then fix it.

python examples/evaluation_oom.py   # needs a C++ compiler, once
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainer_plugins import classify, report_oom
from trainer_plugins.testing import simgpu


def evaluate(output_dir: str, mended: bool) -> None:
    """Evaluate 40 batches; their logits are 40 MB unless only the best token of each is kept."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    tokens = torch.randint(1, 4096, (40, 64), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(output_dir, per_device_eval_batch_size=1, report_to="none")
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        eval_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        compute_metrics=lambda kept: {"right": float((kept[0] == kept[1]).mean())},
        preprocess_logits_for_metrics=(lambda logits, _: logits.argmax(-1)) if mended else None,
    )
    trainer.evaluate()


def main(output_dir: str = "runs/evaluation_oom") -> None:
    """Fail, classify the error, and evaluate again."""
    simgpu.enable(capacity_bytes=32 << 20)
    try:
        with report_oom(output_dir):  # for `trainer-plugins explain runs/evaluation_oom`
            evaluate(output_dir, mended=False)
    except RuntimeError as error:
        found = classify(error)
        if found is None:
            raise
        words = f"{found.source}: {found.requested_bytes} bytes were refused"
    print(f"without preprocess_logits_for_metrics: {words}")
    evaluate(output_dir, mended=True)
    print("with it: evaluated")


if __name__ == "__main__":
    main(*sys.argv[1:])
