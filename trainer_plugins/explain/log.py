"""explain_log: a log is answered by the record that its run wrote, where the log names one."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.text.excerpt import Excerpt, find_first
from trainer_plugins.explain.text.explain import explain_excerpt
from trainer_plugins.printable import printable
from trainer_plugins.record.folder import output_dir_of, places_of_run
from trainer_plugins.record.oom_record import OomRecord, read_oom_record

# What `upkeep/post_mortem.py` says of a record. No other name is followed, whatever a log says.
_NAMED = re.compile(
    r"trainer_plugins: (rank \d+ ran out of memory in .{1,80}?):"
    r" see (.*?oom-rank\d+(?:-\d+)?\.json), or trainer-plugins explain (.+)"
)


class _Named(NamedTuple):
    """Holds what a log says of a record."""

    words: str
    """Which rank it is of, and when that ran out of memory."""

    record: str
    folder: str
    """The output_dir of the run."""


def explain_log(stream: BinaryIO, subject: str, predicts: bool = False) -> Explanation:
    """Explain the first OOM of a log of any size.

    If the log names a record of `OOMReporter`, and that is there, the record is explained: as the
    log has its path, or from the folder of the log on. Only regular files are read.

    Args:
        stream: the log.
        subject: its path, or what it is.
        predicts: whether the planner says what each remedy of a record brings.

    Raises:
        ValueError: it is empty, or is not text.
    """
    excerpt = find_first(stream)
    named = dict.fromkeys(_named(excerpt))
    for each in named:
        for path, folder in _places(each, Path(subject).parent):
            record = read_oom_record(path)
            # One of an earlier or later run may have the same path.
            if record is not None and record.words == each.words:
                return _of_record(record, path, folder, subject, predicts)
    said = explain_excerpt(excerpt, subject)
    lost = tuple(
        f"what the run wrote down itself: the log names {printable(each.record)}, which is not"
        " here, or of another run; explain it where it is"
        for each in named
    )
    return replace(said, unknown=(*said.unknown, *lost))


def _named(excerpt: Excerpt) -> Iterator[_Named]:
    for line in excerpt.lines:
        if said := _NAMED.search(line.text):
            try:
                words, record, (folder,) = said[1], said[2], shlex.split(said[3])
            except ValueError:
                continue
            yield _Named(words, record, folder)


def _places(named: _Named, beside: Path) -> Iterator[tuple[Path, Path]]:
    """Yield where a record may be, and the output_dir that it is of; the log may lie in that."""
    for base in (beside, Path()):
        yield base / named.record, base / named.folder
    for place in places_of_run(beside):
        yield place / Path(named.record).name, output_dir_of(place)


def _of_record(
    record: OomRecord, path: Path, folder: Path, subject: str, predicts: bool
) -> Explanation:
    from trainer_plugins.explain.run import explain_record

    said = explain_record(record, folder, predicts)
    where = printable(f"the log names the record of its run, which was read: {path}")
    return replace(said, subject=printable(subject), facts=(where, *said.facts))
