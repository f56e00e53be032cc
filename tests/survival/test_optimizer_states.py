"""The optimizer's states are there before the first micro-batch, and nothing else is different."""

from types import SimpleNamespace

import pytest
import torch

from tests.events import at
from tests.models import tiny_llama
from tests.survival.failing import small_trainer
from trainer_plugins import survive_oom

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-3, amsgrad=True, foreach=True
    ),
    "Adam with decay": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
}


def train(tmp_path, make_optimizer, attached: bool):
    model = tiny_llama()
    groups = [
        {"params": list(model.model.parameters())},
        {"params": list(model.lm_head.parameters()), "lr": 1e-2},
    ]
    trainer = small_trainer(tmp_path, model, steps=3, optimizers=(make_optimizer(groups), None))
    if attached:
        survive_oom(trainer)
    seen = SimpleNamespace()

    def look(now) -> None:
        seen.num_states = len(now.optimizer.state)
        seen.weights = [each.detach().clone() for each in model.parameters()]
        seen.has_gradients = any(each.grad is not None for each in model.parameters())

    trainer.add_callback(at("step_begin", look, 0))
    trainer.train()
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    return seen, [*model.parameters(), *states]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_exist_early_and_training_is_bit_for_bit_the_same(tmp_path, name: str) -> None:
    without, ended = train(tmp_path, OPTIMIZERS[name], attached=False)
    attached, ended_attached = train(tmp_path, OPTIMIZERS[name], attached=True)

    assert (without.num_states, attached.num_states) == (0, len(attached.weights))
    assert all(
        torch.equal(a, b) for a, b in zip(attached.weights, tiny_llama().parameters(), strict=True)
    )
    assert not attached.has_gradients
    assert all(torch.equal(a, b) for a, b in zip(ended_attached, ended, strict=True))


def test_an_epsilon_of_0_makes_no_weight_a_nan(tmp_path) -> None:
    def of_the_head(groups):  # each of its gradients is more than 0
        return torch.optim.AdamW(groups[1:], eps=0.0)

    _, ended = train(tmp_path, of_the_head, attached=False)
    _, ended_attached = train(tmp_path, of_the_head, attached=True)
    assert all(torch.equal(a, b) for a, b in zip(ended_attached, ended, strict=True))


@pytest.mark.parametrize(
    ("make_optimizer", "said"),
    [
        (
            lambda parameters: torch.optim.RMSprop(parameters),
            "RMSprop creates its states in the first step",
        ),
        (
            lambda parameters: torch.optim.SGD(parameters, momentum=0.9, dampening=0.5),
            "SGD with dampening",
        ),
    ],
    ids=["another optimizer", "dampening"],
)
def test_where_it_would_change_something_it_is_left_out_and_said(
    tmp_path, caplog, make_optimizer, said: str
) -> None:
    seen, _ = train(tmp_path, make_optimizer, attached=True)

    assert seen.num_states == 0
    assert caplog.text.count(said) == 1
