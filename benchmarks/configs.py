"""Compare the shipped ZeRO-3 offload files with those of other projects, in one training.

The others are LLaMA-Factory, axolotl and accelerate. The model is Llama-2 7B in miniature: its 32
layers, every matrix an 8th as wide and as high, so a 64th of its elements. A file's numbers that
count elements are divided by 64 too, so buckets, thresholds and distances relate to the layers as
they do at 7B. "auto" follows the model by itself.

`accelerate launch` starts each row on two CPU ranks, interleaved, in rounds. Nothing is printed
unless the intended training is the one that ran, and all rows trained alike. The meaning of a
figure on the CPU:

    tokens/s     the cost of gathering, reducing and stepping; neither PCIe nor overlap, and
                 `pin_memory` has no effect
    card         a census (see `benchmarks/configs_train.py`) of the memory of a card, without
                 activations; given for 7B: every term counts elements, so it is 64 times the count
    fetched      weights gathered in a step, over those of the model; on a card with offload, the
                 traffic over PCIe
    waited for   the part of them that was not requested when their layer began: not overlapped on
                 any device
    main memory  of a rank, with Python's own and with the card's share, which is main memory here

With a CUDA card the same program trains on it in bf16, capped to 24 GiB at 7B, or to the same share
of a smaller model if main memory does not hold 7B. NOT YET RUN ON A GPU.

    python -m benchmarks.configs [KEY=VALUE[,KEY=VALUE]] ...

Each argument is one more row: zero3_offload_all with these values, as `trainer-plugins configs copy
--set` takes them.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import yaml

from trainer_plugins.launch import configs
from trainer_plugins.launch.lint.document import ConfigError, read_document
from trainer_plugins.units import GIB, MIB

ROOT = Path(__file__).parents[1]
ROUNDS = 2
FIGURES = ("card_bytes", "gathered_bytes", "fetched", "waited_for", "host_bytes", "cuda_bytes")
OURS = "zero3_offload_all"

# Settings that count elements, with DeepSpeed's default if a file does not have them.
ELEMENTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "auto",
)
# axolotl writes max_live_parameters and max_reuse_distance: DeepSpeed reads these names too.
AXOLOTL = {
    **AUTO,
    "sub_group_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
TORCH_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


@dataclass(frozen=True)
class Row:
    """Describes a launch file: a shipped one, and the differences of another project's."""

    file: str = OURS
    zero: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    """The differences outside `zero_optimization`."""

    optimizer: str = "DeepSpeedCPUAdam"

    def deepspeed(self, divisor: int) -> dict[str, Any]:
        """Return the DeepSpeed configuration for 1 / `divisor ** 2` of the elements."""
        shipped: Any = read_document(configs.path(self.file)).deepspeed
        zero = {**ELEMENTS, **shipped["zero_optimization"], **self.zero}
        for key in ELEMENTS:
            if zero[key] != "auto":
                zero[key] = int(zero[key]) // divisor**2
        zero = {key: value for key, value in zero.items() if value is not None}
        return {**shipped, "zero_optimization": zero, **self.rest}

    def launch_file(self, divisor: int) -> str:
        """Return it as YAML, for `accelerate launch`."""
        accelerate: Any = read_document(configs.path(self.file)).accelerate
        text = json.dumps(self.deepspeed(divisor))
        section = {**accelerate["deepspeed_config"], "deepspeed_config_file": text}
        return str(yaml.safe_dump({**accelerate, "deepspeed_config": section}))


ROWS = {
    OURS: Row(),
    "zero3_offload_optimizer": Row("zero3_offload_optimizer"),
    # hiyouga/LLaMA-Factory ff6d4d12, examples/deepspeed/ds_z3_offload_config.json
    "LLaMA-Factory": Row(
        zero={**AUTO, "overlap_comm": False}, rest={"zero_allow_untested_optimizer": True}
    ),
    # axolotl-ai-cloud/axolotl 067b021c, deepspeed_configs/zero3_bf16_cpuoffload_all.json: torch's
    # AdamW on the CPU
    "axolotl _all": Row(zero=AXOLOTL, rest=TORCH_OPTIMIZER, optimizer="AdamW"),
    # the same, deepspeed_configs/zero3_bf16_cpuoffload_params.json
    "axolotl _params": Row(
        zero={**AXOLOTL, "offload_optimizer": None}, rest=TORCH_OPTIMIZER, optimizer="AdamW"
    ),
    # huggingface/accelerate 16cb6eb8,
    # examples/deepspeed_config_templates/zero_stage3_offload_config.json. Its fp16 and its
    # accumulation of 1 would stop a training in bf16, or with any other, so they are "auto" here;
    # and its learning rate schedule is left out, so that all train alike. Its AdamW is the one that
    # the others get from the Trainer.
    "accelerate": Row(zero=AUTO),
}


@dataclass(frozen=True)
class Bench:
    """Sets the size of the training on this machine."""

    divisor: int
    num_ranks: int
    words: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Return the tokens of one step, on all ranks."""
        return int(self.words[1]) * int(self.words[3]) * self.num_ranks


def bench_here() -> Bench:
    """Choose two CPU ranks; or one card, and the largest model that main memory holds.

    A parameter takes 20.1 B, of 90 % of free main memory.
    """
    if not torch.cuda.is_available():
        return Bench(8, 2, ("--rows", "1", "--length", "32", "--use_cpu"))
    room = 0.9 * psutil.virtual_memory().available / 20.1
    divisor = next((divisor for divisor in (1, 2, 4) if 6.74e9 / divisor**2 < room), 8)
    return Bench(
        divisor, 1, ("--rows", "4", "--length", "1024", "--card_bytes", str(24 * GIB // divisor**2))
    )


def launch(row: Row, bench: Bench) -> list[dict[str, Any]]:
    """Train once, and return each rank's checked results; nothing if the card was too small.

    Raises:
        RuntimeError: another training than intended ran, or none.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "launch.yaml").write_text(row.launch_file(bench.divisor))
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(folder / "launch.yaml"),
        ]
        command += ["--num_processes", str(bench.num_ranks), "--main_process_port", "0"]
        command += ["-m", "benchmarks.configs_train"]
        command += ["--result", temporary, "--divisor", str(bench.divisor), *bench.words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        environment["PATH"] = (
            f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
        )
        if bench.num_ranks > 1:
            environment["DS_ACCELERATOR"] = "cpu"
        # A rank may die at exit after its work is done: trust the results, not the exit code.
        done = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if "OutOfMemoryError" in done.stderr:
        return []
    if len(results) != bench.num_ranks:
        raise RuntimeError(
            f"{len(results)} of {bench.num_ranks} ranks finished:\n{done.stderr[-3000:]}"
        )
    zero = row.deepspeed(bench.divisor)["zero_optimization"]
    meant = {
        "world_size": bench.num_ranks,
        "stage": 3,
        "optimizer": row.optimizer,
        "offload": {
            name: zero.get(f"offload_{name}", {}).get("device", "none")
            for name in ("optimizer", "param")
        },
    }
    for result in results:
        ran = {key: result[key] for key in meant}
        if ran != meant or result["partitioned_share"] < 0.9:
            raise RuntimeError(
                f"what ran is not what was meant: {ran}, {result['partitioned_share']}, not {meant}"
            )
    return results


def rows_with(words: list[str]) -> dict[str, Row]:
    """Return the table's rows, and one for each word.

    Raises:
        ConfigError: no such key, or a value that does not fit it.
    """
    more = {}
    for word in words:
        with TemporaryDirectory() as temporary:
            changed: Any = read_document(
                configs.copy(OURS, Path(temporary), word.split(","))
            ).deepspeed
        more[f"{OURS}, {word}"] = Row(zero=changed["zero_optimization"])
    return {**ROWS, **more}


def measure(rows: dict[str, Row], bench: Bench) -> dict[str, list[list[dict[str, Any]]]]:
    """Return for each row the results of all ranks and rounds; empty if the card was too small."""
    results: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, row in rows.items():
            try:
                ranks = launch(row, bench)
            except RuntimeError as error:
                raise SystemExit(f"{name}: {error}") from None
            results[name] += [ranks] if ranks else []
            if ranks and results[OURS]:
                loss, ours = ranks[0]["losses"][-1], results[OURS][0][0]["losses"][-1]
                if abs(loss - ours) > 0.001 * ours:
                    raise SystemExit(
                        f"{name} ends at a loss of {loss}, {OURS} at {ours}: not the same training"
                    )
    return results


def main(words: list[str]) -> None:
    """Print the table."""
    bench = bench_here()
    try:
        rows = rows_with(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    results = measure(rows, bench)
    if not results[OURS]:
        raise SystemExit(f"{OURS} does not fit on this card: nothing to compare with")
    seconds = {
        name: [median(second for rank in ranks for second in rank["seconds"]) for ranks in rounds]
        for name, rounds in results.items()
    }
    print(
        f"{results[OURS][0][0]['parameters'] / 1e6:.0f}M parameters, {bench.num_ranks} ranks,",
        end=" ",
    )
    print(f"{bench.tokens} tokens a step; {OURS} takes {median(seconds[OURS]):.2f} s a step")
    print("tokens/s  card at 7B  of it weights  fetched  waited for  main memory  on the card")
    print("   ratio         GiB            GiB  x model     x model          MiB          MiB")
    for name, rounds in results.items():
        if not rounds:
            print(f"out of memory on this card: {name}")
            continue
        ratio = median(
            ours / other for ours, other in zip(seconds[OURS], seconds[name], strict=True)
        )
        most = {key: max(rank[key] for ranks in rounds for rank in ranks) for key in FIGURES}
        at_7b = bench.divisor**2 / GIB
        print(
            f"{ratio:8.2f}  {most['card_bytes'] * at_7b:10.2f}"
            f"  {most['gathered_bytes'] * at_7b:13.2f}  {most['fetched']:7.2f}"
            f"  {most['waited_for']:10.2f}  {most['host_bytes'] / MIB:11.0f}"
            f"  {most['cuda_bytes'] / MIB:11.0f}  {name}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
