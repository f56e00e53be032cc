"""Writes findings for CI: GitHub's workflow commands, or SARIF for code scanning."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from trainer_plugins import __version__
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.printable import printable

_OF_FILES = "config-"  # the codes of findings about launch files
_GITHUB = {Severity.INFO: "notice", Severity.WARNING: "warning", Severity.ERROR: "error"}
_SARIF = {**_GITHUB, Severity.INFO: "note"}


class Format(str, Enum):
    """Names the forms in which findings are printed."""

    TEXT = "text"
    GITHUB = "github"
    SARIF = "sarif"


FORMAT_HELP = "For CI: GitHub's annotations, or SARIF for code scanning."


class _Place(NamedTuple):
    file: str  # relative to the working directory, if it lies there
    line: int


def print_annotations(form: Format, findings: Iterable[Finding], files: Sequence[Path]) -> None:
    """Print findings; those about launch files get the line of the key that their words name."""
    lines = {file: file.read_text(errors="replace").splitlines() for file in files}
    placed = [(each, _place(each, lines)) for each in findings]
    if form is Format.SARIF:
        print(json.dumps(_sarif(placed), indent=2))
        return
    for each, place in placed:
        at = "" if place is None else f"file={_property(place.file)},line={place.line},"
        words = f"{each.summary} ({each.evidence}). {each.remedy}"
        print(f"::{_GITHUB[each.severity]} {at}title={_property(each.code)}::{_data(words)}")


def _place(finding: Finding, files: Mapping[Path, Sequence[str]]) -> _Place | None:
    """Find the key that a finding is about: the first of its words that is a key of a file."""
    if not files or not finding.code.startswith(_OF_FILES):
        return None
    for word in re.findall(r"\w[\w.]*", f"{finding.summary} {finding.evidence}"):
        key = re.compile(rf"(?:^|[\s{{,])[\"']?{re.escape(word.rpartition('.')[2])}[\"']?\s*:")
        for file, lines in files.items():
            found = [number for number, line in enumerate(lines, 1) if key.search(line)]
            if found:  # of a key that occurs twice the last one counts
                return _Place(_relative(file), found[-1])
    return _Place(_relative(next(iter(files))), 1)


def _relative(file: Path) -> str:
    path, here = file.absolute(), Path().absolute()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def _data(text: str) -> str:
    """Escape a text as actions/toolkit does (packages/core/src/command.ts)."""
    plain = "\n".join(map(printable, text.splitlines()))
    return plain.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(placed: Sequence[tuple[Finding, _Place | None]]) -> dict[str, object]:
    codes = dict.fromkeys(each.code for each, _ in placed)
    driver = {
        "name": "trainer-plugins",
        "version": __version__,
        "rules": [{"id": code} for code in codes],
    }
    results = [
        {
            "ruleId": each.code,
            "level": _SARIF[each.severity],
            "message": {"text": f"{each.summary} ({each.evidence}). {each.remedy}"},
            "locations": [] if place is None else [_location(place)],
        }
        for each, place in placed
    ]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _location(place: _Place) -> dict[str, object]:
    where = {"uri": quote(place.file)}
    region = {"startLine": place.line}
    return {"physicalLocation": {"artifactLocation": where, "region": region}}
