"""Trainings under FSDP in which ranks run out of memory, one after the other.

Launched by test_fsdp2.py and test_fsdp1.py; the launch file says which version of FSDP it is.

accelerate takes its FSDP branch for accelerators only, and calls two gloo ranks MULTI_CPU
(accelerate/state.py).
"""

import contextlib
import gc
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    _flat_param,
    _runtime_utils,
    fully_sharded_data_parallel,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback

from tests.models import tiny_llama
from tests.survival import test_trl
from tests.survival.failing import (
    Counted,
    Recentred,
    know_limit,
    logged_by,
    off_by,
    padded,
    ragged_rows,
    small_trainer,
    votes_fit,
)
from tests.survival.ranks.half_full import HalfFull
from tests.survival.test_sweep import forgetting_each_step
from trainer_plugins import survive_oom
from trainer_plugins.survival import Survival
from trainer_plugins.survival.attempt.attempt import CardReader as RealCard
from trainer_plugins.survival.certificate import certificate
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.ranks.sharded import Sharded
from trainer_plugins.upkeep.agreement import Agreement, RollCall

RANK = int(os.environ["RANK"])
IS_FIRST = os.environ.get("FSDP_VERSION") == "1"
initialise = PartialState.__init__


def initialise_as_multi_gpu(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if IS_FIRST:  # takes no cpu:0
            self._shared_state["device"] = torch.device("cpu")


def norm_in_float64(parameters, norm_type, *_):
    """FSDP1 takes the norm of what this rank holds in float32, and refuses float64."""
    local = [p.grad.norm(norm_type) for p in parameters if p.grad is not None]
    return torch.stack(local).norm(norm_type) if local else torch.zeros((), dtype=torch.float64)


fully_sharded_data_parallel._get_grad_norm = norm_in_float64
PartialState.__init__ = initialise_as_multi_gpu


def flat_parameters(model):
    """What this rank holds of each unit of FSDP1."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return [unit._handle.flat_param for unit in units if unit._handle is not None]


def weights_of(model):
    """The whole weights; under FSDP1 this rank's part, which is its own to compare."""
    if IS_FIRST:
        return [flat._local_shard.clone() for flat in flat_parameters(model)]
    for unit in units_of(model):  # an evaluation leaves weights gathered
        unit.reshard()
    return [weight.detach().full_tensor().clone() for weight in model.parameters()]


def gradients_of(model):
    gradients = [p.grad for p in (flat_parameters(model) if IS_FIRST else model.parameters())]
    return [
        g if g is None else (g if IS_FIRST else g.detach().full_tensor()).clone() for g in gradients
    ]


def units_of(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered_by(trainer):
    """How many times a pass gathers, and whose collectives FSDP uses: its own, unless ours stayed."""
    models = [trainer.model, getattr(trainer, "ref_model", None) or torch.nn.Module()]
    if IS_FIRST:
        handles = [flat for model in models for flat in flat_parameters(model)]
        used = {"DefaultAllGather", "DefaultReduceScatter"}
        are_theirs = all(module.dist is dist for module in (_flat_param, _runtime_utils))
        return len(handles), used if are_theirs else {"ours"}
    groups = [
        group
        for model in models
        for unit in units_of(model)
        for group in unit._get_fsdp_state()._fsdp_param_groups
    ]
    comms = [(type(group._all_gather_comm), type(group._reduce_scatter_comm)) for group in groups]
    return len(groups), {kind.__name__ for pair in comms for kind in pair}


class Gradients(TrainerCallback):
    """What each optimizer step was made of, on all ranks together; and how often each rank voted until then."""

    def __init__(self) -> None:
        self.kept: list[list[torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append(gradients_of(model))


class AttachesEachStep(TrainerCallback):
    """Attaches survival anew at each step, so that each measures, and an error may fall into that."""

    def __init__(self, trainer, survival: Survival) -> None:
        self.trainer, self.survival = trainer, survival

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            self.survival.detach()
            self.survival = survive_oom(self.trainer)


class Run(Counted):
    """One training of this rank.

    `only_attempts`: of what survive_oom tries, and not the few numbers on the CPU by which it is
        judged afterwards.
    """

    def __init__(self, trainer, fail_at=None, *, only_attempts=False, **train) -> None:
        super().__init__(trainer, fail_at)
        self.gradients = Gradients()
        trainer.add_callback(self.gradients)
        self.num_forwards, self.ended = 0, ""
        # Of all modules: survival looks at what hooks of the model keep, and this is no user's.
        hook = register_module_forward_pre_hook(self.count_forward)
        attempt = Sharded.attempt

        def tried(*args, **kwargs):
            with self.allocations:
                return attempt(*args, **kwargs)

        with patch.object(Sharded, "attempt", tried) if only_attempts else self.allocations:
            try:
                trainer.train(**train)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self.ended, self.weights = f"{type(error).__name__}: {error}", []
                return
            finally:
                hook.remove()
        self.weights = weights_of(trainer.model)

    def count_forward(self, module, _):
        self.num_forwards += module is self.trainer.model and torch.is_grad_enabled()


def make(folder: Path, case: dict):
    """The Trainer of a case, with what the launcher would have put into the environment."""
    AcceleratorState._reset_state()
    reshards = case.get("reshard_after_forward", "true")
    if IS_FIRST:
        os.environ["FSDP_SHARDING_STRATEGY"] = (
            "FULL_SHARD" if reshards == "true" else "SHARD_GRAD_OP"
        )
        os.environ["FSDP_USE_ORIG_PARAMS"] = case.get("orig_params", "true")
        os.environ["FSDP_FORWARD_PREFETCH"] = str("prefetch" in case)
        os.environ["FSDP_BACKWARD_PREFETCH"] = case.get("prefetch", "NO_PREFETCH")
    else:
        os.environ["FSDP_RESHARD_AFTER_FORWARD"] = reshards
    settings = dict(case.get("settings", {}))
    folder = folder / str(RANK) if case.get("own_folders") else folder
    if case.get("sync_each_batch"):
        settings["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if "trl" in case:
        trainer = getattr(test_trl, case["trl"])(folder, **settings)
        if "rows" in case:
            collate = trainer.data_collator
            trainer.data_collator = lambda rows: collate(rows[: case["rows"][RANK]])
        return trainer
    # Other rows on each rank, and of other lengths: 64 rows are dealt out by the Trainer.
    settings.setdefault("train_dataset", ragged_rows(case.get("num_rows", 64)))
    if "rows" in case:  # so many of each micro-batch, by rank
        settings["data_collator"] = lambda rows: padded(rows[: case["rows"][RANK]])
    if "rows_in_turn" in case:
        nums = itertools.cycle(case["rows_in_turn"])
        settings["data_collator"] = lambda rows: padded(rows[: next(nums)])
    model = tiny_llama(**case.get("config", {})).double()
    if case.get("own_norm"):
        model.model.norm = torch.nn.Sequential(model.model.norm, Recentred(32).double())
    if "lora" in case:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    if "eval_steps" in settings:
        settings["eval_dataset"] = ragged_rows(8)
    trainer = small_trainer(folder, model, **settings)
    if case.get(
        "mixed"
    ):  # what is not reduced yet is then kept apart, in the precision of the reduction
        types: dict[str, Any] = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
        policy = (
            MixedPrecision(**types)
            if IS_FIRST
            else MixedPrecisionPolicy(**types, output_dtype=torch.float32)
        )
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return trainer


class Card(HalfFull):
    """On which so many tokens fit in a forward pass. Another on each rank."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def refuse(self, module, args, kwargs):
        if kwargs["input_ids"].numel() > self.num_tokens:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory, with {kwargs['input_ids'].numel()} tokens."
            )


@contextlib.contextmanager
def as_torch_says(naive: bool):
    """Where asked for, all failures but the first are followed by what torch documents: reset, zero, go on."""
    clear, num_cleared = Sharded.clear, []

    def reset_and_zero(ranks):
        num_cleared.append(1)
        if len(num_cleared) == 1:  # after which it is measured whether gradients add up
            clear(ranks)
        else:
            ranks.model.set_requires_gradient_sync(True)
            ranks.model.reset_iter_state()
            ranks.model.zero_grad()

    with patch.object(Sharded, "clear", reset_and_zero if naive else clear):
        yield


@contextlib.contextmanager
def counted_votes():
    """What was voted, and how long it took."""
    highest, votes = Agreement.highest, []

    def counted(agreement, value):
        started = perf_counter()
        found = highest(agreement, value)
        votes.append(perf_counter() - started)
        return found

    with votes_fit(), patch.object(Agreement, "highest", counted):
        yield votes


def run_case(folder: Path, case: dict, reference: Run) -> dict:
    trainer = make(folder, case)
    anew = AttachesEachStep(trainer, survive_oom(trainer, **case.get("options", {})))
    if "sweep" in case:
        trainer.add_callback(anew if "and" in case["sweep"] else forgetting_each_step(trainer))
    fail_at = {
        int(n): [
            max(1, int(reference.num_allocations[int(n)] * part)) + again
            for part in parts
            for again in range(case.get("again", 1))
        ]
        for n, parts in case.get("fail", {}).get(str(RANK), {}).items()
    }
    if (
        "sweep" in case
    ):  # one allocation after the other, a step each, in this micro-batch of the window
        num_steps, accumulated = trainer.args.max_steps, trainer.args.gradient_accumulation_steps
        first = 4  # after the batch has been copied
        num = min(reference.num_allocations)
        if case["sweep"]["rank"] == RANK:
            for step in range(num_steps):
                at = first + int(
                    step * (num - first) * case["sweep"].get("until", 1) / (num_steps - 1)
                )
                fail_at[step * accumulated + case["sweep"]["micro_batch"]] = [
                    *case["sweep"].get("and", ()),
                    at,
                ]
    resume = {"resume_from_checkpoint": str(folder / "checkpoint-2")} if "resume" in case else {}
    if "limit" in case:
        know_limit(trainer, case["limit"][RANK])  # it grows to between two numbers
    card = Card(case["card"][RANK]) if "card" in case else None
    if card:
        trainer.model.register_forward_pre_hook(card.refuse, with_kwargs=True)
    with (
        patch("trainer_plugins.survival.memo.card_of", lambda _: card or RealCard(None)),
        patch.object(certificate, "_SPARING", case.get("sparing", certificate._SPARING)),
        as_torch_says(case.get("naive", False)),
        counted_votes() as votes,
    ):
        sweep = case.get("sweep", {})
        survived = Run(trainer, fail_at, only_attempts="and" in sweep or "trl" in case, **resume)
    memo = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SurvivalMemo))
    anew.survival.detach()
    logged = list(
        zip(logged_by(trainer), logged_by(reference.trainer), strict=survived.ended == "")
    )
    num_gathers, comms = gathered_by(trainer)
    return {
        "wrapped": type(trainer.model).__name__,
        "num_gathers": num_gathers,
        "restored": sorted(comms),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "ended": survived.ended,
        "num_steps": [len(survived.gradients.kept), len(reference.gradients.kept)],
        "gradients": max(
            map(off_by, reversed(survived.gradients.kept), reversed(reference.gradients.kept)),
            default=0.0,
        ),
        "weights": 0.0 if survived.ended else off_by(survived.weights, reference.weights),
        "logged_off_by": max(
            (
                abs(ours[k] - theirs[k]) / max(1.0, abs(theirs[k]))
                for ours, theirs in logged
                for k in theirs
                if k in ours and ("trl" in case or k in ("loss", "learning_rate"))
            ),
            default=0.0,
        ),
        "logged": sorted({name for logs in logged_by(trainer) for name in logs}),
        "num_to_fail": sum(map(len, fail_at.values())),
        "num_failed": survived.allocations.num_failed,
        "num_survived": memo.num_survived,
        "num_forwards": [survived.num_forwards, reference.num_forwards],
        "num_votes": len(votes),
        "seconds_a_vote": median(votes) if votes else 0.0,
        "limit": memo.limit,
        "checkpointing": memo.rungs,
    }


@contextlib.contextmanager
def heard(logger: str):
    """What was logged there at WARNING or above."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger(logger).addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(listener)


def run_on_some(folder: Path, case: dict, reference: Run) -> dict:
    """Survival is attached on some ranks only; the others know nothing of it."""
    trainer = make(folder, case)
    survival = survive_oom(trainer, on_refusal="warn") if RANK in case["on"] else None
    with heard("trainer_plugins") as said, counted_votes() as votes:
        alone = Run(trainer)
    if survival is not None:
        survival.detach()
    return {
        "wrapped": type(trainer.model).__name__,
        "ended": alone.ended,
        "num_votes": len(votes),
        "num_forwards": [alone.num_forwards, reference.num_forwards],
        "gradients": max(map(off_by, alone.gradients.kept, reference.gradients.kept)),
        "said": said,
    }


def run_late(folder: Path) -> dict:
    """Rank 1 signs when rank 0 already asks."""
    roll_call, store = RollCall("late"), dist.distributed_c10d._get_default_store()
    if RANK == 1:
        store.get("rank 0 has signed")
    roll_call.sign()
    if RANK == 0:
        store.set("rank 0 has signed", "yes")
    told = roll_call.missing(wait_seconds=60)
    dist.barrier()
    roll_call.leave()
    dist.barrier()
    return {"missing": told, "missing when all have left": roll_call.missing(wait_seconds=0)}


def run_refusal(folder: Path, case: dict) -> dict:
    with pytest.MonkeyPatch.context() as patched:
        trainer = make(folder, case)
        if "without" in case:
            patched.delattr(FSDPModule, case["without"], raising=False)
        try:
            survive_oom(trainer)
        except ValueError as error:
            return {"refused": str(error)}
    return {"refused": ""}


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    gc.collect()
    # each survival collects garbage; what imported libraries hold, a million objects, is spared
    # that
    gc.freeze()
    references: dict[str, Run] = {}
    facts = {}
    for name, case in cases.items():
        began = perf_counter()
        like = json.dumps(
            {
                k: v
                for k, v in case.items()
                if k not in ("fail", "naive", "sweep", "options", "resume", "card", "limit", "on")
            }
        )
        if "refused_as" in case:
            facts[name] = run_refusal(folder / "run", case)
        elif "late" in case:
            facts[name] = run_late(folder)
        else:
            if like not in references:
                references[like] = Run(make(folder / "run", case))
            run = run_on_some if "on" in case else run_case
            facts[name] = run(folder / "run", case, references[like])
        facts[name]["seconds"] = perf_counter() - began
        draft = folder / f"rank-{RANK}.draft"  # a rank may be ended while it writes
        draft.write_text(json.dumps(facts))
        draft.rename(folder / f"rank-{RANK}.json")
        if facts[name].get("ended") and "card" not in case and "options" not in case:
            print(f"rank {RANK} ended: {facts[name]['ended']}", file=sys.stderr, flush=True)
            os._exit(1)  # the other ranks may wait in a collective
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
