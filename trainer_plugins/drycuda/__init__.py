"""drycuda: the user's own program at full size on CUDA cards that compute nothing.

`card/` has the libraries that stand where CUDA's would, `inside/` what runs in the program, and
`dry_plan.py` makes a MemoryPlan of a command. docs/dry.md and
docs/internals/testing.md say how to use them.
"""

from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable
from trainer_plugins.drycuda.dry_cuda import DryCuda, unavailable_reason

__all__ = ["DryCuda", "DryCudaUnavailable", "unavailable_reason"]
