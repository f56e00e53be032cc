"""`trainer-plugins explain`: explain why a run ran out of memory, and suggest remedies."""

import sys
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

import click

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.typed_options import refuse_bad_input, take_as_json
from trainer_plugins.explain.answer import GRADES, Explanation
from trainer_plugins.explain.log import explain_log
from trainer_plugins.plug_in.flags import PATH, Command, argument
from trainer_plugins.printable import printable

_NO_OOM = 1
_FIRST: dict[str, Any] = {"fg": "green", "bold": True}
_WIDE = 10_000  # characters: nothing wraps in a file
_PICKLE = b"\x80"  # the first byte of a pickle (protocol 2 and later), but of no log


@click.command(cls=Command)
@argument(
    "paths",
    nargs=-1,
    metavar="[PATH]...",
    help="A run's output_dir, a log, or a torch memory snapshot; two snapshots are compared"
    " (default: standard input, as with -).",
)
@take_as_json
@click.option(
    "--html", type=PATH, help="Write an HTML page of the snapshot, or of two, to this file."
)
@click.option("--verbose", is_flag=True, help="Print all evidence, causes, remedies and unknowns.")
@click.option(
    "--predict/--no-predict",
    "predicts",
    default=True,
    help="Predict the effect of remedies, if the log or record shows the run (up to a minute).",
)
def explain(
    paths: tuple[str, ...], as_json: bool, html: Path | None, verbose: bool, predicts: bool
) -> None:
    """Explain why a run ran out of memory, with evidence, and what to do first.

    Example: trainer-plugins explain train.log

    Example: python train.py 2>&1 | trainer-plugins explain -

    Exit codes: 0 explained, or a snapshot was read; 1 there is no OOM; 2 unreadable.
    """
    with refuse_bad_input(ValueError):
        if not paths and sys.stdin.isatty():
            raise ValueError("name a log, the output_dir of a run or a snapshot, or pipe in a log")
        paths = paths or ("-",)
        is_snapshot = len(paths) > 1 or _is_pickle(Path(paths[0]))
        if is_snapshot or html is not None:
            answer = _explain_snapshots(paths, html)
        else:
            answer = _explain_path(paths[0], predicts)
    if as_json:
        print_json("explain", answer)
    else:
        _print(answer, is_snapshot, verbose)
    is_oom = answer.causes and answer.causes[0].code != "not-an-oom"
    if not is_oom and not is_snapshot:
        raise SystemExit(_NO_OOM)


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == _PICKLE


def _explain_path(path: str, predicts: bool) -> Explanation:
    if path == "-":
        return explain_log(sys.stdin.buffer, "standard input", predicts)
    if Path(path).is_dir():
        from trainer_plugins.explain.run import explain_run

        return explain_run(Path(path), predicts)
    if path.endswith(".json"):
        from trainer_plugins.explain.run import explain_record
        from trainer_plugins.record.folder import output_dir_of
        from trainer_plugins.record.oom_record import open_oom_record

        if (record := open_oom_record(Path(path))) is not None:
            return explain_record(record, output_dir_of(Path(path).parent), predicts)
    with Path(path).open("rb") as file:
        return explain_log(file, path, predicts)


def _explain_snapshots(paths: tuple[str, ...], html: Path | None) -> Explanation:
    from trainer_plugins.explain.snapshot import compare_snapshots, explain_snapshot

    if html is not None and (len(paths) > 2 or not all(_is_pickle(Path(each)) for each in paths)):
        raise ValueError(
            "--html draws one memory snapshot, or two side by side; for a run folder use"
            " trainer-plugins report RUN_DIR --html FILE"
        )
    if len(paths) > 2:
        raise ValueError("explain takes one path, or two memory snapshots to compare")
    if len(paths) == 2:
        cases, answer = compare_snapshots(Path(paths[0]), Path(paths[1]))
    else:
        case, answer = explain_snapshot(Path(paths[0]))
        cases = [case]
    if html is not None:
        from trainer_plugins.report.html.snapshot_page import snapshot_page

        html.write_text(snapshot_page(answer, *cases), encoding="utf-8")
    return answer


def _print(answer: Explanation, is_snapshot: bool, verbose: bool) -> None:
    if not answer.causes:
        heading, facts = "no out-of-memory error found in it", [*answer.facts]
        if is_snapshot and facts:
            heading = facts.pop(0)
        _print_line(f"{answer.subject}: {heading}", indent=0)
        for line in (*facts, *answer.unknown):
            _print_line(line, indent=0, dim=True)
        return
    if not verbose:
        for label, text in answer.brief():
            _print_line(text, label, **_FIRST if label == "Try" else {})
        return
    first, *others = answer.causes
    _print_line(f"{first.summary}  [{first.grade}: {first.code}]", "Cause")
    for line in first.evidence:
        _print_line(line)
    for line in answer.facts:
        _print_line(line, dim=True)
    if first.doubt:
        _print_line(f"Not known: {first.doubt}.", fg="yellow")
    for cause in others:
        _print_line(f"Also possible ({cause.code}): {cause.summary}")
    for number, remedy in enumerate(answer.remedies):
        _print_line(remedy.do, {0: "Try", 1: "Or"}.get(number, ""), **_FIRST)
        when = f"If the cause is {remedy.cause}: " if remedy.cause != first.code else ""
        _print_line(f"{when}{remedy.words} ({GRADES[remedy.grade]})", indent=9)
    for line in answer.unknown:
        _print_line(line, "Unknown:", indent=9, dim=True)


def _print_line(text: str, label: str = "", *, indent: int = 7, **style: Any) -> None:
    """Print text behind a label; a terminal gets shorter lines, all of them indented."""
    width = max(20, get_terminal_size().columns - indent) if sys.stdout.isatty() else _WIDE
    for line in wrap(printable(text), width, break_on_hyphens=False):
        click.echo(click.style(f"{label:{indent}}", bold=True) + click.style(line, **style))
        label = ""
