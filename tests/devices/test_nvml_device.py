"""The card as the driver sees it: what NvmlDevice says of a good driver, and of every bad one."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pynvml
import pytest

from tests.testing.alone import alone, needs_scripted_nvml
from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.devices.nvml import NvmlDevice, NvmlError
from trainer_plugins.testing.nvml import ScriptedNvml
from trainer_plugins.units import GIB, MIB

needs_scripted_nvml()

BARE = "8a5f0e2c-1111-2222-3333-444444444444"
CARD, SLICE = f"GPU-{BARE}", f"MIG-{BARE}"
USABLE_BYTES = 80 * GIB - 600 * MIB
MEMORY = "nvmlDeviceGetMemoryInfo_v2"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v2"


def error_of(function: Callable[..., object], *arguments: object) -> NvmlError:
    with pytest.raises(NvmlError) as raised:
        function(*arguments)
    return raised.value


@alone
def test_it_reads_the_card_and_who_holds_memory_there(tmp_path):
    card = ScriptedNvml(tmp_path).card(CARD)
    card.process(os.getpid(), 2 * GIB).process(4_000_000, 3 * GIB, name="infer").write().preload()
    device = NvmlDevice.open(CARD, name="cuda:0")
    reading = device.read()
    assert (device.name, device.uuid, reading.device) == ("cuda:0", CARD, "cuda:0")
    assert reading.total_bytes == USABLE_BYTES
    assert reading.free_bytes == USABLE_BYTES - 5 * GIB
    assert reading.non_torch_bytes == 5 * GIB
    assert NvmlDevice.open(CARD).memory() == (reading.total_bytes, reading.free_bytes)
    mine, other = device.processes() or ()
    assert (mine.pid, mine.used_bytes) == (os.getpid(), 2 * GIB)
    assert mine.name == psutil.Process().name()  # the system knows it
    assert other == GpuProcess(4_000_000, 3 * GIB, "infer")  # only the driver does
    card.write()
    assert device.processes() == ()


@alone
def test_a_card_is_found_by_its_uuid_however_it_is_written(tmp_path):
    other = ScriptedNvml(tmp_path).card("GPU-other", total_bytes=8 * GIB)
    other.card(CARD).write().preload()
    assert NvmlDevice.open(BARE).uuid == NvmlDevice.open(CARD).uuid == CARD
    assert not NvmlDevice.open(BARE).is_mig
    assert NvmlDevice.open(BARE).name == CARD
    assert NvmlDevice.open(BARE).memory()[0] == USABLE_BYTES

    # In a MIG slice torch's bare text is the slice's: its total and its processes.
    cut = (
        other.mig_slice(SLICE, total_bytes=10 * GIB)
        .process(os.getpid(), GIB)
        .process(4_000_000, GIB)
    )
    cut.write()
    device = NvmlDevice.open(BARE)
    assert (device.uuid, device.is_mig) == (SLICE, True)
    assert device.memory() == (10 * GIB, 8 * GIB)
    assert [process.pid for process in device.processes() or ()] == [os.getpid(), 4_000_000]

    # The bare text of a card that is cut into slices names none of them.
    other.card(CARD).mig_slice("MIG-1", total_bytes=10 * GIB).write()
    error = error_of(NvmlDevice.open, BARE)
    assert error.code == pynvml.NVML_ERROR_NOT_FOUND
    assert "open the slice by its own UUID, MIG-" in str(error)
    assert NvmlDevice.open(CARD).memory()[0] == USABLE_BYTES  # who says GPU- means the whole card


@alone
def test_the_list_of_processes_is_believed_only_as_far_as_it_goes(tmp_path):
    card = ScriptedNvml(tmp_path).card(CARD)
    card.process(100, GIB, says_bytes=False).write().preload()
    device = NvmlDevice.open(CARD)
    assert [(process.pid, process.used_bytes) for process in device.processes() or ()] == [
        (100, None)
    ]
    assert device.memory()[1] == USABLE_BYTES - GIB

    # Hidden from this container: used, and not listed.
    card.process(100, GIB).hide(100).write()
    assert device.processes() == ()
    assert device.memory()[1] == USABLE_BYTES - GIB

    # A process may be listed several times, and one without a number in this container is nobody
    # that could be named.
    twice = (
        card.process(4_000_000, GIB)
        .process(4_000_000, 2 * GIB)
        .process(4_000_000, GIB, says_bytes=False)
    )
    twice.process(0, GIB).write()
    assert device.processes() == (GpuProcess(4_000_000, 2 * GIB, None),)

    # Impossible numbers mean that the list was read with the wrong layout: then none of it is
    # known.
    for impossible in card.process(1 << 22, GIB), card.process(100, GIB).process(200, 81 * GIB):
        impossible.write()
        assert device.processes() is None
    # Drivers of the 535s return long records from version 3 of the call, so it has to be version 2.
    three = (
        card.driver(version="535.54.03", process_record_bytes=32)
        .process(100, GIB)
        .process(200, GIB)
    )
    three.process(os.getpid(), 3 * GIB).write()
    assert [process.pid for process in device.processes() or ()] == [100, 200, os.getpid()]

    # Not allowed or not able to say is not the same as nobody.
    for code in (
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    ):
        card.process(100, GIB).fault(PROCESSES, code).write()
        assert device.processes() is None
        assert device.read().free_bytes == USABLE_BYTES - GIB

    # Other failures of the list are failures, with their code.
    card.fault(PROCESSES, pynvml.NVML_ERROR_TIMEOUT, times=1).write()
    assert error_of(device.processes).code == pynvml.NVML_ERROR_TIMEOUT
    assert device.processes() == ()


@alone
def test_every_failure_has_its_remedy(tmp_path):
    card = ScriptedNvml(tmp_path).card(CARD)
    at_the_start = [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "install the driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot the machine"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia*"),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, "whether this container"),
        (pynvml.NVML_ERROR_OPERATING_SYSTEM, "/dev/nvidia*"),
        (pynvml.NVML_ERROR_UNKNOWN, "ask again later"),
    ]
    card.write().preload()
    for code, remedy in at_the_start:
        card.cannot_start(code).write()
        assert remedy in str(error_of(NvmlDevice.open, BARE))
    at_the_card = [
        (pynvml.NVML_ERROR_NOT_FOUND, "nvidia-smi -L"),
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, "nvidia-smi -L"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "Xid"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia*"),
    ]
    for code, remedy in at_the_card:
        card.fault("nvmlDeviceGetHandleByUUID", code).write()
        assert remedy in str(error_of(NvmlDevice.open, BARE))
    lasting = [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "do without"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "update the older one"),
        (pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "update the older one"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia*"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "reboot"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, f"nvidia-smi --gpu-reset -i {CARD}"),
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, "recreated"),
    ]
    passing = [
        (pynvml.NVML_ERROR_TIMEOUT, "ask again later"),
        (pynvml.NVML_ERROR_IN_USE, "ask again later"),
        (pynvml.NVML_ERROR_MEMORY, "ask again later"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        (4711, "Scripted Error"),  # a code of a later driver
    ]
    for code, remedy in (*lasting, *passing):
        card.write()
        device = NvmlDevice.open(CARD)
        card.fault(MEMORY, code).write()
        for question in device.memory, device.read, device.processes:
            error = error_of(question)
            assert error.code == code
            assert remedy in str(error)
            assert CARD in str(error)
        assert error.permanent == ((code, remedy) in lasting)
    again = pickle.loads(pickle.dumps(error))  # errors travel between processes
    assert (again.code, str(again)) == (error.code, str(error))

    # What may pass has passed: the same device answers.
    card.write()
    assert device.memory()[0] == USABLE_BYTES


@alone
def test_it_lives_through_forks_and_through_what_others_do_to_nvml(tmp_path):
    ScriptedNvml(tmp_path).card(CARD).write().preload()
    device = NvmlDevice.open(CARD)
    child = os.fork()
    if not child:
        os._exit(0 if device.memory()[0] == USABLE_BYTES else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert device.memory()[0] == USABLE_BYTES

    # Another user of NVML in this process shuts it down once more than it began it.
    pynvml.nvmlShutdown()
    assert device.memory()[0] == USABLE_BYTES

    # Initialisation is counted, and a failure to open a device leaves the count as it was.
    error_of(NvmlDevice.open, "GPU-nobody")
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    assert device.memory()[0] == USABLE_BYTES


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has the library")
def test_without_the_library_it_says_so():
    with pytest.raises(NvmlError, match="libnvidia-ml") as raised:
        NvmlDevice.open(BARE)
    assert raised.value.code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert raised.value.permanent


def test_it_starts_no_thread_and_asks_for_no_cuda(tmp_path):
    code = (
        "import threading, sys; from trainer_plugins.devices.nvml import NvmlDevice;"
        f"before = threading.active_count(); device = NvmlDevice.open({CARD!r}); device.read(); device.processes();"
        "assert threading.active_count() == before; print(open('/proc/self/maps').read())"
    )
    env = ScriptedNvml(tmp_path).card(CARD).write().env()
    outcome = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "libnvidia-ml.so.1" in outcome.stdout
    assert "libcuda.so" not in outcome.stdout
