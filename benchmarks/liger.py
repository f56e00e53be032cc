"""Holds what Liger's kernels are planned to take against what their authors measured on CUDA.

tests/planner/published_liger.csv has the peaks of `max_memory_allocated` in
benchmark/data/all_benchmark_data.csv of linkedin/Liger-Kernel. Each row says the release that has
the code which was measured: layer norms, which it dates with 0.2.1 and 0.6.0, were measured between
releases, with code that came with 0.3.0 and 0.6.1. Liger's RMS norm was measured with code of no
release, and is left out. A row is only compared with that release: install it with
`pip install --no-deps --target FOLDER liger-kernel==0.4.2`, and add the folder to PYTHONPATH.
Triton is not needed. On a card, the dry one too, the calls run there instead of being planned:

    python -m trainer_plugins.drycuda --gpu a100-80gb -m benchmarks.liger
"""

import csv
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainer_plugins.allocator.model import AllocatorModel
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.pretend import triton
from trainer_plugins.planner.pretend.as_on_card import World, in_world
from trainer_plugins.planner.pretend.fake_cuda import install_once
from trainer_plugins.planner.tracing.events import ALLOC, Trace
from trainer_plugins.units import MIB

ROWS = Path(__file__).parents[1] / "tests" / "planner" / "published_liger.csv"
_TIMES = 3  # its authors call ten times, and take the median: the first call is not like the others


@dataclass(frozen=True)
class Row:
    """Describes one call, forward and backward, whose peak was measured."""

    kernel: str
    provider: str
    """`liger`, or `huggingface` for what it replaces."""

    liger: str
    gpu: str
    settings: dict[str, Any]
    peak_mib: float


def rows(of_version: str) -> list[Row]:
    """Read the rows of one version of Liger."""
    with ROWS.open() as file:
        return [_row(each) for each in csv.DictReader(file) if each["liger"] == of_version]


def _row(fields: dict[str, str]) -> Row:
    pairs = (word.split("=") for word in fields["settings"].split())
    settings = {key: int(value) if value.isdigit() else value for key, value in pairs}
    settings[fields["size"]] = int(fields["value"])
    settings["dtype"] = getattr(torch, str(settings.get("dtype", "float32")))
    return Row(
        fields["kernel"],
        fields["provider"],
        fields["liger"],
        fields["gpu"],
        settings,
        float(fields["peak_mib"]),
    )


def planned_mib(row: Row) -> float:
    """Run a call as its benchmark does, without a card; return the peak of the last call in MiB."""
    install_once()
    world = World(device="cuda", card=card_of(row.gpu))
    with in_world(world) as tracker, torch.device("cuda"):
        call, kept = _CALLS[row.kernel](row.settings, row.provider == "liger")
        for _ in range(_TIMES):
            before = len(tracker.trace().events)
            call()
        trace = tracker.trace()
        del kept
    return _peak_since(before, trace) / MIB


def measured_mib(row: Row) -> float:
    """Run a call as its benchmark does, on this process's card; return the peak as planned_mib."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each row is another process of its authors
    with torch.device("cuda"):
        call, kept = _CALLS[row.kernel](row.settings, row.provider == "liger")
        for _ in range(_TIMES):
            torch.cuda.reset_peak_memory_stats()
            call()
        del kept
    return torch.cuda.max_memory_allocated() / MIB


def _peak_since(begin: int, trace: Trace) -> int:
    """Return the most that was allocated after so many events, in bytes."""
    model, blocks = AllocatorModel(None, None), {}
    for position, event in enumerate(trace.events):
        if position == begin:
            model.reset_peaks()
        if event.kind == ALLOC:
            storage = trace.storages[event.number]
            blocks[event.number] = model.malloc(storage.num_bytes, storage.stream)
        elif event.number in blocks:
            model.free(blocks.pop(event.number))
    return model.peak_allocated_bytes if begin < len(trace.events) else model.allocated_bytes


Call = tuple[Callable[[], object], object]
"""A call, and what is alive beside it."""


def _head(settings: dict[str, Any], is_liger: bool) -> Call:
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    hidden, vocabulary, dtype = settings["H"], settings["V"], settings["dtype"]
    # the benchmark has both heads on the card, whichever is measured
    theirs, ours = (torch.nn.Linear(hidden, vocabulary, False, dtype=dtype) for _ in range(2))
    x = torch.randn(settings["BT"], hidden, requires_grad=True, dtype=dtype)
    target = torch.randint(vocabulary, (settings["BT"], 1)).squeeze(1)
    fused, plain = LigerFusedLinearCrossEntropyLoss(), torch.nn.CrossEntropyLoss()

    def call() -> None:
        loss = fused(ours.weight, x, target) if is_liger else plain(theirs(x), target)
        loss.backward()

    # its process had timed the plain head before, whose backward leaves a workspace of cuBLAS
    theirs(x[:1].detach()).sum().backward()
    theirs.weight.grad = None
    return call, theirs


def _cross_entropy(settings: dict[str, Any], is_liger: bool) -> Call:
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss() if is_liger else torch.nn.CrossEntropyLoss()
    num_rows, vocabulary = settings["B"] * settings["T"], settings["V"]
    x = torch.randn(num_rows, vocabulary, requires_grad=True)
    target = torch.randint(vocabulary, (num_rows, 1)).squeeze(1)
    return lambda: loss(x, target).backward(), None


def _norm(make: Callable[[int, bool], torch.nn.Module], name: str) -> Callable[..., Call]:
    def norm(settings: dict[str, Any], is_liger: bool) -> Call:
        size = settings[name]
        both = [make(size, kind) for kind in (True, False)]
        layer = both[0 if is_liger else 1]
        x = torch.randn((settings["M"], size), dtype=settings["dtype"])
        gradient = torch.randn_like(x)
        x.requires_grad_(True)
        return lambda: layer(x).backward(gradient, retain_graph=True), (both, gradient)

    return norm


class _PlainRmsNorm(torch.nn.Module):
    """Normalises as Llama of the measured transformers does, which multiplied in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, x = x.dtype, x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(kind)


def _rms(size: int, is_liger: bool) -> torch.nn.Module:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    return LigerRMSNorm(size) if is_liger else _PlainRmsNorm(size)


def _layer(size: int, is_liger: bool) -> torch.nn.Module:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    return LigerLayerNorm(size) if is_liger else torch.nn.LayerNorm(size)


def _mlp(activation: str, name: str) -> Callable[..., Call]:
    def mlp(settings: dict[str, Any], is_liger: bool) -> Call:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP

        hidden = settings["hidden_size"]
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=settings["intermediate_size"],
            hidden_act=activation,
        )
        module = import_module(f"liger_kernel.transformers.{name[5:-3].lower()}")
        kind = getattr(module, name) if is_liger else LlamaMLP
        layer = kind(config=config).to(settings["dtype"])
        rows: int = settings["B"] if "B" in settings else settings["bsz"]
        x = torch.randn((rows, settings["T"], hidden), dtype=settings["dtype"], requires_grad=True)

        def call() -> None:
            y = layer(x)
            y.backward(torch.randn_like(y), retain_graph=True)

        return call, None

    return mlp


def _rope(settings: dict[str, Any], is_liger: bool) -> Call:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden: int = settings["H"] if "H" in settings else settings["hidden_size"]
    length: int = settings["T"] if "T" in settings else settings["seq_len"]
    size, dtype = hidden // settings["num_q_heads"], settings["dtype"]
    q, k = (
        torch.randn((1, length, heads, size), requires_grad=True, dtype=dtype).transpose(1, 2)
        for heads in (settings["num_q_heads"], settings["num_kv_heads"])
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length).unsqueeze(0)
    frequencies = torch.arange(0, size, 2).float()
    frequencies[None, :, None] @ positions[:, None, :].float()  # takes a workspace of cuBLAS
    cos, sin = (torch.empty((1, length, size), dtype=dtype) for _ in range(2))
    turn = liger_rotary_pos_emb if is_liger else apply_rotary_pos_emb

    def call() -> None:
        turned = turn(q, k, cos, sin, positions) if is_liger else turn(q, k, cos, sin)
        torch.autograd.grad(turned, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return call, (positions, frequencies)


_CALLS: dict[str, Callable[[dict[str, Any], bool], Call]] = {
    "fused_linear_cross_entropy": _head,
    "cross_entropy": _cross_entropy,
    "rms_norm": _norm(_rms, "H"),
    "layer_norm": _norm(_layer, "N"),
    "swiglu": _mlp("silu", "LigerSwiGLUMLP"),
    "geglu": _mlp("gelu_pytorch_tanh", "LigerGEGLUMLP"),
    "rope": _rope,
}


def lines(of_version: str) -> Iterator[str]:
    """Yield a line of the table for each kernel: its rows, and the errors in per cent."""
    found: dict[tuple[str, str, str], list[float]] = {}
    on_card = torch.cuda.is_available()
    for row in rows(of_version):
        if on_card and card_of(row.gpu).capability != torch.cuda.get_device_capability():
            continue
        error = 100 * ((measured_mib if on_card else planned_mib)(row) / row.peak_mib - 1)
        found.setdefault((row.kernel, row.provider, row.gpu), []).append(error)
    for (kernel, provider, gpu), errors in found.items():
        worst = max(errors, key=abs)
        mean = statistics.fmean(map(abs, errors))
        yield f"| {kernel} | {provider} | {gpu} | {len(errors)} | {mean:.2f} | {worst:+.2f} |"


def begin() -> None:
    """Let Liger's layers be imported without its patches of models, and Triton without a card.

    Those of older versions are for older transformers.
    """
    if not torch.cuda.is_available():
        triton.kernels_do_nothing()
    # An older one has no __init__.py, so Python would prefer another that is installed.
    folder = Path(str(distribution("liger-kernel").locate_file("liger_kernel")))
    for name, place in (("", folder), (".transformers", folder / "transformers")):
        package = ModuleType(f"liger_kernel{name}")
        package.__path__ = [str(place)]
        sys.modules[package.__name__] = package


def main() -> None:
    """Print the table of the installed version."""
    begin()
    installed = version("liger-kernel")
    print(f"liger-kernel {installed}: {len(rows(installed))} rows that were published")
    print("| kernel | provider | card | rows | mean error, % | worst |")
    for line in lines(installed):
        print(line, flush=True)
    os._exit(0)  # autograd's thread of a card that is not there aborts some processes at their end


if __name__ == "__main__":
    main()
