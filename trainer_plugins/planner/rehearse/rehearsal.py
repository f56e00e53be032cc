"""Run an unmodified Trainer on tensors without bytes: three optimizer steps and what follows."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback

from trainer_plugins.hf_trainer import HfArguments, HfTrainer
from trainer_plugins.planner import progress
from trainer_plugins.planner.kind import Kind
from trainer_plugins.planner.one_card import OneCard
from trainer_plugins.planner.pretend import quantised
from trainer_plugins.planner.rehearse import rollout, ship
from trainer_plugins.planner.rehearse.evaluation import evaluate
from trainer_plugins.planner.rehearse.generate import Generation
from trainer_plugins.planner.rehearse.model_of_config import model_of
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.tracing.values import NOTHING, Asked
from trainer_plugins.streaming.stream import stream_of

if TYPE_CHECKING:
    from trainer_plugins.planner.rehearse.streamed import Streaming

Batch = dict[str, object]
# builds the model of a config on a device, or divided among cards, and says what was assumed
ModelOf = Callable[[ConfigSource, torch.device | None, int], tuple[torch.nn.Module, list[str]]]

_MICRO_STEPS_RUN = 2  # besides the last one, in which ranks reduce; later ones repeat the second


@dataclass(frozen=True, slots=True)
class Build:
    """Holds what a Trainer is built with, besides its source."""

    args: HfArguments  # the user's
    kind: Kind
    has_padding: bool | None  # whether batches have padding; None: as the source says
    folder: str  # its output_dir
    streaming: "Streaming | None" = None
    model_of: ModelOf = model_of
    loads: Callable[[bytes], Any] = ship.loads
    has_stand_ins: bool = True  # for what needs a card; on the dry card everything is real

    @property
    def home(self) -> torch.device:
        """Return where the model of a config is built: on the card, unless it is streamed."""
        return self.args.device if self.streaming is None else torch.device("cpu")


@dataclass(slots=True)
class Rehearsed:
    """Holds a Trainer with its model on the card, and its batches."""

    trainer: HfTrainer
    make_batch: Callable[[], Batch]
    make_evaluation_batch: Callable[[], Batch] | None  # None if the run does not evaluate
    num_evaluation_batches: int
    has_padding: bool
    assumptions: list[str]
    asked: Asked = NOTHING  # what the model asks of the numbers in its batches
    has_packed_rows: bool = False  # of several texts each, whose positions begin again


def rehearse(run: Rehearsed, kind: Kind, strategy: OneCard, tracker: Tracker) -> None:
    """Train; then evaluate, save and resume, if the run does so. It uses the Trainer up."""
    trainer = run.trainer
    methods: Any = trainer  # mypy lets no method be replaced
    num_batches = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    methods.get_train_dataloader = lambda: loader(trainer, run.make_batch, num_batches)
    _name_parameters(trainer.model, kind, tracker)
    for model in other_models(trainer):
        tracker.tag((*model.parameters(), *model.buffers()), "frozen weights")
    if kind.trains_on_completions:
        rollout.prepare(trainer, tracker)
        run.assumptions.append(rollout.ASSUMPTION)
    tracker.moment = "forward"
    tracker.values.asked = run.asked
    with _moments(trainer, tracker), _modules(trainer.model, tracker):
        _skip_like_micro_steps(trainer, kind)
        methods.add_callback(_InTheEnd(lambda: _evaluate_and_save(run, kind, strategy, tracker)))
        trainer.train()
        if kind.saves and kind.resumes:
            if kind.is_streamed and (stream := stream_of(trainer.model)) is not None:
                with tracker.during("save"):
                    stream.release()  # the process that resumes has not fetched a layer
            strategy.resume(trainer, tracker)


class _InTheEnd(TrainerCallback):  # type: ignore[misc]
    """Calls a function after the last step, while the Trainer holds its batches, loss and norm."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """Call the function."""
        self._call()


def _evaluate_and_save(run: Rehearsed, kind: Kind, strategy: OneCard, tracker: Tracker) -> None:
    trainer, make, number = run.trainer, run.make_evaluation_batch, run.num_evaluation_batches
    methods: Any = trainer
    _name_parameters(trainer.model, kind, tracker)  # a strategy may have replaced them
    if make is not None:
        methods.get_eval_dataloader = lambda *_, **__: loader(trainer, make, number)
        with tracker.during("evaluation"):
            run.assumptions.extend(evaluate(trainer, number))
        tracker.moment = "evaluation"  # what the loop lets go after it is no part of a step
    if kind.saves:
        strategy.save(trainer, tracker)
        tracker.moment = "save"


def other_models(trainer: HfTrainer) -> list[torch.nn.Module]:
    """Return the models of a Trainer that it does not train: a reference, a teacher, a reward."""
    trained = {id(trainer.model), id(getattr(trainer, "model_wrapped", None))}
    held = (*vars(trainer).values(), *getattr(trainer, "reward_funcs", ()))
    others = {id(value): value for value in held if isinstance(value, torch.nn.Module)}
    return [value for key, value in others.items() if key not in trained]


def _name_parameters(model: torch.nn.Module, kind: Kind, tracker: Tracker) -> None:
    """Tell the tracker the category and the module of each parameter and buffer."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [
        tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad
    ]
    if kind.is_quantised:
        frozen += quantised.scales_of(model)
    tracker.tag(frozen, "frozen weights")
    tracker.tag(trainable, "weights")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        storage = tracker.storage_of(tensor)
        if storage is not None:
            storage.module = _plain(name.rpartition(".")[0])


def _plain(name: str) -> str:
    """Leave out of a module's name what wraps it, such as `_fsdp_wrapped_module`."""
    return ".".join(part for part in name.split(".") if not part.startswith("_"))


def _name_after(parameter: torch.Tensor, tensors: Iterable[torch.Tensor], tracker: Tracker) -> None:
    """Count tensors for the module of the parameter they belong to, whatever made them."""
    owner = tracker.storage_of(parameter)
    for tensor in tensors:
        storage = tracker.storage_of(tensor)
        if owner is not None and storage is not None:
            storage.module = owner.module


@contextlib.contextmanager
def _moments(trainer: HfTrainer, tracker: Tracker) -> Iterator[None]:
    """Tell the tracker each moment of the run, and what gradients and optimizer states are."""
    training_step = trainer.training_step
    backward: Callable[..., None] = torch.autograd.backward

    def step(*args: object, **kwargs: object) -> object:
        tracker.moment = "forward"
        number = trainer.state.global_step + 1
        progress.step(f"rehearsing the training, step {number} of {trainer.args.max_steps}")
        return training_step(*args, **kwargs)

    def run_backward(*args: object, **kwargs: object) -> None:
        with tracker.graph.backward():
            if tracker.moment == "backward":  # reentrant checkpointing runs a backward in another
                backward(*args, **kwargs)
                return
            tracker.moment = "backward"
            backward(*args, **kwargs)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                tracker.tag([parameter.grad], "gradients")
                _name_after(parameter, [parameter.grad], tracker)
        tracker.moment = "optimizer step"  # clipping is part of it

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            states = [value for value in state.values() if isinstance(value, torch.Tensor)]
            tracker.tag(states, "optimizer states")
            _name_after(parameter, states, tracker)

    model: Any = trainer.model
    generate = getattr(model, "generate", None)

    def generate_in_its_moment(*args: object, **kwargs: object) -> object:
        assert generate is not None
        generation = Generation(tracker)
        with generation.around():
            return generation.completed(generate(*args, **kwargs))

    trainer.training_step = step
    torch.autograd.backward = run_backward
    hook = register_optimizer_step_post_hook(stepped)
    if generate is not None:
        model.generate = generate_in_its_moment
    try:
        yield
    finally:
        hook.remove()
        torch.autograd.backward = backward


@contextlib.contextmanager
def _modules(model: torch.nn.Module, tracker: Tracker) -> Iterator[None]:
    """Tell the tracker which module is running its forward, where backward nodes are made."""
    names = {id(module): _plain(name) for name, module in model.named_modules()}
    outer: list[str] = []

    def enter(module: torch.nn.Module, _: object) -> None:
        outer.append(tracker.module)
        tracker.module = names.get(id(module), tracker.module)
        tracker.graph.enter(tracker.module)

    def leave(*_: object) -> None:
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


def loader(trainer: HfTrainer, make: Callable[[], Batch], num_batches: int) -> object:
    """Return what gives each rank this number of batches."""
    loader: object = torch.utils.data.DataLoader(
        range(num_batches * _num_readers(trainer)),  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=lambda _: make(),
    )
    return trainer.accelerator.prepare_data_loader(loader)


def _num_readers(trainer: HfTrainer) -> int:
    """Return how many cards read batches of their own.

    Cards of one row get the same batch (accelerate/data_loader.py, prepare_data_loader), except
    under DeepSpeed, which gathers the batches of such cards.
    """
    shared = getattr(trainer.accelerator, "parallelism_config", None)
    num_cards = trainer.accelerator.num_processes
    return num_cards // (shared.cp_size * shared.tp_size) if shared is not None else num_cards


def _skip_like_micro_steps(trainer: HfTrainer, kind: Kind) -> None:
    """Skip micro-steps that repeat the one before. Their batches still go to the card."""
    training_step = trainer.training_step
    count = 0

    def step(*args: object, **kwargs: object) -> object:
        nonlocal count
        accumulation = trainer.args.gradient_accumulation_steps
        num_steps, position = divmod(count, accumulation)
        count += 1
        is_skipped = _MICRO_STEPS_RUN <= position < accumulation - 1
        if kind.trains_on_completions:
            if num_steps == trainer.args.max_steps - 1 and position == 0:
                rollout.generate_again(trainer)
            is_skipped = is_skipped and rollout.skip(trainer)
        if is_skipped:
            return torch.zeros((), device=trainer.args.device)
        return training_step(*args, **kwargs)

    trainer.training_step = step
