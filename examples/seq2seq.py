"""Train a T5 that generates in its evaluation, guarded by two callbacks.

python examples/seq2seq.py
"""

import sys
from typing import Any

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from trainer_plugins import EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog


def exact_match(prediction: Any) -> dict[str, float]:
    """Compare generated tokens with the labels, skipping the decoder's start token."""
    length = min(prediction.predictions.shape[1] - 1, prediction.label_ids.shape[1])
    same = prediction.predictions[:, 1 : length + 1] == prediction.label_ids[:, :length]
    return {"tokens_right": float(same.mean())}


def main(output_dir: str = "runs/seq2seq") -> None:
    """Train a copying task for 20 steps; evaluate by generating."""
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = config.pad_token_id
    tokens = torch.randint(2, 64, (72, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    args = Seq2SeqTrainingArguments(
        output_dir=output_dir,
        max_steps=20,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=10,
        predict_with_generate=True,
        generation_max_length=9,
        save_strategy="no",
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(config),
        args,
        train_dataset=rows[:64],
        eval_dataset=rows[64:],
        compute_metrics=exact_match,
        callbacks=[MemoryWatchdog(), EvalGenerateCleanup(), KVCacheGuard()],
    )
    trainer.train()
    print(f"generated tokens that are right: {trainer.evaluate()['eval_tokens_right']:.0%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
