"""DryCuda: torch's own CUDA build at full size on a card that computes nothing.

Libraries of this folder replace CUDA's. The card's memory is only address space, and kernels are
counted instead of run, so the unmodified script runs at full size in seconds: torch's caching
allocator, its CUDA operators, its real OutOfMemoryError, accelerate, DeepSpeed, bitsandbytes'
library, Triton. Tensors are zero, except small ones (`inside/values.py`).

    with DryCuda(card_of("a100-80gb"), num_cards=2) as dry:
        subprocess.run(dry.command(["python", "train.py"]), env=dry.environment())

Such a program changes none of your files, and reaches no other host (`wall.py`).
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trainer_plugins.compiled import plain_compiler
from trainer_plugins.drycuda.card.libraries import NO_COMPILER, built, libraries_in
from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable, site_with_cuda
from trainer_plugins.drycuda.wall import OFFLINE, Allowed, Wall, unlock
from trainer_plugins.planner.cards import Card
from trainer_plugins.testing import nvml
from trainer_plugins.testing.card import SimCard
from trainer_plugins.testing.nvml import ScriptedNvml

_SITE = Path(__file__).parents[1] / "_site"
"""Python imports it at startup; it prepares a process of a dry run."""


def unavailable_reason() -> str | None:
    """Return why the dry card is not available here; None if it is. Builds nothing."""
    try:
        site_with_cuda()
    except DryCudaUnavailable as error:
        return str(error)
    if not plain_compiler("c++"):
        return NO_COMPILER
    return nvml.unavailable_reason()


class DryCuda(contextlib.AbstractContextManager["DryCuda"]):
    """Provides dry cards, and the environment in which programs see them; a context manager.

    Args:
        card: the kind of each card.
        num_cards: how many there are.
        alone: run only rank 0 of a program, and assume that every other rank behaves like it.
        numbers: compute every operator, so that small models really train; their files are really
            written.
        allowed: the exceptions from the wall (None: none).

    Raises:
        DryCudaUnavailable: the libraries cannot be built here.
        PlanError: a folder in `allowed` does not exist.
    """

    def __init__(
        self,
        card: Card,
        num_cards: int = 1,
        *,
        alone: bool = False,
        numbers: bool = False,
        allowed: Allowed | None = None,
    ) -> None:
        self.kind = card
        self._site = site_with_cuda()
        try:
            self._libraries = [*libraries_in(built()), nvml.build()]
        except (RuntimeError, OSError) as error:
            raise DryCudaUnavailable(str(error)) from error
        self._alone, self._numbers = alone, numbers
        self.folder = Path(tempfile.mkdtemp(prefix="trainer-plugins-dry-"))
        self.wall = None if numbers else Wall(self.folder, allowed or Allowed())
        self.cards = [
            SimCard.create(self.folder / f"card-{index}", card.capacity_bytes)
            for index in range(num_cards)
        ]
        self._nvml = ScriptedNvml(self.folder)
        name = f"Dry {card.name} (computes nothing)"
        for each in self.cards:
            self._nvml = self._nvml.card_from_file(each.path, reserved_bytes=0, name=name)
        self._nvml.write()
        num_threads, shared_kib = card.of_multiprocessor
        described = {
            "name": name,
            "major": card.capability[0],
            "minor": card.capability[1],
            "multiprocessors": card.num_multiprocessors,
            "l2_bytes": card.l2_mib << 20,
            "shared_bytes": shared_kib << 10,
            "shared_optin_bytes": (shared_kib - 1) << 10,
            "max_threads": num_threads,
            "context_bytes": card.context_bytes,
            "has_numbers": int(numbers),
        }
        lines = "".join(f"{key}={value}\n" for key, value in described.items())
        (self.folder / "card.txt").write_text(lines)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` behind the wall."""
        return self.wall.command(words) if self.wall else list(words)

    def environment(self, of: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return an environment with the cards, for a Python program or a launcher."""
        site = str(self._site)
        ahead = [] if site in sys.path else [site]  # ahead of the installed torch
        path = [str(_SITE), *ahead, *filter(None, [of.get("PYTHONPATH")])]
        walled = self.wall.environment(self._libraries[0].parent) if self.wall else dict(OFFLINE)
        first = walled.pop("LD_PRELOAD", None)
        preload = filter(None, [first, *map(str, self._libraries), of.get("LD_PRELOAD")])
        ours = {
            **walled,
            "LD_PRELOAD": ":".join(preload),
            "PYTHONPATH": os.pathsep.join(path),
            "TRAINER_PLUGINS_DRYCUDA": str(self.folder),
            "TRAINER_PLUGINS_DRYCUDA_TORCH": site,
            "TRAINER_PLUGINS_NVML_SCRIPT": str(self._nvml.path),
            # Triton links its launchers to the driver's library, and looks for it by itself.
            "TRITON_LIBCUDA_PATH": str(self._libraries[0].parent),
            "TRAINER_PLUGINS_DRYCUDA_NUMBERS": str(int(self._numbers)),
            # Results of autotuning, and builds against our libraries, must not reach a real run.
            "USE_PYTORCH_KERNEL_CACHE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self._libraries[0].parent / "inductor"),
            "TRITON_CACHE_DIR": str(self._libraries[0].parent / "triton"),
            # Threads would load weights in a different order each time, and blocks would lie
            # elsewhere.
            "HF_DEACTIVATE_ASYNC_LOAD": "1",
            # From 128 ranks on, some wait for others before they start (ProcessGroupNCCL.cpp).
            "TORCH_NCCL_RANKS_PER_ROOT": "1000000",
        }
        if self._alone:
            ours["TRAINER_PLUGINS_DRYCUDA_ALONE"] = "1"
        # DeepSpeed sets "cpu" when it is imported without a card.
        own = {"CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK", "DS_ACCELERATOR"}
        return {name: text for name, text in of.items() if name not in own} | ours

    def read_refusals(self) -> list[str]:
        """Return the actions refused to programs, such as `write /home/me/out`.

        With namespaces the list is empty: writes succeed without a trace, and the kernel refuses
        connections.
        """
        file = self.folder / "refused"
        return list(dict.fromkeys(file.read_text().splitlines())) if file.exists() else []

    def __exit__(self, *_: object) -> None:
        """End all processes that have these cards, and delete their folder."""
        for each in psutil.process_iter():  # processes that outlive their launcher
            with contextlib.suppress(psutil.Error):
                if each.environ().get("TRAINER_PLUGINS_DRYCUDA") == str(self.folder):
                    each.kill()
        unlock(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
