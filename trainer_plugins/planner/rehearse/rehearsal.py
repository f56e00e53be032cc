"""Run an unmodified Trainer on tensors without bytes: three optimizer steps, and whatever else its run will do."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer_plugins.planner.request import OPTIMIZER_STEPS
from trainer_plugins.planner.sharded import sharded_checkpoint
from trainer_plugins.planner.tracing.trace import Tracker

Batch = dict[str, Any]

_MICRO_STEPS_RUN = 2
"""The second micro-batch of a step adds to gradients; the third does what the second did, until the
last, in which ranks reduce."""

_EVALUATION_STEPS_RUN = 2


def rehearse(run: Any, tracker: Tracker) -> None:
    """Train, evaluate where there is something to evaluate, save, and resume.

    Args:
        run: the `build.Rehearsed`. Its Trainer has its model on the card, and is used up.
        tracker: sees what happens.
    """
    trainer = run.trainer
    num_batches = OPTIMIZER_STEPS * trainer.args.gradient_accumulation_steps
    trainer.get_train_dataloader = lambda: _loader(trainer, run.make_batch, num_batches)
    _name_parameters(trainer.model, tracker)
    for model in other_models(trainer):
        tracker.tag((*model.parameters(), *model.buffers()), "frozen weights")
    tracker.moment = "forward"
    with _moments(trainer, tracker), _modules(trainer.model, tracker):
        _skip_like_micro_steps(trainer)
        trainer.train()
        _name_parameters(trainer.model, tracker)  # those of now: a strategy may have replaced them
        if run.make_evaluation_batch is not None:
            num_batches = run.num_evaluation_batches
            trainer.get_eval_dataloader = lambda *_, **__: _loader(
                trainer, run.make_evaluation_batch, num_batches
            )
            _skip_like_evaluation_steps(trainer, num_batches)
            with tracker.during("evaluation"):
                trainer.evaluate()
        is_sharded = getattr(trainer.accelerator.state, "fsdp_plugin", None) is not None
        if run.saves:
            (sharded_checkpoint.save if is_sharded else _save)(trainer, tracker)
        if run.saves and run.resumes and not trainer.is_deepspeed_enabled:
            (sharded_checkpoint.resume if is_sharded else _resume)(trainer, tracker)


def other_models(trainer: Any) -> list[Any]:
    """Models that a Trainer holds beside the one it trains: a reference, a teacher, a reward."""
    trained = {id(trainer.model), id(getattr(trainer, "model_wrapped", None))}
    others = {
        id(value): value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)
    }
    return [value for key, value in others.items() if key not in trained]


def _name_parameters(model: Any, tracker: Tracker) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [
        tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad
    ]
    tracker.tag(frozen, "frozen weights")
    tracker.tag(trainable, "weights")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        storage = tracker.storage_of(tensor)
        if storage is not None:
            storage.module = name.rpartition(".")[0]


def _name_after(parameter: Any, tensors: Iterable[Any], tracker: Tracker) -> None:
    """What belongs to a parameter is of its module, whatever has made it."""
    owner = tracker.storage_of(parameter)
    for tensor in tensors:
        storage = tracker.storage_of(tensor)
        if owner is not None and storage is not None:
            storage.module = owner.module


@contextlib.contextmanager
def _moments(trainer: Any, tracker: Tracker) -> Iterator[None]:
    """Follow the run from moment to moment, and say what its tensors turn out to be."""
    training_step, backward = trainer.training_step, torch.autograd.backward

    def step(*args: Any, **kwargs: Any) -> Any:
        tracker.moment = "forward"
        return training_step(*args, **kwargs)

    def run_backward(*args: Any, **kwargs: Any) -> None:
        with tracker.graph.backward():
            if tracker.moment == "backward":  # reentrant checkpointing: one inside of another
                backward(*args, **kwargs)
                return
            tracker.moment = "backward"
            backward(*args, **kwargs)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                tracker.tag([parameter.grad], "gradients")
                _name_after(parameter, [parameter.grad], tracker)
        tracker.moment = "optimizer step"  # clipping belongs to it

    def stepped(optimizer: Any, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            states = [value for value in state.values() if isinstance(value, torch.Tensor)]
            tracker.tag(states, "optimizer states")
            _name_after(parameter, states, tracker)

    generate = getattr(trainer.model, "generate", None)

    def generate_in_its_moment(*args: Any, **kwargs: Any) -> Any:
        assert generate is not None
        with tracker.during("generation"):
            return generate(*args, **kwargs)

    trainer.training_step = step
    torch.autograd.backward = run_backward
    hook = register_optimizer_step_post_hook(stepped)
    if generate is not None:
        trainer.model.generate = generate_in_its_moment
    try:
        yield
    finally:
        hook.remove()
        torch.autograd.backward = backward


@contextlib.contextmanager
def _modules(model: Any, tracker: Tracker) -> Iterator[None]:
    """Know the innermost module that is running, and that in whose forward a node of the backward was made."""
    names = {id(module): name for name, module in model.named_modules()}
    outer: list[str] = []

    def enter(module: Any, _: Any) -> None:
        outer.append(tracker.module)
        tracker.module = names.get(id(module), tracker.module)
        tracker.graph.enter(tracker.module)

    def leave(*_: Any) -> None:
        tracker.module = outer.pop() if outer else ""
        tracker.graph.enter(tracker.module)

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _loader(trainer: Any, make: Callable[[], Batch], num_batches: int) -> Any:
    loader: Any = torch.utils.data.DataLoader(
        range(num_batches * trainer.accelerator.num_processes),  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=lambda _: make(),
    )
    return trainer.accelerator.prepare_data_loader(loader)


def _skip_like_micro_steps(trainer: Any) -> None:
    """Do nothing in the micro-steps that repeat the one before; their batches are on the card all the same."""
    training_step = trainer.training_step
    count = 0

    def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        position = count % trainer.args.gradient_accumulation_steps
        count += 1
        if _MICRO_STEPS_RUN <= position < trainer.args.gradient_accumulation_steps - 1:
            return torch.zeros((), device=trainer.args.device)
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = step


def _skip_like_evaluation_steps(trainer: Any, num_batches: int) -> None:
    """Of the evaluation steps in the middle only make the predictions, which may stay on the card."""
    prediction_step = trainer.prediction_step
    count, shapes = 0, None

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count, shapes
        count += 1
        if _EVALUATION_STEPS_RUN < count < num_batches and shapes is not None:
            return _like(shapes)
        result = prediction_step(*args, **kwargs)
        shapes = _shapes(result)
        return result

    trainer.prediction_step = step


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return [_shapes(each) for each in value]
    return (
        {name: _shapes(each) for name, each in value.items()} if isinstance(value, dict) else None
    )


def _like(shapes: Any) -> Any:
    if isinstance(shapes, tuple):
        return torch.empty(shapes[0], dtype=shapes[1], device=shapes[2])
    if isinstance(shapes, list):
        return tuple(_like(each) for each in shapes)
    return {name: _like(each) for name, each in shapes.items()} if shapes is not None else None


def _save(trainer: Any, tracker: Tracker) -> None:
    """Tensors go to the host one by one: transformers/modeling_utils.py, save_pretrained, and torch.save."""
    with tracker.during("save"):
        states = trainer.model.state_dict()
        if trainer.is_deepspeed_enabled:
            with contextlib.suppress(ValueError):  # it refuses where weights shall not be gathered
                states = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        for tensor in states.values():
            tensor.to("cpu")


def _resume(trainer: Any, tracker: Tracker) -> None:
    """States are loaded to the host, and moved: transformers/trainer.py, _load_optimizer_and_scheduler."""
    if trainer.optimizer is None:
        return
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    with tracker.during("resume"):
        loaded = _on_host(optimizer.state_dict())
        optimizer.state.clear()  # a fresh optimizer has none
        optimizer.load_state_dict(loaded)
        states = (value for state in optimizer.state.values() for value in state.values())
        tracker.tag(
            (value for value in states if isinstance(value, torch.Tensor)), "optimizer states"
        )


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("cpu")
    if isinstance(value, dict):
        return {name: _on_host(each) for name, each in value.items()}
    return [_on_host(each) for each in value] if isinstance(value, (list, tuple)) else value
