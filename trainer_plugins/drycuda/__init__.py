"""drycuda: run your own program at full size on CUDA cards that compute nothing.

`card/` has the libraries that replace CUDA's, `inside/` the code that runs in the program, and
`dry_plan.py` makes a MemoryPlan of a command. docs/dry.md and docs/internals/testing.md show their
use.
"""

from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable
from trainer_plugins.drycuda.dry_cuda import DryCuda, unavailable_reason

__all__ = ["DryCuda", "DryCudaUnavailable", "unavailable_reason"]
