"""Reads the allocator settings that the running torch uses, and explains deviations."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_plugins.allocator import variables
from trainer_plugins.allocator.machine import Machine, expandable_blocker, gather_machine
from trainer_plugins.allocator.settings import OPTION_OF, Kind, Value, read, values_of
from trainer_plugins.finding import Finding
from trainer_plugins.units import MIB

Reported = Mapping[str, Any]  # `_snapshot()["allocator_settings"]` of torch
_DEFAULTS: dict[str, Value] = {
    **{key: False for key, option in OPTION_OF.items() if option.kind is Kind.FLAG},
    "backend": "native",
    "pinned_num_register_threads": 1,
    "per_process_memory_fraction": 1.0,
}


@dataclass(frozen=True, slots=True)
class InForce:
    """The settings that the allocator of this process uses."""

    text: str = ""  # the text that torch read last, from a variable or a call
    # reported by the allocator, and preferred to the text; None: not set
    known: dict[str, Value | None] = field(default_factory=dict)
    refusal: str | None = None  # torch's error, if it could not read its settings

    def value(self, key: str) -> Value | None:
        """Return the value of an option; None if it is not set and has no default."""
        if key in self.known:
            return self.known[key]
        return values_of(read(self.text)[0]).get(key, _DEFAULTS.get(key))


def check(asked: str | None = None) -> Finding | None:
    """Check that the allocator of this process uses the requested settings.

    The check fixes the settings, as the first use of the card does: torch reads its variables once.

    Args:
        asked: the text that should be in force. Default: the variables', the unified name first.
    """
    texts = variables.pick(os.environ)
    if asked is None:
        asked = texts.get(variables.UNIFIED) or next(iter(texts.values()), None)
    in_force = read_in_force()
    if not asked or in_force is None:
        return None
    return verify(asked, in_force, texts, gather_machine(os.environ))


def has_expandable_segments() -> bool:
    """Return whether a variable that torch reads, or a call, requested expandable segments."""
    texts = [variables.read_text(os.environ)]
    # torch before 2.12 lacks this call, and any version may reject the text.
    with suppress(AttributeError, RuntimeError, ValueError, IndexError):
        texts.append(torch._C._accelerator_getAllocatorSettings())
    return any(InForce(text).value("expandable_segments") for text in texts)


def read_in_force() -> InForce | None:
    """Read the allocator's settings; None if this build cannot report them.

    Builds without CUDA before torch 2.12 cannot. A CUDA build's snapshot grows: call this early.
    """
    core = torch._C
    snapshot = getattr(core, "_cuda_memorySnapshot", None)
    text_of = getattr(core, "_accelerator_getAllocatorSettings", None)
    if snapshot is None and text_of is None:
        return None
    reported: Reported = {}
    known: dict[str, Value | None] = {}
    try:
        text = text_of() if text_of else ""
        if snapshot is not None:
            known["backend"] = str(core._cuda_getAllocatorBackend())
            if known["backend"] == "native":  # other backends refuse to take a snapshot
                reported = snapshot(None)["allocator_settings"]
    except (RuntimeError, ValueError, IndexError) as error:
        return InForce(refusal=str(error).splitlines()[0])
    text = text or str(reported.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return InForce(text, known | _values_reported(reported))


def _values_reported(reported: Reported) -> dict[str, Value | None]:
    """Translate `_snapshot()["allocator_settings"]`, where sizes are bytes and -1 is no limit."""
    values: dict[str, Value | None] = {key: reported[key] for key in OPTION_OF if key in reported}
    for name, key in {
        "max_split_size": "max_split_size_mb",
        "max_round_threshold": "pinned_max_round_threshold_mb",
        "max_cached_size": "pinned_max_cached_size_mb",
    }.items():
        if name in reported:
            values[key] = reported[name] // MIB if reported[name] >= 0 else None
    if values.get("garbage_collection_threshold") == 0:
        values["garbage_collection_threshold"] = None
    divisions = reported.get("roundup_power2_divisions")
    values.pop("roundup_power2_divisions", None)
    # torch 2.9 fills the interval before `>` differently, which users cannot know.
    if divisions is not None and hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        values["roundup_power2_divisions"] = tuple(divisions.values())
    return values


def verify(
    asked: str, in_force: InForce, texts: Mapping[str, str], machine: Machine
) -> Finding | None:
    """Report requested settings that are not in use; `texts` has the variables of the process."""
    wanted = values_of(read(asked)[0])
    differing = [key for key in wanted if in_force.value(key) != wanted[key]]
    if in_force.refusal is None and not differing:
        return None
    why, remedy = _reason(wanted, in_force, texts, machine)
    seen = ", ".join(
        f"{key} is {in_force.value(key)} instead of {wanted[key]}" for key in differing
    )
    return Finding.warning(
        code="allocator-settings-not-in-force",
        summary=f"the allocator does not use the requested settings: {why}",
        evidence=f"requested {asked}; in force {in_force.text or 'nothing'!r}"
        + (f"; {seen}" if seen else ""),
        remedy=remedy,
    )


def _reason(
    wanted: dict[str, Value], in_force: InForce, texts: Mapping[str, str], machine: Machine
) -> tuple[str, str]:
    """Return the reason for a difference and its remedy, by the first cause that applies."""
    if in_force.refusal is not None:
        return (
            f"torch refused to read them ({in_force.refusal})",
            "Correct the text: `trainer-plugins env` shows what is wrong.",
        )
    holders = [name for name, text in texts.items() if _holds(text, wanted)]
    if not holders:
        return (
            "no variable of this process holds them",
            'Export them in the shell that launches: eval "$(trainer-plugins env)".',
        )
    read_name = variables.find_read(texts, machine)
    if not set(holders) & set(variables.names_read(machine)):
        return (
            f"{machine.torch_name} does not read {holders[0]}",
            f"Set {variables.CUDA} to the same.",
        )
    if read_name not in holders:
        other = f"{read_name}={texts[str(read_name)]}"
        return (
            f"{other} takes precedence over {holders[0]}",
            f"Unset {read_name}, or give it the same text.",
        )
    if not _holds(in_force.text, wanted):
        return (
            f"torch had read {read_name} before it was set, or a call has changed them since",
            "Set it before the process starts: torch reads it once, when it first uses the card.",
        )
    blocker = expandable_blocker(machine) if "expandable_segments" in wanted else None
    return (
        "torch has read them and uses something else"
        f" ({blocker or 'a build without that option, or a call since'})",
        "Remove what has no effect here.",
    )


def _holds(text: str, wanted: dict[str, Value]) -> bool:
    have = InForce(text)
    return all(have.value(key) == value for key, value in wanted.items())
