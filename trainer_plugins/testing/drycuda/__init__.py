"""drycuda: CUDA cards that compute nothing, for tests of what CUDA's own code does with memory."""

from trainer_plugins.dry.dry_cuda import DryCuda, DryCudaUnavailable, unavailable_reason

__all__ = ["DryCuda", "DryCudaUnavailable", "unavailable_reason"]
