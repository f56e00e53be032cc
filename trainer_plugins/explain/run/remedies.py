"""What helps against the causes of a recorded error, in the order of `advice.for_causes`."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.for_causes import ONE_ROW, in_order
from trainer_plugins.advice.vendors import Vendor, vendor_of
from trainer_plugins.explain.advised import SURVIVAL_REFUSED, remedies_for, remedy
from trainer_plugins.explain.answer import Cause, Remedy
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.causes import kept_in, kept_logits
from trainer_plugins.record.oom_record import Frame
from trainer_plugins.record.timeline import Remark
from trainer_plugins.units import size

_COPIES = re.compile(
    r"\.(?:clone|float|half|bfloat16|to|type|contiguous)\(|deepcopy\(|\.cat\(|\.stack\("
    r"|merge_and_unload\("
)
_LIBRARIES = (
    "transformers/", "torch/", "accelerate/", "peft/", "trl/", "deepspeed/", "safetensors/",
    "trainer_plugins/", "copy.py",
)  # fmt: skip
_DOORS = (
    Door.TRAINER, Door.TRL, Door.CODE, Door.ACCELERATE, Door.DEEPSPEED, Door.ENVIRONMENT,
    Door.SHELL,
)  # fmt: skip


def remedies_of(causes: Iterable[Cause], case: Case) -> tuple[Remedy, ...]:
    """Return what helps, for the first cause first; nothing is listed twice."""
    found: dict[str, Remedy] = {}
    for cause in causes:
        has_one_row = cause.code == "capacity" and _rows(case) <= 1
        order = ONE_ROW if has_one_row else in_order(cause.code, "record")
        made = partial(_made, cause.code, case)
        for one in remedies_for(cause.code, order, made, _vendor(case)):
            found.setdefault(one.do, one)
    return tuple(found.values())


def less_main_memory(cause: str, num_workers: int) -> tuple[Remedy, ...]:
    """Return what helps where main memory or /dev/shm ended a run, of which there is no record."""
    found = [_fewer_workers(cause, num_workers), _more_main_memory(cause)]
    return tuple(replace(each, cause=cause) for each in found if each is not None)


def _vendor(case: Case) -> Vendor:
    run = case.record.run
    is_wsl = run.place is not None and "WSL" in run.place.limits
    return vendor_of(run.device, run.versions.get("torch", ""), is_windows=is_wsl)


def _made(cause: str, case: Case, one: Advice) -> Remedy | None:
    """Fill an advice with the numbers of a record; None if it does not apply."""
    if one in _FOR_CAUSE:
        return _FOR_CAUSE[one](cause, case)
    if one in _FILLED:
        return _FILLED[one](case)
    if one not in _AS_THEY_ARE or not _AS_THEY_ARE[one](case):
        return None
    return remedy(one, next(each for each in _DOORS if each in one.spellings))


def _rows(case: Case) -> int:
    return case.argument("per_device_train_batch_size", 8)


def _smaller_micro_batch(case: Case) -> Remedy | None:
    rows, one = _rows(case), advice.SMALLER_MICRO_BATCH
    if rows <= 1:
        return None
    steps = max(1, case.argument("gradient_accumulation_steps", 1))
    smaller, needed = _rows_that_fit(case, rows, case.fixed + case.to_come)
    do = one.flag(Door.TRAINER, rows=smaller, steps=steps * rows // smaller)
    effect = f"{_about(case, needed)}, with the same effective batch"
    return remedy(one, do, effect, by_arithmetic=needed)


def _rows_that_fit(case: Case, rows: int, fixed: int) -> tuple[int, int]:
    """Return the most rows, of those that divide the batch, that should fit, and what they need.

    A forward pass that was not over would have needed more: twice what it had is assumed. Where
    nothing was counted, half the rows are returned, and 0 bytes.
    """
    divisors = [each for each in range(rows - 1, 0, -1) if rows % each == 0]
    if case.record.alive is None or not case.total:
        return next((each for each in divisors if each <= rows // 2), 1), 0
    of_batch = max(0, case.live + case.asked - case.fixed)
    if case.record.part != "backward":
        of_batch *= 2
    sizes = [(each, fixed + of_batch * each // rows) for each in divisors]
    return next((pair for pair in sizes if pair[1] <= case.room), sizes[-1])


def _about(case: Case, needed: int) -> str:
    if not needed:
        return "less of the batch is on the card at once"
    if needed > case.room:
        return f"about {size(needed)} of {size(case.total)}, which alone is not enough"
    return f"about {size(needed)} of {size(case.total)} instead of more than {size(case.total)}"


def _survive(case: Case) -> Remedy | None:
    codes = [each.finding.code for each in case.entries if isinstance(each, Remark)]
    if SURVIVAL_REFUSED.search(" ".join([case.record.error.text, *codes])):
        return None
    return remedy(advice.SURVIVE, advice.SURVIVE.flag(Door.SHELL, command=_command(case)))


def _command(case: Case) -> str:
    """Return the command line that starts the run, as it is typed again."""
    run = case.record.run
    if run.launch is not None and run.launch.words:
        return shlex.join(run.launch.words)
    if run.world_size > 1 or not run.command:
        return "YOUR LAUNCH COMMAND"
    return shlex.join(("python", *run.command))


def _is_checkpointing(case: Case) -> bool:
    strategy = case.record.run.strategy
    is_asked_for = bool(case.record.run.arguments.get("gradient_checkpointing"))
    return is_asked_for or (strategy is not None and strategy.is_checkpointing)


def _shorter_rows(case: Case) -> Remedy:
    length = case.tokens[1] if case.tokens else 0
    values = {"length": length // 2} if length > 1 else {}
    return remedy(advice.SHORTER_ROWS, advice.SHORTER_ROWS.flag(Door.TRL, **values))


def _liger(case: Case) -> Remedy:
    asked = f"{advice.LIGER.effect}: {size(case.asked)} were asked for there" * bool(case.asked)
    return remedy(advice.LIGER, Door.TRAINER, asked, by_arithmetic=case.asked)


def _without_table(one: Advice, is_sdpa: bool, case: Case) -> Remedy | None:
    if ("scaled_dot_product_attention" in case.functions) is not is_sdpa:
        return None
    effect = f"the table of {size(case.asked)} is not made"
    return remedy(one, Door.ARGUMENTS, effect, by_arithmetic=True)


def _outputs_to_main_memory(cause: str, case: Case) -> Remedy | None:
    if cause != "eval-logits" or case.argument("eval_accumulation_steps", 0):
        return None
    one, kept = advice.OUTPUTS_TO_MAIN_MEMORY, kept_logits(case)
    effect = f"{size(kept)} of outputs go to main memory" if kept else ""
    return remedy(one, one.flag(Door.TRAINER, steps=1), effect, by_arithmetic=kept)


def _smaller_eval_batch(cause: str, case: Case) -> Remedy | None:
    rows, one = case.argument("per_device_eval_batch_size", 8), advice.SMALLER_EVAL_BATCH
    if rows <= 1:
        return None
    if cause == "generate-cache":
        return remedy(one, one.flag(Door.TRAINER, rows=rows // 2), "half the cache at once")
    smaller, needed = _rows_that_fit(case, rows, case.fixed)
    effect = f"{_about(case, needed)}; metrics stay the same"
    return remedy(one, one.flag(Door.TRAINER, rows=smaller), effect, by_arithmetic=needed)


def _shorter_answers(case: Case) -> Remedy | None:
    length, one = case.argument("generation_max_length", 0), advice.SHORTER_ANSWERS
    return remedy(one, one.flag(Door.TRAINER, length=length // 2)) if length > 1 else None


def _trained(case: Case) -> int:
    return case.category("gradient") or case.category("parameter")


def _states(case: Case) -> int:
    return int(case.state_factor * _trained(case))


def _fused_adamw(cause: str, case: Case) -> Remedy | None:
    has_foreach = any("multi_tensor" in name for name in case.functions)
    if not has_foreach or _has_saved_otherwise(cause, case):
        return None
    effect = f"temporaries of up to {size(_trained(case))} are not made"
    return remedy(advice.FUSED_ADAMW, Door.TRAINER, effect, by_arithmetic=True)


def _eight_bit_adamw(cause: str, case: Case) -> Remedy | None:
    states = _states(case)
    is_there = "bitsandbytes" in case.record.run.versions
    if not is_there or not states or _has_saved_otherwise(cause, case):
        return None
    effect = f"states of about {size(states // 4)} instead of {size(states)}"
    return remedy(advice.EIGHT_BIT_ADAMW, Door.TRAINER, effect, by_arithmetic=True)


def _adafactor(cause: str, case: Case) -> Remedy | None:
    if _has_saved_otherwise(cause, case):
        return None
    states = _states(case)
    effect = (
        f"states of less than {size(states * 0.01)} instead of {size(states)}" if states else ""
    )
    return remedy(advice.ADAFACTOR, Door.TRAINER, effect, by_arithmetic=states)


def _has_saved_otherwise(cause: str, case: Case) -> bool:
    """Return whether a save has a remedy of its own, so that smaller states are no answer to it."""
    strategy = case.record.run.strategy
    is_sharded = strategy is not None and (strategy.family == "FSDP" or strategy.zero_stage == 3)
    has_other = is_sharded or _copying(case) is not None or _saves_states(case)
    return cause == "save-gather" and has_other


def _saves_states(case: Case) -> bool:
    return "_save_optimizer_and_scheduler" in case.functions


def _copy_in_main_memory(case: Case) -> Remedy | None:
    if (copied := _copying(case)) is None:
        return None
    how = "instead of .clone()" if ".clone()" in copied.code else "before the copy"
    do = advice.COPY_IN_MAIN_MEMORY.flag(Door.CODE, how=how, place=f"{copied.file}:{copied.line}")
    return remedy(advice.COPY_IN_MAIN_MEMORY, do)


def _copying(case: Case) -> Frame | None:
    """Return the innermost line of the user's that copies a tensor or a model."""
    for frame in reversed(case.record.frames):
        if _COPIES.search(frame.code) and not frame.file.startswith(_LIBRARIES):
            return frame
    return None


def _load_into_main_memory(case: Case) -> Remedy | None:
    loads = [each for each in case.record.frames if "torch.load(" in each.code]
    if not loads or loads[-1].file.startswith(_LIBRARIES):
        return None
    one = advice.LOAD_INTO_MAIN_MEMORY
    return remedy(one, f"{one.flag(Door.CODE)} at {loads[-1].file}:{loads[-1].line}")


def _keep_numbers(case: Case) -> Remedy:
    kept = kept_in(case)
    where = f" at {kept[0][1]}" if kept else ""
    return remedy(advice.KEEP_NUMBERS, advice.KEEP_NUMBERS.flag(Door.CODE) + where)


def _released(case: Case) -> Remedy:
    models = case.record.alive.models if case.record.alive else ()
    held = sum(each.num_bytes for each in models[1:])
    effect = f"releases {size(held)} of weights and what belongs to them; names what holds more"
    return remedy(advice.RELEASED, Door.CODE, effect, by_arithmetic=True)


def _end_process(case: Case) -> Remedy | None:
    others = [each for each in case.record.processes or () if not each.is_own]
    if len(others) != 1 or not others[0].is_of_user:
        return None
    name = others[0].name or "its name is unknown"
    do = advice.END_PROCESS.flag(Door.SHELL, pid=others[0].pid)
    effect = f"frees {size(case.foreign)}; it is yours: {name}"
    return remedy(advice.END_PROCESS, do, effect, by_arithmetic=True)


def _list_processes(case: Case) -> Remedy:
    effect = f"shows who holds {size(case.foreign)}; end it, or wait"
    return remedy(advice.LIST_PROCESSES, Door.SHELL, effect, by_arithmetic=True)


def _other_card(case: Case) -> Remedy:
    do = advice.OTHER_CARD.flag(Door.SHELL, card="CARD", command=_command(case))
    return remedy(advice.OTHER_CARD, do)


def _smaller_engine_share(case: Case) -> Remedy:
    """Lower the share that the engine holds now, by what was missing."""
    told = case.record.run.arguments.get("vllm_gpu_memory_utilization")
    share = told if isinstance(told, float) else case.foreign / max(1, case.total)
    missing = max(0, case.asked - case.free) / max(1, case.total)
    new = advice.smaller_share(share, missing)
    one = advice.SMALLER_ENGINE_SHARE
    door = Door.TRL if isinstance(told, float) else Door.VLLM
    effect = f"the engine holds {size(case.foreign)} now, and takes this share of the card then"
    return remedy(one, one.flag(door, share=f"{new:g}"), effect, by_arithmetic=missing)


def _expandable_segments(case: Case) -> Remedy | None:
    if case.is_expandable:
        return None
    effect = f"the {size(case.unused)} that lay unused can be joined"
    return remedy(advice.EXPANDABLE_SEGMENTS, Door.ENVIRONMENT, effect, by_arithmetic=True)


def _print_shapes(case: Case) -> Remedy:
    users = [each for each in case.record.frames if not each.file.startswith(_LIBRARIES)]
    place = f"{users[-1].file}:{users[-1].line}" if users else "the failing line"
    return remedy(advice.PRINT_SHAPES, advice.PRINT_SHAPES.flag(Door.CODE, place=place))


def _workers_of_record(cause: str, case: Case) -> Remedy | None:
    return _fewer_workers(cause, case.argument("dataloader_num_workers", 0))


def _fewer_workers(cause: str, num_workers: int) -> Remedy | None:
    one = advice.FEWER_WORKERS
    if cause == "shm":
        return remedy(one, one.flag(Door.TRAINER, workers=0))
    if not num_workers:
        return None
    half = num_workers // 2
    effect = f"{num_workers - half} processes less, each with its part of the data"
    return remedy(one, one.flag(Door.TRAINER, workers=half), effect)


def _more_main_memory(cause: str) -> Remedy:
    if cause == "shm":
        return remedy(advice.LARGER_SHM, advice.LARGER_SHM.flag(Door.SHELL, size="16g"))
    return remedy(advice.MORE_MAIN_MEMORY, Door.SHELL)


def _family(case: Case) -> str:
    return case.record.run.strategy.family if case.record.run.strategy is not None else ""


def _zero_stage(case: Case) -> int | None:
    return case.record.run.strategy.zero_stage if case.record.run.strategy is not None else None


def _always(case: Case) -> bool:
    del case
    return True


_FILLED: Mapping[Advice, Callable[[Case], Remedy | None]] = {
    advice.SMALLER_MICRO_BATCH: _smaller_micro_batch,
    advice.SURVIVE: _survive,
    advice.SHORTER_ROWS: _shorter_rows,
    advice.LIGER: _liger,
    advice.SDPA_ATTENTION: partial(_without_table, advice.SDPA_ATTENTION, False),
    advice.FLASH_ATTENTION: partial(_without_table, advice.FLASH_ATTENTION, True),
    advice.SHORTER_ANSWERS: _shorter_answers,
    advice.COPY_IN_MAIN_MEMORY: _copy_in_main_memory,
    advice.LOAD_INTO_MAIN_MEMORY: _load_into_main_memory,
    advice.KEEP_NUMBERS: _keep_numbers,
    advice.RELEASED: _released,
    advice.END_PROCESS: _end_process,
    advice.LIST_PROCESSES: _list_processes,
    advice.OTHER_CARD: _other_card,
    advice.SMALLER_ENGINE_SHARE: _smaller_engine_share,
    advice.EXPANDABLE_SEGMENTS: _expandable_segments,
    advice.PRINT_SHAPES: _print_shapes,
}
_FOR_CAUSE: Mapping[Advice, Callable[[str, Case], Remedy | None]] = {
    advice.OUTPUTS_TO_MAIN_MEMORY: _outputs_to_main_memory,
    advice.SMALLER_EVAL_BATCH: _smaller_eval_batch,
    advice.FUSED_ADAMW: _fused_adamw,
    advice.EIGHT_BIT_ADAMW: _eight_bit_adamw,
    advice.ADAFACTOR: _adafactor,
    advice.FEWER_WORKERS: _workers_of_record,
    advice.LARGER_SHM: lambda cause, case: _more_main_memory(cause),
    advice.MORE_MAIN_MEMORY: lambda cause, case: _more_main_memory(cause),
}
_AS_THEY_ARE: Mapping[Advice, Callable[[Case], bool]] = {
    advice.CHECKPOINTING: lambda case: not _is_checkpointing(case),
    advice.PAD_TO_FEW_LENGTHS: _always,
    advice.ARGMAX_LOGITS: _always,
    advice.LOSS_ONLY: _always,
    advice.METRICS_ON_CPU: _always,
    advice.OFFLOADED_CACHE: _always,
    advice.SHARDED_SAVE: lambda case: _family(case) == "FSDP",
    advice.SAVE_WITHOUT_GATHER: lambda case: _zero_stage(case) == 3,
    advice.SAVE_ONLY_MODEL: _saves_states,
    advice.OFFLOAD_OPTIMIZER: lambda case: _family(case) == "DeepSpeed",
    advice.HALF_PRECISION_WEIGHTS: lambda case: (
        case.record.run.dtype not in ("bfloat16", "float16")
    ),
    advice.FOUR_BITS: lambda case: "quantization_config" not in case.record.run.model_config,
    advice.LOAD_ON_ONE_RANK: lambda case: _family(case) == "FSDP",
    advice.RESUME_WITHOUT_STATES: _always,
    advice.FEWER_LIVE_PARAMETERS: _always,
    advice.NO_PINNED_BATCHES: _always,
    advice.NO_PINNED_OFFLOAD: lambda case: _family(case) == "DeepSpeed",
    advice.HEADROOM: _always,
    advice.SMALLER_NCCL_BUFFERS: _always,
    advice.WATCH_THE_CARD: _always,
    advice.MAPPING_LIMITS: _always,
    advice.ROCM_MEMORY: _always,
    advice.ROCM_LOG: _always,
}
"""What needs no numbers, and where it applies; a record has no use for what is in no table."""
