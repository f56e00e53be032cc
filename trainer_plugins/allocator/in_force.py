"""Ask the running torch which allocator settings it uses. Imports torch."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.allocator.settings import Value
from trainer_plugins.allocator.variables import UNIFIED, Variables
from trainer_plugins.allocator.verify import InForce, verify
from trainer_plugins.finding import Finding
from trainer_plugins.units import MIB

Reported = Mapping[str, Any]  # `_snapshot()["allocator_settings"]` of torch


def check(asked: str | None = None, environ: Mapping[str, str] | None = None) -> Finding | None:
    """Judge whether the allocator of this process uses the settings that were asked for.

    Asking fixes the settings, as the first use of the card does: torch reads its variables once.

    Args:
        asked: the text that should be in force; None takes what the variables hold, the unified
            name first.
        environ: the variables; None takes those of this process.
    """
    variables = Variables.of(os.environ if environ is None else environ)
    if asked is None:
        asked = variables.texts.get(UNIFIED) or next(iter(variables.texts.values()), None)
    in_force = read_in_force()
    if not asked or in_force is None:
        return None
    return verify(asked, in_force, variables, gather_machine(os.environ))


def has_expandable_segments() -> bool:
    """Return whether a variable that torch reads, or a call, asked for expandable segments."""
    variables = Variables.of(os.environ)
    texts = [variables.texts.get(variables.read_by(gather_machine(os.environ)) or "", "")]
    # torch before 2.12 has no such call, and any torch may refuse the text.
    with suppress(AttributeError, RuntimeError, ValueError, IndexError):
        texts.append(torch._C._accelerator_getAllocatorSettings())
    return any(InForce(text).value("expandable_segments") for text in texts)


def read_in_force() -> InForce | None:
    """Read what the allocator uses; None if this build cannot tell (no CUDA, before torch 2.12).

    The snapshot of a build with CUDA grows with the run: ask early.
    """
    core = torch._C
    snapshot = getattr(core, "_cuda_memorySnapshot", None)
    text_of = getattr(core, "_accelerator_getAllocatorSettings", None)
    if snapshot is None and text_of is None:
        return None
    try:
        text = text_of() if text_of else ""
    except (RuntimeError, ValueError, IndexError) as error:
        return InForce(refusal=str(error).splitlines()[0])
    reported: Reported = {}
    known: dict[str, Value | None] = {}
    if snapshot is not None:
        known["backend"] = str(core._cuda_getAllocatorBackend())
        if known["backend"] == "native":  # any other refuses to make a snapshot
            try:
                reported = snapshot(None)["allocator_settings"]
            except (RuntimeError, ValueError, IndexError) as error:
                return InForce(refusal=str(error).splitlines()[0])
    text = text or str(reported.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return InForce(text, known | values_reported(reported), _is_initialized())


def values_reported(reported: Reported) -> dict[str, Value | None]:
    """Translate `_snapshot()["allocator_settings"]`, where sizes are bytes and -1 is no limit."""
    values: dict[str, Value | None] = {}
    for name, key in {
        "max_split_size": "max_split_size_mb",
        "max_round_threshold": "pinned_max_round_threshold_mb",
        "max_cached_size": "pinned_max_cached_size_mb",
    }.items():
        if name in reported:
            values[key] = reported[name] // MIB if reported[name] >= 0 else None
    if "garbage_collection_threshold" in reported:
        values["garbage_collection_threshold"] = reported["garbage_collection_threshold"] or None
    # torch 2.9 fills the interval before `>` differently, which no user could know.
    if "roundup_power2_divisions" in reported and hasattr(
        torch._C, "_accelerator_setAllocatorSettings"
    ):
        values["roundup_power2_divisions"] = tuple(reported["roundup_power2_divisions"].values())
    for key in (
        "expandable_segments",
        "pinned_num_register_threads",
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "graph_capture_record_stream_reuse",
    ):
        if key in reported:
            values[key] = reported[key]
    return values


def _is_initialized() -> bool:
    try:
        return bool(torch._C._accelerator_isAllocatorInitialized())
    except RuntimeError:  # no accelerator
        return False
