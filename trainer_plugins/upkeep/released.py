"""Frees a Trainer's GPU memory, and names the holders of the rest."""

import gc
import traceback
from types import TracebackType
from weakref import ref

import torch
from torch import nn

from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.record.oom_record import Held
from trainer_plugins.streaming.stream import stream_of
from trainer_plugins.units import size
from trainer_plugins.upkeep.holders import GROWTH_FRACTION, list_held
from trainer_plugins.upkeep.stack import code_of, find_last_errors


def released(trainer: HfTrainer) -> "Released":
    """Free a Trainer's GPU memory: now, and again at the end of a `with` block.

        released(trainer)              # after a training, whether it ended or failed

        with released(trainer):        # also if it raises
            trainer.train()

    The model, and any other module of the Trainer, moves to main memory, and back to its GPU when
    it is next called, so you can train, evaluate and save as before. Gradients, optimizer states,
    the dataloaders' batches, and the wrapper of DDP with its buckets are dropped; a later `train()`
    starts with new states, unless it resumes. Tracebacks of a failure in this Trainer that Python
    and IPython keep lose the variables of their frames, not their lines.

    Tensors held by other variables stay; the result names each of them as in code.

    Cost: main memory the size of the model, one copy over the bus each way, and 0.1 to 1 s to find
    holders, if anything is left.

    Args:
        trainer: alone or under DDP. Under FSDP or DeepSpeed, whose ranks hold shards, and if the
            model is spread over several devices, the model stays where it is.

    Returns:
        A `Released`, with `freed_bytes`, `left_bytes` and `held`.
    """
    return Released(trainer)


class Released:
    """The bytes freed, the bytes left, and their holders. Also a context manager."""

    freed_bytes = 0  # total allocated bytes freed
    left_bytes = 0  # allocated bytes left
    held: tuple[Held, ...] = ()  # the largest tensors left, if those exceed 1% of the card

    def __init__(self, trainer: HfTrainer) -> None:
        # A notebook keeps the result of a cell in `Out`: it must not keep the Trainer.
        self._trainer = ref(trainer)
        self._device = open_device(trainer.args.device)
        self._release()

    def __enter__(self) -> "Released":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._release(None if error is None else error.__traceback__)

    def __repr__(self) -> str:
        lines = [
            f"{size(self.freed_bytes)} freed on {self._device.name}, {size(self.left_bytes)} left"
        ]
        lines += [f"  {size(each.num_bytes)} held by {each.holder}" for each in self.held]
        return "\n".join(lines)

    def _release(self, frames: TracebackType | None = None) -> None:
        before_bytes = self._device.read().allocated_bytes
        _clear(frames)
        if (trainer := self._trainer()) is not None:
            _let_go(trainer)
            del trainer
        gc.collect()
        self._device.release_cached()
        after = self._device.read()
        self.left_bytes = after.allocated_bytes
        self.freed_bytes += max(0, before_bytes - self.left_bytes)
        self.held = ()
        kind = self._device.name.split(":")[0]
        # Main memory holds far more than tensors.
        if kind != "cpu" and self.left_bytes > GROWTH_FRACTION * after.total_bytes:
            self.held = list_held(kind, self.left_bytes)


class _ComesBack:
    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self.handle.remove()
        nn.Module.to(module, self.device)


def _let_go(trainer: HfTrainer) -> None:
    _forget_failure(trainer)
    handler = trainer.callback_handler
    handler.train_dataloader = handler.eval_dataloader = None
    handler.model, handler.optimizer = trainer.model, trainer.optimizer
    handler.lr_scheduler = trainer.lr_scheduler
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    trainer.accelerator.free_memory()
    trainer.model_wrapped = trainer.model
    if trainer.model is not None:  # None after one of optuna's trials
        # The next training or evaluation then prepares the model again, and moves it.
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        vars(trainer.model).pop("_is_accelerate_prepared", None)
    if trainer.optimizer is not None:
        trainer.optimizer.state.clear()
    modules = {id(value): value for value in vars(trainer).values() if isinstance(value, nn.Module)}
    for module in modules.values():
        module.zero_grad(set_to_none=True)
        if (stream := stream_of(module)) is not None:  # most of it is in main memory already
            stream.release()
            continue
        devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        device = devices.pop() if len(devices) == 1 else None
        if device is not None and device.type == trainer.args.device.type != "cpu":
            _ComesBack(module, device)
            nn.Module.to(module, "cpu")


def _forget_failure(trainer: HfTrainer) -> None:
    """Clear the frames of the interpreter's last error, if this Trainer raised it."""
    ours = {code_of(getattr(type(trainer), name)) for name in ("train", "evaluate", "predict")}
    for error in find_last_errors():
        frames = error.__traceback__
        if any(frame.f_code in ours for frame, _ in traceback.walk_tb(frames)):
            _clear(frames)


def _clear(frames: TracebackType | None) -> None:
    """Clear the variables of a traceback's frames, except those still running."""
    for frame, _ in traceback.walk_tb(frames):
        try:
            frame.clear()
        except RuntimeError:
            continue
        # Up to Python 3.12, if a frame's variables were read, as IPython does to print them, it
        # keeps a copy; reading them again renews it.
        frame.f_locals  # noqa: B018
