"""Fine-tune a causal language model on real text with the callbacks, evaluation and generation.

By default a byte-level Llama of 0.4 million parameters learns the text of Python's own
documentation, which ships with Python, so nothing is downloaded. `--model PATH_OR_ID` takes any
causal LM instead. Its micro-batch is too large for the simulated card of `scripts/quickstart`.
"""

import argparse
import logging
import textwrap
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.utils.logging import disable_progress_bar

from trainer_plugins import (
    CudaCacheCallback,
    EvalGenerateCleanup,
    KVCacheGuard,
    MemoryWatchdog,
    SurviveOOM,
    read_timeline,
)
from trainer_plugins.record.timeline import Flush, Remark, Sample
from trainer_plugins.units import size

PROMPT = "The statement "

# transformers 5.23 renamed it, and warns about the old name.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Holds a text as blocks of tokens of equal length, each its own label."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.blocks = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class GeneratingTrainer(Trainer):
    """Prints the loss, and generates from a prompt at each evaluation."""

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        super().log(logs, *args, **kwargs)
        if "loss" in logs:
            step = f"step {self.state.global_step} of {self.args.max_steps}"
            print(f"{step}: loss {float(logs['loss']):.2f}", flush=True)

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        prompt = self.processing_class(PROMPT, return_tensors="pt", add_special_tokens=False).to(
            self.args.device
        )
        tokens = self.model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        new = tokens.shape[-1] - prompt["input_ids"].shape[-1]
        generated = f"generated {new} tokens after {PROMPT!r}"
        print(f"evaluated: loss {metrics['eval_loss']:.2f}; {generated}", flush=True)
        return metrics


def byte_level_llama() -> tuple[Any, Any]:
    """Build an untrained Llama of 0.4 million parameters over bytes, and its tokenizer."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer


def pretrained(name: str) -> tuple[Any, Any]:
    """Load any causal LM and its tokenizer, from a folder or the local cache of the hub."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer


def summary(output_dir: Path) -> str:
    """Say in a few lines what the callbacks noted in the memory timeline of the run."""
    entries = read_timeline(output_dir / "_trainer_plugins" / "memory" / "rank-0.jsonl")
    lines = [
        ("Survived", f"Step {entry.step}: {entry.finding.summary}. The gradient is the same.")
        for entry in entries
        if isinstance(entry, Remark) and entry.finding.code == "out-of-memory-survived"
    ][:1] or [("Survived", "Nothing: each micro-batch fitted.")]
    freed = [entry for entry in entries if isinstance(entry, Flush) and "eval" in entry.reason]
    if freed:
        most = size(max(entry.released_bytes for entry in freed))
        what = f"EvalGenerateCleanup freed up to {most} of cache after each evaluation."
        lines.append(("Cleaned up", what))
    peaks: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, Sample):
            peak = entry.reading.peak_allocated_bytes
            peaks[entry.moment] = max(peak, peaks.get(entry.moment, 0))
            capacity = size(entry.reading.total_bytes)
    names = {"train": "training", "eval": "evaluation", "generate": "generation"}
    shown = ", ".join(f"{name} {size(peaks[key])}" for key, name in names.items())
    lines.append(("Peak", f"{shown}, of {capacity}."))
    return "\n".join(
        textwrap.fill(text, 88, initial_indent=f"{label:12}", subsequent_indent=" " * 12)
        for label, text in lines
    )


def main() -> None:
    """Train, evaluate, and leave a memory timeline in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--model", help="a causal LM: a folder or an id; default: a byte-level Llama, untrained"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, help="default: 9, or 3 with --too-large")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument(
        "--careless", action="store_true", help="without checkpointing and SurviveOOM: it dies"
    )
    parser.add_argument(
        "--too-large", action="store_true", help="a micro-batch 8 times as large, to be survived"
    )
    options = parser.parse_args()
    options.steps = options.steps or (3 if options.too_large else 9)
    options.micro_batch *= 8 if options.too_large else 1
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    logging.getLogger("trainer_plugins").setLevel(logging.ERROR)  # the summary says it
    disable_progress_bar()

    model, tokenizer = pretrained(options.model) if options.model else byte_level_llama()
    text = "\n".join(topics.values())
    # Enough text for the steps, and some held out for evaluation.
    text = text[: (options.steps * options.micro_batch + 64) * options.length * 6]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    blocks = Blocks(tokens, options.length)
    held_out = 16
    train, evaluation = torch.utils.data.random_split(
        blocks, [len(blocks) - held_out, held_out], torch.Generator().manual_seed(0)
    )
    args = TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.micro_batch,
        learning_rate=3e-5 if options.model else 3e-3,
        **{CHECKPOINTING: not options.careless},
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 3),
        logging_steps=max(1, options.steps // 6),
        save_strategy="steps",
        save_steps=options.steps,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
    )
    callbacks = [
        CudaCacheCallback(interval=10),
        EvalGenerateCleanup(),
        KVCacheGuard(),
        MemoryWatchdog(),
    ]
    if not options.careless:
        callbacks.append(SurviveOOM(plan_first=False))  # shows survival instead of avoiding the OOM
    trainer = GeneratingTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        # all blocks have one length, and not every tokenizer can pad
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # a few lines are enough here
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    print(f"\ntrained on {args.device}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(summary(options.output_dir))


if __name__ == "__main__":
    main()
