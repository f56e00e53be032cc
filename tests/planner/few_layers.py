"""Print the allocated peak of a run of torchtitan's with 2, 4 and all of its layers. For test_published.py.

`few_layers.py KEY`. The last figure is foretold: each layer adds the same.
"""

import sys
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.published import Row, published
from benchmarks.several_torchtitan import trace_of
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.tracing.replay import replay


@dataclass(frozen=True)
class Short(Row):
    num_layers: int = 2

    @property
    def architecture(self) -> dict[str, Any]:
        return {**super().architecture, "num_hidden_layers": self.num_layers}


def main(key: str) -> None:
    fake_cuda.install()
    row = next(row for row in published() if row.key == key)
    same = {field.name: getattr(row, field.name) for field in fields(row)}
    two, four = (
        replay(trace_of(Short(**same, num_layers=count), is_early=False)).allocated_peak_bytes
        for count in (2, 4)
    )
    others = row.architecture["num_hidden_layers"] - 2
    print(two, four, two + (four - two) // 2 * others)


if __name__ == "__main__":
    main(sys.argv[1])
