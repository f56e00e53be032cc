"""What the stories of a card share: where they run, what a run wrote, and a card made small."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from transformers import LlamaForCausalLM

from tests import processes
from tests.models import tiny_llama
from trainer_plugins.finding import Finding
from trainer_plugins.record.folder import folder_of_run
from trainer_plugins.record.timeline import Remark, read_timeline

ROOT = Path(__file__).parent.parent.parent
ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
CARD = "cuda:0"


def total_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory)


@contextmanager
def card_of(num_bytes: int) -> Iterator[None]:
    """Let torch's allocator reserve no more than this, and the whole card again afterwards."""
    torch.cuda.set_per_process_memory_fraction(num_bytes / total_bytes())
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def folder(trainer: Any) -> Path:
    """Find what was written beside the run; a dry card keeps it in a folder of its own."""
    return folder_of_run(Path(trainer.args.output_dir))


def entries(trainer: Any) -> list:
    """Read the timeline of a run; where nothing was to be told there is none."""
    path = folder(trainer) / "memory" / "rank-0.jsonl"
    return list(read_timeline(path)) if path.exists() else []


def findings(trainer: Any) -> list[Finding]:
    return [entry.finding for entry in entries(trainer) if isinstance(entry, Remark)]


def wide_llama(**config: Any) -> LlamaForCausalLM:
    """A small model with large activations: 1 MiB of logits for each 64 tokens."""
    return tiny_llama(vocab_size=4096, max_position_embeddings=4096, **config)


def token_rows(num_rows: int, length: int, vocab_size: int = 4096) -> list[dict[str, torch.Tensor]]:
    dice = torch.Generator().manual_seed(0)
    rows = torch.randint(1, vocab_size, (num_rows, length), generator=dice)
    return [{"input_ids": row, "labels": row} for row in rows]


class Lengths:
    """A collator that gives its batches lengths in this order, and the last one from then on."""

    def __init__(self, *lengths: int, num_rows: int = 1) -> None:
        self._lengths, self._num_rows = list(lengths), num_rows

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        length = self._lengths.pop(0) if len(self._lengths) > 1 else self._lengths[0]
        ids = torch.arange(self._num_rows * length).reshape(self._num_rows, length) % 100 + 1
        return {"input_ids": ids, "labels": ids}


def is_this_process_listed() -> bool:
    """Whether the driver lists this process by its own number: in many containers it does not."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"{torch.cuda.get_device_properties(0).uuid}")
    except pynvml.NVMLError:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    try:
        rows = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
        return any(row.pid == os.getpid() and row.usedGpuMemory for row in rows)
    finally:
        pynvml.nvmlShutdown()


def environment(**variables: str) -> dict[str, str]:
    """Of a process that finds this package, and takes its settings from nowhere else."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "ACCELERATE_TORCH_DEVICE")
    kept = {name: text for name, text in os.environ.items() if name not in hidden}
    return {**kept, "PYTHONPATH": path, **variables}


def python(*arguments: object, cwd: Path, **variables: str) -> Any:
    """Run Python to its end; its exit code, and what it wrote."""
    return processes.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        environ=environment(**variables),
        fresh="a process that was forked cannot use the card of the first one",
    )
