"""Keep a dry run away from the user's files, accounts and network.

`namespaces.py` does so where the kernel gives the command its own namespaces; elsewhere, as in many
containers, `card/wall.cpp` refuses real writes.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_plugins import namespaces
from trainer_plugins.compiled import cache_folder
from trainer_plugins.drycuda.card.libraries import WALL
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.snapshot.owners import is_ours

_NAMESPACES = namespaces.__file__
_REFUSALS = {
    "Read-only file system": "changes none of your files: allow some with --allow-writes PATH",
    "Connection refused|Network is unreachable|[Nn]ame resolution|[Oo]ffline ?[Mm]ode": (
        "reaches no other program: allow that with --allow-network"
    ),
}
"""Words in errors that the wall causes, each with the cause and the fix."""

OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "CLEARML_OFFLINE_MODE", "TRACKIO_DISABLED"), "1"),
    **dict.fromkeys(("DO_NOT_TRACK", "AXOLOTL_DO_NOT_TRACK"), "1"),
    **dict.fromkeys(("WANDB_MODE", "COMET_MODE", "SWANLAB_MODE"), "disabled"),
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}
"""Trackers and the hub read these on import, so they have to be set before Python starts."""

_SCRIPT_LINE = re.compile(r'^(?:\[rank\d+\]: *)? *File "([^"]+)", line (\d+)', re.MULTILINE)


class Allowed(NamedTuple):
    """Lists the exceptions that a dry run gets from the wall."""

    writes: tuple[Path, ...] = ()  # folders and files that it may write, rename and delete
    # whether it may connect to other hosts, and to other programs on this one
    network: bool = False


class Wall:
    """Puts commands behind a wall.

    Args:
        scratch: a folder that is really written, and deleted after the run.
        allowed: further exceptions for the command.

    Raises:
        PlanError: a folder of `allowed` does not exist.
    """

    def __init__(self, scratch: Path, allowed: Allowed) -> None:
        if missing := [path for path in allowed.writes if not path.exists()]:
            raise PlanError(
                f"--allow-writes: {missing[0]} does not exist: name a folder or a file that does"
            )
        self._scratch, self._network = scratch, allowed.network
        own = [path for path in _caches() if path.is_dir()]
        self._real = [path.resolve() for path in (*own, *allowed.writes)]
        self.has_namespaces = find_obstacle() is None

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` behind the wall."""
        if not self.has_namespaces:
            return list(command)
        python = [sys.executable, "-I", "-S", _NAMESPACES]
        return [*python, json.dumps(self.asked), *command]

    @property
    def asked(self) -> dict[str, object]:
        """Describe the wall for `namespaces.py`; empty without namespaces."""
        if not self.has_namespaces:
            return {}
        return {
            "scratch": str(self._scratch.resolve()),
            "real": list(map(str, self._real)),
            "network": self._network,
        }

    def environment(self, libraries: Path) -> dict[str, str]:
        """Return the variables of a command behind the wall; put its `LD_PRELOAD` first.

        Args:
            libraries: the folder with the libraries of the dry card.
        """
        offline = {} if self._network else OFFLINE
        if self.has_namespaces:
            return dict(offline)
        temporary = self._scratch / "tmp"
        temporary.mkdir(exist_ok=True)
        real = [str(self._scratch.resolve()), *map(str, self._real)]
        return {
            **offline,
            "LD_PRELOAD": str(libraries / WALL),
            "TRAINER_PLUGINS_DRY_WALL": ":".join(real),
            "TRAINER_PLUGINS_DRY_NETWORK": str(int(self._network)),
            "TMPDIR": str(temporary),
            "PYTHONDONTWRITEBYTECODE": "1",  # otherwise each module would be noted as refused
        }


def explain_refusal(log: str) -> str:
    """Return a note for the error of a command that the wall stopped; else nothing."""
    does = next((does for words, does in _REFUSALS.items() if re.search(words, log)), None)
    if does is None:
        return ""
    others = ("site-packages", "/lib/python", "<", str(cache_folder().absolute()))
    lines = [
        f"{place}:{number}"
        for place, number in _SCRIPT_LINE.findall(log)
        if not is_ours(place) and not any(each in place for each in others)
    ]
    where = f" (at {lines[-1]})" if lines else ""
    return f" -- a dry run {does}{where}"


@functools.cache
def find_obstacle() -> str | None:
    """Return why commands get no namespaces here; None if they do."""
    with tempfile.TemporaryDirectory(prefix="trainer-plugins-wall-") as folder:
        asked = json.dumps({"scratch": folder, "real": [], "network": False})
        probe = [sys.executable, "-I", "-S", _NAMESPACES, asked, "true"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        unlock(Path(folder))
    return done.stderr.strip() or "it ended" if done.returncode else None


def unlock(scratch: Path) -> None:
    """Make an overlay's own folders deletable."""
    for path in scratch.glob("layers/*/work/work"):
        path.chmod(0o700)


def _caches() -> list[Path]:
    """Return the caches in which a dry run leaves its results: ours, datasets, and extensions."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    of_hub = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return [
        cache_folder().absolute(),
        Path(os.environ.get("HF_DATASETS_CACHE") or of_hub / "datasets"),
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions"),
    ]
