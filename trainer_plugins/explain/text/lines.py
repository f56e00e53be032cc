"""Cleans the lines of a log of what terminals, launchers and loggers put around the words."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_LONGEST_CHARACTERS = 4000


class Line(NamedTuple):
    """Holds one line of a log, and which process wrote it."""

    writer: str  # the rank or the worker as the log names it; empty if it does not
    text: str


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
    rf"|\[?{_TIME}\]?(?: std(?:err|out) [FP])?[|:,-]?"
    r"|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?(?: \d\d-\d\d \d\d:\d\d:\d\d)?:?"
    r"|\[[\w.]{1,60}(?::\w{1,60}){0,2}\]"
    r"|[a-zA-Z][\w.-]{1,60} {0,4}\| "
    r"|>(?!\w)|`{1,3}(?!\w{0,20}$)"
    r")\s?"
)
_MOST_PREFIXES = 6


def clean_lines(text: str) -> Iterator[Line]:
    """Yield the lines of a text without escapes, boxes and prefixes."""
    for raw in re.split(r"\r\n|\n|\r", text):
        yield clean_line(raw[:_LONGEST_CHARACTERS])


def clean_line(raw: str) -> Line:
    """Strip one line, and name its writer."""
    text = _LINK.sub(r"\1", _ESCAPE.sub("", raw)).rstrip()
    writer = ""
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text, len(text) - len(text.lstrip()))
        if not match:
            break
        writer = writer or next((one for one in match.groups() if one), "")
        text = text[match.end() :]
    return Line(writer, _BOX.sub("", text))
