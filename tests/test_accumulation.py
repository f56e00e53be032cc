"""What is said of gradient accumulation is what it does: each judgement beside gradients of a real Trainer."""

import functools
import gc
import inspect
import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests import processes
from tests.events import at
from tests.explain.stated import explained
from tests.explain.test_text import FULL, TRAINER
from tests.models import IN_ORDER, IS_OLD, tiny_llama
from tests.planner.test_plans import request
from tests.survival.classes.batches import batch_for
from tests.survival.classes.judge import _LARGEST, _TAKES_A_LOSS, class_names
from tests.survival.classes.tiny import tiny_model
from tests.survival.test_every_class import NUM_RUNS, NUM_SHARDS, RUN
from trainer_plugins import Preflight, StrategyInForce
from trainer_plugins.accumulation import Accumulation, Effect
from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.explain.text.remedies.filled import SUMMED
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.units import MIB

NUM_ROWS = 4
EXACT, IN_FLOAT32 = 1e-6, 2e-3
KINDS = {
    "LlamaForCausalLM": Effect.SAME,
    "ViTForImageClassification": Effect.SAME,
    "BertForSequenceClassification": Effect.SCALED,
    "LlamaForTokenClassification": Effect.SCALED,
    "BertForMaskedLM": Effect.SCALED,
    "T5ForConditionalGeneration": Effect.SCALED,
    "BlipTextLMHeadModel": Effect.SCALED,
    "BertForQuestionAnswering": Effect.OTHER,
    "EsmForMaskedLM": Effect.OTHER,
    "PaliGemmaForConditionalGeneration": Effect.OTHER,
}
"""One class of each kind."""


def run_of(model, batch, num_steps: int, folder, trainer_class=Trainer, **into_trainer) -> Trainer:
    """A run of one step, which moves nothing: the rows of a batch in so many micro-batches."""
    rows = NUM_ROWS // num_steps // int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=rows, report_to="none",
        gradient_accumulation_steps=num_steps, max_grad_norm=0, learning_rate=0.0, optim="sgd",
        use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        dataloader_pin_memory=False, **IN_ORDER,
    )  # fmt: skip

    def collate(places: list[int]) -> dict[str, Any]:
        return {
            name: value[places] if torch.is_tensor(value) and len(value) == NUM_ROWS else value
            for name, value in batch.items()
        }

    places: Any = list(range(NUM_ROWS))
    return trainer_class(
        model=model, args=args, train_dataset=places, data_collator=collate, **into_trainer
    )


def gradient(trainer: Trainer) -> torch.Tensor:
    """The gradient of its step."""
    seen: list[torch.Tensor] = []

    def keep(now) -> None:
        gradients = [p.grad for p in now.model.parameters() if p.grad is not None]
        seen.append(torch.cat([each.flatten() for each in gradients]).clone())

    trainer.add_callback(at("pre_optimizer_step", keep))
    trainer.model.zero_grad()
    trainer.train()
    return seen[-1]


def off_by(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def rows_of_classes() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 120, (NUM_ROWS, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids[:, 0] % 3}


def hold(judged: Accumulation, make, batches, tolerance: float = EXACT) -> None:
    """Compare what is said with four micro-batches beside one; `make` makes the run of a batch."""
    whole = [gradient(make(batch, 1)) for batch in batches]
    parts = [gradient(make(batch, NUM_ROWS)) for batch in batches]
    distances = [off_by(ours, theirs) for ours, theirs in zip(parts, whole, strict=True)]
    if judged.effect is Effect.SAME:
        assert max(distances) < tolerance
    elif judged.effect is Effect.OTHER:
        assert max(distances) > tolerance
    elif judged.effect is Effect.SCALED:
        trainer = make(batches[0], NUM_ROWS)
        if "trainer." in judged.cure:
            exec(judged.cure.removeprefix("set "), {"trainer": trainer})
            assert judge_accumulation(trainer).effect is not Effect.SCALED
            assert off_by(NUM_ROWS * gradient(trainer), parts[0]) < tolerance
        # Of rows that weigh alike it is the mean, but models differ in which of them they count.
        assert min(distances) == pytest.approx(NUM_ROWS - 1, rel=0.5)


def hold_class(name: str, folder: Path) -> Accumulation | None:
    """Hold the judgement of a class; None if it takes no loss here, or does not run."""
    kind = getattr(transformers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, PreTrainedModel)):
        return None
    model_class: Any = kind
    if not any(map(_TAKES_A_LOSS.search, inspect.signature(model_class.forward).parameters)):
        return None
    try:
        model = tiny_model(model_class)
    except Exception:  # noqa: BLE001 - whatever a config that nobody wrote for this says
        return None
    if sum(each.numel() for each in model.parameters()) > _LARGEST:
        return None
    judged = judge_accumulation(run_of(model, {}, 1, folder))
    if re.search(SUMMED, name) and not IS_OLD:
        assert judged.effect is Effect.SCALED, judged
    for dtype in (torch.float64, torch.float32):
        try:
            model.to(dtype)
            batches = [
                {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}
                for batch in (batch_for(model, labels_at_padding=there) for there in (False, True))
            ]
            is_finite = all(
                gradient(run_of(model, each, 1, folder)).isfinite().all() for each in batches
            )
            gradient(run_of(model, batches[0], NUM_ROWS, folder))
        except Exception:  # noqa: BLE001 - the same
            continue
        if is_finite:
            tolerance = EXACT if dtype is torch.float64 else IN_FLOAT32
            hold(judged, functools.partial(run_of, model, folder=folder), batches, tolerance)
            break
    return judged


@pytest.mark.parametrize("name", KINDS)
def test_one_class_of_each_kind_is_judged_as_it_trains(name: str, tmp_path) -> None:
    if not hasattr(transformers, name) or (IS_OLD and name.startswith("PaliGemma")):
        pytest.skip("not in this transformers, or not with labels where the mask is 0")
    judged = hold_class(name, tmp_path)
    assert judged is not None
    if transformers.__version__.startswith("5.23."):
        assert judged.effect is KINDS[name], judged


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize("shard", range(RUN, NUM_SHARDS, NUM_RUNS))
def test_every_class_is_judged_as_it_trains(shard: int, tmp_path) -> None:
    judged = {}
    for name in class_names()[shard::NUM_SHARDS]:
        if (found := hold_class(name, tmp_path)) is not None:
            judged[name] = found.effect
        gc.collect()
    known = [name for name, effect in judged.items() if effect is not Effect.UNKNOWN]
    assert len(known) > 0.9 * len(judged)


class DropsTheNumber(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs)


class PassesItOn(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class OwnMean(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss()(outputs.logits.flatten(0, -2), labels.flatten())
        return (loss, outputs) if return_outputs else loss


class OwnSum(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits.flatten(0, -2)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class DividesItself(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss / self.args.gradient_accumulation_steps


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Focal(nn.Module):
    def forward(self, logits, labels):
        each = F.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


class Classifier(nn.Module):
    """A model of the user's own, with any loss."""

    def __init__(self, criterion) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.criterion = nn.Embedding(128, 8), nn.Linear(8, 3), criterion

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.words(input_ids).mean(1))
        return {"loss": self.criterion(logits, labels), "logits": logits}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, **kwargs):
        return self.inner(**kwargs)


def mean_of_own(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels)


def sum_of_own(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def classifier() -> nn.Module:
    return tiny_model(transformers.BertForSequenceClassification)


def llama() -> nn.Module:
    return tiny_llama().double()


def with_adapter(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query"], init_lora_weights=False, lora_dropout=0.0)
    return peft.get_peft_model(model, config).double()


def own(criterion) -> nn.Module:
    return Classifier(criterion).double()


OWN: dict[str, tuple[Any, dict[str, Any], Effect]] = {
    "drops": (llama, {"trainer_class": DropsTheNumber}, Effect.SCALED),
    "passes, a mean": (classifier, {"trainer_class": PassesItOn}, Effect.SCALED),
    "passes": (llama, {"trainer_class": PassesItOn}, Effect.SAME),
    "own mean": (llama, {"trainer_class": OwnMean}, Effect.SCALED),
    "own sum": (llama, {"trainer_class": OwnSum}, Effect.SAME),
    "divides itself": (llama, {"trainer_class": DividesItself}, Effect.UNKNOWN),
    "own step": (classifier, {"trainer_class": OwnStep}, Effect.UNKNOWN),
    "mean function": (classifier, {"compute_loss_func": mean_of_own}, Effect.SCALED),
    "partial": (classifier, {"compute_loss_func": functools.partial(mean_of_own)}, Effect.SCALED),
    "sum function": (classifier, {"compute_loss_func": sum_of_own}, Effect.SAME),
    "own model": (lambda: own(nn.CrossEntropyLoss()), {}, Effect.SCALED),
    "own model, a sum": (lambda: own(nn.CrossEntropyLoss(reduction="sum")), {}, Effect.SAME),
    "own model, focal": (lambda: own(Focal()), {}, Effect.SCALED),
    "around": (Around, {}, Effect.SCALED),
    "adapter": (lambda: with_adapter(classifier()), {}, Effect.SCALED),
    "compiled": (lambda: torch.compile(classifier(), backend="eager"), {}, Effect.SCALED),
}


# With transformers 4, the mean of a BERT is divided by the number of micro-batches.
AVERAGED = ("passes, a mean", "around", "adapter", "compiled") if IS_OLD else ()


@pytest.mark.parametrize("case", [case for case in OWN if case not in AVERAGED])
def test_a_loss_of_the_users_own_is_judged_as_it_trains(case: str, tmp_path) -> None:
    build, into_trainer, effect = OWN[case]
    model = build()
    make: Any = functools.partial(run_of, model, folder=tmp_path, **into_trainer)
    batch = rows_of_classes()
    if build is llama:
        batch["labels"] = batch["input_ids"].clone()

    judged = judge_accumulation(make(batch, 1), batch)

    assert judged.effect is effect, judged
    hold(judged, make, [batch])
    if effect is Effect.UNKNOWN:
        assert judge_accumulation(make(batch, 1), ["input_ids"]).effect is not Effect.SCALED


@pytest.mark.skipif(IS_OLD, reason="the mean of a BERT is divided by the number of micro-batches")
@pytest.mark.parametrize(
    "callbacks", [(StrategyInForce,), (Preflight,), (StrategyInForce, Preflight)]
)
def test_a_run_whose_micro_batches_add_up_is_told_so_once(tmp_path, caplog, callbacks) -> None:
    def train(num_steps: int, *, is_cured: bool = False) -> list[str]:
        trainer = run_of(classifier(), rows_of_classes(), num_steps, tmp_path)
        if is_cured:
            trainer.model_accepts_loss_kwargs = False
        for each in callbacks:
            trainer.add_callback(each())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainer_plugins"):
            trainer.train()
        return [one for one in caplog.messages if "gradient-summed" in one]

    (said,) = train(NUM_ROWS)
    assert f"each step are {NUM_ROWS} times too large" in said
    assert "BertForSequenceClassification.forward ignores num_items_in_batch" in said
    assert "set trainer.model_accepts_loss_kwargs = False" in said
    assert train(1) == train(NUM_ROWS, is_cured=True) == []


@pytest.mark.all
def test_on_two_ranks_the_trainer_multiplies_by_them_too(tmp_path) -> None:
    one = gradient(run_of(classifier(), rows_of_classes(), 1, tmp_path))
    command = (
        "from tests.test_accumulation import *; import logging; logging.basicConfig();"
        " run = run_of(classifier(), rows_of_classes(), 2, sys.argv[1]);"
        " run.add_callback(StrategyInForce()); found = gradient(run);"
        " torch.save(found, sys.argv[1] + f'/{run.args.process_index}.pt')"
    )
    (tmp_path / "train.py").write_text(command)
    done = processes.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(tmp_path / "train.py"), str(tmp_path)],
        cwd=tmp_path, environ={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("[gradient-summed]") == 1
    assert "are 4 times too large" in done.stderr
    assert (
        "does not divide by the 2 micro-batches of a step and multiplies by the 2 ranks"
        in done.stderr
    )
    assert off_by(torch.load(tmp_path / "0.pt"), 4 * one) < EXACT


FORWARD = (
    '  File "/v/lib/python3.12/site-packages/torch/nn/functional.py", line 2, in gelu\n'
    "    return torch._C._nn.gelu(input)\n"
)
TRACEBACK = "Traceback (most recent call last):\n"
BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 128,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.all
def test_what_a_plan_proposes_has_its_price_for_this_loss() -> None:
    def plan(gpu: str, *, proposes: bool = False, **changed: object) -> MemoryPlan:
        run = request({**BERT, **changed}, rows=64, gpu=gpu, dtype=None, sequence_length=512)
        (found,) = predict_all([replace(run, proposes=proposes)])
        assert isinstance(found, MemoryPlan), found
        return found

    whole = plan("80GiB")
    assert whole.accumulation is not None
    assert whole.accumulation.effect is Effect.SCALED
    assert MemoryPlan.from_json(whole.to_json()) == whole
    gpu = f"{(whole.nvidia_smi_peak_bytes + whole.context_bytes) // 2 // MIB}MiB"
    found = [each for each in plan(gpu, proposes=True).proposals if each.accumulation_steps > 1]
    assert found
    for each in found:
        assert "set trainer.model_accepts_loss_kwargs = False" in each.price
        assert "the same training" not in each.price


@pytest.mark.parametrize(
    ("name", "is_named"),
    [("BertForTokenClassification", True), ("LlamaForCausalLM", False), ("EsmForMaskedLM", False)],
)
def test_an_explanation_names_the_price_of_fewer_rows_for_the_model_that_a_log_names(
    name: str, is_named: bool
) -> None:
    log = f"Some weights of {name} were not initialized\n{TRACEBACK}{TRAINER}{FORWARD}{FULL}"
    fewer = next(each for each in explained(log).remedies if "accumulation" in each.do)
    assert (f"gradients of {name} add up" in fewer.price) is is_named
    assert ("trainer.model_accepts_loss_kwargs = False" in fewer.price) is is_named
