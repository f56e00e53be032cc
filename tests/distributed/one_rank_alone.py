"""Trainings of two ranks in which one of them does something alone.

Launched by test_one_rank_alone.py.

Each story runs in two processes of its own, forked from this one, which has imported what takes
long.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from tests import processes
from tests.models import tiny_llama, token_rows
from trainer_plugins import (
    CudaCacheCallback,
    EvalGenerateCleanup,
    KVCacheGuard,
    MemoryWatchdog,
    StrategyInForce,
    SurviveOOM,
)

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401 - accelerate imports it in each process where it is installed

HANGS_AFTER_SECONDS = 100
"""Far more than a training of 8 steps needs, and far less than `ddp_timeout`."""


class Tracker(TensorBoardCallback):
    """Stands where the trackers of `report_to` stand, and writes nothing."""

    def __init__(self) -> None:
        TrainerCallback.__init__(self)

    def on_train_begin(self, *args, **kwargs): ...
    def on_log(self, *args, **kwargs): ...
    def on_train_end(self, *args, **kwargs): ...


def callbacks(interval: int = 2, where: str = "all", rank: int = 0) -> list[TrainerCallback]:
    """Everything that asks the other ranks, and everything else."""
    if where.startswith("rank ") and where != f"rank {rank}":
        return []
    asking = [CudaCacheCallback(interval), EvalGenerateCleanup(), MemoryWatchdog(stop=True)]
    return [*asking, KVCacheGuard(), StrategyInForce(), SurviveOOM()]


CALLBACKS: dict[str, Callable[[int], list[TrainerCallback]]] = {
    "none": lambda rank: [],
    "all": lambda rank: callbacks(),
    "rank 0": lambda rank: callbacks(where="rank 0", rank=rank),
    "rank 1": lambda rank: callbacks(where="rank 1", rank=rank),
    "another order": lambda rank: callbacks()[:: 1 - 2 * rank],
    "a tracker on one": lambda rank: [*[Tracker()] * (rank == 0), *callbacks()],
    "another interval": lambda rank: callbacks(interval=2 + rank),
    "given twice on one": lambda rank: [*callbacks(), *callbacks()[: 3 * rank]],
}


class Evaluates(Trainer):
    """Evaluates on all ranks, on one alone as clients do it who have one card for that, or fails on one."""

    where = "all"

    def evaluate(self, *args, **kwargs):
        if self.where == "rank 0":
            if self.args.process_index == 0:
                batch = next(iter(self.get_eval_dataloader()))
                with torch.no_grad():
                    self.model(
                        **{name: value.to(self.args.device) for name, value in batch.items()}
                    )
                self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
            return {}
        if self.where == "fails" and self.args.process_index == 1:
            raise RuntimeError("no such benchmark on this rank")
        return super().evaluate(*args, **kwargs)


def train(rank: int, folder: Path, story: str) -> None:
    """Train twice, since what the first training leaves behind must not reach the second."""
    given, _, where = story.partition(" / ")
    Evaluates.where = where
    args = TrainingArguments(
        str(folder), max_steps=8, per_device_train_batch_size=2, report_to="none", disable_tqdm=True, use_cpu=True,
        eval_strategy="steps", eval_steps=3, eval_on_start=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Evaluates(
        tiny_llama(),
        args,
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        callbacks=CALLBACKS[given](rank),
    )
    steps = []
    for _ in range(2):
        trainer.train()
        steps.append(trainer.state.global_step)
    (folder / f"steps-{rank}.json").write_text(json.dumps(steps))


def fork(rank: int, port: str, folder: Path, story: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    printed = os.open(folder / f"printed-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    code = 1
    try:
        train(rank, folder, story)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(folder: Path, story: str) -> dict[str, object]:
    folder.mkdir()
    port = processes.free_port()
    began = time.monotonic()
    left = {fork(rank, port, folder, story): rank for rank in (0, 1)}
    codes, is_hanging = {}, False
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        is_hanging = bool(left) and time.monotonic() - began > HANGS_AFTER_SECONDS
        if is_hanging or any(codes.values()):  # as torchrun does where one rank has failed
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return {
        "is_hanging": is_hanging,
        "codes": [codes[0], codes[1]],
        "seconds": time.monotonic() - began,
        "steps": [json.loads(path.read_text()) for path in sorted(folder.glob("steps-*.json"))],
        "said": [(folder / f"printed-{rank}.txt").read_text() for rank in (0, 1)],
    }


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for number, story in enumerate(json.loads(sys.argv[2])):
        print(
            json.dumps({"story": story, **run(Path(sys.argv[1]) / str(number), story)}), flush=True
        )
