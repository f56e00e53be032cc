"""Causes beside the card: main memory, shared memory, pinned memory, collectives."""

import re

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.oom.rules import Source
from trainer_plugins.units import GIB, size

_SMALL_BYTES = 4 * GIB
_PINS = r"pin_memory|\bpin\b|cudaHostRegister|offload|\.cpu\(|to\(['\"]cpu|swap_tensor|cpu_memory"
_USED = r"CPU Virtual Memory: *used = ([\d.]+) GB, percent = ([\d.]+)%"
_LIMITED = (
    r"OOMKilled|[Mm]emory cgroup|CONSTRAINT_MEMCG|oom_memcg|oom[-_ ]kill event|srun: error.*Out Of"
)


def shm(facts: TextFacts) -> Cause | None:
    """A worker did not get shared memory."""
    return _of_source(
        facts,
        "shared",
        code="shm",
        summary="shared memory (/dev/shm) is full",
        why="Batches of dataloader workers go through /dev/shm; a container has 64 MiB of it.",
        doubt="A bus error has other reasons too: `df -h /dev/shm` during the run",
    )


def host_limit(facts: TextFacts) -> Cause | None:
    """A container or a job passed its limit of main memory."""
    if facts.oom.source != "host":
        return None
    told = re.search(_LIMITED, facts.oom.text)
    near = facts.says(
        r"(?i)slurmstepd|SLURM_|\bsrun\b|\bsbatch\b|kubectl|kubelet|docker run|\bpod\b"
    )
    if not told and not (near and _is_killed(facts)):
        return None
    return Cause(
        code="host-limit",
        grade="certain" if told else "likely",
        summary="the job or container passed its limit of main memory",
        evidence=(f"The words are: {_first_line(facts)}", *_host_use(facts)),
        doubt=""
        if told
        else "SIGKILL does not say who sent it: `kubectl describe pod`, `sacct -j JOB"
        " --format=State,MaxRSS,ReqMem` or `cat /sys/fs/cgroup/memory.events` settles it",
    )


def host_kill(facts: TextFacts) -> Cause | None:
    """The kernel killed the process for main memory."""
    if facts.oom.source != "host":
        return None
    by_kernel = re.search(
        r"Out of memory: Killed process|ray\.exceptions\.OutOfMemory", facts.oom.text
    )
    if not by_kernel and not _is_killed(facts):
        return None
    return Cause(
        code="host-kill",
        grade="certain" if by_kernel else "likely",
        summary="the process was killed because main memory ran out",
        evidence=(f"The words are: {_first_line(facts)}", *_host_use(facts)),
        doubt=""
        if by_kernel
        else "SIGKILL does not say who sent it: `sudo dmesg -T | grep -i 'killed process'` settles"
        " it; in a container look at `cat /sys/fs/cgroup/memory.events`",
    )


def host_commit(facts: TextFacts) -> Cause | None:
    """Windows refuses memory that its paging file cannot back."""
    by_code = re.search(r"WinError 1455|os error 1455", facts.oom.text)
    by_torch = facts.oom.source == "host" and re.search(
        r"not enough memory: you tried", facts.oom.text
    )
    if not by_code and not (by_torch and (facts.asked or 0) < _SMALL_BYTES):
        return None
    return Cause(
        code="host-commit",
        grade="certain" if by_code else "likely",
        summary="Windows' commit limit is reached: main memory and the paging file together",
        evidence=(f"The words are: {_first_line(facts)}",),
        doubt=""
        if by_code
        else "Whether main memory or the paging file is the limit is not in the text: Task Manager,"
        " Performance, Memory, 'Committed' settles it",
    )


def host_alloc(facts: TextFacts) -> Cause | None:
    """Main memory refused one allocation."""
    if facts.oom.source != "host" or not facts.oom.is_certain:
        return None
    frame = facts.users_frame
    asked = f"It asked for {size(facts.asked)} of main memory." if facts.asked else ""
    return Cause(
        code="host-alloc",
        grade="certain",
        summary="main memory (not the card's) was refused",
        evidence=tuple(
            filter(
                None,
                (
                    f"The words are: {_first_line(facts)}",
                    asked,
                    f"The innermost line outside packages is {frame}." if frame else "",
                    *_host_use(facts),
                ),
            )
        ),
    )


def nccl(facts: TextFacts) -> Cause | None:
    """A collective got no buffer."""
    return _of_source(
        facts,
        "nccl",
        code="nccl",
        summary="NCCL got no memory for its buffers: torch has left it no room",
        why="NCCL allocates outside torch, and torch's cache does not make room for it.",
        doubt="NCCL_DEBUG=WARN prints the reason that this line leaves out",
    )


def _of_source(
    facts: TextFacts, source: Source, *, code: str, summary: str, why: str, doubt: str
) -> Cause | None:
    """Name the cause that the words of one source stand for, with a doubt if they may not."""
    if facts.oom.source != source:
        return None
    sure = facts.oom.is_certain
    return Cause(
        code=code,
        grade="certain" if sure else "likely",
        summary=summary,
        evidence=(f"The words are: {_first_line(facts)}", why),
        doubt="" if sure else doubt,
    )


def pinned(facts: TextFacts) -> Cause | None:
    """Page-locked main memory ran out; the driver says it in its own words."""
    is_driver = facts.oom.source == "driver" and facts.total is None
    frame = facts.called(_PINS, innermost=6) if is_driver else None
    wsl = is_driver and facts.is_wsl
    if facts.oom.source != "pinned" and not frame and not wsl:
        return None
    sure = facts.oom.source == "pinned"
    return Cause(
        code="pinned",
        grade="certain" if sure else "likely",
        summary="page-locked (pinned) main memory ran out, not the card's",
        evidence=(
            f"It failed in {frame}." if frame else f"The words are: {_first_line(facts)}",
            *(
                ("The text speaks of WSL, which can pin half of its memory at most.",)
                if wsl
                else ()
            ),
            "The driver's words have no numbers of torch's, as for pinned memory.",
        ),
        doubt=""
        if sure
        else "The driver's words do not say which memory: if `nvidia-smi` shows room on the card"
        " while it fails, it is main memory; WSL pins half of what it has at most",
    )


def _is_killed(facts: TextFacts) -> bool:
    return "killed from outside" in facts.oom.fatal


def _first_line(facts: TextFacts) -> str:
    return next(iter(facts.oom.text.strip().splitlines()), "")[:200]


def _host_use(facts: TextFacts) -> tuple[str, ...]:
    used = list(re.finditer(_USED, facts.text))
    if not used:
        return ()
    gib, share = float(used[-1][1]), float(used[-1][2])
    total = f", so it has about {gib / share * 100:.0f} GB" if share else ""
    return (f"DeepSpeed last saw {gib} GB of main memory in use, {share} % of the host{total}.",)
