"""One Trainer that trains several times: another accelerator, another model, after an interruption."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForSequenceClassification, Trainer, set_seed
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.integrations import integration_utils
from transformers.trainer_utils import HPSearchBackend

from tests.models import tiny_llama
from tests.survival.failing import (
    Gradients,
    Run,
    gradients_off_by,
    off_by_steps,
    padded,
    ragged_rows,
    small_trainer,
)
from trainer_plugins import protect, survive_oom
from trainer_plugins.survival import Survival


class Twice:
    """Stands for wandb, which need not be installed: two trials."""

    def ensure_available(self) -> None:
        pass

    def run(self, trainer, n_trials, direction, **kwargs):
        for rate in (1e-3, 2e-3)[:n_trials]:
            trainer.train(trial={"learning_rate": rate})


class WithModels(Trainer):
    """Has a `model_init`, as a search wants it."""

    def __init__(self, model, **kwargs) -> None:
        super().__init__(model_init=lambda: tiny_llama().double(), **kwargs)


@pytest.mark.parametrize(
    "attach", [survive_oom, lambda trainer: protect(trainer, preset="survive")]
)
def test_every_trial_of_a_search_survives(tmp_path, monkeypatch, attach) -> None:
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.WANDB, Twice)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(id="1")))

    def searched(attach=None):
        trainer, gradients = small_trainer(tmp_path, trainer_class=WithModels), list[list]()
        trainer.add_callback(Gradients(gradients))
        survival = attach(trainer) if attach else None
        fails = OnceEachTrial(trainer) if attach else None
        trainer.hyperparameter_search(hp_space=dict, n_trials=2, backend="wandb")
        return trainer, gradients, survival, fails

    _, whole, *_ = searched()
    trainer, survived, survival, fails = searched(attach)

    assert fails.num_failed == 4
    assert len(survived) == len(whole) == 4
    assert off_by_steps(survived, whole) <= 1e-12
    if isinstance(survival, Survival):
        survival.detach()
        assert not {"backward", "gather"} & vars(trainer.accelerator).keys()


class OnceEachTrial:
    """In each trial the first micro-batch fails in the forward pass, and the third in the backward pass."""

    def __init__(self, trainer) -> None:
        self.trainer, self.num_failed, self.num = trainer, 0, 0
        self._step, trainer.training_step = trainer.training_step, self.step

    def step(self, model, *args, **kwargs):
        self.num += 1
        where = {1: model.model.layers[1], 3: None}.get((self.num - 1) % 4 + 1, False)
        hooks: list = []
        if where is not False:
            layer = model.model.layers[1]

            def fail(*_):
                hooks.pop().remove()
                self.num_failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

            if where is not None:
                hooks.append(layer.register_forward_pre_hook(fail))
            else:
                hooks.append(layer.register_full_backward_pre_hook(fail))
        return self._step(model, *args, **kwargs)


def test_a_model_that_another_training_makes_is_judged_anew(tmp_path) -> None:
    models = iter([tiny_llama().double(), tiny_llama().double(), classifier()])

    class Changes(Trainer):
        def __init__(self, model, **kwargs) -> None:
            super().__init__(model_init=lambda: next(models), **kwargs)

    def collate(rows):
        batch = padded(rows)
        return {**batch, "labels": torch.arange(len(rows)) % 3} if is_classifier[-1] else batch

    is_classifier = [False]
    trainer = small_trainer(tmp_path, trainer_class=Changes, data_collator=collate)
    survive_oom(trainer)
    trainer.train()
    is_classifier.append(True)
    second = Run(trainer, {0: [60]})
    assert second.allocations.num_failed == 1

    plain = small_trainer(tmp_path, classifier(), data_collator=collate)
    assert gradients_off_by(second, Run(plain)) <= 1e-5, "transformers takes it in float32"


def classifier():
    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels, config.architectures = 3, None
    return LlamaForSequenceClassification(config).double()


def test_an_interruption_in_the_middle_of_a_division_leaves_all_as_it_was(tmp_path) -> None:
    def interrupt(module, args):
        if module is not trainer.model.lm_head:
            return
        calls.append(len(args[0]) if args else 0)
        if (
            len(calls) == 7
        ):  # whole, three to measure with, one piece, and in the midst of the second
            raise KeyboardInterrupt

    calls: list = []
    trainer = small_trainer(tmp_path)
    before = [p.requires_grad for p in trainer.model.parameters()], dict(vars(trainer.accelerator))
    survival = survive_oom(trainer)
    # Of all modules: survival would take back what a hook of the model has counted.
    hook = register_module_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        Run(trainer, {0: [250]})
    hook.remove()

    assert [p.requires_grad for p in trainer.model.parameters()] == before[0]
    rows = padded(ragged_rows(4))
    trainer.model.zero_grad()
    trainer.accelerator.backward(
        trainer.compute_loss(trainer.model.train(), rows)
    )  # by hand, as in a notebook
    by_hand = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    trainer.model(**rows).loss.backward()
    assert all(
        torch.equal(mine, p.grad)
        for mine, p in zip(by_hand, trainer.model.parameters(), strict=True)
    )

    trainer.model.load_state_dict(tiny_llama().double().state_dict())
    trainer.optimizer = trainer.lr_scheduler = None
    set_seed(1)
    again = Run(trainer, {1: [200]})
    assert again.allocations.num_failed == 1
    plain = small_trainer(tmp_path)
    set_seed(1)
    assert gradients_off_by(again, Run(plain)) <= 1e-12
    survival.detach()
    assert dict(vars(trainer.accelerator)).keys() == before[1].keys()
