"""Explain memory snapshots, and compare the results with the files' own figures.

For each file: the allocated bytes stated at its end and the sum of the categories there, the
recorded peak of reserved memory and that of the replay; and the cost of its page: CPU seconds, and
megabytes. Prints Markdown, and exits with 1 if anything differs. `docs/explain.md` has
the sums of public ones:

    python -m benchmarks.explained SNAPSHOT ...
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer_plugins.explain.snapshot import explain_snapshot
from trainer_plugins.report.html.snapshot_page import snapshot_page
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.snapshot.pickled import NotReadableError
from trainer_plugins.units import size

_MOST_CATEGORIES = 3


def main(words: Sequence[str]) -> int:
    """Print a table of all files; return the exit code."""
    print(
        "| snapshot | events | at the end, stated | summed | reserved, recorded | replayed |",
        end="",
    )
    print(" allocated at the peak | most of it | CPU s | page, MB |\n|" + " --- |" * 10)
    different = []
    for path in map(Path, words):
        try:
            began = time.process_time()
            case, answer = explain_snapshot(path)
            page = snapshot_page(answer, case)
            seconds = time.process_time() - began
        except NotReadableError as error:
            different.append(f"{path}: {error}")
            continue
        print(_row(path.name, case), f"{seconds:.1f} | {len(page.encode()) / 1e6:.2f} |")
        if not _is_same(case):
            different.append(f"{path}: {case.why_not_repeated or 'figures differ'}")
    for line in different:
        print(line, file=sys.stderr)
    return 1 if different else 0


def _is_same(case: SnapshotCase) -> bool:
    return (
        case.repeated is not None
        and case.repeated.outcome.is_same
        and case.repeated.outcome.replayed_peak_bytes == case.peak_reserved_bytes
        and case.at_end.allocated_bytes == case.card.allocated_bytes
    )


def _row(name: str, case: SnapshotCase) -> str:
    repeated = case.repeated.outcome.replayed_peak_bytes if case.repeated is not None else None
    categories = list(case.held.categories.items())[:_MOST_CATEGORIES]
    words = ", ".join(f"{category} {size(num_bytes)}" for category, num_bytes in categories)
    figures = (
        f"{len(case.card.events):,}",
        f"{case.card.allocated_bytes:,}",
        f"{case.at_end.allocated_bytes:,}",
        f"{case.peak_reserved_bytes:,}",
        f"{repeated:,}" if repeated is not None else "-",
        size(case.held.allocated_bytes),
        words,
    )
    return " | ".join([f"| {name}", *figures]) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
