"""What DeepSpeed compiles at its first use is built once, before the first launch, and nothing cuts that off."""

import fcntl
import functools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from trainer_plugins.launch.extensions import lock_findings, read_locks

ROOT = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix) / "torch_extensions")
"""Of this environment alone. In the folder that torch has for all of them each would compile anew
what another one did: the path of torch is part of how a compiler is called."""

BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:
        builder.load()
"""


def folder(accelerator: str) -> Path:
    """TORCH_EXTENSIONS_DIR of a launch. For a card DeepSpeed compiles with other options."""
    return ROOT / accelerator


@functools.cache
def build(accelerator: str) -> None:
    """Compile them, or wait for another test process that does. Minutes the first time.

    In a session of its own, which holds the lock: whoever ends the tests meanwhile lets the build
    end too.

    Raises:
        AssertionError: a lock lies there on which every launch would wait, or a build failed.
    """
    if find_spec("deepspeed") is None:
        return
    where = folder(accelerator)
    where.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(where), "DS_ACCELERATOR": accelerator}
    environ["PATH"] = (
        # ninja is beside the Python that runs
        f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    )
    log = where / "build.log"
    with (where / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuse_a_lock(accelerator)
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", BUILD], env=environ, stdout=said, stderr=said, start_new_session=True,
                pass_fds=[lock.fileno()],
            )  # fmt: skip
        assert process.wait() == 0, log.read_text(errors="replace")[-5000:]


def refuse_a_lock(accelerator: str) -> None:
    """Fail where a launch would wait for ever."""
    found = list(lock_findings(read_locks({"TORCH_EXTENSIONS_DIR": str(folder(accelerator))})))
    assert not found, "\n".join(map(str, found))
