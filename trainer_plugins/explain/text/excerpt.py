"""Finds the first OOM of a log of any size, and keeps the lines around it, cleaned."""

import codecs
import html
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from itertools import islice
from typing import BinaryIO, NamedTuple

from trainer_plugins.explain.text.notebook import is_notebook, printed_by
from trainer_plugins.oom import OutOfMemory, classify
from trainer_plugins.oom.rules import KILLED

_BLOCK_BYTES = 1 << 20
_NOTEBOOK_BLOCKS = 64  # of a notebook, which is read at once: pictures make it large
_KEPT_CHARACTERS = 1 << 16  # of the head of the log, of what precedes the OOM and what follows it
_LONGEST_LINE = 4000
# Words without which no line is an OOM.
_HINTS = re.compile(
    r"ut of memory|utOfMemory|MemoryError|OOM ?Kill|OOM when|EXHAUSTED|ALLOC_FAILED"
    r"|annot allocate|not enough mem|memory pressure|Allocation |llocation of|llocation failed"
    r"|lloc |lloc: |loc async|_STATUS_"
    r"|cuDNN algo|cusolver error|CUFFT_|OUT_OF_|INTERNAL ASSERT|API call failed|Workspace can"
    r"|unable to (?:mmap|write|open|allo|resize)|posix_mem|bad_alloc|srun: err|oom[-_ ]kill"
    r"|SIGKILL|xit ?code|xit(?:ed)? with|xit status|code = -9|by signal|bus error|Killed|1455"
    r"|Free memory on|cache blocks|max seq len|mem-fraction-static|Resource exhausted|zsh: killed"
    r"|Invalid buffer size|Insufficient Mem|metal::malloc|running low on mem|w on resource"
    r"|on the node|memory limit|OOM killer|EL0004|/dev/shm/"
    rf"|{KILLED}"
)
_LONGEST_HINT = 32
_MOST_UNKNOWN = 0.3  # of a text's characters that are invalid in UTF-8, even in another encoding
# In a sentence, where `classify` takes it for no error: someone who pastes it means an OOM.
_TRIED = re.compile(
    r"(?<!: [\"'])(?:(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate \d"
    r"|MPS backend out of memory \(MPS)"
)
# accelerate's find_executable_batch_size, which the Trainer's auto_find_batch_size uses.
_GAVE_UP = re.compile(r"RuntimeError: No executable batch size found")
# How the last line of a message ends that a terminal has broken.
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
# What precedes the words, often more than once. A group names the writer of the line.
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
# A traceback as one string of JSON, and Docker's line of JSON.
_ESCAPED, _END = '\\n  File \\"', re.compile(r"(?<!\\)\\n")
_DOCKER = re.compile(r'\{"log": ?"((?:[^"\\]|\\.){0,8000})"')
_GZIP = b"\x1f\x8b"


class Line(NamedTuple):
    """Holds one line of a log, and which process wrote it."""

    writer: str  # the rank or the worker as the log names it; empty if it does not
    text: str


class Excerpt(NamedTuple):
    """Keeps the cleaned lines around the first OOM of a log, or its head and its end."""

    oom: OutOfMemory | None
    lines: tuple[Line, ...]
    at: int = 0  # the index of the line with the OOM


def _clean_lines(text: str) -> list[Line]:
    return [_clean_line(raw[:_LONGEST_LINE]) for raw in re.split(r"\r\n|\n|\r", text)]


def _clean_line(raw: str) -> Line:
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
    return Line(writer, _BOX.sub("", text))


def find_first(stream: BinaryIO) -> Excerpt:
    """Read a log until its first OOM and a little further, in bounded memory and linear time."""
    head = buffer = ""
    scanned, is_cut = 0, False
    for text, is_last in _texts(stream):
        buffer += text
        head = head or buffer[:_KEPT_CHARACTERS]
        limit = len(buffer) if is_last else max(0, len(buffer) - _KEPT_CHARACTERS)
        at = _first_oom(buffer, scanned, limit)
        if at is not None:
            start = max(0, at - _KEPT_CHARACTERS)
            is_far = is_cut or start > _KEPT_CHARACTERS
            before = _clean_lines(head + "\n" + buffer[start:at] if is_far else buffer[:at])
            after = _clean_lines(buffer[at : at + _KEPT_CHARACTERS])
            return _excerpt([*before[:-1], *after], len(before) - 1)
        scanned = max(0, limit - _LONGEST_HINT)
        drop = max(0, scanned - _KEPT_CHARACTERS)
        buffer, scanned, is_cut = buffer[drop:], scanned - drop, is_cut or drop > 0
    tail = buffer[-_KEPT_CHARACTERS:]
    lines = tuple(_clean_lines(head + "\n" + tail if is_cut else tail))
    for at in range(len(lines) - 1, -1, -1):
        if said := _GAVE_UP.search(lines[at].text):
            text = lines[at].text[said.start() :]
            oom = OutOfMemory(source="allocator", is_certain=False, fatal="", text=text)
            return Excerpt(oom, lines, at)
    return Excerpt(None, lines)


def _texts(stream: BinaryIO) -> Iterator[tuple[str, bool]]:
    """Yield the text block by block, and whether it is the last one."""
    blocks = _blocks(stream)
    block = next(blocks, b"")
    if not block.strip():
        raise ValueError("there is nothing in it")
    wide = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide and b"\0" in block[:_KEPT_CHARACTERS]:
        raise ValueError("it is not text")
    if is_notebook(block):
        block += b"".join(islice(blocks, _NOTEBOOK_BLOCKS))
        printed = printed_by(block.decode("utf-8", "replace"))
        if printed is not None:
            yield printed, True
            return
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8")("replace")
    while block:
        following = next(blocks, b"")
        text = decoder.decode(block, not following)
        if text.count("\ufffd") > _MOST_UNKNOWN * len(text):
            raise ValueError("it is not text")
        if _ESCAPED in text:
            text = _END.sub("\n", text).replace('\\"', '"')
        yield (html.unescape(text) if "&quot;" in text else text), not following
        block = following


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Read block by block; unpack what gzip has packed, also if its end is missing."""
    block = stream.read(_BLOCK_BYTES)
    packed = zlib.decompressobj(wbits=31) if block.startswith(_GZIP) else None
    while block:
        try:
            yield packed.decompress(block, _BLOCK_BYTES) if packed else block
        except zlib.error as error:
            raise ValueError(f"its gzip data are damaged: {error}") from error
        block = (packed and packed.unconsumed_tail) or stream.read(_BLOCK_BYTES)


def _first_oom(text: str, start: int, end: int) -> int | None:
    """Return where the first line with an OOM begins, at or after `start`; None without one."""
    seen = start
    for match in _HINTS.finditer(text, start, end):
        if match.start() < seen:
            continue
        earliest = max(0, match.start() - _LONGEST_LINE)
        begin = 1 + max(text.rfind(end_of, earliest, match.start()) for end_of in "\n\r")
        begin = begin or earliest
        line = re.match(r"[^\r\n]*", text[begin : match.end() + _LONGEST_LINE])
        seen = begin + (line.end() if line else 0)
        if line and _oom_in(line[0]):
            return begin
    return None


def _oom_in(raw: str) -> OutOfMemory | None:
    text = _clean_line(raw).text
    tried = _TRIED.search(text)
    return classify(text) or (classify(text[tried.start() :]) if tried else None)


def _excerpt(lines: list[Line], at: int) -> Excerpt:
    """Read the message at a line; if that is doubtful, prefer a certain one that follows soon."""
    writer = lines[at].writer
    context = [one.text for one in lines[max(0, at - _NUM_BEFORE) : at] if one.writer == writer]
    found = classify("\n".join([*context, _message(lines, at)])) or _oom_in(lines[at].text)
    if found and not found.is_certain:
        for later in range(at + 1, min(len(lines), at + _NUM_AFTER)):
            better = _oom_in(lines[later].text)
            if better and better.is_certain:
                return _excerpt(lines, later)
    return Excerpt(found, tuple(lines), at)


def _message(lines: list[Line], at: int) -> str:
    """Join what a terminal has broken; a message of several lines keeps them."""
    said = [lines[at].text]
    tried = _TRIED.search(said[0])
    if tried and not classify(said[0]):
        said = [said[0][tried.start() :]]
    is_one_line = _ONE_LINE.search(said[0])
    for line in lines[at + 1 : at + _MOST_BROKEN_LINES]:
        if _ANOTHER.match(line.text) or (is_one_line and _COMPLETE.search(" ".join(said))):
            break
        if line.writer == lines[at].writer:
            said.append(line.text)
    if not is_one_line:
        return "\n".join(said)
    # Some break between words, others in the middle of one.
    return max("".join(said), " ".join(map(str.strip, said)), key=_num_numbers)


def _num_numbers(message: str) -> int:
    found = classify(message)
    return 0 if found is None else sum(value is not None for value in astuple(found))
