"""A trainer of TRL on two ranks, on which memory ends at random points; launched by test_random_failures.py.

Each rank writes what became of each seed; the first that ends the run is its last.
"""

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState

from tests.survival.failing import Run, logged_by, numbers_off_by, off_by, votes_fit
from tests.survival.ranks import every_trainer
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.wrapped import local_tensor

RANK = int(os.environ["RANK"])


def points(seed: int, num: int) -> dict[int, list[int]]:
    """Where memory ends on this rank, by micro-batch: often on one rank alone, now and then twice."""
    dice = random.Random(seed)
    chosen = [
        dice.choice(([], [dice.random()], [dice.random(), 2 * dice.random()])) for _ in range(4)
    ]
    if not any(chosen):
        chosen[seed % 4] = [dice.random()]
    mine = enumerate(chosen[2 * RANK : 2 * RANK + 2])
    return {micro: [1 + int(num * part) for part in parts] for micro, parts in mine}


def made(make):
    AcceleratorState._reset_state(reset_partial_state=True)
    return make()


def weights(run: Run) -> list[torch.Tensor]:
    """This rank's part of them."""
    return [local for weight in run.weights if (local := local_tensor(weight)).numel()]


def main(folder: Path, strategy: str, name: str, num_seeds: int) -> None:
    if "FSDP" in strategy:
        PartialState.__init__ = every_trainer.initialise_for_fsdp
    make = partial(every_trainer.made, every_trainer.TRAINERS[name], folder, strategy)
    facts: list[dict] = []
    with votes_fit():
        whole = Run(made(make))
        for seed in range(num_seeds):
            trainer = made(make)
            survive_oom(trainer, plan_first=False)
            where = points(seed, min(whole.num_allocations))
            fact: dict[str, Any] = {
                "where": where,
                "ended": "",
                "wrapped": type(whole.trainer.model_wrapped).__name__,
            }
            try:
                run = Run(trainer, where)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                fact |= {"ended": f"{type(error).__name__}: {error}", "at": time.time()}
            else:
                fact |= {
                    "weights": off_by(weights(run), weights(whole)),
                    "logged": numbers_off_by(logged_by(run.trainer), logged_by(whole.trainer)),
                    "num_survived": memo_of(trainer).num_survived,
                }
            facts.append(fact)
            (folder / f"facts-{RANK}.json").write_text(json.dumps(facts))
            if fact["ended"]:
                print(fact["ended"], file=sys.stderr, flush=True)
                os._exit(1)
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
