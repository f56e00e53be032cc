"""Replay the actions of real cards' allocators, and compare address by address.

Without a file it takes the traces in `tests/allocator/traces`; `benchmarks/results/traces.txt`
lists their sources, and `docs/internals/measurements.md` their results. A file is a torch snapshot
(`torch.cuda.memory._dump_snapshot`). Prints Markdown, and exits with 1 if anything differs:

    python -m benchmarks.traces [FILE] ...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.snapshots import read
from trainer_plugins.snapshot.pickled import NotReadableError
from trainer_plugins.snapshot.replay import Outcome, replay
from trainer_plugins.snapshot.trace import NotModelledError, Trace
from trainer_plugins.units import MIB

KEPT = Path(__file__).parents[1] / "tests" / "allocator" / "traces"


def main(words: Sequence[str]) -> int:
    """Print a table of all traces; return the exit code."""
    files = [Path(word) for word in words] or sorted(KEPT.glob("*.json.gz"))
    print("| trace | allocations | same address | growths | peak, MiB |")
    print("| --- | --- | --- | --- | --- |")
    different: list[str] = []
    for file in files:
        try:
            traces = read(file)
            outcomes = [(trace, replay(trace)) for trace in traces]
        except (NotReadableError, NotModelledError) as error:
            different.append(f"{file}: {error}")
            continue
        for trace, outcome in outcomes:
            print(_row(trace, outcome))
            if not outcome.is_same:
                different.append(f"{file}: {outcome.first_difference or 'another peak'}")
    for line in different:
        print(line, file=sys.stderr)
    return 1 if different else 0


def _row(trace: Trace, outcome: Outcome) -> str:
    peak = f"{outcome.peak_bytes / MIB:.0f}"
    counts = (outcome.allocations, outcome.same_address, outcome.growths)
    return " | ".join(["| " + trace.source, *(f"{each:,}" for each in counts), peak]) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
