"""Notices that a model runs before its training, as TRL's precompute_ref_log_probs lets it."""

import time
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

Peaks = list[tuple[int, int]]  # of each card: allocated and reserved bytes

_load: list[tuple[int, Peaks]] = []  # when the first pass began, and the peaks until then
_hooks: list[Any] = []


def notice_passes() -> None:
    """Look for the first pass through a model, until the training begins."""
    _hooks.append(register_module_forward_pre_hook(_run_before))


def _run_before(module: torch.nn.Module, _: object) -> None:
    if hasattr(module, "save_pretrained") and not _load and any(now for now, _ in peaks()):
        _load.append((time.time_ns() // 1000, peaks()))
        reset_peaks()


def until_training() -> tuple[dict[str, Peaks], list[tuple[int, str]]]:
    """Return the peaks of each moment so far, and when each began; the load goes on."""
    while _hooks:
        _hooks.pop().remove()
    if not _load:
        return {}, [(0, "load")]
    began, of_load = _load.pop()
    moments = {"load": of_load, "forward": peaks()}
    reset_peaks()
    return moments, [(0, "load"), (began, "forward"), (time.time_ns() // 1000, "load")]


def peaks() -> Peaks:
    """Return the peaks of each card since they were reset."""
    return [
        (torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index))
        for index in range(torch.cuda.device_count())
    ]


def reset_peaks() -> None:
    """Begin to look for new peaks."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
