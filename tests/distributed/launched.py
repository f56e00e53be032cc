"""Launches examples/train.py as a user would, and judges it by what it wrote, never by its exit code alone."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import processes
from tests.distributed import extensions
from tests.written import read_entries, read_findings
from trainer_plugins.finding import Finding
from trainer_plugins.launch.configs import path
from trainer_plugins.record.timeline import Beginning
from trainer_plugins.strategy import Strategy

ROOT = Path(__file__).parent.parent.parent
TRAIN = ROOT / "examples" / "train.py"
QUIET = (
    "--report_to",
    "none",
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--per_device_train_batch_size",
    "2",
)

ABORTED_AFTER_THE_WORK = "terminate called without an active exception"
"""What one process of gloo in about sixty prints as its Python ends; a launcher then fails."""


@dataclass(frozen=True)
class Launched:
    """What a launch left in its output folder."""

    output_dir: Path
    text: str

    @property
    def strategies(self) -> list[Strategy]:
        """As what the last training ran, by rank."""
        num_ranks = len([*self.output_dir.glob("_trainer_plugins/memory/rank-*.jsonl")])
        began = [
            [each.strategy for each in read_entries(self.output_dir, Beginning, rank=rank)]
            for rank in range(num_ranks)
        ]
        assert all(began), self.text[-3000:]
        return [strategies[-1] for strategies in began]

    @property
    def findings(self) -> dict[str, Finding]:
        """What rank 0 remarked, by code."""
        return {finding.code: finding for finding in read_findings(self.output_dir)}

    def losses(self, checkpoint: str, key: str = "loss") -> list[float]:
        """What was logged until a checkpoint was saved."""
        state = json.loads((self.output_dir / checkpoint / "trainer_state.json").read_text())
        return [record[key] for record in state["log_history"] if key in record]


def torchrun(num_ranks: int) -> list[str]:
    """The words before a script that start so many ranks of it."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *words, "--master-port", processes.free_port()]


def command(config: str | Path, flags: tuple[str, ...] = (), script: Path = TRAIN) -> list[str]:
    file = path(config) if isinstance(config, str) else config
    flags = ("--num_processes", "2", "--main_process_port", processes.free_port(), *flags)
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        *flags,
        str(script),
    ]


def environment(**more: str) -> dict[str, str]:
    """The variables of a launch on the CPU; DeepSpeed finds ninja beside the Python that runs."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_"))
    }
    tools = str(Path(sys.executable).parent)
    accelerator = more.get("DS_ACCELERATOR", "cpu")
    return kept | {
        "PATH": f"{tools}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": accelerator,
        "TORCH_EXTENSIONS_DIR": str(extensions.folder(accelerator)),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


LOOKED_AT = "the ranks read the command of the launcher above them"
"""Why a launch is not forked: the parent of each fork is the server."""


def start(
    call: Sequence[str | Path], folder: Path, *, fresh: str = "", **variables: str
) -> subprocess.Popen[bytes]:
    """Begin a launch that is judged later, by `finished`.

    What it prints goes into a file, which never blocks.
    """
    environ = environment(**variables)
    extensions.build(environ["DS_ACCELERATOR"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "printed.txt").open("wb") as printed:
        streams = {"stdout": printed, "stderr": printed}
        return processes.start(call, cwd=folder, environ=environ, fresh=fresh, **streams)


def ended(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for a launch, and end what is left of it. Returns what it printed."""
    printed = folder / "printed.txt"
    try:
        processes.end(process)
    except subprocess.TimeoutExpired as error:
        extensions.refuse_a_lock("cpu")
        raise AssertionError(f"{error}\n{printed.read_text()[-5000:]}") from None
    return printed.read_text()


def finished(process: subprocess.Popen[bytes], folder: Path, output_dir: Path) -> Launched:
    """Wait for a launch, and look that it did its work."""
    text = ended(process, folder)
    # gloo now and then aborts a process at its end, after the work: the last thing that training
    # writes counts.
    assert process.returncode == 0 or (output_dir / "model.safetensors").is_file(), text[-5000:]
    return Launched(output_dir, text)


def launch(
    folder: Path,
    config: str | Path,
    *arguments: str,
    flags: tuple[str, ...] = (),
    script: Path = TRAIN,
    use_cpu: bool = True,
    fresh: str = "",
    **variables: str,
) -> Launched:
    """Launch on two CPU ranks, from a folder of its own."""
    output_dir = folder / "run"
    call = [*command(config, flags, script), *QUIET, "--output_dir", str(output_dir)]
    call += [*(["--use_cpu"] if use_cpu else []), *arguments]
    return finished(start(call, folder, fresh=fresh, **variables), folder, output_dir)
