"""Find the OOM that ended a log of any size, and keep the lines around it, cleaned."""

import json
import re
from contextlib import suppress
from dataclasses import astuple
from typing import BinaryIO, NamedTuple

from trainer_plugins.explain.kept_log import SKIPPED, read_log
from trainer_plugins.oom import OutOfMemory, classify
from trainer_plugins.oom.rules import KILLED

_MOST_OOMS, _MOST_JUDGED = 300, 1 << 19  # OOMs to compare, and characters to read for them
_KEPT_CHARACTERS = 1 << 16  # each: the log's head, and the text before and after the OOM
_LONGEST_LINE = 4000
_LINE = re.compile(rf"[^\r\n]{{1,{_LONGEST_LINE}}}")
# Every line with an OOM has one of these.
_HINTS = re.compile(
    r"ut of memory|utOfMemory|MemoryError|OOM ?Kill|ALLOC_FAILED"
    r"|annot allocate|NOT allocate|not enough mem|memory pressure|Allocation |llocation of"
    r"|llocation failed|lloc |lloc: |loc async|_STATUS_"
    r"|cuDNN algo|cusolver error|CUFFT_|OUT_OF_|INTERNAL ASSERT|API call failed|Workspace can"
    r"|unable to (?:mmap|write|open|allo|resize)|posix_mem|bad_alloc|srun: err|oom[-_ ]kill"
    r"|SIGKILL|xit|eturn ?code|eturn(?:ed)?[_ -](?:code|value|status)|died|erminated"
    r"| ended with|illed|ignals?\W{1,6}(?:9|killed)|us error|1455"
    r"|Free memory on|cache blocks|max seq len|mem-fraction-static|zsh: killed"
    r"|Invalid buffer size|Insufficient Mem|running low on mem|w on resource"
    r"|on the node|memory limit|OOM killer|EL0004|/dev/shm/"
    rf"|{KILLED}"
)
# In a sentence, which `classify` takes for no error: a person who pastes it means an OOM.
_TRIED = re.compile(
    r"(?<!: [\"'])(?:(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate \d"
    r"|MPS backend out of memory \(MPS)"
)
# accelerate's find_executable_batch_size, used by the Trainer's auto_find_batch_size.
_GAVE_UP = re.compile(r"RuntimeError: No executable batch size found")
# The ends of messages that a terminal has broken into lines.
_COMPLETE = re.compile(
    r"unallocated|in total by PyTorch|cached\)|system failure|1EB memory"
    r"|initializing the engine|by other processes"
)
_ANOTHER = re.compile(r"^(?:Traceback|\s+File |[\w.]+Error\b|\s*\d{1,3}%\||\s*$)")
_ONE_LINE = re.compile(
    r"ried to allocate|(?:CUDA|HIP|XPU|NPU|backend) out of|Free memory on|max seq len"
)
_MOST_BROKEN_LINES, _NUM_BEFORE, _NUM_AFTER = 12, 12, 40

_ESCAPE = re.compile(
    r"\x1b\[[0-?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|\x1b[@-_]"
)
_LINK = re.compile(r"\[([^\]\n]{1,300})\]\(https?://[^)\n]{0,300}\)")  # as Colab prints paths
_BOX = re.compile(r"^[│┃╭╰╮╯─━┏┗ ]*[│┃╭╰─━]|[ ]*[│┃╮╯]$|─{4,}")
_TIME = r"\d{4}-\d\d-\d\d[T_ ]{1,2}\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
# Prefixes of the message, often more than one. A group names the writer of the line.
_PREFIX = re.compile(
    r"(?:"
    r"\[(?:default|[Rr]ank ?)(?P<rank>\d{1,6})\]:?"
    r"|\((?P<worker>[\w.]{1,60}(?:\(\))? (?:rank=\d{1,6} )?pid=\d{1,9})[^)\n]{0,60}\)"
    r"|\[\d{1,4},(?P<mpi>\d{1,6})\]<std(?:err|out)>:"
    r"|(?P<slurm>\d{1,5}): (?=Traceback|  File|\[|\w{3,60}Error)"
    rf"|(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|{_TIME}) [\w.-]{{1,60}} [\w./-]{{1,60}}"
    r"\[(?P<journal>\d{1,9})\]:"
    rf"|\[?{_TIME}\]?(?: std(?:err|out) [FP]| - std(?:err|out) -)?[|:,-]?"
    r"|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?(?: \d\d-\d\d \d\d:\d\d:\d\d)?:?"
    r"|\[[\w.]{1,60}(?::\w{1,60}){0,2}\]"
    r"|[a-zA-Z][\w.-]{1,60} {0,4}\| "
    r"|>(?!\w)|`{1,3}(?!\w{0,20}$)"
    r")\s?"
)
_MOST_PREFIXES = 6
# Docker's line of JSON.
_DOCKER = re.compile(r'\{"log": ?"((?:[^"\\]|\\.){0,8000})"')
# Between two OOMs: one was raised while the other was handled; a person writes, or types.
_CHAINED = re.compile(r"During handling of the above exception|was the direct cause of the foll")
_SPOKEN = re.compile(
    r"(?m)^(?!.*(?:Error|[={}<>|]))(?=\W{0,3}(?:(?i:after|now|then|with|when|next|still|again"
    r"|update|edit|but|and|second|later)\b|[^\n]*\b(?:I|we|We|my|My)\b))"
    r"[^\W\d](?:[^\s]{1,40}[ \t]+){4,60}[^\n]*$"
    r"|^(?:[^\n]{0,60}[$#>] |!|\+ )(?:\w+=\S+ ){0,9}"
    r"(?:python\S*|torchrun|accelerate|deepspeed|trl|axolotl|srun) \S"
)


class LogLine(NamedTuple):
    """Holds one line of a log, and the process that wrote it."""

    writer: str  # the rank or worker as named in the log; else empty
    text: str


class Excerpt(NamedTuple):
    """Keeps the cleaned lines around the OOM of a log, or its head and its end."""

    oom: OutOfMemory | None
    lines: tuple[LogLine, ...]
    at: int = 0  # the index of the line with the OOM
    since: int = 0  # the index of the first line of the failed attempt
    not_read: str = ""  # the part of a large log that was not searched, as a clause


def _clean_lines(text: str) -> list[LogLine]:
    return [_clean_line(raw[:_LONGEST_LINE]) for raw in re.split(r"\r\n|\n|\r", text)]


def _clean_line(raw: str) -> LogLine:
    """Strip one line of escapes, boxes and prefixes, and name its writer."""
    if docker := _DOCKER.match(raw):
        with suppress(ValueError):
            raw = str(json.loads(f'"{docker[1]}"'))
    text = _LINK.sub(r"\1", _ESCAPE.sub("", raw)).rstrip()
    writer = ""
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text, len(text) - len(text.lstrip()))
        if not match:
            break
        writer = writer or next((one for one in match.groups() if one), "")
        text = text[match.end() :]
    return LogLine(writer, _BOX.sub("", text))


def find_oom(stream: BinaryIO) -> Excerpt:
    """Read the head and the end of a log, and find the OOM of its last attempt."""
    text, not_read = read_log(stream)
    parts = text.split(SKIPPED)  # skipped text lies between the head and the end
    for part in reversed(parts):
        if (at := _last_attempt(part)) is not None:
            begin, since = at
            start = max(0, begin - _KEPT_CHARACTERS)
            head = "" if part is parts[0] and start <= _KEPT_CHARACTERS else text[:_KEPT_CHARACTERS]
            start = start if head else 0
            before = _clean_lines(f"{head}\n{part[start:begin]}" if head else part[:begin])
            after = _clean_lines(part[begin : begin + _KEPT_CHARACTERS])
            num_since = part.count("\n", max(start, since), begin)
            index = len(before) - 1
            first = max(0, index - num_since) if since else 0
            found = _excerpt([*before[:-1], *after], index, first)
            return found._replace(since=min(first, found.at), not_read=not_read)
    is_cut = len(text) > 2 * _KEPT_CHARACTERS
    kept = f"{text[:_KEPT_CHARACTERS]}\n{text[-_KEPT_CHARACTERS:]}" if is_cut else text
    lines = tuple(_clean_lines(kept))
    for number in range(len(lines) - 1, -1, -1):
        if said := _GAVE_UP.search(lines[number].text):
            words = lines[number].text[said.start() :]
            oom = OutOfMemory(source="allocator", is_certain=False, fatal="", text=words)
            return Excerpt(oom, lines, number, not_read=not_read)
    return Excerpt(None, lines, not_read=not_read)


def _last_attempt(text: str) -> tuple[int, int] | None:
    """Return where the first OOM of the last attempt begins, and where that attempt does.

    A second error of the same rank and card is another attempt, unless it repeats the first; so is
    one after a person's sentence. Errors of other ranks, or consequences, belong to the first.
    """
    found = _ooms(text)
    if not found:
        return None
    begin, since, seen = found[0][0], 0, dict[tuple[object, ...], OutOfMemory]()
    for (before, _, _), (start, writer, oom) in zip([found[0], *found], found, strict=False):
        key = (writer, oom.source, oom.device)
        between = text[before:start]
        if start != before and _CHAINED.search(between):
            continue
        is_repeated = key in seen and _numbers_of(seen[key]) == _numbers_of(oom)
        again = key in seen and oom.requested_bytes is not None and not is_repeated
        if start != before and (again or _SPOKEN.search(between)):
            begin, since, seen = start, 1 + text.find("\n", before), {}
        seen.setdefault(key, oom)
    return begin, since


def _numbers_of(oom: OutOfMemory) -> tuple[int | None, ...]:
    return (oom.requested_bytes, oom.free_bytes, oom.allocated_bytes)


def _ooms(text: str) -> list[tuple[int, str, OutOfMemory]]:
    """Return the last OOMs of a text: the start of each line, its writer, and the error.

    Lines are read from the end, up to a number of characters: classifying a line costs far more
    than searching for candidates.
    """
    hinted = [line for line in _LINE.finditer(text) if _HINTS.search(line[0])]
    found: list[tuple[int, str, OutOfMemory]] = []
    judged = 0
    for line in reversed(hinted):
        judged += len(line[0])
        if (oom := _oom_in(line[0])) is not None:
            found.append((line.start(), _clean_line(line[0]).writer, oom))
        if len(found) == _MOST_OOMS or judged > _MOST_JUDGED:
            break
    return found[::-1]


def _oom_in(raw: str) -> OutOfMemory | None:
    text = _clean_line(raw).text
    tried = _TRIED.search(text)
    return classify(text) or (classify(text[tried.start() :]) if tried else None)


def _excerpt(lines: list[LogLine], at: int, since: int) -> Excerpt:
    """Read the message at a line; if it is doubtful, prefer a certain one soon after it."""
    writer = lines[at].writer
    first = max(since, at - _NUM_BEFORE)
    context = [one.text for one in lines[first:at] if one.writer == writer]
    found = classify("\n".join([*context, _message(lines, at)])) or _oom_in(lines[at].text)
    if found and not found.is_certain:
        for later in range(at + 1, min(len(lines), at + _NUM_AFTER)):
            better = _oom_in(lines[later].text)
            if better and better.is_certain:
                return _excerpt(lines, later, since)
    return Excerpt(found, tuple(lines), at)


def _message(lines: list[LogLine], at: int) -> str:
    """Join lines that a terminal has broken; a message of several lines keeps them."""
    said = [lines[at].text]
    tried = _TRIED.search(said[0])
    if tried and not classify(said[0]):
        said = [said[0][tried.start() :]]
    is_one_line = _ONE_LINE.search(said[0])
    for line in lines[at + 1 : at + _MOST_BROKEN_LINES]:
        if _ANOTHER.match(line.text) or (is_one_line and _COMPLETE.search(" ".join(said))):
            break
        # The rest of a broken line has no prefix.
        if line.writer in ("", lines[at].writer):
            said.append(line.text)
    if not is_one_line:
        return "\n".join(said)
    # Some terminals break between words, others within a word or a number.
    whole, *rest = said
    for text in rest:
        is_number = re.search(r"\d\.?$", whole) and re.match(r"\.?\d", text)
        joined = (f"{whole}{text}", f"{whole.rstrip()} {text.lstrip()}")
        whole = max(joined if is_number else joined[::-1], key=_num_numbers)
    return whole


def _num_numbers(message: str) -> int:
    found = classify(message)
    return 0 if found is None else sum(value is not None for value in astuple(found))
