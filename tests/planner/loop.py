"""The closed loop: predict, then really run on the simulated card, and compare.

No figure is written by hand.
"""

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan
from trainer_plugins.planner import PlanError
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of
from trainer_plugins.testing import simgpu
from trainer_plugins.units import GIB


class Loop:
    """Runs by name, each predicted when it goes round."""

    def __init__(self, runs: Mapping[str, Callable[[Path], Trainer]]) -> None:
        self.runs = runs
        self.outcomes: dict[str, MemoryPlan | PlanError] = {}

    def goes_round(self, name: str, folder: Path) -> MemoryPlan:
        """What was predicted of this run, which the card has then held.

        Asks for the fixture `simgpu`.
        """
        plan = self._planned(name, folder)
        assert isinstance(plan, MemoryPlan), plan
        # other tests set garbage aside, and what it holds of the card would be counted here
        gc.unfreeze()
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        held, kept = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()

        self.runs[name](folder).train()

        assert plan.allocated_peak_bytes == pytest.approx(
            torch.accelerator.max_memory_allocated() - held, rel=0.002
        )
        assert plan.reserved_peak_bytes == pytest.approx(
            torch.accelerator.max_memory_reserved() - kept, rel=0.01
        )
        assert sum(plan.breakdown.values()) == plan.allocated_peak_bytes
        return plan

    def refuses(self, name: str, folder: Path, line: str) -> None:
        """This run is not predicted, and that is what is said of it.

        Asks for the fixture `simgpu`.
        """
        assert line in str(self._planned(name, folder))

    def _planned(self, name: str, folder: Path) -> MemoryPlan | PlanError:
        simgpu.set_capacity(4 * GIB)
        if name not in self.outcomes:
            request = request_of(self.runs[name](folder), None, "", 1, None)
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # left there by transformers 4
            (self.outcomes[name],) = predict_all([request], ENDS_A_HANG)
        return self.outcomes[name]
