"""Compare predictions with published figures, and with the answers of other estimators.

The rows are those of `tests/planner/published.toml`.

Each row is run on the dry card, with the versions of torch, transformers and peft of its
measurement. They and the other estimators are installed beside this environment, into a cache.
Prints the rows kept in `benchmarks/results` and summed up in docs/internals/plans.md:

    python -m benchmarks.prediction [WORD] ...
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from threading import Lock

from benchmarks.prediction_peers import PEERS
from benchmarks.published import CARDS, Row, published
from trainer_plugins.compiled import cache_folder
from trainer_plugins.drycuda.cuda_build import fetch

ROOT = Path(__file__).parents[1]
CACHE = cache_folder() / "prediction"
COUNTERS = {"allocated": "allocated", "reserved": "reserved", "step_end": "at step end"}

FITTED_ROW = "PEFT method comparison: lora-rank32"
LONGEST_BATCH = 657
"""Tokens in the longest batch of PEFT's comparison, which is not documented. Fitted on the reserved
memory of `FITTED_ROW`, which therefore proves nothing about reserved memory; the other rows saw the
same batches."""

RELEASED = {"0.19.2.dev0": "0.20.0", "0.20.1.dev0": "0.21.0"}
"""The first release after a development version that cannot be installed."""

BITSANDBYTES = "0.50.2"
"""The version that fitcheck used, as its `data/measurements/manifest.json` says."""

BESIDE = {"4.57.6": ("--no-deps", "datasets==4.2.0")}
"""Packages that an old transformers imports, and that fail in a new environment."""


_one_installs = Lock()


class NotInstalledError(Exception):
    """Reports pip's reason."""


def installed(*steps: Sequence[str]) -> str:
    """Return a folder with the packages of these pip calls; they run once.

    Raises:
        NotInstalledError: one of them fails.
    """
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:12]
    folder = CACHE / f"{steps[0][-1].replace('==', '-')}-{digest}"
    with _one_installs:
        if (folder / ".installed").exists():
            return str(folder)
        print(f"installing {steps[0][-1]} into {folder} ...", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"]
        for step in steps:
            command = [*pip, "--target", str(folder), *step]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise NotInstalledError(last_line(done.stderr))
        (folder / ".installed").touch()
        return str(folder)


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def why(done: "subprocess.CompletedProcess[str]") -> str:
    """Say why a program ended."""
    if done.returncode == -signal.SIGVTALRM:
        return "it computes for more than two minutes"
    if done.returncode < 0:
        return f"the process ended by {signal.Signals(-done.returncode).name}"
    return last_line(done.stderr)


def run(
    module: str, words: Iterable[str], folders: Iterable[str]
) -> "subprocess.CompletedProcess[str]":
    """Run a program of this folder, with packages that precede this environment's."""
    path = os.pathsep.join([*folders, str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )


def why_not(row: Row) -> str:
    """Say why this row is not replayed; empty if it is."""
    if not row.loop:
        return "; ".join(row.missing)
    if row.settings.get("quantization", "nf4") != "nf4":
        return f"quantised as {row.settings['quantization']}"
    return (
        ""
        if row.settings["optimizer"] == "adamw_torch"
        else f"optimizer {row.settings['optimizer']}"
    )


@dataclass
class Predicted:
    """Holds the results of the replays, by the key of a row."""

    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def equip_dry_cards() -> None:
    """Fetch torch's CUDA build, and bitsandbytes for runs on dry cards."""
    fetch(lambda line: print(line, file=sys.stderr))
    ours = installed(["--no-deps", f"bitsandbytes=={BITSANDBYTES}"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, os.getenv("PYTHONPATH")]))


def asked_for(row: Row) -> list[str]:
    """List the replays of a row: several if its counters belong to batches of different lengths."""
    if "seq_length" in row.settings:
        return [row.key]
    return [f"{row.key}@{LONGEST_BATCH}", f"{row.key}@{row.settings['mean_seq_length']}"]


def folders_of(row: Row) -> list[str]:
    """Install the versions of a row's measurement, as far as its replay needs them; runs once.

    Raises:
        NotInstalledError: pip refuses it.
    """
    transformers, peft = row.versions["transformers"], row.versions["peft"]
    steps = [
        [f"transformers=={transformers}"],
        ["--no-deps", f"peft=={RELEASED.get(peft, peft)}"],
    ]
    if transformers in BESIDE:
        steps += [["httpx"], list(BESIDE[transformers])]
    torch = row.versions["torch"].partition("+")[0]
    folders = [installed(["--no-deps", f"torch=={torch}"]), installed(*steps)]
    if row.source.startswith("fitcheck"):
        folders.append(installed(["--no-deps", f"bitsandbytes=={BITSANDBYTES}"]))
    return folders


def replays(rows: Sequence[Row]) -> Predicted:
    """Run these rows on the dry card, one process for each version."""
    found = Predicted()
    for source in dict.fromkeys(row.source for row in rows):
        same = [row for row in rows if row.source == source]
        left = [asked for row in same for asked in asked_for(row)]
        dry = "trainer_plugins.drycuda"
        words = [dry, "--gpu", CARDS[same[0].gpu], "-m", "benchmarks.prediction_dry"]
        try:
            folders = folders_of(same[0])
        except NotInstalledError as reason:
            found.refused.update(dict.fromkeys([row.key for row in same], str(reason)))
            continue
        while left:
            print(f"{words[-1]}: {len(left)} of {source} ...", file=sys.stderr)
            done = run(words[0], [*words[1:], *left], folders)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            for line in lines:
                note(found, json.loads(line))
            left = left[len(lines) :]
            if left:
                key = left[0].partition("@")[0]
                found.refused[key] = why(done)
                left = [asked for asked in left if asked.partition("@")[0] != key]
    found.sizes = {key: each for key, each in found.sizes.items() if key not in found.refused}
    return found


def note(found: Predicted, answer: Mapping[str, int | str]) -> None:
    """Keep the counters from one replay, or the reason why there are none."""
    key, _, length = str(answer["key"]).partition("@")
    if "failed" in answer:
        found.refused[key] = str(answer["failed"])
        return
    kept = set(COUNTERS)
    if length:
        kept = {"allocated", "reserved"} if int(length) == LONGEST_BATCH else {"step_end"}
    found.sizes.setdefault(key, {}).update({name: int(answer[name]) for name in kept})


@dataclass
class Peer:
    """Holds one estimator's answers, by the key of a row, or the reason why there are none."""

    answers: dict[str, int] = field(default_factory=dict)
    refused: str = ""


def peers(rows: Sequence[Row]) -> dict[str, Peer]:
    """Ask all estimators."""
    found = {}
    for name, (package, _, _) in PEERS.items():
        try:
            folders = [installed(["--no-deps", package])] if package else []
        except NotInstalledError as reason:
            found[name] = Peer(refused=str(reason))
            continue
        print(f"asking {name} ...", file=sys.stderr)
        done = run("benchmarks.prediction_peers", [name, *(row.key for row in rows)], folders)
        if done.returncode:
            found[name] = Peer(refused=last_line(done.stderr))
        else:
            found[name] = Peer(json.loads(last_line(done.stdout)))
    return found


def error(predicted: int, measured: int) -> float:
    """Return the error in percent of the measured value."""
    return 100 * (predicted / measured - 1)


def columns(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table as a block of text, as in docs/internals/plans.md and benchmarks/results."""
    rows = [head, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    print("\n```text")
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    print("```")


def gib(size: int | None) -> str:
    """Format a size as the tables do."""
    return "" if size is None else f"{size / 2**30:.3f}"


def summary(errors: Sequence[float]) -> list[str]:
    """Return the number of errors, the mean and median of their sizes, and the worst one."""
    if not errors:
        return ["0", "", "", ""]
    sizes = [abs(each) for each in errors]
    return [
        str(len(errors)),
        f"{mean(sizes):.3f}",
        f"{median(sizes):.3f}",
        f"{max(errors, key=abs):+.2f}",
    ]


def no_evidence(row: Row, counter: str) -> str:
    """Say which fit used this figure, so that it is no evidence for it; empty if none did."""
    if counter != "reserved":
        return ""
    return "fitted" if row.key == FITTED_ROW else ""


def print_rows(rows: Sequence[Row], ways: Mapping[str, Predicted]) -> None:
    """Print one table per source: measured, and each way's prediction with its error in percent."""
    for source in dict.fromkeys(row.source for row in rows):
        of = [
            row
            for row in rows
            if row.source == source and any(row.key in way.sizes for way in ways.values())
        ]
        if not of:
            continue
        counters = [counter for counter in COUNTERS if counter in of[0].measured]
        versions = ", ".join(f"{name} {version}" for name, version in of[0].versions.items())
        print(f"\n### {source}\n\n{of[0].gpu}, measured with {versions}. GiB; errors in percent.")
        of_ways = [word for name in ways for word in (name, "error")]
        head = ["run", *(word for name in counters for word in (COUNTERS[name], *of_ways))]
        columns(head, [line_of(row, counters, ways) for row in of])
    print(
        "\n### All of them\n\nErrors in percent. Figures that decided something in the prediction"
        " have lines of their own."
    )
    lines = []
    for source in [*dict.fromkeys(row.source for row in rows), ""]:
        for counter, name in COUNTERS.items():
            for decided in ("", "fitted"):
                of = [
                    row
                    for row in rows
                    if (source or row.source) == row.source
                    and counter in row.measured
                    and no_evidence(row, counter) == decided
                ]
                found = [summary(errors_of(of, counter, way)) for way in ways.values()]
                if any(each[0] != "0" for each in found) and (source or not decided):
                    told = f"{name}, {decided}" if decided else name
                    lines.append([source or "all", told, *(word for one in found for word in one)])
    of_ways = [word for name in ways for word in (f"{name}: rows", "mean", "median", "worst")]
    columns(["source", "counter", *of_ways], lines)
    for name, way in ways.items():
        for key, reason in way.refused.items():
            print(f"\nNot by {name}, {key}: {reason}")


def line_of(row: Row, counters: Sequence[str], ways: Mapping[str, Predicted]) -> list[str]:
    """Return a row of the table of its source."""
    line = [row.name]
    for counter in counters:
        measured = row.measured[counter]
        line.append(gib(measured))
        for way in ways.values():
            size = way.sizes.get(row.key, {}).get(counter)
            told = "" if size is None else f"{error(size, measured):+.3f}"
            line += [gib(size), f"{told} {no_evidence(row, counter)}".strip()]
    return line


def errors_of(rows: Iterable[Row], counter: str, way: Predicted) -> list[float]:
    """Return the errors of one way for a counter, for the rows that it can predict."""
    return [
        error(way.sizes[row.key][counter], row.measured[counter])
        for row in rows
        if row.key in way.sizes
    ]


def print_peers(rows: Sequence[Row], found: Predicted, asked: Mapping[str, Peer]) -> None:
    """Print the errors of all estimators for the complete rows."""

    def errors(name: str, of: Iterable[Row]) -> list[float]:
        claim = PEERS[name][2]
        return [
            error(asked[name].answers[row.key], row.measured.get(claim, row.measured["allocated"]))
            for row in of
            if row.key in asked[name].answers
        ]

    ours = {row.key: found.sizes[row.key]["allocated"] for row in rows if row.key in found.sizes}
    lines = []
    for row in rows:
        own = f"{error(ours[row.key], row.measured['allocated']):+.2f}" if row.key in ours else "-"
        others = [f"{one[0]:+.0f}" if (one := errors(name, [row])) else "-" for name in asked]
        lines.append([row.name, own, *others])
    print(
        "\n### Next to other estimators\n\nErrors in percent; - if it cannot be asked, or does not"
        " predict it."
    )
    columns(["run", "this planner", *asked], lines)
    of_cards = [
        [row for row in rows if row.gpu == gpu] for gpu in dict.fromkeys(row.gpu for row in rows)
    ]
    own_errors = [
        [error(ours[row.key], row.measured["allocated"]) for row in of if row.key in ours]
        for of in of_cards
    ]
    lines = [["this planner", *(word for one in own_errors for word in summary(one))]]
    for name, peer in asked.items():
        words = [word for of in of_cards for word in summary(errors(name, of))]
        if peer.refused:
            words = [peer.refused] + [""] * (len(words) - 1)
        lines.append([PEERS[name][0] or name, *words])
    columns(
        [
            "estimator",
            *(word for of in of_cards for word in (of[0].gpu, "mean", "median", "worst")),
        ],
        lines,
    )


def main(words: Sequence[str]) -> None:
    """Print everything."""
    rows = [row for row in published() if not words or any(word in row.key for word in words)]
    replayed = [row for row in rows if not why_not(row)]
    ways = {"plan": replays(replayed)}
    print_rows(replayed, ways)
    complete = [row for row in rows if row.complete]
    if complete:
        print_peers(complete, ways["plan"], peers(complete))
    print("\n### Published and not replayed\n")
    for source in dict.fromkeys(row.source for row in rows):
        left = [row for row in rows if row.source == source and why_not(row)]
        if left:
            print(f"- {source}, {len(left)} rows: {why_not(left[0])}")


if __name__ == "__main__":
    main(sys.argv[1:])
