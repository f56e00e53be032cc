"""Training steps, losses, models and callbacks of users' own: computed right, or refused before anything is changed."""

import random
import shutil
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn
from transformers import (
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Trainer,
)

from tests.events import at
from tests.models import tiny_llama
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    gradients_off_by,
    padded,
    ragged_rows,
    refuse,
    small_trainer,
    survive,
    weights_by_rounding,
    with_norm,
)
from tests.survival.test_refusals import OwnLoss
from trainer_plugins import SurviveOOM, survive_oom
from trainer_plugins.survival.memo import memo_of


class WithPenalty(Trainer):
    """Adds to the loss what `compute_loss` knows nothing of: half a percent of it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(
            model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
        )
        loss = loss + 5e-5 * sum(parameter.square().sum() for parameter in model.parameters())
        self.accelerator.backward(loss)
        return loss.detach()


class CallsBackward(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = 0.5 * self.compute_loss(
            model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
        )
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("trainer_class", "why", "why_divided"),
    [
        (
            WithPenalty,
            "training_step adds a term to the loss, and pieces would miss its gradient",
            "training_step adds a term",
        ),
        (
            CallsBackward,
            "training_step does not call accelerator.backward once for each compute_loss",
            "backward was not called by trainer.accelerator",
        ),
    ],
)
def test_a_training_step_that_pieces_cannot_follow_is_refused_before_the_first_step(
    tmp_path, trainer_class, why, why_divided
) -> None:
    """Also where the first micro-batch was divided."""
    fitting, divided, warned, plain = (
        small_trainer(tmp_path, trainer_class=trainer_class) for _ in range(4)
    )
    refuse(fitting, why, error=ValueError)
    refuse(divided, why_divided, {0: [100]}, RuntimeError)
    assert fitting.state.global_step == divided.state.global_step == 0
    survive_oom(warned, on_refusal="warn")
    assert gradients_off_by(Run(warned), Run(plain)) == 0


_SEEN: list[int] = []  # the first token of each row


class CountsTokens(Trainer):
    """Reads its batch as what a tokenizer's `pad` returns, which collators pass on."""

    num_tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_tokens += inputs.attention_mask.sum().item()
        _SEEN.extend(inputs.input_ids[:, 0].tolist())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def counting(tmp_path, **options) -> Trainer:
    def encode(rows):
        return BatchEncoding(padded(rows))

    return small_trainer(tmp_path, None, CountsTokens, data_collator=encode, **options)


def test_a_batch_is_of_the_collators_class_whole_and_in_pieces(tmp_path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ragged_rows(8)}
    whole, survived = survive(lambda: counting(tmp_path, **options), {0: 0.8, 3: 0.3})
    assert gradients_off_by(survived, whole) <= 1e-12


def test_what_a_loss_counts_is_of_each_row_once(tmp_path) -> None:
    """A failed attempt and the measurements before the first pieces leave nothing."""
    _SEEN.clear()
    whole, survived = survive(lambda: counting(tmp_path), {0: 0.8, 3: 0.3})
    assert survived.trainer.num_tokens == whole.trainer.num_tokens
    assert _SEEN[:16] == _SEEN[16:]


class Logs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.log({"part": loss.item()})
        return loss


def test_what_a_loss_logs_is_of_the_rows_and_not_of_the_measurements(tmp_path) -> None:
    whole, survived = survive(lambda: small_trainer(tmp_path, trainer_class=Logs), {0: 0.4})

    def parts(run):
        return [logs["part"] for logs in run.trainer.state.log_history if "part" in logs]

    assert len(parts(survived)) > len(parts(whole)) == 4
    assert sum(parts(survived)) == pytest.approx(sum(parts(whole)), rel=1e-6)


class UnpacksTuples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, labels = inputs
        batch = {"input_ids": ids, "labels": labels}
        return super().compute_loss(model, batch, return_outputs, num_items_in_batch)


def test_batches_without_names_are_trained_on_as_they_are(tmp_path, caplog) -> None:
    def collate(rows):
        batch = padded(rows)
        return batch["input_ids"], batch["labels"]

    def make():
        return small_trainer(tmp_path, trainer_class=UnpacksTuples, data_collator=collate)

    trainer = make()
    survive_oom(trainer, on_refusal="warn")
    assert gradients_off_by(Run(trainer), Run(make())) == 0
    assert "its micro-batches are no dictionaries: each is a tuple" in caplog.text


def test_a_loss_that_a_callback_computes_between_steps_adds_no_gradient(tmp_path) -> None:
    def make():
        def look(now) -> None:
            rows = next(iter(trainer.get_train_dataloader()))
            float(trainer.compute_loss(now.model.train(), rows))

        trainer = small_trainer(tmp_path)
        trainer.add_callback(at("step_end", look))
        return trainer

    whole, survived = survive(make, {1: 0.6})
    assert gradients_off_by(survived, whole) <= 1e-12


@pytest.mark.parametrize("on_refusal", ["error", "warn"])
def test_nor_is_one_within_a_step_taken_for_a_micro_batch(tmp_path, on_refusal: str) -> None:
    """Divided, it has a gradient before anybody asks for one."""

    def look(now) -> None:
        memo_of(trainer).limit = 20
        float(trainer.compute_loss(now.model.train(), padded(ragged_rows(4))))

    trainer = small_trainer(tmp_path)
    trainer.add_callback(at("substep_end", look))
    why = "once for each compute_loss, so the gradients of this step are wrong"
    refuse(trainer, why, error=RuntimeError, on_refusal=on_refusal)
    assert trainer.state.global_step == 0


class Shards(torch.autograd.Function):
    """A linear layer whose backward runs backward passes of its own, shard by shard, as tiled layers do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        parts = []
        for some, its in zip(x.chunk(2, 1), gradient.chunk(2, 1), strict=True):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                torch.autograd.backward(ctx.layer(leaf), its)
            parts.append(leaf.grad)
        return torch.cat(parts, 1), None


class Tiled(nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Shards.apply(x, self.inner)


def test_layers_that_accumulate_inside_a_backward_are_refused_and_their_gradients_left_alone(
    tmp_path,
) -> None:
    model, plain = tiny_llama().double(), tiny_llama().double()
    for each in (model, plain):
        each.model.layers[0].mlp.down_proj = Tiled(each.model.layers[0].mlp.down_proj)
    trainer = small_trainer(tmp_path, model)
    refuse(trainer, r"accumulates the gradient of `.*mlp\.down_proj", {1: [250]})
    with pytest.raises(torch.OutOfMemoryError):
        Run(small_trainer(tmp_path, plain), {1: [250]})
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class CoupledInTraining(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


def test_rows_that_are_coupled_in_training_alone_are_found(tmp_path) -> None:
    trainer = small_trainer(
        tmp_path,
        with_norm(lambda norm: nn.Sequential(norm, CoupledInTraining())),
        data_collator=lambda rows: {
            n: torch.stack([r["input_ids"][:6] for r in rows]) for n in ("input_ids", "labels")
        },
    )
    refuse(trainer, "its gradient is not the sum over its parts", {0: [100]}, ladder=())


def test_a_forward_of_your_own_is_refused_and_a_subclass_without_one_is_not(tmp_path) -> None:
    class OwnForCausalLM(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class NamedForCausalLM(LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match=r"OwnForCausalLM\.forward is not that of transformers"):
        survive_oom(small_trainer(tmp_path, OwnForCausalLM(tiny_llama().config).double()))
    survive_oom(small_trainer(tmp_path, NamedForCausalLM(tiny_llama().config).double()))


def test_gpt2(tmp_path) -> None:
    def make():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, name, 0.0)
        return small_trainer(tmp_path, GPT2LMHeadModel(config).double())

    whole, survived = survive(make, {0: 0.4, 1: 0.8})
    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, (
        "it takes its loss in float32"
    )


def test_attached_in_the_middle_of_a_run_it_is_saved_with_it(tmp_path) -> None:
    trainer = small_trainer(tmp_path, save_strategy="steps", save_steps=1, steps=3)
    trainer.add_callback(at("step_begin", lambda _: survive_oom(trainer), 1))
    trainer.train()
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def test_python_and_numpy_draw_the_same_numbers_again(tmp_path) -> None:
    noted: ContextVar[list[list]] = ContextVar("noted")  # where survival does not look
    noted.set([])

    def draw(module, args):
        if module.training:
            noted.get()[-1].append((random.random(), float(np.random.rand())))

    def make():
        noted.get().append([])
        model = tiny_llama().double()
        model.model.layers[0].register_forward_pre_hook(draw)
        random.seed(0)
        np.random.seed(0)
        return small_trainer(tmp_path, model, per_device_train_batch_size=1)

    survive(make, {0: 0.6}, ladder=("checkpointing",))
    (first, *_), (failed, again, *_) = noted.get()
    assert failed == again == first


def test_a_run_that_stopped_in_mid_accumulation_is_resumed_as_if_it_had_not(tmp_path) -> None:
    """By the same Trainer, which has half of a step in its gradients, and by a new one."""

    def make() -> Trainer:
        made = small_trainer(tmp_path, steps=4, save_strategy="steps", save_steps=2)
        survive_oom(made)
        return made

    def stops(*args: object) -> None:
        raise KeyboardInterrupt

    whole = Run(small_trainer(tmp_path / "whole", steps=4))
    failing = {n: [int(whole.num_allocations[n] * part)] for n, part in ((0, 0.8), (3, 0.3))}
    stopped = make()
    step, counted = stopped.training_step, iter(range(6))
    stopped.training_step = lambda *args: (step if next(counted) < 5 else stops)(*args)
    with pytest.raises(KeyboardInterrupt):
        Run(stopped, failing)
    assert all(parameter.grad is not None for parameter in stopped.model.parameters())

    stopped.training_step = step
    for trainer in (stopped, make()):
        again = Run(trainer, {1: failing[3]}, resume_from_checkpoint=True)
        assert trainer.state.global_step == 4
        assert gradients_by_rounding(again.gradients, whole.gradients[2:]) <= 1
        assert weights_by_rounding(again.weights, whole.weights, steps=4) <= 1
        assert again.allocations.num_failed == 1
        shutil.rmtree(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("by", ["call", "callback"])
def test_it_takes_the_place_of_the_batch_size_finder(tmp_path, caplog, by: str) -> None:
    """The finder would begin again with 3 rows, and steps of 6."""

    def finding():
        return small_trainer(tmp_path, auto_find_batch_size=True)

    whole = Run(small_trainer(tmp_path))
    trainer = finding()
    if by == "call":
        survive_oom(trainer)
    else:
        trainer.add_callback(SurviveOOM(on_refusal="error"))
    survived = Run(trainer, {0: [whole.num_allocations[0] // 2]})

    assert survived.allocations.num_failed == 1
    assert gradients_off_by(survived, whole) <= 1e-12
    assert trainer._train_batch_size == 4
    assert "survival replaces auto_find_batch_size" in caplog.text
    assert trainer.args.auto_find_batch_size  # it is the user's again

    alone = Run(finding(), {0: [whole.num_allocations[0] // 2]})
    assert alone.trainer._train_batch_size < 4


def test_where_it_cannot_help_the_finder_goes_on(tmp_path, caplog) -> None:
    trainer = small_trainer(tmp_path, auto_find_batch_size=True, trainer_class=OwnLoss)
    trainer.add_callback(SurviveOOM())
    Run(trainer, {0: [20]})
    assert caplog.text.count("[out-of-memory-refused]") == 1
    assert trainer._train_batch_size < 4


def test_a_finder_around_the_trainer_finds_the_first_size(tmp_path) -> None:
    tried = []

    def trained(batch_size: int) -> Trainer:
        tried.append(batch_size)
        trainer = small_trainer(tmp_path, per_device_train_batch_size=batch_size)
        survive_oom(trainer)
        return Run(trainer, {0: [20]}).trainer

    found = find_executable_batch_size(trained, starting_batch_size=4)
    assert found().state.global_step == 2
    assert tried == [4]
