"""Judge causes outside the card: main memory, shared memory, pinned memory, collectives."""

import re

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.shared import SUMMARIES, Said, cause, say
from trainer_plugins.explain.text.states import read_states
from trainer_plugins.explain.text.text_facts import Rule, TextFacts
from trainer_plugins.oom.rules import KILLED_FROM_OUTSIDE
from trainer_plugins.units import GIB, KIB

_SMALL_BYTES = 4 * GIB
_PINS = r"pin_memory|\bpin\b|cudaHostRegister|offload|\.cpu\(|to\(['\"]cpu|swap_tensor|cpu_memory"
_USED = r"CPU Virtual Memory: *used = ([\d.]+) GB, percent = ([\d.]+)%"
_LIMITED = (
    r"OOM ?Killed|emory limit|low on resource|[Mm]emory cgroup|CONSTRAINT_MEMCG|oom_memcg"
    r"|oom[-_ ]kill event|srun: error.*Out Of"
)
_LIMITING = r"(?i)slurmstepd|SLURM_|\bsrun\b|\bsbatch\b|kubectl|kubelet|docker run|\bpod\b"

BY_RAY = r"node running low on memory|ray\.exceptions\.OutOfMemory"  # ends one of its actors
SLURM = r"(?i)slurm|\bsrun\b|\bsbatch\b"
CONTAINER = r"(?i)docker|kubectl|kubelet|\bpod\b"
# Cloud notebooks, whose users have no sudo on the host.
HOSTED = r"(?i)\bcolab\b|/content/|kaggle|/usr/local/lib/python3\.\d+/dist-packages/google"
# What the kernel's killer prints (mm/oom_kill.c): its verdict, and a line for each process, whose
# fifth number counts resident pages of 4 KiB.
KILLED = re.compile(r"Killed process (\d+) \(([^)\n]+)\).*?anon-rss:(\d+)kB")
_TASK = re.compile(r"\[ *\d+\](?: +\d+){3} +(\d+)(?: +-?\d+){3,7} +(\S+)$", re.MULTILINE)
_PAGE_BYTES = 4 * KIB
# NCCL's files that register main memory, and a system that often refuses that.
NCCL_ON_THE_HOST = (
    r"transport/shm\.cc|ncclShm\w*|cuMemHost\w*|ibv_reg_mr\w*|shmutils\.cc"
    r"|microsoft-standard-WSL2|\bWSL2?\b"
)

LOAD_BAR = r"Loading (?:weights|checkpoint shards): {1,3}(?!100)\d{1,2}%"
# DeepSpeed prints it before it writes; under ZeRO-3 the first rank has gathered all weights then.
SAVE_LINE = r"(?m)^(?:\[Torch\] )?Saving [^\n]*\n(?:(?!.*Saved )[^\n]*\n){0,4}?Killing sub" + (
    r"|(?i:\b(?:while|when|during|at|each|every)\b[^.!?\n]{0,24}\b(?:sav|wr[io]t)\w*\b"
    r"[^.!?\n]{0,16}(?:checkpoint|model)|\bon save\b)|保存(?:模型|权重|检查点|checkpoint)"
)
# A merge turns a base of 4 bits into 16, beside the adapter and the copy that is written.
MERGES = (
    r"merge_and_unload|save_pretrained_(?:merged|gguf)"
    r"|(?i:\bmerg(?:e|es|ing)\b[^.\n]{0,30}(?:model|weights))"
)
_BY_SOMEBODY = "killed by SIGKILL: by the kernel for main memory, preemption or scancel"
WORKER_KILLED = "a dataloader worker was killed, as the kernel does when main memory is full"


def shm(facts: TextFacts) -> Cause | None:
    """A worker, or NCCL, did not get shared memory."""
    if facts.oom.source != "shared":
        return None
    is_nccl = "nccl" in facts.oom.text
    sent = "Data between ranks of one host goes" if is_nccl else "Batches of dataloader workers go"
    return cause(
        "shm",
        facts.words,
        f"{sent} through /dev/shm; a container has 64 MiB of it.",
        doubt="A bus error has other causes too: `df -h /dev/shm` during the run settles it",
        is_sure=facts.oom.is_certain,
    )


def nccl(facts: TextFacts) -> Cause | None:
    """A collective got no buffer."""
    if facts.oom.source != "nccl":
        return None
    by_host = facts.says(NCCL_ON_THE_HOST)
    return cause(
        "nccl",
        facts.words,
        f"The log names `{by_host[0]}`: there, ranks exchange data through main memory."
        if by_host
        else "NCCL allocates outside torch, and torch's cache does not make room for it.",
        summary="NCCL could not register shared memory: main memory was short, not the card's"
        if by_host
        else "",
        doubt="NCCL reports the card's memory and registered main memory alike: NCCL_DEBUG=INFO"
        " prints the file, and `nvidia-smi` shows whether the card had room",
    )


def host_end(facts: TextFacts) -> Cause | None:
    """A limit or the kernel ended the process because of main memory, or another sender did."""
    if facts.oom.source != "host":
        return None
    by_limit = re.search(_LIMITED, facts.oom.text)
    by_kernel = re.search(
        r"Out of memory: Killed process|invoked oom-killer|oom-kill:|low on memory"
        r"|ray\.exceptions\.OutOfMemory|docs\.ray|memory pressure|Memory on the node",
        facts.oom.text,
    )
    is_killed, is_memory = facts.oom.fatal == KILLED_FROM_OUTSIDE, shows_main_memory(facts)
    if not by_limit and not by_kernel and not is_killed:
        return None
    is_limited = by_limit or (is_killed and is_memory and facts.says(_LIMITING))
    is_merge, killed = not facts.frames and facts.says(MERGES), SUMMARIES["host-kill"]
    summaries = (
        (is_limited, ""),
        (is_merge, f"{killed} while the adapter was merged"),
        (not by_kernel and not is_memory, _BY_SOMEBODY),
        ("DataLoader worker" in facts.oom.text, WORKER_KILLED),
        (facts.says(SAVE_LINE), f"{killed} while a checkpoint was saved"),
        (not facts.progress and facts.says(LOAD_BAR), f"{killed} while each rank loaded the model"),
    )
    return cause(
        "host-limit" if is_limited else "host-kill",
        facts.words,
        _read_kill(facts),
        _host_use(facts),
        _host_states(facts),
        summary=next((words for shown, words in summaries if shown), ""),
        grade=None if is_limited or by_kernel or is_memory else "possible",
        doubt="The text does not show which memory was full: watch `free -h` and `nvidia-smi` then"
        if is_merge
        else f"The log does not show who sent the SIGKILL: {name_killer(facts)} settles it",
        is_sure=(by_limit and facts.oom.is_certain) or (by_kernel and not is_limited),
    )


def name_killer(facts: TextFacts) -> str:
    """Name the tool that shows the sender of SIGKILL, given where the run was."""
    if facts.says(HOSTED):
        return "the notebook's own RAM display, while it runs,"
    if facts.says(SLURM):
        return f"`{advice.ASK_SLURM.flag(Door.SHELL)}`"
    if facts.says(CONTAINER):
        return "`kubectl describe pod` or `cat /sys/fs/cgroup/memory.events`"
    return (
        f"`{advice.FIND_THE_KILL.flag(Door.SHELL)}` (in a container `cat"
        " /sys/fs/cgroup/memory.events`, under Slurm `sacct -j JOB`)"
    )


def shows_main_memory(facts: TextFacts) -> bool:
    """Return whether the text points to main memory, which makes an outside signal unlikely."""
    words = (
        r"(?i)dataloader|offload|\boom\b|out of memory|\bRAM\b|内存",
        r"(?i)(?:main|host|cpu|system) memory",
        r"exceeded (?:K8s pod )?memory|memory limit|memory usage",
    )
    return any(map(facts.says, (*words, _USED, LOAD_BAR, SAVE_LINE, _LIMITED)))


def host_commit(facts: TextFacts) -> Cause | None:
    """Windows refuses memory that its paging file cannot back."""
    by_code = re.search(r"[Ee]rror 1455|paging file is too small", facts.oom.text)
    by_torch = facts.oom.source == "host" and re.search(
        r"not enough memory: you tried", facts.oom.text
    )
    if not by_code and not (by_torch and (facts.asked_bytes or 0) < _SMALL_BYTES):
        return None
    return cause(
        "host-commit",
        facts.words,
        doubt="The text does not show whether main memory or the paging file is the limit: Task"
        " Manager, Performance, Memory, 'Committed' settles it",
        is_sure=by_code,
    )


def host_alloc(facts: TextFacts) -> Cause | None:
    """Main memory refused one allocation."""
    if facts.oom.source != "host" or not facts.oom.is_certain:
        return None
    words = "The request was {requested_bytes} of main memory."
    asked = facts.states(words) if facts.asked_bytes else ""
    return cause("host-alloc", facts.words, asked, facts.users_line, _host_use(facts))


def judge_pinned(facts: TextFacts) -> Cause | None:
    """Page-locked main memory ran out, which the driver reports in its own words."""
    is_pinned = facts.oom.source == "pinned"
    is_driver = facts.oom.source == "driver" and facts.total_bytes is None
    frame = facts.find_call(_PINS, innermost=6) if is_driver else None
    is_wsl = is_driver and facts.is_wsl
    if not is_pinned and not frame and not is_wsl:
        return None
    return cause(
        "pinned",
        f"It failed in {frame}." if frame else facts.words,
        "The text mentions WSL, which can pin at most half of its memory." if is_wsl else "",
        "The driver's message has none of torch's numbers, as for pinned memory.",
        doubt="The driver's message does not say which memory was full: if `nvidia-smi` shows room"
        " on the card while it fails, it is main memory; WSL pins at most half of it",
        is_sure=is_pinned and facts.oom.is_certain,
    )


def _read_kill(facts: TextFacts) -> str | Said:
    """State what the killed process held, and the processes of the kernel's table together."""
    if (killed := KILLED.search(facts.text)) is None:
        return ""
    pid, name, resident = killed.groups()
    tasks = [(int(pages) * _PAGE_BYTES, task) for pages, task in _TASK.findall(facts.text)]
    alike = [held for held, task in tasks if task == name]
    together = "; {num_alike} processes of this name held {alike_bytes}" if alike[1:] else ""
    return say(
        f"The kernel killed {{name}} (pid {{pid}}), which held {{killed_bytes}}{together}.",
        name=name,
        pid=pid,
        killed_bytes=int(resident) * KIB,
        num_alike=len(alike),
        alike_bytes=sum(alike),
    )


def _host_states(facts: TextFacts) -> str | Said:
    """State the main memory of offloaded states (DeepSpeed's estimate_zero3_model_states)."""
    states = read_states(facts)
    if states is None or not (states.billions and states.is_full and states.is_offloaded):
        return ""
    return say(
        f"{states.billions:g} billion parameters x 18 bytes = {{host_bytes}} of main memory for"
        " states that are offloaded, and DeepSpeed's estimator adds half for buffers.",
        host_bytes=int(states.billions * 18e9),
    )


def _host_use(facts: TextFacts) -> str | Said:
    used = list(re.finditer(_USED, facts.text))
    if not used:
        return ""
    return say(
        "DeepSpeed last reported {host_used_bytes} of main memory in use,"
        " {host_used_fraction} of it.",
        host_used_bytes=int(float(used[-1][1]) * GIB),  # psutil's bytes by 2**30, labelled GB
        host_used_fraction=float(used[-1][2]) / 100,
    )


RULES: tuple[Rule, ...] = (shm, host_end, host_commit, host_alloc, nccl, judge_pinned)
