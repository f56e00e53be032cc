"""Measures the CPU seconds of a search and of a plan that does not fit, with all subprocesses."""

import os
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

CONFIG = Path(__file__).parent.parent / "tests/planner/configs/llama-3-8b.json"
COMMON = ("--model", str(CONFIG), "--dtype", "bf16", "--bf16", "True", "--seq-length", "2048")
FOUR_ROWS = ("--per_device_train_batch_size", "4")
ON_24_GIB = (*COMMON, *FOUR_ROWS, "--gpu", "24GiB")
LORA = ("--lora-r", "16")

COMMANDS = {
    "plan, 8B, without a card": (*COMMON, *FOUR_ROWS),
    "plan, 8B on 24 GiB, does not fit, with proposals": ON_24_GIB,
    "search, 8B LoRA on 24 GiB": (*ON_24_GIB, *LORA, "--search"),
    "search, 8B on 8 x 80 GiB": (
        *(*COMMON, *FOUR_ROWS, "--gradient_accumulation_steps", "2"),
        *("--gpu", "h100-80gb", "--num-gpus", "8", "--search"),
    ),
}


def cpu_seconds(arguments: tuple[str, ...]) -> tuple[float, str]:
    """Run one command; return the CPU seconds of all its processes, and what it printed."""
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", "plan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = getrusage(RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stderr + done.stdout


def main(names: list[str]) -> None:
    """Measure all commands, or those whose name contains one of the words."""
    for name, arguments in COMMANDS.items():
        if not names or any(word in name for word in names):
            seconds, printed = cpu_seconds(arguments)
            print(f"{name}: {seconds:.1f} CPU seconds")
            print(printed)


if __name__ == "__main__":
    main(sys.argv[1:])
