"""A leak is planted; the finding names what grew, who holds it, since when, and the line that cures it."""

import collections
import copy
import gc
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Trainer, TrainerCallback

from tests.events import at
from tests.models import IN_ORDER
from trainer_plugins import MemoryWatchdog
from trainer_plugins.finding import Finding
from trainer_plugins.record.timeline import Remark, Timeline
from trainer_plugins.units import MIB
from trainer_plugins.upkeep.growth import GrowthTeller

STEPS = 50
KEPT_BY_THE_MODULE: list[torch.Tensor] = []
IN_EACH_RUN = ("LossesWithGraphs", "Errors")  # the others are left to `--all`


@pytest.fixture(autouse=True)
def _holders_are_seen():
    """What conftest.py freezes, this module too, is not seen by `gc.get_referrers`."""
    gc.unfreeze()
    yield
    KEPT_BY_THE_MODULE.clear()


def some(args, kib: int = 256) -> torch.Tensor:
    return torch.zeros(kib, 1024, dtype=torch.uint8, device=args.device)


class EachStep(TrainerCallback):
    """Leaks at the end of each step."""

    def on_step_end(self, args, state, control, **event):
        self.leak(args, event)


class LossesWithGraphs(EachStep):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def leak(self, args, event) -> None:
        ids = torch.ones(2, 16, dtype=torch.long, device=args.device)
        self.losses.append(event["model"](ids, labels=ids).loss)


class RunningLoss(EachStep):
    total: torch.Tensor | float = 0.0

    def leak(self, args, event) -> None:
        ids = torch.ones(2, 16, dtype=torch.long, device=args.device)
        self.total = self.total + event["model"](ids, labels=ids).loss


class OnTheModel(EachStep):
    def leak(self, args, event) -> None:
        event["model"].seen = [*getattr(event["model"], "seen", []), some(args)]


class InAGlobalList(EachStep):
    def leak(self, args, event) -> None:
        KEPT_BY_THE_MODULE.append(some(args))


class Caches(EachStep):
    def __init__(self) -> None:
        self.caches: list[DynamicCache] = []

    def leak(self, args, event) -> None:
        cache = DynamicCache()
        keys, values = (torch.zeros(2, 4, 64, 64, device=args.device) for _ in range(2))
        cache.update(keys, values, 0)
        self.caches.append(cache)


class OptimizerStates(EachStep):
    """Keeps a copy of the optimizer's states at each step, as an average of checkpoints would."""

    def __init__(self) -> None:
        self.history: dict[int, dict] = {}

    def leak(self, args, event) -> None:
        self.history[len(self.history)] = copy.deepcopy(event["optimizer"].state_dict())


class Errors(EachStep):
    """Catches an error, and keeps it with the frames that hold its tensors."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def leak(self, args, event) -> None:
        def fails() -> None:
            logits = some(args)
            raise ValueError(f"{logits.shape} is not what was expected")

        try:
            fails()
        except ValueError as error:
            self.errors.append(error)


class Recycles(EachStep):
    """Keeps tensors, each where Python had another one, which was freed just before."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.passing: collections.deque[torch.Tensor] = collections.deque()

    def leak(self, args, event) -> None:
        device = args.device
        if len(self.passing) == 4:
            self.passing.popleft()
        self.kept.append(torch.zeros(256, 1024, dtype=torch.uint8, device=device))
        self.passing.append(some(args))


class CachingRows(torch.utils.data.Dataset):
    """Moves each row to the card, and keeps it there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i):
        self.cache[i] = torch.zeros(128, 1024, dtype=torch.uint8, device=self.device)
        return {
            "input_ids": torch.ones(16, dtype=torch.long),
            "labels": torch.ones(16, dtype=torch.long),
        }


def leak_of(make_trainer, *callbacks, **settings) -> Finding:
    return leaks_of(make_trainer, *callbacks, **settings)[0]


def leaks_of(
    make_trainer,
    *callbacks,
    prepare: Callable[[Trainer], None] | None = None,
    code: str = "leak-tensors",
    **settings,
) -> list[Finding]:
    timeline = Timeline()
    trainer = make_trainer(
        *callbacks, MemoryWatchdog(timeline=timeline), **{"max_steps": STEPS, **settings}
    )
    if prepare:
        prepare(trainer)
    trainer.train()
    remarks = (each.finding for each in timeline if isinstance(each, Remark))
    return [each for each in remarks if each.code == code]


@pytest.mark.all(unless=lambda callback: callback.__name__ in IN_EACH_RUN)
@pytest.mark.parametrize(
    ("callback", "grew", "holder", "cure"),
    [
        (LossesWithGraphs, "x Tensor [] float32, each with its graph,", "LossesWithGraphs.losses", "`LossesWithGraphs.losses.append(loss.item())`"),
        (RunningLoss, "Tensor [] float32", "RunningLoss.total keeps the graphs of all steps", "`RunningLoss.total += loss.item()`"),
        (OnTheModel, "x Tensor [256, 1024] uint8", "LlamaForCausalLM.seen", "`LlamaForCausalLM.seen.clear()`"),
        (InAGlobalList, "x Tensor [256, 1024] uint8", "tests.callbacks.test_growth.KEPT_BY_THE_MODULE", "KEPT_BY_THE_MODULE.clear()`"),
        (Caches, "x Tensor [2, 4, 64, 64] float32", "Caches.caches", "`Caches.caches.clear()`"),
        (OptimizerStates, "x Tensor [", "OptimizerStates.history", "`OptimizerStates.history.clear()`"),
        (Errors, "x Tensor [256, 1024] uint8", "Errors.errors", "`str(error)`"),
        (Recycles, "x Tensor [256, 1024] uint8", "Recycles.kept", "`Recycles.kept.clear()`"),
    ],
)  # fmt: skip
def test_what_a_callback_keeps_is_named(make_trainer, simgpu, callback, grew, holder, cure) -> None:
    finding = leak_of(make_trainer, callback())

    assert grew in finding.evidence
    assert f"held by {holder}" in finding.evidence
    if callback is not RunningLoss:
        assert "since about step" in finding.evidence
    assert cure in finding.remedy


def keep_outputs_in_a_closure(trainer: Trainer) -> None:
    outputs = []

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> None:
        outputs.append(torch.zeros(256, 1024, device=output.device))

    trainer.model.lm_head.register_forward_hook(keep)


class Metrics:
    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, prediction):
        self.logits.append(torch.as_tensor(prediction.predictions).to("simgpu").repeat(8, 1, 1))
        return {}


@pytest.mark.all
@pytest.mark.parametrize(
    ("plant", "settings", "held", "cure"),
    [
        (keep_outputs_in_a_closure, {}, "x Tensor [256, 1024] float32 held by outputs, a variable around keep()", "`outputs.clear()`"),
        (lambda trainer: setattr(trainer, "compute_metrics", Metrics()), {"eval_strategy": "steps", "eval_steps": 1}, "Metrics.logits", "`Metrics.logits.clear()`"),
        (lambda trainer: setattr(trainer, "train_dataset", CachingRows("simgpu")), {"remove_unused_columns": False}, "x Tensor [128, 1024] uint8 held by CachingRows.cache, 2 more per step since about step 0", "`CachingRows.cache.clear()`"),
    ],
    ids=["a closure", "metrics", "a data set"],
)  # fmt: skip
def test_what_a_trainer_was_given_and_keeps_is_named(
    make_trainer, simgpu, plant, settings, held, cure
) -> None:
    finding = leak_of(make_trainer, prepare=plant, **settings)

    assert held in finding.evidence
    assert cure in finding.remedy


class KeepsAtSaves(TrainerCallback):
    """Keeps something with each save, so often that each window of steps rises too."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_save(self, args, state, control, **event):
        self.kept.append(some(args, 3 << 10))


class Snapshots(TrainerCallback):
    """Keeps the weights of each checkpoint on the card, as choderalab/pinot#23 did."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args, state, control, model, **event):
        for number in range(4):  # a tiny model's alone would be too small to count
            self.states[4 * state.global_step + number] = copy.deepcopy(model.state_dict())


@pytest.mark.all
@pytest.mark.parametrize("every", [8, 12])
def test_what_rises_with_each_save_is_named(make_trainer, simgpu, every) -> None:
    first, *later = leaks_of(
        make_trainer, Snapshots(), save_strategy="steps", save_steps=every, max_steps=6 * every
    )

    assert "grow with each save: out of memory after about" in first.summary
    assert "held by Snapshots.states[" in first.evidence
    assert first.evidence.endswith("with each save")
    assert "`Snapshots.states.clear()`" in first.remedy
    assert later == []


@pytest.mark.parametrize(("kind", "mib"), [(KeepsAtSaves, 84), (LossesWithGraphs, 18)])
@pytest.mark.all(but=1)
def test_a_leak_is_said_again_when_half_is_left(
    make_trainer, simgpu, kind, mib, monkeypatch
) -> None:
    begin, begun = GrowthTeller.begin, []

    def count(self: GrowthTeller) -> None:
        begun.append(self)
        begin(self)

    monkeypatch.setattr(GrowthTeller, "begin", count)
    simgpu.set_capacity(mib * MIB)
    of_saves = kind is KeepsAtSaves
    saves = "steps" if of_saves else "no"
    told = leaks_of(make_trainer, kind(), max_steps=90, save_strategy=saves, save_steps=4)

    assert len(told) >= 2
    assert len(begun) <= len(told) + 1, "all objects are walked through for a report alone"
    for before, after in pairwise(told):
        assert after.amount >= 2 * before.amount or after.severity > before.severity
        assert float(after.data["held_bytes"]) > float(before.data["held_bytes"])
        assert after.data["holder"] == f"{kind.__name__}.{'kept' if of_saves else 'losses'}"
        assert ("grow with each save" in after.summary) is of_saves


class Sums(Trainer):
    """BatsResearch/labelmodels#4: `running_loss += loss`, of a loss that no backward pass frees."""

    running_loss: torch.Tensor | float = 0.0

    def training_step(self, model, inputs, *args, **kwargs):
        self.running_loss = self.running_loss + model(**inputs).loss
        return super().training_step(model, inputs, *args, **kwargs)


class KeepsOutputs(Trainer):
    """TRI-ML/packnet-sfm#47: the outputs of all batches wait for the end of the epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.outputs: list[dict[str, torch.Tensor]] = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        outputs = model(**inputs)
        self.outputs.append({"loss": outputs.loss, "metrics": outputs.logits.repeat(4, 1, 1)})
        return outputs.loss


@pytest.mark.parametrize(
    ("kind", "holder", "cure"),
    [
        (Sums, "Sums.running_loss keeps the graphs of all steps", "`Sums.running_loss += loss.item()`"),
        (KeepsOutputs, "KeepsOutputs.outputs[...]['metrics']", "`KeepsOutputs.outputs.append(tensor.detach().cpu())`"),
    ],
)  # fmt: skip
@pytest.mark.all
def test_leaks_of_public_issues_are_named(make_trainer, simgpu, kind, holder, cure) -> None:
    finding = leak_of(make_trainer, trainer_class=kind)

    assert holder in finding.evidence
    assert cure in finding.remedy


class Journal(EachStep):
    """Writes a log of Python objects into main memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def leak(self, args, event) -> None:
        self.rows.append({"text": "x" * (4 << 20)})


@pytest.mark.all
def test_a_list_that_fills_main_memory_is_named(make_trainer, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    finding = leak_of(make_trainer, Journal(), code="leak-host")

    assert "x dict in Journal.rows, 1 more per step since about step 0" in finding.evidence
    assert "`Journal.rows.clear()`" in finding.remedy


class KeepingRows(torch.utils.data.Dataset):
    """Keeps in each worker what it has read, as a cache without a bound."""

    def __init__(self, rows: list[dict[str, str]] | None = None) -> None:
        self.cache: dict[int, bytes] = {}
        self.rows = rows

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i):
        self.cache[i] = b"x" * (4 << 20)
        return {"input_ids": torch.ones(16, dtype=torch.long), "labels": torch.ones(16).long()}


def test_objects_of_which_each_worker_makes_a_copy_are_named() -> None:
    """pytorch#13246: a read of an object writes into its page, which was shared until then."""
    rows = [{"text": str(i)} for i in range(20_000)]
    wrapped = KeepingRows(rows)
    leak = Finding.warning(code="leak-workers", summary="it rises", evidence="1 MiB", remedy="Look")

    for dataset, place in ((rows, "train_dataset, a list,"), (wrapped, "KeepingRows.rows")):
        told = GrowthTeller("cuda", nn.Linear(2, 2), None, dataset).tell(leak, step=40)

        assert f"; {place} has 20,000 Python objects: " in told.evidence
        assert "`datasets.Dataset.from_list(rows)`" in told.remedy
    assert GrowthTeller("cuda", nn.Linear(2, 2), None, iter(())).tell(leak, step=40) == leak


@pytest.mark.all
def test_what_each_worker_keeps_is_named(make_trainer, simgpu, monkeypatch) -> None:
    def plant(trainer: Trainer) -> None:
        trainer.train_dataset = torch.utils.data.Subset(KeepingRows(), range(9_000))

    monkeypatch.setattr("trainer_plugins.watch.memory_watch.HOST_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("trainer_plugins.watch.memory_watch.WORKERS_SHARE", 1.0)

    finding = leak_of(
        make_trainer,
        prepare=plant,
        code="leak-workers",
        dataloader_num_workers=2,
        max_steps=300,
        remove_unused_columns=False,
    )

    assert "each worker has its own KeepingRows.cache" in finding.evidence
    assert "`self.cache.clear()`" in finding.remedy


@pytest.mark.skipif(not IN_ORDER, reason="this Trainer always shuffles")
def test_lengths_that_fill_the_cache_are_named(make_trainer, simgpu) -> None:
    """Of 20 to 70 tokens, none twice; each takes half a MiB for a token, for a moment."""
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in range(20, 71)]
    lengths: set[int] = set()

    def find_batches(_) -> None:
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        on_card = [each for each in tensors if each.device.type == "simgpu" and each.dim() == 2]
        lengths.update(each.size(1) for each in on_card if each.dtype == torch.long)

    def plant(trainer: Trainer) -> None:
        trainer.train_dataset = rows
        trainer.model.lm_head.register_forward_hook(
            lambda module, args, _: [some(trainer.args, 512 * args[0].size(1))].clear()
        )

    simgpu.set_capacity(1 << 30)
    finding = leak_of(
        make_trainer,
        at("step_end", find_batches, STEPS),
        prepare=plant,
        code="leak-cache",
        per_device_train_batch_size=1,
        **IN_ORDER,
    )

    assert "; 8 shapes of input_ids in 8 steps, [1, 60] to [1, 67]" in finding.evidence
    assert "expandable_segments" in finding.remedy
    # A frame whose variables were read holds them, before Python 3.13.
    assert lengths == {69}, "what was read for the finding is kept"
