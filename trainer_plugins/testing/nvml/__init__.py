"""ScriptedNvml: the NVIDIA driver library, following a script, for tests on machines without a card.

A `libnvidia-ml.so.1` in C (`nvml.c`), compiled when first needed, that the real pynvml, nvitop,
gpustat and torch load:

    nvml = ScriptedNvml(tmp_path).card("GPU-1…").process(4242, 3 * GIB, name="infer").write()
    subprocess.run([...], env=nvml.env())                                # a child sees that card
    nvml.fault("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_GPU_IS_LOST).write()  # and now it
    falls off the bus
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_plugins.units import GIB, MIB

__all__ = ["ScriptedNvml", "unavailable_reason"]

LIBRARY = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml.c")
COMPILER_FLAGS = (
    "-shared",
    "-fPIC",
    "-O1",
    "-pthread",
    f"-Wl,-soname,{LIBRARY}",
    "-Wl,-z,nodelete",
)
INIT_FUNCTIONS = ("nvmlInitWithFlags", "nvmlInit_v2", "nvmlInit")


def unavailable_reason() -> str | None:
    """Why the scripted library cannot be had on this machine, as a sentence without a full stop; None if it can."""
    if sys.platform != "linux":
        return (
            f"the scripted NVML needs Linux, where programs load {LIBRARY}; this is {sys.platform}"
        )
    if _compiler() is None:
        return "the scripted NVML needs a C compiler (cc, gcc or clang) on the PATH"
    return None


@dataclass(frozen=True, slots=True)
class ScriptedNvml:
    """A script for the library, one record after another. Each method returns a new, longer script.

    Nothing happens until `write`: from then on every program that was given the library with this
    folder, by `env` or `preload`, answers accordingly, also if it has long been running. What a
    script counts (`skip`, `times`, growth) is counted in each program for itself, from the moment
    it reads the script.
    """

    folder: Path
    """Where the script file lies. One folder, one driver; a pytest `tmp_path` will do."""

    records: tuple[str, ...] = ()

    def driver(
        self,
        *,
        version: str = "580.95.05",
        cuda_version: int = 13000,
        process_record_bytes: int = 24,
    ) -> "ScriptedNvml":
        """Set what the driver says of itself; drivers 535.43 to 535.86 had `process_record_bytes=32` (gpustat #161)."""
        return self._with(
            "driver", version=version, cuda=cuda_version, record_bytes=process_record_bytes
        )

    def card(
        self,
        uuid: str | None = None,
        *,
        total_bytes: int = 80 * GIB,
        reserved_bytes: int = 600 * MIB,
        name: str = "NVIDIA H100 80GB HBM3",
    ) -> "ScriptedNvml":
        """Add a card.

        Args:
            uuid: as `nvidia-smi -L` prints it; None for `GPU-0000000<index>-…`.
            total_bytes: all its memory.
            reserved_bytes: the part of it that the driver keeps for itself. Memory info version 1
                counts it as used, version 2 does not.
            name: of the product.
        """
        index = self._num("card")
        uuid = uuid or f"GPU-{index:08x}-1111-2222-3333-444444444444"
        bus = f"00000000:{0x17 + index:02X}:00.0"
        return self._with(
            "card", uuid=uuid, name=name, bus=bus, total=total_bytes, reserved=reserved_bytes
        )

    def card_from_file(
        self, path: Path, *, reserved_bytes: int = 600 * MIB, name: str = "Simulated card"
    ) -> "ScriptedNvml":
        """Add the card that a simulated accelerator shares: its uuid, capacity and processes come from its card file.

        The total is that capacity and `reserved_bytes`. While there is no such file, the GPU is
        lost; once there is, it stays the one that is read until the next script.
        """
        bus = f"00000000:{0x17 + self._num('card'):02X}:00.0"
        return self._with(
            "card", name=name, bus=bus, reserved=reserved_bytes, file=Path(path).absolute()
        )

    def mig_slice(
        self, uuid: str, *, total_bytes: int, name: str = "NVIDIA H100 80GB HBM3 MIG"
    ) -> "ScriptedNvml":
        """Cut a MIG slice from the last card, with memory and processes of its own.

        The card is then in MIG mode.
        """
        self._last_card()
        return self._with("slice", uuid=uuid, name=name, total=total_bytes)

    def process(
        self,
        pid: int,
        used_bytes: int,
        *,
        name: str = "",
        grow_bytes: int = 0,
        live: bool = False,
        says_bytes: bool = True,
        graphics: bool = False,
    ) -> "ScriptedNvml":
        """Let a process hold memory on the last card or slice.

        Args:
            pid: its number; no such process need exist.
            used_bytes: what it holds when the device's memory is first asked for.
            name: what the driver calls it. Empty: the driver does not know it.
            grow_bytes: how much more it holds at every later query of the device's memory.
            live: it holds memory only while a process of that number exists.
            says_bytes: False to list it with N/A for bytes, as on WSL; the card's used memory
                counts them all the same.
            graphics: list it with the graphics processes instead of the compute processes.
        """
        if "\tfile=" in self._last_card():
            raise ValueError(
                "the processes of a card from a file are in that file, or the two would not agree"
            )
        flags = "l" * live + "u" * (not says_bytes) + "g" * graphics
        return self._with(
            "process", pid=pid, bytes=used_bytes, grow=grow_bytes, flags=flags, name=name
        )

    def hide(self, pid: int) -> "ScriptedNvml":
        """Leave a process out of every list, as drivers do with those outside of the container; its bytes count."""
        return self._with("hide", pid=pid)

    def fault(
        self,
        function: str,
        code: int,
        *,
        uuid: str | None = None,
        skip: int = 0,
        times: int | None = None,
    ) -> "ScriptedNvml":
        """Let a function of the library fail.

        Args:
            function: its C name with its version, as in `nvmlDeviceGetMemoryInfo_v2`.
            code: the return code, one of pynvml's `NVML_ERROR_*`.
            uuid: fail on this device only; None for all of them, and for functions that take none.
            skip: how many calls to let pass first.
            times: how many calls to fail after that; None for all.

        Raises:
            ValueError: the library has no such function.
        """
        if not re.search(rf"\b{re.escape(function)}\b", SOURCE.read_text()):
            raise ValueError(
                f"the scripted NVML has no function {function!r}; see {SOURCE.name} for those it has"
            )
        limits = {} if times is None else {"times": times}
        return self._with(
            "fault", function=function, code=code, uuid=uuid or "", skip=skip, **limits
        )

    def hang(self, function: str, *, skip: int = 0) -> "ScriptedNvml":
        """Let a function of the library never answer.

        Args:
            function: its C name with its version, as in `nvmlDeviceGetMemoryInfo_v2`.
            skip: how many calls to let pass first.

        Raises:
            ValueError: the library has no such function.
        """
        script = self.fault(function, 0, skip=skip)
        return replace(script, records=(*self.records, f"{script.records[-1]}\thangs=1"))

    def cannot_start(self, code: int) -> "ScriptedNvml":
        """Let the library fail to start: `NVML_ERROR_DRIVER_NOT_LOADED`, `…_LIB_RM_VERSION_MISMATCH` and their like."""
        script = self
        for function in INIT_FUNCTIONS:
            script = script.fault(function, code)
        return script

    def write(self) -> "ScriptedNvml":
        """Put the script in force in one piece: a reader sees the whole old one or the whole new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(descriptor, "w") as file:
            file.write(
                "\n".join((*ScriptedNvml(self.folder).driver().records, *self.records)) + "\n"
            )
        # The library tells by inode, size and time that there is a new script. Kernels stamp files
        # by a clock of milliseconds and reuse inodes, so of two quick rewrites the second could go
        # unseen: stamp it in nanoseconds.
        now = time.time_ns()
        os.utime(temporary, ns=(now, now))
        os.replace(temporary, self.path)
        return self

    @property
    def path(self) -> Path:
        """The script file."""
        return self.folder / "nvml.script"

    def env(self, **more: str) -> dict[str, str]:
        """Return the environment in which a child process finds this library first, with `more` variables added."""
        search_path = [str(build().parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ours = {
            "LD_LIBRARY_PATH": os.pathsep.join(search_path),
            "TRAINER_PLUGINS_NVML_SCRIPT": str(self.path.absolute()),
        }
        return {**os.environ, **ours, **more}

    def preload(self) -> None:
        """Serve the running process, from now on and until it ends: an NVML client that loads its library finds ours.

        The loader of glibc knows a loaded library again by its SONAME, so no environment variable
        is needed. pynvml and torch keep the library they have found: for another driver write
        another script, in this folder or not.

        Raises:
            RuntimeError: the process has loaded NVIDIA's own library already, so clients will go on
                finding that.
        """
        ours = ctypes.CDLL(str(build()))
        if not hasattr(ctypes.CDLL(LIBRARY), "scriptedNvmlFollow"):
            raise RuntimeError(
                f"this process has loaded NVIDIA's {LIBRARY} already; preload before anything asks for it"
            )
        ours.scriptedNvmlFollow(os.fsencode(self.path.absolute()))

    def _with(self, kind: str, **fields: object) -> "ScriptedNvml":
        record = "\t".join([kind, *(f"{key}={value}" for key, value in fields.items())])
        if "\n" in record or record.count("\t") != len(fields):
            raise ValueError(
                f"a script has one record a line and tabs between fields, so no text in it may: {record!r}"
            )
        return replace(self, records=(*self.records, record))

    def _num(self, kind: str) -> int:
        return sum(record.startswith(f"{kind}\t") for record in self.records)

    def _last_card(self) -> str:
        cards = [record for record in self.records if record.startswith("card\t")]
        if not cards:
            raise ValueError("add a card first: a process or a slice is on the last one")
        return cards[-1]


def build() -> Path:
    """Compile the library unless that has been done, and return its path.

    It lies in `$TRAINER_PLUGINS_CACHE`, or `~/.cache/trainer_plugins`, in a folder of its own for
    each source, kind of machine and set of flags. Any number of processes may build at once: each
    renames a whole file into place.

    Raises:
        RuntimeError: there is no compiler (`unavailable_reason`), or it fails; the message has its
            words.
    """
    what = f"{SOURCE.read_text()}{COMPILER_FLAGS}{platform.machine()}"
    cache = Path(
        os.environ.get("TRAINER_PLUGINS_CACHE") or Path.home() / ".cache" / "trainer_plugins"
    )
    library = cache.absolute() / f"nvml-{hashlib.sha256(what.encode()).hexdigest()[:16]}" / LIBRARY
    if library.exists():
        return library
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(unavailable_reason())
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        finished = Path(folder) / LIBRARY
        command = [compiler, *COMPILER_FLAGS, "-o", str(finished), str(SOURCE)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise RuntimeError(
                f"could not compile the scripted NVML: {' '.join(command)}\n{outcome.stderr}"
            )
        os.replace(finished, library)
    return library


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
