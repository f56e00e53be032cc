"""Whether this torch can be planned for several GPUs."""

import torch

IS_TOO_OLD = torch.__version__.startswith("2.9.")
"""For several GPUs, and for DeepSpeed on one: its collectives take no fake tensors, and a plan or a search says so."""

WHY_NOT = "several GPUs need a newer torch, and the plan says so"
