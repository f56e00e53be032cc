"""examples/train.py with accelerate's FSDP branch taken on the CPU, which it takes for accelerators only.

For tests alone: accelerate calls two gloo ranks MULTI_CPU, and FSDP asks for MULTI_GPU
(accelerate/state.py).
"""

import runpy
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType

initialise = PartialState.__init__


def initialise_as_multi_gpu(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


PartialState.__init__ = initialise_as_multi_gpu
sys.argv[0] = str(Path(__file__).parent.parent.parent / "examples" / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
