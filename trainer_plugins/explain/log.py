"""Explain a log by the record that its run wrote, if the log names one."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.text.excerpt import Excerpt, find_oom
from trainer_plugins.explain.text.explain import explain_excerpt
from trainer_plugins.printable import printable
from trainer_plugins.record.folder import output_dir_of, place_of_run, read_one

# The message of `upkeep/post_mortem.py` about a record. We follow no other name found in a log.
_NAMED = re.compile(
    r"trainer_plugins: (rank \d+ ran out of memory in .{1,80}?):"
    r" see (.*?oom-rank\d+(?:-\d+)?\.json), or trainer-plugins explain (.+)"
)


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
    found = explain_excerpt(excerpt, subject, predicts)
    lost = tuple(
        f"the run's own record: the log names {printable(each.record)}, which is not here, or"
        " belongs to another run; run explain where it is"
        for each in named
    )
    return replace(found, unknown=(*found.unknown, *lost))


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
