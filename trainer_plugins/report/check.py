"""Render a checklist for the terminal: findings with remedies, and the number of good results."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.check import Checklist
from trainer_plugins.check.facts import CheckLine
from trainer_plugins.finding import Severity
from trainer_plugins.printable import printable
from trainer_plugins.report.page import STYLES
from trainer_plugins.units import count_in_words


def check_report(checklist: Checklist, verbose: bool = False) -> RenderableType:
    """Render the findings, with `verbose` also the good results, then a count of each."""
    table = Table.grid(padding=(0, 2))
    num_well = 0
    for name, lines in checklist.groups.items():
        shown = [line for line in lines if line.findings or verbose]
        num_well += len(lines) - len(shown)
        for number, row in enumerate(row for line in shown for row in _rows(line)):
            table.add_row(Text("" if number else name, style="bold"), *row)
    well = f" {num_well} checks passed: --verbose lists them." if num_well else ""
    total = Text(_total(checklist) + well, style="bold")
    return Group(table, total) if table.rows else total


def _rows(line: CheckLine) -> Iterator[tuple[Text, Text, Text]]:
    if not line.findings:
        yield Text("ok", style="green"), Text(line.name), Text(line.seen, style="dim")
    for number, finding in enumerate(line.findings):
        word = "note" if finding.severity is Severity.INFO else finding.severity.name.lower()
        text = Text(printable(f"{finding.summary} [{finding.code}]"))
        text.append(f"\n{printable(finding.evidence)}", style="dim")
        text.append(f"\n-> {printable(finding.remedy)}", style="cyan")
        yield Text(word, style=STYLES[finding.severity]), Text("" if number else line.name), text


def _total(checklist: Checklist) -> str:
    severities = [finding.severity for finding in checklist.findings]
    counts = [
        count_in_words(num, severity.name.lower())
        for severity in (Severity.ERROR, Severity.WARNING)
        if (num := severities.count(severity))
    ]
    if not counts:
        return "No problems found."
    ends = "; an error ends the run" if checklist.worst is Severity.ERROR else ""
    return f"{' and '.join(counts)}{ends}. docs/findings.md explains each code."
