"""Trainings under FSDP2 in which ranks run out of memory, one after the other. Launched by test_fsdp2.py.

accelerate takes its FSDP branch for accelerators only, and calls two gloo ranks MULTI_CPU (accelerate/state.py).
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import TrainerCallback

from tests.models import tiny_llama
from tests.survival.failing import Allocations, off_by, off_by_steps, padded, ragged_rows, small_trainer
from trainer_plugins import survive_oom
from trainer_plugins.agreement import Agreement
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.ranks.fsdp2 import FSDP2

RANK = int(os.environ["RANK"])
initialise = PartialState.__init__


def initialise_as_multi_gpu(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


PartialState.__init__ = initialise_as_multi_gpu


def whole(values):
    return [None if value is None else value.detach().full_tensor().clone() for value in values]


class Gradients(TrainerCallback):
    """What each optimizer step was made of, on all ranks together; and how often each rank voted until then."""

    def __init__(self) -> None:
        self.kept: list[list[torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append(whole(p.grad for p in model.parameters()))


class AnewEachStep(TrainerCallback):
    """Attached at the beginning of each step, so that none is divided because of what the one before has learned."""

    def __init__(self, trainer) -> None:
        self.trainer, self.survival = trainer, None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.survival is not None:
            self.survival.detach()
        self.survival = survive_oom(self.trainer)


class Run:
    """One training. `fail_at`: for the n-th micro-batch of this rank, the allocations that fail in it."""

    def __init__(self, trainer, fail_at=None, **train) -> None:
        self.trainer, self.allocations, self.gradients = trainer, Allocations(), Gradients()
        self.num_allocations: list[int] = []
        self.fail_at = fail_at or {}
        self._training_step = trainer.training_step
        trainer.training_step = self.training_step
        trainer.add_callback(self.gradients)
        with self.allocations:
            trainer.train(**train)
        self.weights = whole(trainer.model.parameters())
        self.logged = [
            {k: v for k, v in logs.items() if not any(u in k for u in ("runtime", "per_second", "out_of_memory"))}
            for logs in trainer.state.log_history
        ]

    def training_step(self, *args, **kwargs):
        self.allocations.begin(self.fail_at.get(len(self.num_allocations), []))
        try:
            return self._training_step(*args, **kwargs)
        finally:
            self.num_allocations.append(self.allocations.num)
            self.allocations.begin([])


def make(folder: Path, case: dict):
    """The Trainer of a case, with what the launcher would have put into the environment."""
    AcceleratorState._reset_state()
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = case.get("reshard_after_forward", "true")
    os.environ["FSDP_OFFLOAD_PARAMS"] = case.get("offload", "false")
    settings = dict(case.get("settings", {}))
    if case.get("sync_each_batch"):
        settings["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    # Other rows on each rank, and of other lengths: 64 rows are dealt out by the Trainer.
    settings.setdefault("train_dataset", ragged_rows(case.get("num_rows", 64)))
    if "rows" in case:  # so many of each micro-batch, by rank
        settings["data_collator"] = lambda rows: padded(rows[: case["rows"][RANK]])
    trainer = small_trainer(folder, tiny_llama(**case.get("config", {})).double(), **settings)
    if case.get("mixed"):  # what is not reduced yet is then kept apart, in the precision of the reduction
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float32)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return trainer


@contextlib.contextmanager
def as_torch_says(naive: bool):
    """Where asked for, all failures but the first are followed by what torch documents: reset, zero, go on."""
    clear, num_cleared = FSDP2.clear, []

    def reset_and_zero(ranks):
        num_cleared.append(1)
        if len(num_cleared) == 1:  # after which it is measured whether gradients add up
            return clear(ranks)
        ranks.model.set_requires_gradient_sync(True)
        ranks.model.reset_iter_state()
        ranks.model.zero_grad()

    FSDP2.clear = reset_and_zero if naive else clear
    yield
    FSDP2.clear = clear


def run_case(folder: Path, case: dict, reference: Run) -> dict:
    trainer = make(folder, case)
    if "sweep" not in case:
        survival = survive_oom(trainer, **case.get("options", {}))
    fail_at = {
        int(n): [max(1, int(reference.num_allocations[int(n)] * part)) for part in parts]
        for n, parts in case.get("fail", {}).get(str(RANK), {}).items()
    }
    if "sweep" in case:  # one allocation after the other, a step each, in this micro-batch of the window
        trainer.add_callback(AnewEachStep(trainer))
        num_steps, accumulated = trainer.args.max_steps, trainer.args.gradient_accumulation_steps
        num = min(reference.num_allocations)
        if RANK == case["sweep"]["rank"]:
            for step in range(num_steps):
                fail_at[step * accumulated + case["sweep"]["micro_batch"]] = [1 + step * (num - 1) // (num_steps - 1)]
    votes = []
    highest = Agreement.highest
    Agreement.highest = lambda self, value: votes.append(value) or highest(self, value)
    with as_torch_says(case.get("naive", False)):
        survived = Run(trainer, fail_at)
    Agreement.highest = highest
    units = [m for m in trainer.model.modules() if isinstance(m, FSDPModule)]
    memo = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SurvivalMemo))
    if "sweep" not in case:
        survival.detach()
    return {
        "wrapped": type(trainer.model).__name__,
        "units": len(units),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "gradients": off_by_steps(survived.gradients.kept, reference.gradients.kept),
        "weights": off_by(survived.weights, reference.weights),
        "steps": [len(survived.gradients.kept), len(reference.gradients.kept)],
        "num_failed": survived.allocations.num_failed,
        "survived": sum("out_of_memory_survived" in logs for logs in trainer.state.log_history),
        "logged_off_by": max(
            abs(ours[k] - theirs[k]) for ours, theirs in zip(survived.logged, reference.logged, strict=True) for k in theirs
        ),
        "votes": len(votes),
        "limit": memo.limit,
        "checkpointing": trainer.model.is_gradient_checkpointing,
        "restored": [type(g._all_gather_comm).__name__ for m in units for g in m._get_fsdp_state()._fsdp_param_groups],
    }


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    references: dict[str, Run] = {}
    facts = {}
    for name, case in cases.items():
        like = json.dumps({k: v for k, v in case.items() if k not in ("fail", "naive", "sweep", "options")})
        if like not in references:
            references[like] = Run(make(folder / "run", case))
        facts[name] = run_case(folder / "run", case, references[like])
        (folder / f"rank-{RANK}.json").write_text(json.dumps(facts))
        print(RANK, name, facts[name], flush=True) if "-v" in sys.argv else None
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
