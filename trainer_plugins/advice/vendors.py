"""Vendor: translates advice, which is written for CUDA, into the terms of other vendors' cards."""

import re
from typing import NamedTuple

_PROCESSES = r"nvidia-smi --query-compute-apps=\S+ --format=csv"
_MEMORY = r"nvidia-smi --query-gpu=\S+ --format=csv(?: -l 1)?"


class Vendor(NamedTuple):
    """Holds a vendor's equivalents of CUDA's terms; empty ones do not exist there."""

    name: str
    module: str  # torch's module for these cards
    seen: str = ""  # a pattern that identifies it in a log
    processes: str = ""  # the command that lists processes with their memory
    memory: str = ""  # the command that shows how full the cards are
    visible: str = ""  # the variable that chooses cards
    blocking: str = ""  # the variable that makes each call wait for its kernel
    expandable: str = ""  # the variable that makes the segments of torch's allocator expandable

    def translate(self, words: str) -> str:
        """Translate words for CUDA; empty if they need a term that does not exist there."""
        own = {
            _PROCESSES: self.processes,
            _MEMORY: self.memory,
            r"nvidia-smi": self.memory.split(" -")[0].split(" info")[0],
            r"CUDA_VISIBLE_DEVICES": self.visible,
            r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": self.expandable,
            r"CUDA_LAUNCH_BLOCKING": self.blocking,
            r"torch\.cuda\b": self.module,
            r'"cuda"': f'"{self.module.removeprefix("torch.")}"',
            r"CUDA call": f"{self.name} call",
        }
        for pattern, name in own.items() if self.name != "CUDA" or self.processes else ():
            if not name and re.search(pattern, words):
                return ""
            words = re.sub(pattern, name, words)
        return words


# rocm-smi: rocm.docs.amd.com. npu-smi, ASCEND_RT_VISIBLE_DEVICES and PYTORCH_NPU_ALLOC_CONF:
# hiascend.com (envref_07_0053). xpu-smi: intel.github.io/xpumanager; XPU's segments:
# pytorch#166292. hl-smi: docs.habana.ai. HPU and MPS have no such segments.
# Other makers than NVIDIA, in the order in which a log is searched for them.
VENDORS = (
    Vendor(
        name="HIP",
        seen=r"\bHIP (?:out of memory|error)|hipError|\+rocm\d|/opt/rocm|\bamdgpu\b"
        r"|Memory (?:access fault by GPU|critical error by agent)",
        processes="rocm-smi --showpids",
        memory="rocm-smi --showmeminfo vram",
        visible="HIP_VISIBLE_DEVICES",
        blocking="HIP_LAUNCH_BLOCKING",
        expandable="PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
        module="torch.cuda",
    ),
    Vendor(
        name="NPU",
        seen=r"\bNPU out of memory|torch_npu[/\\.]|\bnpu-smi\b|(?i:\bascend)|\bEL0004\b",
        processes="npu-smi info",
        memory="npu-smi info",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        blocking="ASCEND_LAUNCH_BLOCKING",
        expandable="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        module="torch.npu",
    ),
    Vendor(
        name="XPU",
        seen=r"\bXPU out of memory|can NOT allocate memory block|level_zero|torch\.xpu"
        r"|\bxpu-smi\b|UR_RESULT_",
        processes="xpu-smi ps",
        memory="xpu-smi stats -d 0",
        visible="ZE_AFFINITY_MASK",
        expandable="PYTORCH_ALLOC_CONF=expandable_segments:True  # torch 2.10 or later",
        module="torch.xpu",
    ),
    Vendor(
        name="HPU",
        seen=r"MODULE:(?:PT_DEVMEM|SYNHELPER)|habana_frameworks|\bhl-smi\b|\bsynStatus\b",
        processes="hl-smi",
        memory="hl-smi",
        visible="HABANA_VISIBLE_MODULES",
        module="torch.hpu",
    ),
    Vendor(
        name="MPS",
        seen=r"MPS backend out of memory|Invalid buffer size|Command buffer|kIOGPU",
        processes="Activity Monitor, Memory",
        memory="Activity Monitor",
        module="torch.mps",
    ),
)

CUDA = Vendor(
    name="CUDA",
    visible="CUDA_VISIBLE_DEVICES",
    blocking="CUDA_LAUNCH_BLOCKING",
    expandable="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    module="torch.cuda",
)
# Neither Windows nor WSL tells nvidia-smi the memory of each process.
CUDA_ON_WINDOWS = CUDA._replace(
    processes="Task Manager, Details, with the column 'Dedicated GPU memory'",
    memory="nvidia-smi --query-gpu=memory.used,memory.total --format=csv",
)


def vendor_of(device: str, torch_version: str = "", *, is_windows: bool = False) -> Vendor:
    """Return the vendor of a torch device; AMD's cuda is known by the version `2.13.0+rocm7.0`."""
    kind = "hip" if "+rocm" in torch_version else device.partition(":")[0]
    known = (each for each in VENDORS if each.name.lower() == kind)
    return next(known, CUDA_ON_WINDOWS if is_windows else CUDA)
