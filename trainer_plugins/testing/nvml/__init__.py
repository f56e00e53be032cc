"""ScriptedNvml: an NVIDIA driver library that follows a script, for tests without a card.

It is a `libnvidia-ml.so.1` in C (`nvml.c`), compiled on first use, which the real pynvml, nvitop,
gpustat and torch load:

    nvml = ScriptedNvml(tmp_path).card("GPU-1…").process(4242, 3 * GIB, name="infer").write()
    subprocess.run([...], env=nvml.env())                                # a child sees that card

    # And now the card falls off the bus.
    nvml.fault("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_GPU_IS_LOST).write()
"""

import ctypes
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_plugins.compiled import cache_folder, compile_once, fingerprint, plain_compiler
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
    """Return why the scripted library does not work on this machine; None if it does."""
    if sys.platform != "linux":
        return (
            f"the scripted NVML needs Linux, where programs load {LIBRARY}; this is {sys.platform}"
        )
    if not plain_compiler("cc"):
        return "the scripted NVML needs a C compiler: pip install ziglang, or install gcc"
    return None


@dataclass(frozen=True, slots=True)
class ScriptedNvml:
    """Holds a script for the library, record by record; each method returns a new, longer script.

    Nothing happens until `write`: from then on every program that got the library with this folder,
    through `env` or `preload`, gets these answers, even if it is already running. Each program
    counts `skip`, `times` and growth separately, from the moment it reads the script.
    """

    folder: Path  # the folder of the script file, one for each driver, such as a pytest `tmp_path`
    records: tuple[str, ...] = ()

    def driver(
        self,
        *,
        version: str = "580.95.05",
        cuda_version: int = 13000,
        process_record_bytes: int = 24,
    ) -> "ScriptedNvml":
        """Describe the driver; 535.43 to 535.86 had `process_record_bytes=32` (gpustat #161)."""
        return self._replace(
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
            reserved_bytes: the driver's own part. Memory info version 1 counts it as used, version
                2 does not.
            name: the product name.
        """
        index = len(self._cards)
        uuid = uuid or f"GPU-{index:08x}-1111-2222-3333-444444444444"
        bus = f"00000000:{0x17 + index:02X}:00.0"
        return self._replace(
            "card", uuid=uuid, name=name, bus=bus, total=total_bytes, reserved=reserved_bytes
        )

    def card_from_file(
        self, path: Path, *, reserved_bytes: int = 600 * MIB, name: str = "Simulated card"
    ) -> "ScriptedNvml":
        """Add a simulated accelerator's card: its file has the uuid, capacity and processes.

        Its total is that capacity plus `reserved_bytes`. Without that file, the GPU is lost; once
        it exists, it is read until the next script.
        """
        bus = f"00000000:{0x17 + len(self._cards):02X}:00.0"
        return self._replace(
            "card", name=name, bus=bus, reserved=reserved_bytes, file=Path(path).absolute()
        )

    def mig_slice(
        self, uuid: str, *, total_bytes: int, name: str = "NVIDIA H100 80GB HBM3 MIG"
    ) -> "ScriptedNvml":
        """Add a MIG slice, with its own memory and processes; the last card is then in MIG mode."""
        self._last_card()
        return self._replace("slice", uuid=uuid, name=name, total=total_bytes)

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
        """Add a process that holds memory on the last card or slice.

        Args:
            pid: its process id; no such process need exist.
            used_bytes: its memory when the device's memory is first queried.
            name: the driver's name for it; empty if the driver does not know it.
            grow_bytes: how much more it holds at every later query of the device's memory.
            live: whether it holds memory only while a process with that id exists.
            says_bytes: False lists it with N/A for bytes, as on WSL; the card's used memory still
                includes them.
            graphics: whether it is listed with the graphics processes, not the compute processes.
        """
        if "\tfile=" in self._last_card():
            raise ValueError("the processes of a card from a file are in that file: add it there")
        flags = "l" * live + "u" * (not says_bytes) + "g" * graphics
        return self._replace(
            "process", pid=pid, bytes=used_bytes, grow=grow_bytes, flags=flags, name=name
        )

    def hide(self, pid: int) -> "ScriptedNvml":
        """Leave a process out of every list, as drivers do outside a container; its bytes count."""
        return self._replace("hide", pid=pid)

    def fault(
        self,
        function: str,
        code: int,
        *,
        uuid: str | None = None,
        skip: int = 0,
        times: int | None = None,
    ) -> "ScriptedNvml":
        """Make a function of the library fail.

        Args:
            function: its C name with its version, as in `nvmlDeviceGetMemoryInfo_v2`.
            code: the return code, one of pynvml's `NVML_ERROR_*`.
            uuid: the device on which it fails; None for all, and for functions without a device.
            skip: how many calls succeed first.
            times: how many calls fail after that; None for all.

        Raises:
            ValueError: the library has no such function.
        """
        if not re.search(rf"\b{re.escape(function)}\b", SOURCE.read_text()):
            raise ValueError(
                f"the scripted NVML has no function {function!r}; {SOURCE.name} lists those it has"
            )
        limits = {} if times is None else {"times": times}
        return self._replace(
            "fault", function=function, code=code, uuid=uuid or "", skip=skip, **limits
        )

    def hang(self, function: str, *, skip: int = 0) -> "ScriptedNvml":
        """Make a function of the library hang; `function` and `skip` are as for `fault`."""
        script = self.fault(function, 0, skip=skip)
        return replace(script, records=(*self.records, f"{script.records[-1]}\thangs=1"))

    def cannot_start(self, code: int) -> "ScriptedNvml":
        """Make the library fail to start, with `NVML_ERROR_DRIVER_NOT_LOADED` or the like."""
        script = self
        for function in INIT_FUNCTIONS:
            script = script.fault(function, code)
        return script

    def write(self) -> "ScriptedNvml":
        """Activate the script; a reader sees either the old or the new one, complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        records = (*ScriptedNvml(self.folder).driver().records, *self.records)
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text("\n".join(records) + "\n")
        # Recognised by inode, size and time. Kernels stamp in milliseconds and reuse inodes, so
        # quick rewrites could be missed: stamp in nanoseconds.
        now = time.time_ns()
        os.utime(draft, ns=(now, now))
        draft.replace(self.path)
        return self

    @property
    def path(self) -> Path:
        """Return the path of the script file."""
        return self.folder / "nvml.script"

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment in which a child finds this library first, plus `more`."""
        search_path = [str(build().parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ours = {
            "LD_LIBRARY_PATH": os.pathsep.join(search_path),
            "TRAINER_PLUGINS_NVML_SCRIPT": str(self.path.absolute()),
        }
        return {**os.environ, **ours, **more}

    def preload(self) -> None:
        """Serve this process until it ends: an NVML client that loads its library gets this one.

        glibc's loader recognises a loaded library by its SONAME, so this needs no environment
        variable. pynvml and torch keep the library: for another driver write another script, in any
        folder.

        Raises:
            RuntimeError: the process has already loaded NVIDIA's own library, which clients keep.
        """
        ours = ctypes.CDLL(str(build()))
        if not hasattr(ctypes.CDLL(LIBRARY), "scriptedNvmlFollow"):
            raise RuntimeError(
                f"this process has loaded NVIDIA's {LIBRARY} already; preload before anything loads"
                " it"
            )
        ours.scriptedNvmlFollow(os.fsencode(self.path.absolute()))

    def _replace(self, kind: str, **fields: object) -> "ScriptedNvml":
        record = "\t".join([kind, *(f"{key}={value}" for key, value in fields.items())])
        if "\n" in record or record.count("\t") != len(fields):
            raise ValueError(
                "a script has one record a line and tabs between fields, so its texts may contain"
                f" neither: {record!r}"
            )
        return replace(self, records=(*self.records, record))

    @property
    def _cards(self) -> list[str]:
        return [record for record in self.records if record.startswith("card\t")]

    def _last_card(self) -> str:
        if not self._cards:
            raise ValueError("add a card first: a process or a slice belongs to the last one")
        return self._cards[-1]


def build() -> Path:
    """Compile the library if necessary and return its path; RuntimeError names cc's output."""
    name = fingerprint(SOURCE.read_bytes(), *COMPILER_FLAGS)
    library = cache_folder().absolute() / f"nvml-{name}" / LIBRARY
    compiler = plain_compiler("cc")
    if not compiler and not library.exists():
        raise RuntimeError(unavailable_reason())
    command = [*compiler, *COMPILER_FLAGS, str(SOURCE)]
    return compile_once(library, command)
