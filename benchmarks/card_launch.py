"""Measure on a CUDA card a full fine-tune of a 1.2B Llama under the shipped launch files.

`accelerate launch` starts each in one process: 1 row of 2048 tokens a step, bf16, checkpointing,
from the same saved weights; see `benchmarks/card_launch_train.py`. While one trains, the next
launch imports its libraries, then waits for it to end before it touches the card. DeepSpeed's
CPUAdam is compiled beforehand. By default accelerate gives a process one thread, which slows the
optimizer on the CPU, so a row is named after its threads.

    python -m benchmarks.card_launch [--small]
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.configs import ROWS, Row
from trainer_plugins.launch import configs
from trainer_plugins.units import GIB

ROOT = Path(__file__).parents[1]
BUDGET_SECONDS = 75
"""No launch starts after that."""

ROW_SECONDS = 60
COMPILES = """
from deepspeed.ops.op_builder import CPUAdamBuilder, UtilsBuilder
CPUAdamBuilder().load(verbose=False), UtilsBuilder().load(verbose=False)
"""


@dataclass(frozen=True)
class Launch:
    """Describes one launch."""

    file: str | Row
    """A shipped file, or another project's."""

    threads: int
    dtype: str = "bfloat16"

    def write(self, path: Path) -> None:
        """Write the launch file."""
        if isinstance(self.file, Row):
            path.write_text(self.file.launch_file(1))
        else:
            path.write_text(configs.path(self.file).read_text())


def launches() -> dict[str, Launch]:
    """Return the rows, the important ones first; two threads are left for the next launch."""
    num = max(1, len(os.sched_getaffinity(0)) - 2)
    shipped = ("zero3_offload_all", "fsdp2_offload", "zero3_offload_optimizer")
    return {
        "single_device, bf16 weights": Launch("single_device", num),
        **{f"{file}, {num} threads": Launch(file, num) for file in shipped},
        f"one_gpu_7b_offload, {num} threads": Launch("one_gpu_7b_offload", num),
        "single_device, fp32 weights": Launch("single_device", num, "float32"),
        "zero3_offload_all, 1 thread": Launch("zero3_offload_all", 1),
        f"LLaMA-Factory ds_z3_offload, {num} threads": Launch(ROWS["LLaMA-Factory"], num),
        f"axolotl zero3_bf16_cpuoffload_all, {num} threads": Launch(ROWS["axolotl _all"], num),
    }


def with_ninja() -> dict[str, str]:
    """Return the environment, with this Python's program folder on the PATH, for ninja."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path}


def compile_adam() -> subprocess.Popen[bytes]:
    """Start compiling DeepSpeed's CPUAdam; a second call waits for the first."""
    return subprocess.Popen(
        [sys.executable, "-c", COMPILES], env=with_ninja(), stdout=subprocess.DEVNULL
    )


def save_model(folder: Path, is_small: bool) -> None:
    """Save a model shaped like Llama-3.2-1B, with random weights made on the card."""
    config = LlamaConfig(
        vocab_size=1024 if is_small else 128256,
        hidden_size=512 if is_small else 2048,
        intermediate_size=8192,
        num_hidden_layers=4 if is_small else 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()


def start(launch: Launch, folder: Path, model: Path) -> subprocess.Popen[bytes]:
    """Start a launch in its own process group, with its output in a file."""
    folder.mkdir()
    launch.write(folder / "launch.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(folder / "launch.yaml"), "--num_processes", "1"]
    command += ["--num_cpu_threads_per_process", str(launch.threads), "--main_process_port", "0"]
    command += ["-m", "benchmarks.card_launch_train", "--result", str(folder)]
    command += ["--model", str(model), "--dtype", launch.dtype, "--threads", str(launch.threads)]
    with (folder / "said.txt").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **with_ninja(),
                "OMP_NUM_THREADS": str(launch.threads),
                "PYTHONWARNINGS": "ignore",
            },
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a launch, and end it if it takes too long: torchrun ends its ranks on SIGTERM."""
    waits: tuple[tuple[signal.Signals | None, float], ...] = (
        (None, seconds),
        (signal.SIGTERM, 10),
        (signal.SIGKILL, 10),
    )
    for number, patience in waits:
        if number is not None:
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def result_of(name: str, folder: Path) -> dict[str, float]:
    """Return the figures of a launch, and print the strategy in force, or how it failed."""
    written = folder / "result.json"
    if not written.exists():
        lines = (folder / "said.txt").read_text(errors="replace").splitlines()
        print(f"FAILED: {name}; its last lines:", *lines[-15:], sep="\n", flush=True)
        return {}
    result: dict[str, Any] = json.loads(written.read_text())
    print(f"{name}: {result['strategy']}; parameters on {result['parameters']},", end=" ")
    print(f"states on {result['states']}; losses {result['losses']}", flush=True)
    return {
        "s": result["seconds"],
        "tokens/s": result["tokens"] / result["seconds"],
        "peak GiB": result["allocated_bytes"] / GIB,
        "reserved GiB": result["reserved_bytes"] / GIB,
        "pinned GiB": result["pinned_bytes"] / GIB,
        "VmHWM GiB": result["host_bytes"] / GIB,
        "last loss": result["losses"][-1],
        "whole run s": result["run_seconds"],
    }


def figures(is_small: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the figures of each launch."""
    begun = perf_counter()
    failed = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        compiling = compile_adam()
        save_model(folder / "model", is_small)
        yield "before: model saved s", perf_counter() - begun
        yield "before: CPUAdam's exit code", compiling.wait()
        yield "before: CPUAdam compiled or found s", perf_counter() - begun
        rows = iter(launches().items())
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        until = monotonic() + BUDGET_SECONDS
        while True:
            while len(running) < 2 and monotonic() < until:
                if (row := next(rows, None)) is None:
                    break
                name, launch = row
                place = folder / f"launch-{name.replace(' ', '-')}"
                running.append((name, place, start(launch, place, folder / "model")))
            if not running:
                break
            name, place, process = running.pop(0)
            end(process, ROW_SECONDS)
            found = result_of(name, place)
            failed += [] if found else [name]
            yield from ((f"{name}: {field}", value) for field, value in found.items())
        for name, _ in rows:
            print(f"not run, for want of time: {name}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    for name, value in figures("--small" in sys.argv):
        print(f"{name}: {value:.5g}", flush=True)
