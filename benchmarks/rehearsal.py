"""Four runs that end hours in, on the simulated card: where they die, and what a rehearsal says."""

import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from trainer_plugins import Rehearsal, RehearsalError
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB, size

ROWS = 4
LENGTH = 32

Row = dict[str, torch.Tensor]


def rows(num: int, long_at: int | None = None) -> list[Row]:
    """Return rows of 24 to 32 tokens; the one at `long_at` is four times as long."""
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, LENGTH + 1, (num,), generator=dice).tolist()
    if long_at is not None:
        lengths[long_at] = 4 * LENGTH
    return [{"input_ids": torch.randint(1, 1000, (n,), generator=dice)} for n in lengths]


def padded(examples: list[Row]) -> dict[str, torch.Tensor]:
    """Collate rows of unequal length."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in examples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}


class InOrder(Trainer):
    """Draws the rows in their order, so that the long one comes at a known step."""

    def _get_train_sampler(self, *_: object) -> range:
        return range(len(self.train_dataset))


class SavesMerged(InOrder):
    """Trains the last layer, and saves a second copy of its model, as who merges on the card."""

    def __init__(self, model: LlamaForCausalLM, **options: Any) -> None:
        model.model.requires_grad_(False)
        model.model.layers[-1].requires_grad_(True)
        super().__init__(model, **options)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        merged = copy.deepcopy(self.model)
        super()._save(output_dir, merged.state_dict())


class MomentsInMainMemory(torch.optim.AdamW):
    """Keeps its moments in main memory; `load_state_dict` of torch puts them on the card."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the moments to the card, one weight at a time."""
        groups = self.param_groups
        weights = [(group, list(group["params"])) for group in groups]
        for group in groups:
            group["params"] = []
        for group, some in weights:
            for weight in some:
                group["params"] = [weight]
                self._move(weight, weight.device)
                super().step()
                self._move(weight, torch.device("cpu"))
            group["params"] = []
        for group, some in weights:
            group["params"] = some

    def _move(self, weight: torch.Tensor, device: torch.device) -> None:
        for name in self.state[weight].keys() & {"exp_avg", "exp_avg_sq"}:
            self.state[weight][name] = self.state[weight][name].to(device)


@dataclass(frozen=True, slots=True)
class Late:
    """Describes a run that dies late."""

    what: str
    card_mib: int
    moment: str
    """What a rehearsal says does not fit."""

    trainer: type[Trainer] = InOrder
    long_row: bool = False
    resumes: bool = False
    offloads: bool = False
    settings: tuple[tuple[str, object], ...] = ()
    compute_metrics: Callable[[Any], dict[str, float]] | None = None


def _count(predicted: Any) -> dict[str, float]:
    return {"rows": float(len(predicted.predictions))}


RUNS = (
    Late("one row of the data is 4 times as long", 16, "training", long_row=True),
    Late(
        "the evaluation keeps the logits of 256 rows",
        48,
        "evaluation",
        settings=(("eval_strategy", "steps"),),
        compute_metrics=_count,
    ),
    Late(
        "the save makes a second copy of the model",
        22,
        "save",
        trainer=SavesMerged,
        settings=(("save_strategy", "steps"),),
    ),
    Late(
        "the resume puts offloaded moments on the card",
        26,
        "resume",
        resumes=True,
        offloads=True,
        settings=(("save_strategy", "steps"),),
    ),
)


def make(run: Late, folder: Path, step: int, *callbacks: TrainerCallback) -> Trainer:
    """Make the Trainer of a run whose late moment comes at this step."""
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(run.card_mib * MIB)
    torch.manual_seed(0)
    has_activations = run.moment in ("training", "evaluation")
    rows_at_once, sizes = (ROWS, (64, 2)) if has_activations else (1, (256, 4))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=sizes[0],
            intermediate_size=256,
            num_hidden_layers=sizes[1],
            num_attention_heads=4,
            max_position_embeddings=256,
            pad_token_id=0,
        )
    )
    weights = model.parameters()
    optimizer = MomentsInMainMemory(weights, lr=1e-3) if run.offloads else None
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=step + 2,
        eval_steps=step,
        save_steps=step,
        per_device_train_batch_size=rows_at_once,
        report_to="none",
        save_strategy=dict(run.settings).get("save_strategy", "no"),
        eval_strategy=dict(run.settings).get("eval_strategy", "no"),
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    return run.trainer(
        model=model,
        args=args,
        train_dataset=rows(
            (step + 2) * rows_at_once, step * rows_at_once if run.long_row else None
        ),
        eval_dataset=rows(256),
        data_collator=padded,
        callbacks=list(callbacks),
        compute_metrics=run.compute_metrics,
        optimizers=(optimizer, None),
    )


def dies_at(run: Late, folder: Path, step: int) -> tuple[int, str]:
    """Train until it dies.

    Returns:
        The number of steps that are lost, and what the error says; empty if it does not die.
    """
    trainer = make(run, folder, step)
    try:
        trainer.train()
        if run.resumes:
            trainer = make(run, folder, step)
            trainer.train(resume_from_checkpoint=True)
    except torch.OutOfMemoryError as error:
        return (step if run.resumes else trainer.state.global_step), str(error).partition("\n")[0]
    return trainer.state.global_step, ""


def foretold(run: Late, folder: Path, step: int) -> tuple[float, str]:
    """Train with a rehearsal that refuses; return its seconds, and what it says."""
    rehearsal = Rehearsal(refuse_on="error")
    trainer = make(run, folder, step, rehearsal)
    try:
        trainer.train()
    except RehearsalError as error:
        assert trainer.state.global_step == 0
        return rehearsal.report.seconds, str(error)
    return rehearsal.report.seconds, ""


class _Times(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(perf_counter() - self._began)


def main() -> None:
    """Print what docs/rehearsal.md says of the four runs."""
    simgpu.enable(256 * MIB)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "simgpu"
    for run in RUNS:
        with TemporaryDirectory() as folder:
            lost, error = dies_at(run, Path(folder) / "late", 200)
            seconds, said = foretold(run, Path(folder) / "first", 200)
        print(f"{run.what}: card of {size(run.card_mib * MIB)}")
        print(f"  without: {lost} steps are lost, then {error}")
        print(f"  with: refused after {seconds:.1f} s; {said}")
    times, rehearsal = _Times(), Rehearsal()
    with TemporaryDirectory() as folder:
        fits = Late("all fits", 256, "", settings=(("save_strategy", "steps"),))
        make(fits, Path(folder), 20, rehearsal, times).train()
    step = median(times.seconds)
    print(f"a rehearsal takes {rehearsal.report.seconds / step:.1f} steps of {step * 1000:.0f} ms")
    print(rehearsal.report)


if __name__ == "__main__":
    main()
