"""Watches the Trainer of a program on the dry card, and ends the program once all is measured.

A few training steps on the longest rows, one evaluation and one save contain everything that
determines memory. `TRAINER_PLUGINS_DRY_STEPS` sets how many steps; if unset, programs run in full.
"""

import atexit
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import Any

import psutil
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.nn.modules.module import register_module_forward_pre_hook

from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.inside import alone
from trainer_plugins.inside.later import Waiting, find_later_evaluation, find_later_training
from trainer_plugins.inside.named import Namer, count_parameters
from trainer_plugins.inside.process import host_peak, say
from trainer_plugins.inside.seen import MOST_EVENTS, Seen, find_peak, write, write_results
from trainer_plugins.patched import Patches

_RESUMES = "TRAINER_PLUGINS_DRY_RESUMES"  # set if a process only resumes another's checkpoint
_MICRO_STEPS = 2
_NCCL_LOOKS_SECONDS = 0.15
"""Steps must last longer than the interval at which NCCL's group polls for finished work, to free
its tensors (ProcessGroupNCCL.cpp, kWatchdogThreadSleepMillis).
"""

_OF_THE_FULLEST = (
    *("arguments", "accumulation", "rows", "tokens", "why_whole", "is_quantised", "model"),
    *("num_parameters", "num_trainable_parameters"),
)
"""Facts of the training that takes most memory, if a program has several."""

_Peaks = list[tuple[int, int]]  # per card: allocated and reserved bytes
_load: list[tuple[int, _Peaks]] = []  # when the first pass began, and the peaks until then
_hooks: list[Any] = []

about: dict[str, Any] = {}
"""Facts from `of_request`, by `Seen`'s fields; those known only at the end are functions."""


def record() -> None:
    """Record where memory is allocated, and write the results of a program that runs out of it."""
    if "TRAINER_PLUGINS_DRY_STEPS" not in os.environ:
        return
    # Frees are not recorded: torch 2.11 would lose an exception being raised, and non-reentrant
    # checkpointing stops early with one.
    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=MOST_EVENTS
    )
    # A program that records for itself would restart or end this recording.
    torch.cuda.memory._record_memory_history = lambda *_, **__: None
    _hooks.append(register_module_forward_pre_hook(_notice_first_pass))

    def write_and_show(show: Any, kind: type[BaseException], error: Any, traceback: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            if _Observer.last is not None:
                _Observer.last.write(died=True)
            else:
                seen = Seen(rank=int(os.environ.get("RANK", "0")), died=True)
                moments, seen.began = _read_load()
                seen.moments = moments or {"load": _peaks()}
                write(seen)
        show(kind, error, traceback)

    Patches().wrap(sys, "excepthook", write_and_show)


def _notice_first_pass(module: torch.nn.Module, _: object) -> None:
    """Notice a model that runs before its training, as in TRL's precompute_ref_log_probs."""
    if hasattr(module, "save_pretrained") and not _load and any(now for now, _ in _peaks()):
        _load.append((time.time_ns() // 1000, _peaks()))
        _reset_peaks()


def _read_load() -> tuple[dict[str, _Peaks], list[tuple[int, str]]]:
    """Return the peaks of each moment so far, and when each began; the moment `load` continues."""
    while _hooks:
        _hooks.pop().remove()
    if not _load:
        return {}, [(0, "load")]
    began, of_load = _load.pop()
    moments = {"load": of_load, "forward": _peaks()}
    _reset_peaks()
    return moments, [(0, "load"), (began, "forward"), (time.time_ns() // 1000, "load")]


def _peaks() -> _Peaks:
    return [
        (torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index))
        for index in range(torch.cuda.device_count())
    ]


def _reset_peaks() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


def watch_trainers() -> None:
    """Replace `Trainer.train` by this module's short training; a program may have several."""
    if "TRAINER_PLUGINS_DRY_STEPS" not in os.environ:
        return
    from transformers import Trainer

    from trainer_plugins.inside.shortened import evaluate_few_rows, prepare_trial

    has_card: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not has_card:  # else objects kept alive might be on the card
        gc.freeze()  # accelerate collects often, and imports leave no garbage
    train, notes, waiting = Trainer.train, list[str](), Waiting()
    atexit.register(_miss_nothing)
    evaluate_few_rows(notes)

    @functools.wraps(train)
    def train_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.device.type != "cuda":
            raise RuntimeError(
                f"the Trainer trains on {self.args.device}, not on a GPU: drop use_cpu"
            )
        waiting.interrupt(self.args.world_size)
        if (trial := kwargs.get("trial")) is not None:
            prepare_trial(self, trial)
        observer, caller = _Observer(self, notes), sys._getframe(1)
        try:
            result = observer.run(functools.partial(train, self), caller)
        except torch.OutOfMemoryError:
            observer.write(died=True)
            raise
        later = find_later_training(caller)
        observer.write(missed=later or "")
        if later and waiting.begin():
            say(f"the program continues, up to the training in {later}")
            return result
        say("everything is measured: the program ends here")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    Trainer.train = train_watched


def _miss_nothing() -> None:
    """Record that a program came to its end without another training, if no error ended it."""
    if _Observer.last is not None and not hasattr(sys, "last_value"):
        _Observer.last.miss_nothing()


def _moments_of_first_rank(trainer: Any) -> list[str]:
    """Return the moments in which rank 0 loads or gathers more main memory than other ranks."""
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled and state.deepspeed_plugin.zero_stage == 3:
        return ["load", "save"]  # modeling_utils.py of transformers: the others load on "meta"
    if not trainer.is_fsdp_enabled:
        return ["save"]
    plugin = state.fsdp_plugin
    found = ["save", "resume"] if plugin.state_dict_type.name == "FULL_STATE_DICT" else []
    return [*found, *["load"] * bool(plugin.cpu_ram_efficient_loading)]


def _cast_bytes(trainer: Any) -> int:
    """Return the size of the float32 weights to which FSDP casts others, on every rank."""
    if not trainer.is_fsdp_enabled or trainer.accelerator.mixed_precision == "no":
        return 0
    trained = (each for each in trainer.model.parameters() if each.requires_grad)
    return sum(4 * each.numel() for each in trained if each.dtype != torch.float32)


def _read_given(trainer: Any) -> tuple[Any, Any]:
    """Return the optimizer and the scheduler that a Trainer was given; it makes others itself."""
    optimizer = trainer.optimizer
    if optimizer is None or isinstance(optimizer, AcceleratedOptimizer):  # of an earlier training
        return None, None
    return optimizer, trainer.lr_scheduler


class _Observer:
    """Reads the peaks of a Trainer's moments, continuing those of an earlier training."""

    last: "_Observer | None" = None

    def __init__(self, trainer: Any, notes: list[str]) -> None:
        self._trainer = trainer
        notes.extend(about.get("notes", ()))
        planned = about.get("planned", {})
        arguments = json.loads(trainer.args.to_json_string())
        self._seen = Seen(arguments=arguments, notes=notes, planned=planned)
        self._seen.accumulation = asdict(judge_accumulation(trainer))
        self._seen.is_fsdp = trainer.is_fsdp_enabled
        self._seen.of_first_rank = _moments_of_first_rank(trainer)
        self._seen.cast_bytes = _cast_bytes(trainer)
        self._moment = "load"
        self._seen.host["load"] = host_peak()
        memory = psutil.Process().memory_info()
        self._seen.process_bytes = memory.rss - memory.shared - host_peak()
        self._seen.moments, self._seen.began = _read_load()
        self._namer: Any = Namer(trainer)
        self._is_saved = _RESUMES in os.environ
        self._trainers = [type(trainer).__name__]
        self._peak_before = 0
        if (before := _Observer.last) is not None:
            self._seen.moments, self._seen.names = before._seen.moments, before._seen.names
            self._seen.host = before._seen.host
            self._seen.began = [*before._seen.began, (before._ended, "load")]
            # A training that ran out of memory is one that the program has replaced.
            self._peak_before = 0 if before._seen.died else find_peak(before._seen.moments)
            self._trainers = [*before._trainers[-1:], *self._trainers]

    def run(self, train: Callable[[], object], caller: FrameType) -> object:
        """Train; then evaluate, save and resume, as the arguments and the calling code request."""
        from trainer_plugins.inside.batches import Batches
        from trainer_plugins.inside.shortened import OnceInTheEnd, take_the_longest_rows

        trainer, args = self._trainer, self._trainer.args
        self._given = _read_given(trainer)
        trains = _RESUMES not in os.environ
        evaluates = trains and self._evaluates(caller)
        saves = trains and args.save_strategy != "no"
        resumes = args.save_strategy != "no" and not args.save_only_model
        args.max_steps = int(os.environ["TRAINER_PLUGINS_DRY_STEPS"])
        args.eval_on_start = False
        once = OnceInTheEnd(evaluates=evaluates, saves=saves)
        trainer.add_callback(once)
        take_the_longest_rows(trainer, self._seen.notes)
        self._batches = Batches(trainer)  # before methods are replaced: it checks whose they are
        self._watch_moments()
        self._skip_like_micro_steps()
        trainer.floating_point_ops = lambda _: 0  # it walks all modules in each step
        result = train() if trains else None
        once.do_what_is_left(trainer)  # another callback may have ended the training
        if resumes and self._is_saved:
            self._resume(train)
        return result

    def _evaluates(self, caller: FrameType) -> bool:
        if self._trainer.eval_dataset is None:
            return False
        if self._trainer.args.eval_strategy != "no":
            return True
        later = find_later_evaluation(caller, self._trainer.args)
        if later is not None:
            self._seen.notes.append(f"the evaluation in {later} counts as one while training")
        return later is not None

    def _resume(self, train: Callable[..., object]) -> None:
        """Train one more step from the checkpoint, like a process that has just loaded it."""
        from transformers.trainer_utils import get_last_checkpoint

        trainer, args = self._trainer, self._trainer.args
        if _RESUMES not in os.environ:
            if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
                self._seen.resumes_apart = True
                return
            trainer.accelerator.free_memory()
            for holder in (trainer, trainer.callback_handler):
                holder.optimizer, holder.lr_scheduler = self._given
            if self._given[0] is not None:
                self._given[0].state.clear()
            trainer.model.zero_grad(set_to_none=True)
            gc.collect()
        folder = get_last_checkpoint(args.output_dir)
        args.max_steps, args.ignore_data_skip = int(folder.rpartition("-")[2]) + 1, True
        self._enter("resume")
        with alone.forgive_others("resuming", self._seen.notes):
            train(resume_from_checkpoint=folder)

    def _skip_like_micro_steps(self) -> None:
        """Skip micro-steps that repeat the previous one; not the last if ranks reduce in it."""
        trainer = self._trainer
        accumulation, count = trainer.args.gradient_accumulation_steps, 0
        is_one_process = trainer.accelerator.distributed_type == DistributedType.NO
        num_skippable = accumulation if is_one_process else accumulation - 1

        def training_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            position = count % accumulation
            count += 1
            if _MICRO_STEPS <= position < num_skippable:
                return torch.zeros((), device=trainer.args.device)
            if trainer.args.world_size > 1:
                time.sleep(_NCCL_LOOKS_SECONDS)
            return step(*args, **kwargs)

        Patches().wrap(trainer, "training_step", training_step)

    def write(self, *, died: bool = False, missed: str = "") -> None:
        self._close()
        seen, trainer = self._seen, self._trainer
        seen.died, seen.missed, seen.notes = died, missed, list(dict.fromkeys(seen.notes))
        if self is not _Observer.last:
            seen.num_parameters, seen.num_trainable_parameters = count_parameters(trainer.model)
            seen.world_size, seen.rank = trainer.args.world_size, trainer.args.process_index
            seen.ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            seen.rows = trainer._train_batch_size
            seen.tokens, seen.why_whole = self._batches.tokens, self._batches.why_whole
            seen.is_quantised = bool(getattr(trainer.model, "is_quantized", False))
            seen.model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
            seen.trainer = ", then by ".join(self._trainers)
            if "streamed" in about:
                seen.streamed = asdict(about["streamed"]())
            before = _Observer.last
            if before is not None and self._peak_before >= find_peak(seen.moments):
                for name in _OF_THE_FULLEST:
                    setattr(seen, name, getattr(before._seen, name))
            self._ended = time.time_ns() // 1000
            self._trainer = self._namer = None  # the program may be done with it
            _Observer.last = self
        write(seen)

    def miss_nothing(self) -> None:
        """Write the results again, without a training to come."""
        self._seen.missed = ""
        write_results(self._seen)

    def _watch_moments(self) -> None:
        trainer = self._trainer

        def save_alone(save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            with alone.forgive_others("the save", self._seen.notes):
                save(*args, **kwargs)
                self._is_saved = True

        Patches().wrap(trainer, "_save_checkpoint", save_alone)
        self._around(trainer, "evaluate", "evaluation")
        self._around(trainer, "_save_checkpoint", "save")
        self._around(trainer, "compute_loss", "forward")
        self._around(trainer, "prediction_step", "evaluation")
        self._around(trainer.accelerator, "backward", "backward")
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "generate"):
            self._around(model, "generate", "generation")

    def _around(self, owner: Any, name: str, moment: str) -> None:
        """Make a method a moment; after a backward pass comes the optimizer step."""

        def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._namer is None:  # belongs to an earlier training
                return method(*args, **kwargs)
            outer = self._moment
            if moment == "forward":
                self._batches.look(args)
            self._name("weights" if outer in ("load", "resume") else "optimizer states", outer)
            is_inside = outer == "evaluation" and moment not in ("generation", "save")
            stays = outer == "resume" or is_inside
            self._enter(outer if stays else moment)
            try:
                result = method(*args, **kwargs)
            finally:
                self._enter(outer)
            if outer in ("load", "generation", "forward", "backward", "optimizer step"):
                self._begin("optimizer step" if moment == "backward" else moment)
            if moment == "backward":
                self._name("gradients", moment)
            return result

        Patches().wrap(owner, name, around)

    def _name(self, what: str, moment: str) -> None:
        if moment in ("load", "resume", "backward", "optimizer step"):
            self._seen.names.append(self._namer.names_of(what))

    def _enter(self, moment: str) -> None:
        self._close()
        self._begin(moment)

    def _begin(self, moment: str) -> None:
        self._moment = moment
        self._seen.began.append((time.time_ns() // 1000, moment))

    def _close(self) -> None:
        """Assign the peaks since the last call to the current moment."""
        new = _peaks()
        known = self._seen.moments.get(self._moment, [(0, 0)] * len(new))
        self._seen.moments[self._moment] = [
            (max(a, b), max(c, d)) for (a, c), (b, d) in zip(known, new, strict=True)
        ]
        _reset_peaks()
        host = self._seen.host
        host[self._moment] = max(host.get(self._moment, 0), host_peak())
