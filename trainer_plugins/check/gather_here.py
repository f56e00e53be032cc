"""Gather the facts of this machine. Imports no torch, and takes a few tenths of a second."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trainer_plugins.allocator.machine import gather_machine
from trainer_plugins.check.facts import CardFacts, Facts, MainMemory, Notes, Owner
from trainer_plugins.devices import GpuProcess, HostDevice, NvmlDevice, NvmlError
from trainer_plugins.devices.nvml import NO_CARD, InstalledCard, list_cards
from trainer_plugins.devices.patience import Patience
from trainer_plugins.launch.extensions import read_locks
from trainer_plugins.launch.masked import mask_command
from trainer_plugins.launch.place import read_versions

_LONGEST_COMMAND = 100
_FIRST_PROCESSES = ("systemd", "init", "tini", "dumb-init", "docker-init", "launchd")

_nvml_calls = Patience("trainer_plugins-check", seconds=5.0)


def gather_here(environ: Mapping[str, str]) -> Facts:
    """Read the cards, the main memory and the environment of this machine."""
    notes = Notes()
    return replace(
        notes.try_read("the cards", Facts(), _cards),
        main=notes.try_read("main memory", None, main_memory),
        **notes.try_read("the environment", dict[str, Any](), read_environment, environ),
        locks=notes.try_read("extensions", (), read_locks, environ),
        failed=tuple(notes.failed),
    )


def main_memory() -> MainMemory:
    """Read main memory."""
    host, machine, swap = HostDevice(), psutil.virtual_memory(), psutil.swap_memory()
    return MainMemory(
        reading=host.read(),
        machine_bytes=machine.total,
        shared=host.facts(),
        swap_bytes=swap.total,
        swap_used_bytes=swap.used,
        memlock_bytes=_memlock_bytes(),
    )


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of variables and versions."""
    return {"environ": environ, "machine": gather_machine(environ), "versions": read_versions()}


def owner_of(process: GpuProcess, is_peer: bool = False) -> Owner:
    """Describe a process that holds memory on a card."""
    try:
        known = psutil.Process(process.pid)
        if known.status() == psutil.STATUS_ZOMBIE:
            return Owner(process=process, command="(ended)", is_orphan=True, is_peer=is_peer)
        command = " ".join(mask_command(known.cmdline()))[:_LONGEST_COMMAND]
        return Owner(process=process, command=command, is_orphan=_is_orphan(known), is_peer=is_peer)
    except (psutil.Error, OSError):  # ended, outside the container, or another user's
        return Owner(process=process, is_peer=is_peer)


def folder_trouble(folder: Path) -> str:
    """Return why a folder cannot be written or created; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def disk_free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def _cards() -> Facts:
    try:
        return Facts(cards=tuple(map(_card, _nvml_calls.call(list_cards))))
    except TimeoutError as error:
        return Facts(driver_trouble=f"the driver hangs: {error}; read `dmesg`")
    except NvmlError as error:
        if error.code in NO_CARD:
            return Facts(no_cards="no NVIDIA driver")
        return Facts(driver_trouble=str(error))


def _card(card: InstalledCard) -> CardFacts:
    facts = CardFacts(**asdict(card))
    if card.trouble:
        return facts
    try:
        device = _nvml_calls.call(partial(NvmlDevice.open, card.uuid, card.name or None))
        reading, processes = _nvml_calls.call(device.read), _nvml_calls.call(device.processes)
    except (NvmlError, TimeoutError) as error:
        return replace(facts, trouble=str(error))
    owners = None if processes is None else tuple(map(owner_of, processes))
    return replace(facts, reading=reading, owners=owners)


def _is_orphan(process: psutil.Process) -> bool:
    """Return whether it is a rank of this user whose launcher is gone."""
    parent = process.parent()
    is_alone = parent is None or parent.name() in _FIRST_PROCESSES
    is_mine = process.username() == psutil.Process().username()
    return is_alone and is_mine and "LOCAL_RANK" in process.environ()


def _memlock_bytes() -> int | None:
    if not psutil.LINUX:
        return None
    soft, _ = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)
    return None if soft == psutil.RLIM_INFINITY else soft
