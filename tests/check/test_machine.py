"""The cards as a scripted driver shows them: which are seen, who is on them, and every bad answer."""

import os
import subprocess
import sys

import pynvml
import torch

from tests.testing.alone import alone, needs_scripted_nvml
from trainer_plugins.check import Checklist, judge
from trainer_plugins.check.gather_here import gather_here
from trainer_plugins.finding import Severity
from trainer_plugins.testing.nvml import ScriptedNvml
from trainer_plugins.units import GIB, MIB

needs_scripted_nvml()

ONE, TWO = "GPU-1111aaaa-0000-0000-0000-000000000000", "GPU-1111bbbb-0000-0000-0000-000000000000"
SLICES = ("MIG-1111cccc-0000-0000-0000-000000000000", "MIG-1111dddd-0000-0000-0000-000000000000")

# The torch of these tests is built for the CPU, which is a fault of a machine with cards.
HERE = {"torch-without-cuda"}


def checked(**environ: str) -> Checklist:
    return judge(gather_here({"TORCH_EXTENSIONS_DIR": "/nowhere", **environ}))


def codes(**environ: str) -> set[str]:
    found = {each.code for each in checked(**environ).findings}
    assert torch.version.cuda or "torch-without-cuda" in found or not found
    return found - HERE


@alone
def test_what_cuda_will_show(tmp_path):
    two = ScriptedNvml(tmp_path).card(ONE).card(TWO)
    two.write().preload()
    for good in ("0,1", "1", ONE, f"{TWO},{ONE}", "GPU-1111a", None):
        assert codes(**({} if good is None else {"CUDA_VISIBLE_DEVICES": good})) == set(), good
    # It stops at the first entry that names nothing: cards before it are seen.
    for bad, num in (("2", 0), ("0,7,1", 1), ("GPU-1111", 0), ("GPU-9", 0), ("0,0", 0), ("-1", 0)):
        (found,) = [
            each
            for each in checked(CUDA_VISIBLE_DEVICES=bad).findings
            if each.code == "card-not-visible"
        ]
        assert f"CUDA will show {num} of 2" in found.summary, bad
        assert found.severity is (Severity.WARNING if num else Severity.ERROR)
    assert codes(CUDA_VISIBLE_DEVICES=f"0,{TWO}") == {"card-not-visible"}
    assert codes(CUDA_VISIBLE_DEVICES="") == set()  # as one hides all on purpose

    mixed = ScriptedNvml(tmp_path).card(ONE).card(TWO, name="NVIDIA T4")
    mixed.write()
    assert codes(CUDA_VISIBLE_DEVICES="1") == {"card-order"}
    assert codes(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == set()
    assert codes(CUDA_VISIBLE_DEVICES=TWO) == set()

    cut = ScriptedNvml(tmp_path).card(ONE)
    for uuid in SLICES:
        cut = cut.mig_slice(uuid, total_bytes=10 * GIB)
    cut.write()
    assert codes(CUDA_VISIBLE_DEVICES=SLICES[0]) == set()
    assert codes(CUDA_VISIBLE_DEVICES=",".join(SLICES)) == {"mig-one-slice"}


@alone
def test_who_is_on_the_cards(tmp_path):
    def child(*words: str, **environ: str) -> subprocess.Popen[bytes]:
        python = f"{sys.prefix}/bin/python"  # `sys.executable` may be a shim (tests/forked)
        command = [python, "-c", "import sys; sys.stdin.read()", *words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **environ})

    card = ScriptedNvml(tmp_path).card(ONE)
    card.process(4_000_000, 60 * GIB, name="infer").write().preload()
    (found,) = [each for each in checked().findings if each.code == "foreign-memory"]
    assert "60.00 GiB" in found.summary
    assert "pid 4000000 (infer)" in found.evidence
    assert codes(CUDA_VISIBLE_DEVICES="") == set()  # on a card that is not used

    # The driver lists nobody, or does not tell: bytes decide, and nothing breaks.
    card.process(4_000_000, 60 * GIB).hide(4_000_000).write()
    assert codes() == {"foreign-memory"}
    denied = card.process(4_000_000, 60 * GIB)
    for version in ("v2", "v3"):
        function = f"nvmlDeviceGetComputeRunningProcesses_{version}"
        denied = denied.fault(function, pynvml.NVML_ERROR_NO_PERMISSION)
    denied.write()
    assert codes() == {"foreign-memory"}

    with child("-m", "ipykernel_launcher") as kernel:
        card.process(kernel.pid, 100 * MIB).write()
        assert codes() == {"notebook-holds-card"}
        kernel.communicate()

    both = ScriptedNvml(tmp_path).card(ONE).process(os.getpid(), 400 * MIB)
    both.card(TWO).process(os.getpid(), 30 * GIB).write()
    assert codes(CUDA_VISIBLE_DEVICES=ONE) == {"stray-context"}

    with child() as dead:
        assert dead.stdin is not None
        dead.stdin.close()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it ends, and nobody has asked how
        card.process(dead.pid, 100 * MIB).write()
        assert codes() == {"leftover-process"}


@alone
def test_a_driver_that_does_not_answer(tmp_path):
    two = ScriptedNvml(tmp_path).card(ONE).card(TWO)
    memory = "nvmlDeviceGetMemoryInfo_v2"
    two.fault(memory, pynvml.NVML_ERROR_GPU_IS_LOST, uuid=TWO).write().preload()
    assert codes() == {"card-not-answering"}
    two.cannot_start(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH).write()
    found = checked()
    assert [each.code for each in found.findings] == ["card-not-answering"]
    assert "different versions" in found.findings[0].evidence
    two.fault("nvmlDeviceGetName", pynvml.NVML_ERROR_NO_PERMISSION).write()
    assert codes() == set()
    two.hang(memory).write()
    assert codes() == {"card-not-answering"}
