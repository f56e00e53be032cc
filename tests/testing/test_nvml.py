"""The scripted driver library, told through the clients that real drivers have: pynvml, nvitop, gpustat."""

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.processes import ENDS_A_HANG
from tests.testing.alone import alone, needs_scripted_nvml
from trainer_plugins.testing.card import SimCard
from trainer_plugins.testing.nvml import ScriptedNvml, build, unavailable_reason
from trainer_plugins.units import GIB, MIB

needs_scripted_nvml()

CARD = "GPU-8a5f0e2c-1111-2222-3333-444444444444"
SLICE = "MIG-0f9d4a7e-1111-5222-8333-444444444444"


def memory(uuid: str, version: int | None = pynvml.nvmlMemory_v2) -> Any:
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid), version=version)


def processes(uuid: str) -> dict[int, int | None]:
    rows = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return {row.pid: row.usedGpuMemory for row in rows}


def code_of(function: Callable[..., object], *arguments: object) -> int:
    try:
        function(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


@alone
def test_clients_of_the_running_process_see_the_scripted_cards(tmp_path):
    driver = ScriptedNvml(tmp_path).driver(version="575.57.08", cuda_version=12090)
    first = (
        driver.card(CARD).process(100, 3 * GIB, name="train").process(200, GIB, says_bytes=False)
    )
    second = first.card(total_bytes=24 * GIB, reserved_bytes=0, name="NVIDIA L4").process(
        300, GIB, graphics=True
    )
    second.write().preload()
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == "575.57.08"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 12090
    assert pynvml.nvmlDeviceGetCount() == 2

    # Memory: version 1 counts as used what the driver has reserved, version 2 does not.
    info = memory(CARD)
    assert (info.total, info.reserved, info.used) == (80 * GIB, 600 * MIB, 4 * GIB)
    assert info.free == 76 * GIB - 600 * MIB
    old = memory(CARD, version=None)
    assert (old.total, old.used, old.free) == (info.total, info.used + info.reserved, info.free)

    # Processes, one of them with N/A for its bytes.
    assert processes(CARD) == {100: 3 * GIB, 200: None}
    assert pynvml.nvmlSystemGetProcessName(100) == "train"
    assert code_of(pynvml.nvmlSystemGetProcessName, 200) == pynvml.NVML_ERROR_NOT_FOUND

    # The second card, by index, by its address, and by its UUID.
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA L4"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("0000:18:00.0")) == 1
    assert (
        pynvml.nvmlDeviceGetIndex(
            pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(handle))
        )
        == 1
    )
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert [row.pid for row in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)] == [300]
    assert (
        code_of(pynvml.nvmlDeviceGetHandleByUUID, CARD[:12]) == pynvml.NVML_ERROR_NOT_FOUND
    )  # no prefixes

    # Initialisation is counted.
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert memory(CARD).total == 80 * GIB
    pynvml.nvmlShutdown()
    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED


@alone
def test_a_new_script_is_in_force_at_the_next_call(tmp_path):
    card = ScriptedNvml(tmp_path).card(CARD)
    card.write().preload()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(CARD)
    for num_bytes in range(
        1000, 1500
    ):  # of one length, and two at a time: a file system may reuse the inode
        card.process(100, num_bytes + 1000).write()
        card.process(100, num_bytes).write()
        assert (
            pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == num_bytes
        )

    # What grows, grows with the queries and not with time.
    card.process(100, GIB, grow_bytes=MIB).process(200, GIB).hide(200).write()
    assert [memory(CARD).used - 2 * GIB for _ in range(4)] == [0, MIB, 2 * MIB, 3 * MIB]
    assert processes(CARD) == {100: GIB + 3 * MIB}  # the other is used, and not in the list

    # No card holds more than it has.
    card.process(100, 200 * GIB).write()
    assert (memory(CARD).used, memory(CARD).free) == (80 * GIB - 600 * MIB, 0)

    # A card that is gone from the script has fallen off the bus.
    ScriptedNvml(tmp_path).write()
    assert code_of(pynvml.nvmlDeviceGetUUID, handle) == pynvml.NVML_ERROR_GPU_IS_LOST


@alone
def test_a_live_process_gives_its_memory_back_when_it_exits(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ScriptedNvml(tmp_path).card(CARD).process(child.pid, 2 * GIB, live=True).process(
        100, GIB
    ).write().preload()
    pynvml.nvmlInit()
    assert memory(CARD).used == 3 * GIB
    assert processes(CARD) == {child.pid: 2 * GIB, 100: GIB}
    child.communicate(b"\n")
    assert memory(CARD).used == GIB
    assert processes(CARD) == {100: GIB}


@alone
def test_a_mig_slice_has_memory_and_processes_of_its_own(tmp_path):
    card = ScriptedNvml(tmp_path).card(CARD)
    cut = (
        card.mig_slice(SLICE, total_bytes=10 * GIB)
        .process(100, GIB)
        .mig_slice("MIG-2", total_bytes=20 * GIB)
    )
    cut.process(200, 2 * GIB).write().preload()
    pynvml.nvmlInit()
    whole = pynvml.nvmlDeviceGetHandleByUUID(CARD)
    handles = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index) for index in (0, 1)]
    assert [pynvml.nvmlDeviceGetUUID(handle) for handle in handles] == [SLICE, "MIG-2"]
    assert pynvml.nvmlDeviceGetMigMode(whole) == [1, 1]
    assert pynvml.nvmlDeviceIsMigDeviceHandle(handles[0])
    assert (
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handles[1]))
        == CARD
    )
    assert (memory(SLICE).total, memory(SLICE).used, memory("MIG-2").used) == (
        10 * GIB,
        GIB,
        2 * GIB,
    )
    assert memory(CARD).used == 3 * GIB
    assert processes(SLICE) == {100: GIB}
    assert processes(CARD) == {100: GIB, 200: 2 * GIB}
    assert (
        code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, 2) == pynvml.NVML_ERROR_NOT_FOUND
    )
    assert code_of(pynvml.nvmlDeviceGetUtilizationRates, whole) == pynvml.NVML_ERROR_NOT_SUPPORTED


@alone
def test_any_function_can_fail_on_any_card_any_number_of_times(tmp_path):
    cards = ScriptedNvml(tmp_path).card(CARD).card("GPU-other")
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    cards.fault("nvmlDeviceGetMemoryInfo_v2", lost, uuid=CARD, skip=2, times=1).write().preload()
    pynvml.nvmlInit()
    assert [code_of(memory, CARD) for _ in range(4)] == [0, 0, lost, 0]
    assert [code_of(memory, "GPU-other") for _ in range(4)] == [0, 0, 0, 0]
    cards.fault("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_NO_PERMISSION, uuid=CARD).write()
    assert code_of(memory, CARD) == pynvml.NVML_ERROR_NO_PERMISSION
    assert code_of(memory, "GPU-other") == 0
    cards.fault("nvmlSystemGetDriverVersion", pynvml.NVML_ERROR_UNKNOWN).write()
    assert [code_of(pynvml.nvmlSystemGetDriverVersion) for _ in range(2)] == [
        pynvml.NVML_ERROR_UNKNOWN
    ] * 2

    # The library may not even start.
    pynvml.nvmlShutdown()
    for code in pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        cards.cannot_start(code).write()
        assert code_of(pynvml.nvmlInit) == code
    cards.write()
    assert code_of(pynvml.nvmlInit) == 0

    # A driver of the 535s, whose process records are longer than pynvml thinks.
    skewed = cards.driver(version="535.54.03", process_record_bytes=32)
    skewed.card("GPU-skewed").process(100, GIB).process(200, 2 * GIB).process(300, 3 * GIB).write()
    assert set(processes("GPU-skewed")) == {100, 0, 0xFFFFFFFF}


@alone
def test_a_forked_child_has_to_initialise_again(tmp_path):
    ScriptedNvml(tmp_path).card(CARD).write().preload()
    pynvml.nvmlInit()
    child = os.fork()
    if not child:
        refused = (
            code_of(memory, CARD) == pynvml.NVML_ERROR_UNKNOWN
        )  # NVIDIA promises nothing there
        pynvml.nvmlInit()
        os._exit(0 if refused and memory(CARD).total == 80 * GIB else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory(CARD).total == 80 * GIB


def card_file(uuid: str, capacity_bytes: int, *slots: tuple[int, int, int, bytes]) -> bytes:
    """A card file as the simulated accelerator keeps it; a slot is pid, flags, bytes, name."""
    header = struct.pack("<8sQ48s", b"SIMCARD1", capacity_bytes, uuid.encode())
    return (header + b"".join(struct.pack("<iIQ48s", *slot) for slot in slots)).ljust(4096, b"\0")


@alone
def test_a_card_file_speaks_for_a_simulated_card(tmp_path):
    path = tmp_path / "card"
    card = ScriptedNvml(tmp_path).card_from_file(path, reserved_bytes=MIB).write()
    card.preload()
    pynvml.nvmlInit()
    assert (
        code_of(pynvml.nvmlDeviceGetHandleByIndex, 0) == pynvml.NVML_ERROR_GPU_IS_LOST
    )  # no file yet
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    full_name = b"n" * 48
    free, fixed, live = (
        (0, 0, 5, b""),
        (4242, 0, 10 * MIB, full_name),
        (child.pid, 1, 20 * MIB, b"infer"),
    )
    path.write_bytes(card_file(CARD, 256 * MIB, free, fixed, live))
    info = memory(CARD)
    assert (info.total, info.reserved, info.used, info.free) == (
        257 * MIB,
        MIB,
        30 * MIB,
        226 * MIB,
    )
    assert processes(CARD) == {4242: 10 * MIB, child.pid: 20 * MIB}
    assert pynvml.nvmlSystemGetProcessName(4242) == full_name.decode()

    # The file is shared memory: what one side writes the other sees. A live process counts while it
    # lives.
    with path.open("r+b") as file:
        file.seek(64 + 64 + 8)
        file.write(struct.pack("<Q", 11 * MIB))
    child.communicate(b"\n")
    assert memory(CARD).used == 11 * MIB
    assert processes(CARD) == {4242: 11 * MIB}

    # Faults and hiding hold for it as for any card.
    card.hide(4242).fault("nvmlDeviceGetName", pynvml.NVML_ERROR_TIMEOUT, uuid=CARD).write()
    assert (memory(CARD).used, processes(CARD)) == (11 * MIB, {})
    name = code_of(pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetHandleByUUID(CARD))
    assert name == pynvml.NVML_ERROR_TIMEOUT


@alone
def test_the_simulated_card_and_the_driver_agree(tmp_path):
    simulated = SimCard.create(tmp_path / "card", 256 * MIB)
    ScriptedNvml(tmp_path).card_from_file(simulated.path).write().preload()
    pynvml.nvmlInit()
    simulated.hold(4242, 10 * MIB, "infer")
    simulated.hold(os.getpid(), 20 * MIB, "train", live=True)
    simulated.hold(
        os.getpid(), 5 * MIB, "outside of torch"
    )  # of the same process, so the driver lists one
    info = memory(simulated.uuid)
    assert (
        (info.used, info.free)
        == (simulated.used_bytes, simulated.free_bytes)
        == (35 * MIB, 221 * MIB)
    )
    assert processes(simulated.uuid) == {4242: 10 * MIB, os.getpid(): 25 * MIB}
    assert pynvml.nvmlSystemGetProcessName(4242) == "infer"
    simulated.release(4242)
    simulated.capacity_bytes = 128 * MIB
    info = memory(simulated.uuid)
    assert (info.total - info.reserved, info.free) == (128 * MIB, 103 * MIB)


def run_tool(tool: str, *arguments: str, env: dict[str, str]) -> str:
    path = shutil.which(
        tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return subprocess.run(
        [path, *arguments], env=env, capture_output=True, text=True, timeout=ENDS_A_HANG, check=True
    ).stdout


@pytest.fixture
def two_cards(tmp_path):
    card = (
        ScriptedNvml(tmp_path)
        .card(CARD)
        .process(os.getpid(), 3 * GIB)
        .process(4_000_000, GIB, name="host process")
    )
    return card.card().mig_slice(SLICE, total_bytes=10 * GIB).process(os.getpid(), 2 * GIB).write()


def test_nvitop_reads_it(two_cards):
    page = run_tool("nvitop", "-1", env=two_cards.env())
    assert "4096MiB / 80.00GiB" in page
    assert "2048MiB / 10240MiB" in page  # the slice
    mine = next(line for line in page.splitlines() if str(os.getpid()) in line)
    assert "3072MiB" in mine
    assert "No Such Pro" in next(line for line in page.splitlines() if "4000000" in line)


def test_gpustat_reads_it(two_cards):
    cards = json.loads(run_tool("gpustat", "--json", env=two_cards.env()))["gpus"]
    assert [(card["uuid"], card["memory.used"]) for card in cards] == [
        (CARD, 4096),
        (cards[1]["uuid"], 2048),
    ]
    assert [(row["pid"], row["gpu_memory_usage"]) for row in cards[0]["processes"]] == [
        (os.getpid(), 3072)
    ]


def test_a_script_that_cannot_be_is_refused_where_it_is_written(tmp_path):
    script = ScriptedNvml(tmp_path)
    with pytest.raises(ValueError, match="add a card first"):
        script.process(100, GIB)
    with pytest.raises(ValueError, match="no function 'nvmlDeviceGetMemory'"):
        script.fault("nvmlDeviceGetMemory", pynvml.NVML_ERROR_TIMEOUT)
    with pytest.raises(ValueError, match="one record a line"):
        script.card(name="two\nlines")
    with pytest.raises(ValueError, match="are in that file"):
        script.card_from_file(tmp_path / "card").process(100, GIB)


@pytest.mark.parametrize("variable", ["TRAINER_PLUGINS_CACHE", "XDG_CACHE_HOME"])
def test_it_is_compiled_once_and_by_many_at_once(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", "")
    monkeypatch.setenv(variable, str(tmp_path))
    code = "from trainer_plugins.testing.nvml import build; print(build())"
    builders = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {builder.communicate()[0].strip() for builder in builders}
    assert outputs == {str(build())}
    assert ("trainer_plugins" in build().relative_to(tmp_path).parts) == (variable[0] == "X")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["libnvidia-ml.so.1"]
    built = build().stat().st_mtime_ns
    assert build().stat().st_mtime_ns == built


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs a C compiler" in str(unavailable_reason())
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        build()


def test_without_a_compiler_the_package_ziglang_is_one(tmp_path, monkeypatch):
    """A package of that name, which hands on what it is asked to the installed compiler."""
    compiler, path = shutil.which("cc"), os.environ["PATH"]
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import os, sys\nos.environ['PATH'] = {path!r}\n"
        f"assert sys.argv[1] == 'cc'\nos.execv({compiler!r}, ['cc', *sys.argv[2:]])\n"
    )
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    assert unavailable_reason() is None
    assert build().is_file()


@alone
def test_it_does_not_pretend_where_another_library_is_loaded_already(tmp_path):
    other = tmp_path / "libnvidia-ml.so.1"
    (tmp_path / "other.c").write_text("int nvmlInit(void) { return 0; }")
    soname = "-Wl,-soname,libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", soname, str(tmp_path / "other.c"), "-o", str(other)], check=True
    )
    ctypes.CDLL(str(other))
    with pytest.raises(RuntimeError, match="has loaded NVIDIA's"):
        ScriptedNvml(tmp_path).card().write().preload()
