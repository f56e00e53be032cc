"""Train under a launch of `benchmarks/configs.py`: 7B in miniature; report each rank's memory.

Each rank writes `rank-<rank>.json` into `--result`: what really ran, seconds of the timed steps,
peak main memory, and a census of DeepSpeed's memory on the card. The census is taken in separate
steps, after the timed ones.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

WARM_UP_STEPS = 3  # DeepSpeed records the order of the modules in these, and prefetches afterwards
TIMED_STEPS = 4
CENSUS_STEPS = 1


def shape(divisor: int) -> LlamaConfig:
    """Return Llama-2 7B with all matrices `divisor` times narrower and lower.

    It has `1 / divisor ** 2` of the elements.
    """
    return LlamaConfig(
        hidden_size=4096 // divisor,
        intermediate_size=11008 // divisor,
        vocab_size=32000 // divisor,
        num_hidden_layers=32,
        num_attention_heads=32 // divisor,
        num_key_value_heads=32 // divisor,
        max_position_embeddings=2048,
        use_cache=False,
    )


class Census:
    """Counts the memory that DeepSpeed keeps on the card and moves to it, in elements and bytes.

    It counts, and reads no device. The sum grows when weights are fetched and when gradients are
    reduced, so it is taken there. It includes whole weights (gathered, or on their way), gradients,
    the reduce bucket and reduce-scatter's copies of it. It does not include activations, the loss,
    and copies that a gather makes while it is waited for.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[Any]) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.peak_bytes = self.peak_gathered_bytes = 0
        self.num_fetched = self.num_waited_for = 0
        """Elements gathered; and those neither there nor on their way when their layer began."""

    def begin(self) -> None:
        """Count from now on, until the process ends with its training: nothing is restored."""
        from deepspeed.runtime.zero import stage3

        coordinator = self.optimizer.parameter_offload.get_param_coordinator()
        coordinator.fetch_sub_module = self._counting(coordinator.fetch_sub_module)
        stage3.reduce_scatter_coalesced = self._looking(stage3.reduce_scatter_coalesced)

    def absent(self, parameters: Iterable[Any]) -> int:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        return sum(
            each.ds_numel for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE
        )

    def look(self, copied_bytes: int = 0) -> None:
        buckets = [
            bucket.buffer
            for bucket in self.optimizer.ipg_buckets.values()
            if bucket.buffer is not None
        ]
        # A gradient lies in the bucket, or alone if it is larger.
        held = [*buckets, *(each.grad for each in self.parameters if each.grad is not None)]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in held
        }
        num_gathered = sum(each.ds_numel for each in self.parameters) - self.absent(self.parameters)
        gathered_bytes = num_gathered * self.parameters[0].element_size()
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, gathered_bytes)
        self.peak_bytes = max(
            self.peak_bytes, gathered_bytes + sum(storages.values()) + copied_bytes
        )

    def _counting(self, fetch: Callable[..., None]) -> Callable[..., None]:
        def counted(module: Any, forward: bool) -> None:
            absent = self.absent(self.parameters)
            self.num_waited_for += self.absent(module.parameters(recurse=False))
            fetch(module, forward=forward)
            self.num_fetched += absent - self.absent(self.parameters)
            self.look()

        return counted

    def _looking(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def looked(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            # DeepSpeed reduces one tensor in place, and several in a copy.
            self.look(sum(tensor.nbytes for tensor in tensors) if len(tensors) > 1 else 0)
            return reduce(tensors, *args, **kwargs)

        return looked


def resident_bytes(optimizer: Any, parameters: Iterable[Any]) -> int:
    """Return the bytes of weights, optimizer and gradients that stay on the card."""
    held = 0
    if not optimizer.offload_param:
        held += sum(parameter.ds_tensor.nbytes for parameter in parameters)
    if not optimizer.offload_optimizer:
        states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        tensors = [
            *optimizer.fp32_partitioned_groups_flat,
            *states,
            optimizer.grad_partitions_flat_buffer,
        ]
        held += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    return held


class Stopwatch(TrainerCallback):
    """Measures the seconds of the timed steps; then the census starts."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.marks: list[float] = []
        self.census: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(perf_counter())
        if state.global_step == WARM_UP_STEPS + TIMED_STEPS:
            engine = self.trainer.model_wrapped
            self.census = Census(engine.optimizer, engine.module.parameters())
            self.census.begin()

    def seconds(self) -> list[float]:
        timed = self.marks[WARM_UP_STEPS : WARM_UP_STEPS + TIMED_STEPS + 1]
        return [end - begin for begin, end in pairwise(timed)]


def peak_host_bytes() -> int:
    """Return this process's peak main memory: VmHWM, because getrusage has the launcher's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Train, and record what ran and its cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--divisor", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument(
        "--card_bytes", type=int, default=0, help="what the card may hold; 0: all of it"
    )
    parser.add_argument("--use_cpu", action="store_true")
    words = parser.parse_args()
    if words.card_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, words.card_bytes / total))

    set_seed(0)
    num_steps = WARM_UP_STEPS + TIMED_STEPS + CENSUS_STEPS
    args = TrainingArguments(  # before the model, which is then built in parts
        str(words.result / "run"),
        max_steps=num_steps,
        per_device_train_batch_size=words.rows,
        gradient_checkpointing=True,
        bf16=True,
        use_cpu=words.use_cpu,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    config = shape(words.divisor)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_rows = words.rows * num_steps * args.world_size
    tokens = torch.randint(
        0, config.vocab_size, (num_rows, words.length), generator=torch.Generator().manual_seed(0)
    )
    trainer = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    watch = Stopwatch(trainer)
    trainer.add_callback(watch)
    trainer.train()

    engine = trainer.model_wrapped
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    num_parameters = sum(parameter.ds_numel for parameter in parameters)
    partitioned = sum(parameter.ds_numel for parameter in parameters if not parameter.ds_persist)
    census = watch.census
    offload = engine.zero_offload_optimizer(), engine.zero_offload_param()
    result = {
        "world_size": args.world_size,
        "stage": engine.zero_optimization_stage(),
        "optimizer": type(zero.optimizer).__name__,
        "offload": {
            name: str(block.device) if block else "none"
            for name, block in zip(("optimizer", "param"), offload, strict=True)
        },
        "parameters": num_parameters,
        "partitioned_share": partitioned / num_parameters,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": watch.seconds(),
        "fetched": census.num_fetched / num_parameters,
        "waited_for": census.num_waited_for / num_parameters,
        "gathered_bytes": census.peak_gathered_bytes,
        "card_bytes": census.peak_bytes + resident_bytes(zero, parameters),
        "host_bytes": peak_host_bytes(),
        "cuda_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    (words.result / f"rank-{args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
