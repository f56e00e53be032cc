"""Writes the facts of a run that raises into its folder, before the exception propagates."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import time

import torch

from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.launch.gather_run_facts import facts_of_process, try_read
from trainer_plugins.launch.masked import mask_text
from trainer_plugins.oom import OutOfMemory, classify
from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import write_new
from trainer_plugins.record.history import rank_files
from trainer_plugins.record.oom_record import Host, Moment, OomRecord, Part, Peer, Planned, Shape
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.shown import Process
from trainer_plugins.record.timeline import Sample, from_line
from trainer_plugins.upkeep.frames import batch_of, find_moment, render_frames, traceback_frames
from trainer_plugins.upkeep.holders import count_alive

_NUM_READINGS = 20
_TAIL_BYTES = 1 << 14


@contextmanager
def report_oom(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Record an out-of-memory error that leaves this block, for code without a Trainer.

    The file is `<output_dir>/_trainer_plugins/oom-rank<R>.json`, with a number in its name if that
    exists already. The original exception propagates. Without an error it costs nothing.

    >>> with report_oom("out"):
    ...     loss = sum(x * x for x in range(3))  # your training loop

    Args:
        output_dir: the folder for the file, which `trainer-plugins explain` reads.
    """
    began_seconds = time()
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the original propagates, even if its record fails
            if (found := classify(error)) is not None:
                rank, num = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
                accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
                device = try_read(partial(open_device, accelerator), None)
                run = facts_of_process(device, rank, max(1, num), began_seconds)
                folder = Path(output_dir)
                write_record(
                    make_record(error, found, folder, device, call="report_oom", run=run), folder
                )
        raise


def write_record(record: OomRecord, folder: Path) -> str:
    """Write a record, and print its path; return the name of a written file."""
    try:
        path = write_new(folder, f"oom-rank{record.rank}", asdict(record))
    except OSError as failed:
        why = failed.strerror or failed
        _print(f"the out-of-memory record could not be written to {folder}: {why}")
        return ""
    command = f"trainer-plugins explain {shlex.quote(str(folder))}"
    _print(f"{record.words}: see {path}, or {command}")
    return path.name


def make_record(
    error: BaseException,
    found: OutOfMemory,
    folder: Path,
    device: Device | None,
    *,
    call: str,
    run: RunFacts,
    step: int = 0,
    readings: tuple[MemoryReading, ...] = (),
    trainer_class: type | None = None,
    snapshot: str = "",
    plan: Planned | None = None,
) -> OomRecord:
    """Gather the facts about an error while handling it, on this device and in this folder."""
    frames = traceback_frames(error.__traceback__)
    unknown: tuple[Moment, Part] = ("other", "")
    moment, part = try_read(lambda: find_moment(frames, trainer_class), unknown)
    batch: dict[str, Shape] = {}
    if moment in ("train", "eval", "predict", "generate"):
        batch = try_read(lambda: batch_of(frames, trainer_class), batch)
    frames.clear()  # or they would count as holders of tensors
    reading = None if device is None else try_read(device.read, None)
    return OomRecord(
        time_seconds=time(),
        rank=run.rank,
        call=call,
        step=step,
        moment=moment,
        part=part,
        error_class=type(error).__name__,
        error=replace(found, text=mask_text(found.text)),
        frames=try_read(lambda: render_frames(error.__traceback__), ()),
        batch=batch,
        reading=reading,
        readings=readings[-_NUM_READINGS:],
        alive=None if reading is None else try_read(partial(count_alive, reading), None),
        processes=try_read(lambda: _processes(device), None),
        peers=try_read(lambda: tuple(_peers(folder, run.rank)), ()),
        host=try_read(_host, None),
        snapshot=snapshot,
        plan=plan,
        run=run,
    )


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(f"trainer_plugins: {printable(text)}\n")


def _processes(device: Device | None) -> tuple[Process, ...] | None:
    listed = None if device is None else device.processes()
    if listed is None:
        return None
    return tuple(
        Process(
            pid=each.pid,
            used_bytes=each.used_bytes,
            name=None if each.name is None else mask_text(each.name),
            is_own=each.pid == os.getpid(),
            is_of_user=_is_of_user(each.pid),
        )
        for each in listed
    )


def _is_of_user(pid: int) -> bool:
    with suppress(OSError, AttributeError):  # the process is gone; Windows has no user ids
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    return False


def _host() -> Host:
    host = HostDevice()
    reading, facts = host.read(), host.facts()
    return Host(
        resident_bytes=reading.allocated_bytes,
        total_bytes=reading.total_bytes,
        free_bytes=reading.free_bytes,
        num_oom_kills=facts.num_oom_kills,
        shm_total_bytes=facts.shm_total_bytes,
        shm_free_bytes=facts.shm_free_bytes,
        worker_bytes=try_read(host.worker_bytes, ()),
    )


def _peers(folder: Path, rank: int) -> Iterator[Peer]:
    for other, path in rank_files(folder).items():
        if other == rank or not path.is_file():
            continue
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [read for line in file.read().splitlines() if (read := from_line(line))]
        if lines:
            entry = lines[-1][1]
            yield Peer(
                rank=other,
                step=entry.step,
                time_seconds=entry.time_seconds,
                moment=entry.moment if isinstance(entry, Sample) else "",
            )
