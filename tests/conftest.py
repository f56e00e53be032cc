"""A Trainer small enough to run in a blink, on the CPU or on a simulated card."""

import gc
import inspect
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.distributed import extensions
from tests.models import QUIET, tiny_llama, token_rows
from trainer_plugins.testing import simgpu as simgpu_module
from trainer_plugins.units import MIB

CAPACITY_BYTES = 256 * MIB
ROOT = Path(__file__).parent.parent

# Not the user's own, in which somebody's build may be under way, or may have been cut off.
os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions.ROOT)

# On a machine with AMX oneDNN packs bf16 for instructions that torch was told not to use, and torch
# refuses ("pack_vnni2 is only supported when avx512 is supported": `could_pack` in
# aten/src/ATen/native/CPUBlas.cpp asks oneDNN alone).
if "ATEN_CPU_CAPABILITY" in os.environ:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# torch has one accelerator in a process. Where that is a CUDA card, the tests marked gpu run on it,
# and those on the simulated card run with CUDA_VISIBLE_DEVICES= (scripts/gpu_check does both).
NO_SIMGPU = simgpu_module.unavailable_reason() or (
    "the accelerator here is CUDA" if torch.cuda.is_available() else None
)

# Before the first backward pass of the process: autograd counts its devices once, when it starts
# its threads.
if NO_SIMGPU is None:
    simgpu_module.enable(CAPACITY_BYTES)

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    ],
)


SECONDS = {
    ROOT / name: int(seconds)
    for seconds, name in map(str.split, (ROOT / "tests" / "seconds.txt").read_text().splitlines())
}
"""What files with long tests take, roughly, in `scripts/test`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also more cases of what is tested without")
    parser.addoption("--turn", help="of what --all adds, what tests/turns.txt gives this turn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `--all`. The longest files begin first: nobody waits for one in the end."""
    turn, cases = config.getoption("--turn"), Counter[str]()
    is_left = {item: is_for_all(item, cases) for item in items}
    if turn is not None:
        lines = map(str.split, (ROOT / "tests" / "turns.txt").read_text().splitlines())
        paths = {ROOT / name for number, name in lines if number == turn}
        runs = [item.path in paths and is_left[item] for item in items]
    else:
        runs = [config.getoption("--all") or not is_left[item] for item in items]
    left = [item for item, does_run in zip(items, runs, strict=True) if not does_run]
    config.hook.pytest_deselected(items=left)
    kept = [item for item, does_run in zip(items, runs, strict=True) if does_run]
    items[:] = sorted(kept, key=lambda item: -SECONDS.get(item.path, 0))


def is_for_all(item: pytest.Item, cases: Counter[str]) -> bool:
    """Whether a test is left to `scripts/test --all`.

    `@pytest.mark.all` says so; `@pytest.mark.all(but=2)` for all but its first two cases,
    `@pytest.mark.all(unless=f)` for the parameters of which f is false. `cases` counts.
    """
    for mark in item.iter_markers("all"):
        if "but" in mark.kwargs:
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] > mark.kwargs["but"]:
                return True
            continue
        unless = mark.kwargs.get("unless")
        given = item.callspec.params if unless else {}  # type: ignore[attr-defined]
        if not unless or not unless(
            *(given[name] for name in inspect.signature(unless).parameters)
        ):
            return True
    return False


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_sought_in_what_is_new():
    """Half a million imported objects cost 0.3 s at each collection, of which survival makes many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _on_the_cpu_unless_asked(monkeypatch):
    """Once loaded, the simulated card stays; accelerate takes it only when told to.

    TrainingArguments leave their precision in the environment, where the processes of a later test
    would find it.
    """
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.fixture
def simgpu(monkeypatch):
    """The simulated card of this process: 256 MiB, empty, and the one that accelerate trains on."""
    if NO_SIMGPU:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs the simulated card: {NO_SIMGPU}")
        pytest.skip(NO_SIMGPU)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "simgpu")
    gc.collect()
    torch.accelerator.empty_cache()
    if torch.accelerator.memory_reserved():
        for name in ("last_exc", "last_value", "last_traceback"):
            vars(sys).pop(name, None)  # the frames of a test that failed
        gc.unfreeze()  # cycles that were alive when a module began
        gc.collect()
        torch.accelerator.empty_cache()
    held_bytes = torch.accelerator.memory_reserved()
    assert held_bytes == 0, "an earlier test of this process still holds memory of the card"
    torch.accelerator.reset_peak_memory_stats()  # an earlier test's card may have been larger
    yield simgpu_module
    for process in simgpu_module.card().processes():
        simgpu_module.card().release(process.pid)  # of this process, what was scripted beside torch
    simgpu_module.set_capacity(CAPACITY_BYTES)


@pytest.fixture
def small(simgpu):
    """A card on which two rows fit and 64 do not."""
    simgpu.set_capacity(40 * MIB)
    return simgpu


@pytest.fixture(params=["cpu", "simgpu", CUDA])
def anywhere(request, monkeypatch):
    """The test runs on the CPU, the simulated card, and a CUDA card where there is one.

    Gives the device's type.
    """
    if request.param == "simgpu":
        request.getfixturevalue("simgpu")
    if request.param == "cpu":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return request.param


@pytest.fixture
def make_trainer(tmp_path):
    """A real Trainer over a tiny Llama: 8 optimizer steps unless asked otherwise."""

    def make(*callbacks, trainer_class=Trainer, args_class=TrainingArguments, model=None, **kwargs):
        settings = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 8,
            "per_device_train_batch_size": 2,
            **QUIET,
            "logging_strategy": "no",
            **kwargs,
        }
        return trainer_class(
            model=model if model is not None else tiny_llama(),
            args=args_class(**settings),
            train_dataset=token_rows(),
            eval_dataset=token_rows(4),
            callbacks=list(callbacks),
        )

    return make
