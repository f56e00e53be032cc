"""Read the frames of a traceback as printed by Python 3.8 to 3.14, rich, IPython and Jupyter."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer_plugins.explain.shared import quote
from trainer_plugins.explain.text.excerpt import LogLine
from trainer_plugins.record.shown import Frame
from trainer_plugins.snapshot.owners import is_ours, is_users

_MOST_LINES = 600
_PYTHON = re.compile(r'^\s*File "(?P<path>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_IPYTHON = re.compile(
    r"^\s*(?:File )?\[?(?P<path>(?:/|~|[A-Za-z]:\\|<ipython-input|<tokenize>)[^\s()]{0,300}?)"
    r"(?::(?P<line>\d+)\]?,?)? in (?P<name>[^(\n]{1,80})(?:\(.*)?$"
)
_CELL = re.compile(r"^\s*(?P<path>(?:Cell )?In ?\[\d+\])(?:, line (?P<line>\d+))?")
_RICH = re.compile(r"^\s*(?P<path>\S{2,300}?):(?P<line>\d+) in (?P<name>[\w<>.]+)\s*$")
_ARROW = re.compile(r"^\s*(?:❱|-{1,4}>)\s*\d+[│\s]*(?P<source>.*)$")
_MARKS = re.compile(r"^\s*(?:[\^~ ]+|\.\.\.<\d+ lines>\.\.\.)$")
_HEAD = re.compile(r"Traceback \(most recent call last\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracebackFrame(Frame):
    """Names one call of a traceback; its line is 0 and its code empty if not shown."""

    @property
    def is_users(self) -> bool:
        return is_users(self.file)

    @property
    def words(self) -> str:
        """Return all text that the traceback shows of this call, for a search."""
        return f"{self.file} {self.function} {self.code}"

    def __str__(self) -> str:
        if not self.file:
            return f"the line '{quote(self.code, 100)}'"
        place = re.split(r"[/\\]", self.file)[-1] + (f":{self.line}" if self.line else "")
        source = f": {quote(self.code, 100)}".rstrip(" ,(") if self.code else ""
        return f"{place} in {self.function}{source}"


def frames_around(lines: Sequence[LogLine], at: int) -> tuple[TracebackFrame, ...]:
    """Return the traceback that ends at a line, outermost first, else the frames after it."""
    writer = lines[at].writer
    before: list[str] = []
    for line in reversed(lines[max(0, at - _MOST_LINES) : at]):
        if line.writer != writer:
            continue
        if _HEAD.search(line.text):
            if _frames(before[::-1]):
                break
            before.clear()  # a rank whose frames are elsewhere
            continue
        before.append(line.text)
    following = lines[at + 1 : at + _MOST_LINES]
    found = _frames(before[::-1]) or _frames(
        [one.text for one in following if one.writer == writer]
    )
    if not found and not writer:  # a title: a rank or a worker wrote the following lines
        other = next((one.writer for one in following if _PYTHON.match(one.text)), "")
        found = _frames([one.text for one in following if one.writer == other])
    return tuple(found)


def _frames(texts: Sequence[str]) -> list[TracebackFrame]:
    frames: list[TracebackFrame] = []
    used = -1  # the second line of a frame that rich broke
    for number, text in enumerate(texts):
        if number == used:
            continue
        following = texts[number + 1 : number + 3]
        matches = (each.match(text) for each in (_PYTHON, _CELL, _IPYTHON, _RICH))
        found = next(filter(None, matches), None)
        if not found and following:  # rich breaks a long path within a word
            rest = following[0].lstrip()
            found = _RICH.match(text + rest) or _RICH.match(f"{text} {rest}")
            used = number + 1 if found else used
        arrow = _ARROW.match(text)
        if found:
            named = found.groupdict()
            frames.append(
                TracebackFrame(
                    file=named["path"],
                    line=int(named["line"] or 0),
                    function=(named.get("name") or "<module>").strip(),
                    code=_source(following) if found.re is _PYTHON else "",
                )
            )
        elif arrow and frames:
            frames[-1] = replace(frames[-1], code=arrow["source"].replace("│", "").strip())
    return [frame for frame in frames if not is_ours(frame.file)]


def _source(following: Sequence[str]) -> str:
    for text in following:
        if _PYTHON.match(text):
            break
        if text.strip() and not _MARKS.match(text):
            return text.strip()
    return ""
