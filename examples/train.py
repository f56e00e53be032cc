"""A typical training script: a Trainer, flags for TrainingArguments, callbacks of this package.

It trains a small Llama from scratch on random rows, so it needs no files. The weights are large
enough (hidden size 512) that ZeRO-3 really shards them: `examples/train.py --use_cpu --output_dir
runs/train --max_steps 4`.
"""

from dataclasses import dataclass

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from trainer_plugins import MemoryWatchdog, Preflight, StrategyInForce


@dataclass
class Sizes:
    """Holds the sizes of the model and the data."""

    hidden_size: int = 512
    num_layers: int = 2
    num_rows: int = 64
    length: int = 32


def rows(num_rows: int, length: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Make rows of random tokens, each its own label, the same on every rank."""
    tokens = torch.randint(512, (num_rows, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Train, and save the weights to the output folder."""
    # TrainingArguments come before the model: otherwise each rank first holds all of it under
    # ZeRO-3.
    parser = HfArgumentParser((TrainingArguments, Sizes))
    args, sizes = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=sizes.hidden_size,
        intermediate_size=2 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=sizes.length,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=rows(sizes.num_rows, sizes.length, seed=1),
        eval_dataset=rows(8, sizes.length, seed=2),
        callbacks=[StrategyInForce(), Preflight("error"), MemoryWatchdog()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.end_training()  # without this, a rank is occasionally aborted as it ends


if __name__ == "__main__":
    main()
