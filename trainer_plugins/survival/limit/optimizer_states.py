"""Optimizer states: creates them before step 1, so an OOM comes in a divisible micro-batch."""

from typing import Any

import torch

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt


def create_states(optimizer: Any) -> str | None:
    """Create the states of torch's AdamW, Adam or SGD by an empty step, or return why not."""
    # The first real step stays bit-equal, and cannot fail half way with some weights updated. We go
    # parameter by parameter, so this needs no more memory than the states and one gradient.
    while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper; DeepSpeed's holds a share
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    name = type(inner).__name__
    if inner.state:
        return None  # a checkpoint brought them
    if type(inner) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        return f"{name} creates its states in the first step: an OOM there ends the run"
    if any(group.get("dampening") for group in inner.param_groups):
        return "SGD with dampening starts in the first step: an OOM there ends the run"
    if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
        return f"{name} has step hooks, and creates states in step 1: an OOM there ends the run"
    try:
        failed = attempt(lambda: _step_of_nothing(inner))
    except Exception:
        inner.state.clear()
        raise
    if isinstance(failed, DidNotFit):
        inner.state.clear()
        return f"weights, gradients and states of {name} may not fit together: {failed.first_line}"
    return None


def _step_of_nothing(optimizer: torch.optim.Optimizer) -> None:
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                # Decay is 0 too: Adam and SGD add it to the gradient, and so to the moments.
                one = {**group, "params": [parameter], "lr": 0.0, "weight_decay": 0.0}
                if "eps" in group:  # Adam divides by it alone here, where the user's may be 0
                    one["eps"] = 1.0
                before, parameter.grad = parameter.grad, torch.zeros_like(parameter)
                try:
                    another = kind([one])
                    another.step()
                finally:
                    parameter.grad = before
                optimizer.state.update(another.state)
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
