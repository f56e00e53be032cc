"""Compares published figures of several GPUs with what a plan's own parts say about the same runs.

Each run is repeated in a process of its own: torchtitan's by `several_torchtitan`, that of
DeepSpeed#3734 by `several_deepspeed`. The planner's world, ranks, kernels and allocator take part;
its Trainer does not, because these figures are of other loops. That of trl#6846, which is TRL's
Trainer, is planned as it is (`several_trl`). Prints the table of
`benchmarks/results/several_gpus.txt`, with what rank 0 alone takes on the dry card where it runs;
all runs take some minutes of CPU time:

    python -m benchmarks.several [WORD] ...
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.prediction import columns
from benchmarks.published import Row, published

OF_TORCHTITAN = ("torchtitan#165", "torchtitan 2024-12")
OF_DEEPSPEED = ("DeepSpeed#3734",)
OF_TRL = ("trl#6846",)
EARLY = "the reduced buffer as in an early FSDP2"
FLASH = "flash instead of cuDNN, which torch asks first since 2.11"
COUNTERS = ("allocated", "reserved", "step_end")


def can_be_repeated(row: Row) -> bool:
    """Return whether a module here repeats this run."""
    if row.source in (*OF_DEEPSPEED, *OF_TRL):
        return "config" in row.settings
    needs_more = ("torch.compile", "Float8", "tensor parallelism")
    return row.source in OF_TORCHTITAN and not set(needs_more) & set(row.missing)


def ways(row: Row) -> tuple[str, ...]:
    """Return the ways to repeat a run: with the installed packages, and as it may have been."""
    if row.source in OF_TRL:
        return ("", FLASH)
    is_second = row.settings["strategy"] == "FSDP2"
    return ("", EARLY) if row.source == OF_TORCHTITAN[0] and is_second else ("",)


def compared(row: Row) -> Mapping[str, int]:
    """Return what a plan is held against; a figure whose counter is not said, twice."""
    if row.source in OF_TRL:
        return dict.fromkeys(("allocated", "reserved"), row.measured["nvidia_smi"])
    return row.measured


def answer(key: str, way: str) -> dict[str, int]:
    """Repeat one run, and return its counters in bytes."""
    import torch

    from trainer_plugins.allocator.model import AllocatorRules, first_of_a_size
    from trainer_plugins.planner.pretend import fake_cuda
    from trainer_plugins.planner.tracing.events import ALLOC, FREE
    from trainer_plugins.planner.tracing.replay import replay

    fake_cuda.install()
    torch.backends.cuda.enable_cudnn_sdp(way != FLASH)
    row = next(row for row in published() if row.key == key)
    if row.source in OF_TRL:
        from benchmarks import several_trl

        plan = several_trl.plan_of(row, on_card=False)
        return {"allocated": plan.allocated_peak_bytes, "reserved": plan.reserved_peak_bytes}
    if row.source in OF_DEEPSPEED:
        from benchmarks import several_deepspeed

        trace = several_deepspeed.trace_of(row)
    else:
        from benchmarks import several_torchtitan

        trace = several_torchtitan.trace_of(row, is_early=way == EARLY)
    # run_train.sh sets expandable_segments at the commit of 2024-12, and not at that of 2024-03
    rules = AllocatorRules(
        expandable_segments=row.source == OF_TORCHTITAN[1],
        first_of_a_size=first_of_a_size(torch.__version__),
    )
    found = replay(trace, None, rules)
    active = step_end = peak = 0
    for event in trace.events:
        if event.kind in (ALLOC, FREE):  # what was left is active until it is free
            active += event.kind * found.block_bytes[event.number]
            peak = max(peak, active)
            step_end = active if event.moment != "save" else step_end
    return {"allocated": peak, "reserved": found.reserved_peak_bytes, "step_end": step_end}


def dry_answer(key: str, way: str) -> dict[str, int]:
    """Return what rank 0 of a run takes on the dry card, alone; its process is there.

    Raises:
        ValueError: this run has no dry run.
    """
    row = next(row for row in published() if row.key == key)
    if row.source in OF_TRL:
        if way:
            raise ValueError("the process of its Trainer asks cuDNN")
        from benchmarks import several_trl

        plan = several_trl.plan_of(row, on_card=True)
        return {"allocated": plan.allocated_peak_bytes, "reserved": plan.reserved_peak_bytes}
    if row.source in OF_DEEPSPEED:
        raise ValueError("its fp16 copy takes 26 GB of main memory")
    import torch

    from benchmarks import several_torchtitan
    from benchmarks.prediction_dry import Counters

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    counters: Any = Counters()
    several_torchtitan.train(row, counters, is_early=way == EARLY)
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["active_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "step_end": counters.step_end,
    }


def asked(row: Row, way: str, on_card: bool) -> dict[str, int] | str:
    """Repeat a run in a process of its own. Returns its counters, or why there are none."""
    python = [sys.executable, "-W", "ignore"]
    command = [*python, "-m", "benchmarks.several", "--answer", row.key, way]
    environment = dict(os.environ)
    if on_card:
        command[-3] = "--dry"
    if on_card and row.source in OF_TORCHTITAN:
        cards = ["--gpu", "95GiB", "--num-gpus", "8", "--alone", "--"]
        command = [*python, "-m", "trainer_plugins.drycuda", *cards, *command]
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": row.settings["num_gpus"]}
        environment |= {name: str(number) for name, number in ranks.items()}
        environment |= {"LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        if row.source == OF_TORCHTITAN[1]:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    home = Path(__file__).parents[1]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=home, env=environment
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for row in rows:
        for way in ways(row):
            print(f"repeating {row.key} {way} ...", file=sys.stderr)
            name = f"{row.name}, {way}" if way else row.name
            found = [asked(row, way, on_card) for on_card in (False, True)]
            for each in found:
                if isinstance(each, str):
                    print(f"{row.key}: {each}", file=sys.stderr)
            for counter, measured in compared(row).items():
                sizes = [f"{measured / 2**30:.3f}"]
                for each in found:
                    if isinstance(each, str):
                        sizes += ["", ""]
                        continue
                    error = f"{100 * (each[counter] / measured - 1):+.2f}"
                    sizes += [f"{each[counter] / 2**30:.3f}", error]
                if counter in COUNTERS:
                    yield (row.source, name, counter, *sizes)


def main(words: Sequence[str]) -> None:
    """Print the table of all runs, or of those whose names contain a word."""
    if words[:1] == ["--answer"]:
        print(json.dumps(answer(words[1], words[2])))
        return
    if words[:1] == ["--dry"]:
        print(json.dumps(dry_answer(words[1], words[2])))
        return
    rows = [row for row in published() if can_be_repeated(row)]
    asked_for = [row for row in rows if not words or any(word in row.key for word in words)]
    print("In GiB; errors in percent.")
    head = ("source", "run", "counter", "published", "plan", "error", "dry", "error")
    columns(head, lines(asked_for))


if __name__ == "__main__":
    main(sys.argv[1:])
