"""Turn a log into causes, remedies and open questions, by the record of its run if it names one."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer_plugins import advice
from trainer_plugins.advice.for_causes import CACHE_FLUSHES
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.shared import add_numbers, cause, quote
from trainer_plugins.explain.text.causes import arithmetic, causes_of, others
from trainer_plugins.explain.text.causes.numbers import is_fragmented
from trainer_plugins.explain.text.excerpt import Excerpt, find_oom
from trainer_plugins.explain.text.remedies import choose_remedies, remedies_of
from trainer_plugins.explain.text.remedies.plan_command import shows_run
from trainer_plugins.explain.text.text_facts import TextFacts, gather
from trainer_plugins.explain.text.told import (
    ASKS_NEED,
    FRAME,
    SETS_ROWS,
    find_question,
    find_told_oom,
)
from trainer_plugins.oom import OutOfMemory
from trainer_plugins.oom.rules import KILLED_FROM_OUTSIDE
from trainer_plugins.printable import printable
from trainer_plugins.record.folder import output_dir_of, place_of_run, read_one
from trainer_plugins.units import size

# The message of `upkeep/post_mortem.py` about a record. We follow no other name found in a log.
_NAMED = re.compile(
    r"trainer_plugins: (rank \d+ ran out of memory in .{1,80}?):"
    r" see (.*?oom-rank\d+(?:-\d+)?\.json), or trainer-plugins explain (.+)"
)

# Words of a run that was asked to end. A launcher that ends the others writes "closing signal".
_STOPPED = (
    r"\bCANCELLED AT\b|DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE|NODE FAIL)|\bscancel\b"
    r"|(?i:\b(?:job|instance|node|pod|VM)\b.{0,30}\bpreempt(?:ed|ion)\b)"
    r"|(?i:\bspot\b.{0,20}(?:interrupt|terminat|reclaim))"
    r"|(?i:\b(?:got|received|by)(?: death)? signal:? ?\(?15)|Received 15 death signal"
    r"|(?i:\b(?:got|received|caught|was sent)\b.{0,16}SIGTERM)|Signal 15 \(SIGTERM\)"
    r"|(?i:\bexit\w*|return(?:ed)?[ _]?code|status)\b[^\n\d]{0,14}?\(?(?:-15|143)\b"
    r"|(?<!closing )[Ss]ignal SIGTERM|Signals\.SIGTERM|^Terminated$"
)
# Errors that are often mistaken for a GPU OOM, their meaning, and remedies.
_LOOKALIKES = (
    (
        _STOPPED,
        "the run received SIGTERM, as from preemption, scancel or a time limit",
        (advice.ASK_SLURM, advice.RESUME_THE_RUN),
    ),
    (
        r"(?i:no space left on device|disk quota exceeded|is over \d+% full, available space)",
        "a disk is full, not the card",
        (advice.FREE_DISK,),
    ),
    (
        r"out of resource: shared memory",
        "a Triton kernel asks for more shared memory than a multiprocessor has",
        (advice.SMALLER_BLOCKS,),
    ),
    (
        r"an illegal memory access was encountered|Memory access fault by GPU",
        "a kernel read or wrote outside its tensors",
        (advice.WAIT_FOR_KERNELS,),
    ),
    (
        r"(?i)\bsignal 11\b|SIGSEGV|segmentation fault|Fatal Python error: (?!.*memory)",
        "a native library crashed, such as NCCL or a compiled extension",
        (),
    ),
    (
        r"device-side assert triggered|\.(?:cu|hip):\d{1,5}: .{0,300}\bAssertion `",
        "an index is out of range in a kernel",
        (advice.WAIT_FOR_KERNELS,),
    ),
    (
        r"allocator cache flushes since last step",
        "the card was full, and torch released its cache to continue, which is slow (DeepSpeed)",
        CACHE_FLUSHES,
    ),
    (
        r"(?:CUDA|HIP) error: (?!unhandled|out of memory)[\w ]{4}|Triton Error \[\w+\]: "
        r"|[Cc]uda failure \d{1,4} '"
        r"|\bsynStatus \d{1,3} \[(?![^\]]*memory)|Memory critical error by agent"
        r"|RESULT_ERROR_DEVICE_LOST|\[METAL\] Command buffer execution failed: (?!Insuff)",
        "a kernel or a driver call failed, but not for lack of memory",
        (advice.WAIT_FOR_KERNELS,),
    ),
    (
        r"Driver/library version mismatch",
        "the driver that runs and its libraries, which were updated since, have two versions",
        (advice.REBOOT,),
    ),
    (
        r"(?i)subprocess(?:es has)? abruptly died|子进程\S{0,4}(?:退出|终止|崩溃)",
        "a process that prepares the data ended without an error",
        (advice.STREAM_THE_DATA,),
    ),
    (
        r"Watchdog caught collective operation timeout|ncclCommWatchdog",
        "a rank timed out in a collective: another rank had stopped or was slow",
        (),
    ),
)
_DOUBTS = {  # words that may also follow an OOM
    _STOPPED: "The text does not show who sent it: the scheduler's record does (`sacct -j JOB`,"
    " `kubectl describe pod`), or the cloud's notice of preemption",
    r"available space": "It is a warning, and the run may have ended for another cause: the"
    " earliest error of any rank or worker shows it",
    r"子进程|subprocess": "The kernel may have killed it for main memory, which `dmesg` shows, or a"
    " sample has: one process (`num_proc`, `preprocessing_num_workers` of 1) raises its error",
    r"cublas|Generic failure": "A full card may look the same: `nvidia-smi` shows, while it fails,"
    " whether memory is free",
    r"Watchdog": "The missing rank may have run out of memory: its own earlier lines show that",
}
_ERROR = re.compile(r"[\w.]+(?:Error|Exception): \S")
_LAUNCHER = re.compile(r"Killing subprocess|ChildFailedError|Sending process \d+ closing signal")
_NO_OOM = OutOfMemory(source="allocator", is_certain=False, fatal="", text="")


class _NamedRecord(NamedTuple):
    words: str  # the rank of the record, and when it ran out of memory
    record: str
    folder: str  # the output_dir of the run


def explain_log(stream: BinaryIO, subject: str, predicts: bool = False) -> Explanation:
    """Explain the first OOM of a log of any size, or the record of `OOMReporter` that it names.

    A log without an OOM gives no causes; ValueError if it is empty or not text.
    """
    excerpt = find_oom(stream)
    named = list(dict.fromkeys(_find_named_records(excerpt)))
    for each in named:
        for path, folder in _places(each, Path(subject).parent):
            from trainer_plugins.record.oom_record import OomRecord

            record = read_one(path, OomRecord)
            # A record of an earlier or later run may have the same path.
            if record is not None and record.words == each.words:
                from trainer_plugins.explain.run import explain_record

                found = explain_record(record, folder, predicts)
                where = printable(f"the log names the record of its run, used here: {path}")
                return replace(found, subject=printable(subject), facts=(where, *found.facts))
    found = _explain_excerpt(excerpt, predicts)
    unread = (
        f"part of the file: {excerpt.not_read} were not read; give only the part with the error if"
        " it is there",
    )
    lost = tuple(
        f"the run's own record: the log names {printable(each.record)}, which is not here, or"
        " belongs to another run; run explain where it is"
        for each in named
    )
    unknown = (*found.unknown, *(unread if excerpt.not_read else ()), *lost)
    return replace(found, subject=subject, unknown=unknown)


def _find_named_records(excerpt: Excerpt) -> Iterator[_NamedRecord]:
    for line in excerpt.lines:
        if said := _NAMED.search(line.text):
            try:
                words, record, (folder,) = said[1], said[2], shlex.split(said[3])
            except ValueError:
                continue
            yield _NamedRecord(words, record, folder)


def _places(named: _NamedRecord, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield possible paths of a record, each with its output_dir, which may hold the log."""
    for base in (folder, Path()):
        yield base / named.record, base / named.folder
    place = place_of_run(folder)
    yield place / Path(named.record).name, output_dir_of(place)


def _explain_excerpt(excerpt: Excerpt, predicts: bool = False) -> Explanation:
    """Explain the findings in a log, or report that it has no OOM (no causes)."""
    if excerpt.oom is None or _was_stopped(excerpt, excerpt.oom):
        return _explain_without_oom(excerpt)
    facts = gather(excerpt, excerpt.oom)
    causes = causes_of(facts)
    found = Explanation(
        causes=add_numbers(causes, facts.numbers, lambda _: "text"),
        remedies=remedies_of(causes, facts),
        facts=_list_known(facts),
        unknown=_unknown(facts),
        numbers=facts.numbers,
    )
    if not (predicts and shows_run(facts)):
        return found
    from trainer_plugins.explain.text.predicted import predict_remedies

    return predict_remedies(found, facts)


def _was_stopped(excerpt: Excerpt, oom: OutOfMemory) -> bool:
    """Return whether SIGKILL followed a request to end, after a scheduler's grace period."""
    is_kill = oom.fatal == KILLED_FROM_OUTSIDE
    return is_kill and any(re.search(_STOPPED, line.text) for line in excerpt.lines)


def _explain_without_oom(excerpt: Excerpt) -> Explanation:
    """Explain an nvidia-smi table, or words that are mistaken for an OOM."""
    facts = gather(excerpt, _NO_OOM)
    causes = tuple(filter(None, (others.ddp_gpu0(facts), others.data_parallel(facts))))
    if causes:
        return Explanation(causes=causes, remedies=remedies_of(causes, facts))
    in_words = find_told_oom(excerpt)
    for line, (pattern, meaning, helps) in product(excerpt.lines, _LOOKALIKES):
        if re.search(pattern, line.text) and not (in_words and helps is CACHE_FLUSHES):
            evidence = f"The log says: {quote(line.text)}"
            said = next((_DOUBTS[one] for one in _DOUBTS if re.search(one, line.text)), "")
            doubt = facts.vendor.translate(said)
            found = cause("not-an-oom", evidence, summary=f"not an OOM: {meaning}", doubt=doubt)
            remedies = tuple(choose_remedies("not-an-oom", helps, facts))
            return Explanation(causes=(found,), remedies=remedies)
    need = find_question(excerpt, ASKS_NEED)
    if in_words and not need:
        return _explain_excerpt(in_words)
    if question := need or find_question(excerpt) or find_question(excerpt, SETS_ROWS):
        answer = _explain_excerpt(question)
        first, *more = answer.causes
        grade = first.grade if first.code == "regression" else "possible"
        return replace(answer, causes=(replace(first, grade=grade), *more))
    texts = [line.text for line in excerpt.lines]
    errors = [text for text in texts if _ERROR.match(text)]
    if errors:
        shown = f"its last error: {quote(errors[-1])}"
    elif too_large := arithmetic.judge_size(facts):
        return Explanation(causes=(too_large,), remedies=remedies_of((too_large,), facts))
    elif any(map(_LAUNCHER.search, texts)):
        shown = (
            "only its launcher speaks, which ends the other ranks after one has failed: that rank's"
            " own error is in the lines before, or in its own log; exit code -9 is a kill, as the"
            " kernel does for main memory"
        )
    elif any(map(FRAME.match, texts)):
        shown = "its traceback ends before the error: add the lines that follow"
    else:
        return Explanation()
    return Explanation(facts=(shown,))


def _list_known(facts: TextFacts) -> tuple[str, ...]:
    numbers = facts.numbers
    names = {
        "asked for": numbers.requested_bytes,
        "card": numbers.capacity_bytes,
        "free": numbers.free_bytes,
        "live tensors": numbers.allocated_bytes,
        "cached": numbers.unused_bytes,
        "outside torch": facts.outside_torch_bytes or None,
        "other processes" if facts.outside_torch_bytes else "all else": numbers.others_bytes,
    }
    known = [f"{name} {size(value)}" for name, value in names.items() if value is not None]
    lines = [", ".join(known)] if known else []
    if frame := facts.users_frame:
        lines.append(f"innermost line outside packages: {frame}")
    if facts.writer:
        lines.append(f"the first to fail was {'rank ' * facts.writer.isdigit()}{facts.writer}")
    if facts.progress:
        lines.append(facts.progress)
    unused, asked = numbers.unused_bytes, numbers.requested_bytes
    if unused is not None and asked is not None and not is_fragmented(facts):
        lines.append(f"not fragmentation: {size(unused)} cached, {size(asked)} asked for")
    return tuple(lines)


def _unknown(facts: TextFacts) -> tuple[str, ...]:
    lines = []
    has_a_place = ("allocator", "driver", "library", "masked")
    is_host = facts.oom.source == "host" and facts.oom.is_certain and not facts.oom.fatal
    if not facts.frames and (is_host or facts.oom.source in has_a_place):
        lines.append("where it failed: the text has no traceback")
    if facts.oom.source == "allocator" and facts.total_bytes is None:
        lines.append("the card's numbers: the message is cut, or its library prints none")
    if facts.hides_processes:
        lines.append("what each process holds: 17179869184 GiB is the driver's word for not known")
    return tuple(lines)
