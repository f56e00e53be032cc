"""The simulated card and the scripted driver are one card, and no failure of the driver reaches training."""

import gc
import os
from collections.abc import Callable

import pynvml
import pytest
import torch

from tests.testing.alone import alone, needs_scripted_nvml
from trainer_plugins.testing import simgpu
from trainer_plugins.testing.card import SimCard
from trainer_plugins.testing.nvml import ScriptedNvml
from trainer_plugins.units import MIB

needs_scripted_nvml()
if simgpu.unavailable_reason() and not os.environ.get("CI"):
    pytest.skip(str(simgpu.unavailable_reason()), allow_module_level=True)

CAPACITY_BYTES = 256 * MIB


def one_card(tmp_path) -> tuple[SimCard, ScriptedNvml]:
    """A card in a file, which torch trains on and NVML tells of."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # a CUDA build of torch would believe the scripted driver, and look for it
    )
    card = SimCard.create(tmp_path / "card", CAPACITY_BYTES)
    driver = (
        ScriptedNvml(tmp_path / "driver")
        .card_from_file(tmp_path / "card", reserved_bytes=8 * MIB)
        .write()
    )
    driver.preload()
    simgpu.enable(CAPACITY_BYTES, card)
    return card, driver


@alone
def test_torch_and_the_driver_agree(tmp_path):
    from trainer_plugins.devices import NvmlDevice
    from trainer_plugins.devices.accelerator import open_device

    card, _ = one_card(tmp_path)
    device = open_device("simgpu")
    driver = NvmlDevice.open(card.uuid)
    tensor = torch.ones(64 * MIB, dtype=torch.uint8, device="simgpu")
    card.hold(4242, 32 * MIB, "python infer.py")

    free_bytes, total_bytes = torch.simgpu.mem_get_info(0)  # type: ignore[attr-defined]
    assert (
        driver.memory() == (total_bytes, free_bytes) == (CAPACITY_BYTES, CAPACITY_BYTES - 96 * MIB)
    )
    reading = device.read()
    assert (reading.total_bytes, reading.free_bytes, reading.non_torch_bytes) == (
        *driver.memory(),
        32 * MIB,
    )
    assert {(p.pid, p.used_bytes) for p in device.processes() or ()} == {
        (os.getpid(), 64 * MIB),
        (4242, 32 * MIB),
    }
    del tensor
    assert device.release_cached() == 64 * MIB
    assert driver.memory()[1] == device.read().free_bytes == CAPACITY_BYTES - 32 * MIB


@alone
def test_a_neighbour_is_named_when_the_driver_names_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    from tests.events import at
    from tests.models import tiny_llama, token_rows
    from trainer_plugins import MemoryWatchdog
    from trainer_plugins.record.timeline import Remark, Timeline

    card, _ = one_card(tmp_path)

    intruder = at("step_end", lambda _: card.hold(4_000_000, 80 * MIB, "python infer.py"), 3)
    timeline = Timeline()
    args = TrainingArguments(str(tmp_path), max_steps=5, report_to="none", disable_tqdm=True)
    callbacks = [intruder, MemoryWatchdog(timeline=timeline)]
    Trainer(tiny_llama(), args, train_dataset=token_rows(), callbacks=callbacks).train()

    (remark,) = [entry for entry in timeline if isinstance(entry, Remark)]
    assert (remark.step, remark.finding.code) == (3, "foreign-memory")
    assert "pid 4000000 (python infer.py): 80.0 MiB" in remark.finding.evidence


FAULTS = {
    "not supported": pynvml.NVML_ERROR_NOT_SUPPORTED,
    "no permission": pynvml.NVML_ERROR_NO_PERMISSION,
    "lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "reset required": pynvml.NVML_ERROR_RESET_REQUIRED,
    "time-out": pynvml.NVML_ERROR_TIMEOUT,
    "unknown": pynvml.NVML_ERROR_UNKNOWN,
    "not loaded": pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    "mismatch": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


@alone
def test_no_failure_of_the_driver_reaches_training(tmp_path):
    import logging

    card, driver = one_card(tmp_path)
    logging.getLogger("trainer_plugins").setLevel(logging.INFO)

    for name, code in FAULTS.items():
        starts = name in ("not loaded", "mismatch")
        broken = driver.cannot_start(code) if starts else driver
        broken = broken.fault("nvmlDeviceGetMemoryInfo_v2", code)
        (broken if starts else driver).write()

        said, readings, findings = train_while(
            broken, tmp_path, lambda: card.hold(4242, 80 * MIB, "python infer.py")
        )
        card.release(4242)

        assert {reading.total_bytes for reading in readings} == {CAPACITY_BYTES}, (
            name
        )  # torch counts the same bytes
        assert [finding.code for finding in findings] == ["foreign-memory"], (name, findings)
        assert sum("NVML does not answer" in message for message in said) == 1, (name, said)
        assert not any("failed; training continues" in message for message in said), (name, said)


@alone
def test_a_driver_that_is_missing_is_said_once_a_process(tmp_path):
    import logging

    from trainer_plugins.devices.accelerator import open_device

    _, driver = one_card(tmp_path)
    driver.cannot_start(pynvml.NVML_ERROR_DRIVER_NOT_LOADED).write()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_plugins").addHandler(handler)
    logging.getLogger("trainer_plugins").setLevel(logging.INFO)

    for _ in range(3):  # as each callback does that is made, used and dropped
        open_device(str(torch.accelerator.current_accelerator())).read()
        gc.collect()
    assert len(said) == 1, said


@alone
def test_numbers_that_cannot_be_are_refused_once(tmp_path):
    card, healthy = one_card(tmp_path)
    for total_bytes, reserved_bytes in (64 * MIB, 600 * MIB), (0, 0):
        healthy.write()
        gc.collect()  # what the training before has found out about the card
        broken = ScriptedNvml(tmp_path / "driver").card(
            card.uuid, total_bytes=total_bytes, reserved_bytes=reserved_bytes
        )
        said, readings, _ = train_while(broken, tmp_path)

        assert (
            sum("bytes of GPU-" in message and "cannot be" in message for message in said) == 1
        ), said
        assert {reading.total_bytes for reading in readings} == {
            CAPACITY_BYTES
        }  # as torch counts them


@alone
@pytest.mark.all
def test_a_driver_that_hangs_is_waited_for_once(tmp_path):
    one_card(tmp_path)
    healthy = ScriptedNvml(tmp_path / "driver").card_from_file(
        tmp_path / "card", reserved_bytes=8 * MIB
    )
    said, readings, _ = train_while(healthy.hang("nvmlDeviceGetMemoryInfo_v2"), tmp_path)

    assert sum("the driver hangs: no answer within 5 s" in message for message in said) == 1, said
    assert len(said) == 1, said
    assert {reading.total_bytes for reading in readings} == {CAPACITY_BYTES}


@alone
def test_a_forked_child_asks_the_driver_itself(tmp_path):
    from trainer_plugins.devices.accelerator import open_device

    card, _ = one_card(tmp_path)
    device = open_device("simgpu")
    device.read()
    child = os.fork()
    if not child:
        card.hold(4242, 32 * MIB, "python infer.py")
        os._exit(0 if 4242 in [process.pid for process in device.processes() or ()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def train_while(
    broken: ScriptedNvml, tmp_path, at_step_4: Callable[[], object] = lambda: None
) -> tuple[list[str], list, list]:
    """What is said, read and found in a training in whose step 2 the driver breaks."""
    import logging

    from transformers import Trainer, TrainingArguments

    from tests.events import at
    from tests.models import tiny_llama, token_rows
    from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, MemoryWatchdog
    from trainer_plugins.record.timeline import Remark, Sample, Timeline

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_plugins").addHandler(handler)

    timeline = Timeline()
    args = TrainingArguments(str(tmp_path), max_steps=6, report_to="none", disable_tqdm=True)
    callbacks = [
        at("step_end", lambda _: broken.write(), 2),
        at("step_end", lambda _: at_step_4(), 4),
        CudaCacheCallback(1),
        EvalGenerateCleanup(),
        MemoryWatchdog(timeline=timeline),
    ]
    trainer = Trainer(tiny_llama(), args, train_dataset=token_rows(), callbacks=callbacks)
    trainer.train()
    assert trainer.state.global_step == 6
    logging.getLogger("trainer_plugins").removeHandler(handler)
    readings = [entry.reading for entry in timeline if isinstance(entry, Sample)]
    return said, readings, [entry.finding for entry in timeline if isinstance(entry, Remark)]


@alone
def test_a_slice_of_a_card_is_read_through_torch(tmp_path):
    from trainer_plugins.devices.accelerator import open_device

    bare = "8a5f0e2c-1111-2222-3333-444444444444"
    SimCard.create(tmp_path / "card", CAPACITY_BYTES, uuid=f"GPU-{bare}")
    script = ScriptedNvml(tmp_path / "driver").card("GPU-00000000-0000-0000-0000-000000000000")
    script = script.mig_slice(f"MIG-{bare}", total_bytes=10 * 1024 * MIB)
    script.process(4242, MIB).write().preload()
    simgpu.enable(CAPACITY_BYTES, SimCard(tmp_path / "card"))

    device = open_device("simgpu")

    assert device.read().total_bytes == CAPACITY_BYTES  # not the 10 GiB that the driver says
    assert [each.pid for each in device.processes() or ()] == [4242]
