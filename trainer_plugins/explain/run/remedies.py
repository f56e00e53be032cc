"""Choose remedies for the causes of a recorded error, in the order of `advice.for_causes`."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from trainer_plugins import advice
from trainer_plugins.accumulation import Effect
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.for_causes import ONE_ROW, order_remedies
from trainer_plugins.advice.vendors import vendor_of
from trainer_plugins.checkpointing import is_asked
from trainer_plugins.explain.answer import Cause, Remedy
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.needed import NEEDED_WITH, cache_that_fits
from trainer_plugins.explain.shared import SURVIVAL_REFUSED, remedies_for, remedy
from trainer_plugins.explain.text.remedies import filled
from trainer_plugins.record.shown import Frame
from trainer_plugins.record.timeline import Remark
from trainer_plugins.strategy import keeps_whole_gradients
from trainer_plugins.units import count_in_words, size

_COPIES = re.compile(
    r"\.(?:clone|float|half|bfloat16|to|type|contiguous)\(|deepcopy\(|\.cat\(|\.stack\("
    r"|merge_and_unload\("
)


def remedies_of(causes: Iterable[Cause], case: Case) -> tuple[Remedy, ...]:
    """Return the remedies, those of the first cause first; nothing is listed twice."""
    run = case.record.run
    found: dict[str, Remedy] = {}
    is_wsl = run.place is not None and "WSL" in run.place.limits
    vendor = vendor_of(run.device, run.versions.get("torch", ""), is_windows=is_wsl)
    for cause in causes:
        has_one_row = cause.code == "capacity" and _rows(case) <= 1
        order = ONE_ROW if has_one_row else order_remedies(cause.code, "record")
        made = partial(_build, cause.code, case)
        ours = remedies_for(cause.code, order, made, vendor)
        for one in sorted(ours, key=lambda each: each.fits is False):  # it would fail again
            found.setdefault(one.do, one)
    return tuple(found.values())


def less_main_memory(cause: str, num_workers: int) -> tuple[Remedy, ...]:
    """Return remedies for a run that main memory or /dev/shm ended; it leaves no record."""
    more = remedy(advice.LARGER_SHM if cause == "shm" else advice.MORE_MAIN_MEMORY, Door.SHELL)
    fewer = _fewer_workers(cause, num_workers)
    return tuple(replace(each, cause=cause) for each in (fewer, more) if each is not None)


def _build(cause: str, case: Case, one: Advice) -> Remedy | None:
    found = _build_if_it_applies(cause, case, one)
    needed = NEEDED_WITH[one](case) if one in NEEDED_WITH and case.total_bytes else 0
    if found is None or found.fits is not None or not needed:
        return found
    batch = " and its batch," if one is advice.LOAD_INTO_MAIN_MEMORY else ""
    peak = f"{size(needed + case.outside_bytes)}{batch} of {size(case.total_bytes)}"
    effect = f"{found.effect}. With it, the run would have needed {peak}"
    return _add_peak(replace(found, effect=effect), case, needed)


def _build_if_it_applies(cause: str, case: Case, one: Advice) -> Remedy | None:
    if one in _FILLED:
        return _FILLED[one](one, cause, case)
    if one not in _APPLIES or not _APPLIES[one](case):
        return None
    if one in _AS_IN_TEXTS:
        return filled.FILLED[one](one, case.text)
    effect = _EFFECTS[one](case) if one in _EFFECTS else ""
    return remedy(one, effect=effect, by_arithmetic=effect)


def _add_peak(found: Remedy, case: Case, needed: int) -> Remedy:
    """Add the peak with a remedy, including memory outside torch, unless `needed` is 0: unknown."""
    if not needed:
        return found
    peak = needed + case.outside_bytes
    spare = case.total_bytes - peak
    return replace(found, grade="arithmetic", predicted_peak_bytes=peak, spare_bytes=spare)


def _rows(case: Case) -> int:
    return case.argument("per_device_train_batch_size", 8)


def _smaller_micro_batch(one: Advice, cause: str, case: Case) -> Remedy | None:
    rows, steps = _rows(case), max(1, case.argument("gradient_accumulation_steps", 1))
    if rows <= 1:
        return None
    smaller, needed = _rows_that_fit(case, rows, case.fixed_bytes + case.to_come_bytes)
    effect = f"{_describe_need(case, needed)}, at the same effective batch size"
    values = {"rows": smaller, "steps": steps * rows // smaller}
    found = remedy(one, Door.TRAINER, effect, **values)
    if (judged := case.record.run.accumulation) is not None and judged.effect is not Effect.SAME:
        found = replace(found, price=judged.price)
    return _add_peak(found, case, needed)


def _rows_that_fit(case: Case, rows: int, fixed: int) -> tuple[int, int]:
    """Return the most rows that should fit, and their bytes; half and 0 if none were counted."""
    divisors = [each for each in range(rows - 1, 0, -1) if rows % each == 0]
    if case.record.alive is None or not case.total_bytes:
        return next((each for each in divisors if each <= rows // 2), 1), 0
    of_batch = max(0, case.live_bytes + case.asked_bytes - case.fixed_bytes)
    if case.record.part != "backward":
        of_batch *= 2  # we assume that the rest of the forward pass takes as much again
    sizes = [(each, fixed + of_batch * each // rows) for each in divisors]
    return next((pair for pair in sizes if pair[1] <= case.room_bytes), sizes[-1])


def _describe_need(case: Case, needed: int) -> str:
    if not needed:
        return "puts less of the batch on the card at once"
    card = size(case.total_bytes)
    if needed > case.room_bytes:
        return f"needs about {size(needed)} of {card}, which alone is not enough"
    return f"needs about {size(needed)} of {card} instead of more than {card}"


def _survive(one: Advice, cause: str, case: Case) -> Remedy | None:
    codes = [each.finding.code for each in case.entries if isinstance(each, Remark)]
    if SURVIVAL_REFUSED.search(" ".join([case.record.error.text, *codes])):
        return None
    found, rows = _suggest_relaunch(one, cause, case), _rows(case)
    if rows <= 1 or case.record.moment != "train":
        return found
    smaller, needed = _rows_that_fit(case, rows, case.fixed_bytes + case.to_come_bytes)
    if not needed:
        return found
    piece = f"A piece of {count_in_words(smaller, 'row')}"
    effect = f"{found.effect}. {piece} {_describe_need(case, needed)}"
    return _add_peak(replace(found, effect=effect), case, needed)


def _suggest_relaunch(one: Advice, cause: str, case: Case) -> Remedy:
    run, command = case.record.run, "YOUR LAUNCH COMMAND"
    if run.launch is not None and run.launch.words:
        command = shlex.join(run.launch.words)
    elif run.world_size == 1 and run.command:
        command = shlex.join(("python", *run.command))
    return remedy(one, Door.SHELL, command=command)


def _shorter_rows(one: Advice, cause: str, case: Case) -> Remedy:
    half = case.tokens[1] // 2 if case.tokens else 0
    return remedy(one, Door.TRL, length=half) if half else remedy(one, Door.TRL)


def _suggest_without_table(one: Advice, cause: str, case: Case) -> Remedy | None:
    is_sdpa = case.text.find_call("scaled_dot_product_attention") is not None
    if is_sdpa is not (one is advice.FLASH_ATTENTION):
        return None  # it has this kernel already
    effect = f"avoids the matrix of {size(case.asked_bytes)}"
    return remedy(one, Door.ARGUMENTS, effect, by_arithmetic=True)


def _outputs_to_main_memory(one: Advice, cause: str, case: Case) -> Remedy | None:
    if cause != "eval-logits" or case.argument("eval_accumulation_steps", 0):
        return None
    kept = case.kept_logits_bytes
    effect = f"moves {size(kept)} of outputs to main memory" if kept else ""
    return remedy(one, Door.TRAINER, effect, by_arithmetic=kept, steps=1)


def _smaller_eval_batch(one: Advice, cause: str, case: Case) -> Remedy | None:
    rows = case.argument("per_device_eval_batch_size", 8)
    if rows <= 1:
        return None
    if cause == "generate-cache":
        smaller, needed = cache_that_fits(case, rows)
        effect = "keeps less of the cache at once"
    else:
        smaller, needed = _rows_that_fit(case, rows, case.fixed_bytes)
        effect = "the metrics stay the same"
    effect = f"{_describe_need(case, needed)}; {effect}"
    return _add_peak(remedy(one, Door.TRAINER, effect, rows=smaller), case, needed)


def _shorter_answers(one: Advice, cause: str, case: Case) -> Remedy | None:
    length = case.argument("generation_max_length", 0)
    return remedy(one, Door.TRAINER, length=length // 2) if length > 1 else None


def _smaller_states(one: Advice, cause: str, case: Case) -> Remedy | None:
    is_sharded = case.record.run.family == "FSDP" or _is_zero3(case)
    has_other = is_sharded or _saves_states(case) or _copying(case) is not None
    if cause == "save-gather" and has_other:
        return None
    states, effect = case.state_bytes, ""
    if one is advice.FUSED_ADAMW:
        if not case.text.find_call("multi_tensor"):
            return None
        effect = f"avoids temporaries of up to {size(case.trained_bytes)}"
    elif one is advice.EIGHT_BIT_ADAMW:
        if not states or "bitsandbytes" not in case.record.run.versions:
            return None
        effect = f"keeps states of about {size(states // 4)} instead of {size(states)}"
    elif states:
        effect = f"keeps states of less than {size(states * 0.01)} instead of {size(states)}"
    return remedy(one, Door.TRAINER, effect, by_arithmetic=effect)


def _saves_states(case: Case) -> bool:
    return case.text.find_call("_save_optimizer_and_scheduler") is not None


def _copy_in_main_memory(one: Advice, cause: str, case: Case) -> Remedy | None:
    if (copied := _copying(case)) is None:
        return None
    how = "instead of .clone()" if ".clone()" in copied.code else "before the copy"
    return remedy(one, Door.CODE, how=how, place=f"{copied.file}:{copied.line}")


def _copying(case: Case) -> Frame | None:
    """Return the user's innermost line that copies a tensor or a model."""
    copies = [each for each in case.own_frames if _COPIES.search(each.code)]
    return copies[-1] if copies else None


def _load_into_main_memory(one: Advice, cause: str, case: Case) -> Remedy | None:
    loads = [each for each in case.record.frames if "torch.load(" in each.code]
    if not loads or loads[-1] not in case.own_frames:
        return None
    return remedy(one, f"{one.flag(Door.CODE)} at {loads[-1].file}:{loads[-1].line}")


# Frames and lists before a name of the user's, and the position of a tensor.
_ON_THE_WAY = re.compile(r"^(?:(?:a local of|\[)[^>]*-> )+|(?:\[\d+\])+$")


def _keep_numbers(one: Advice, cause: str, case: Case) -> Remedy:
    kept = case.kept_tensors
    place = re.sub(_ON_THE_WAY, "", kept[0][1]) if kept else ""
    return remedy(one, one.flag(Door.CODE) + (f" at {place}" if place else ""))


def _suggest_16_bits(one: Advice, cause: str, case: Case) -> Remedy:
    largest, *_ = case.second_models
    effect = f"saves {size(largest.num_bytes // 2)} if it is in float32; it is not trained"
    return remedy(one, Door.CODE, effect, by_arithmetic=True, place=largest.place)


def _end_process(one: Advice, cause: str, case: Case) -> Remedy | None:
    others = [each for each in case.record.processes or () if not each.is_own]
    if len(others) != 1 or not others[0].is_of_user or case.record.run.world_size > 1:
        return None
    pid, name = others[0].pid, others[0].name or "its name is unknown"
    effect = f"frees {size(case.foreign_bytes)}; the process is yours: {name}"
    return remedy(one, Door.SHELL, effect, by_arithmetic=True, pid=pid)


def _smaller_engine_share(one: Advice, cause: str, case: Case) -> Remedy:
    held, total = case.foreign_bytes, max(1, case.total_bytes)
    now, door = held / total, Door.VLLM
    share = case.record.run.arguments.get("vllm_gpu_memory_utilization")
    if isinstance(share, float):
        now, door = share, Door.TRL
    new = advice.smaller_share(now, max(0, case.asked_bytes - case.free_bytes) / total)
    effect = f"lowers the engine's share: it holds {size(held)} now"
    return remedy(one, door, effect, by_arithmetic=case.asked_bytes, share=f"{new:g}")


def _fewer_workers(cause: str, num_workers: int) -> Remedy | None:
    one = advice.FEWER_WORKERS
    if cause == "shm":
        return remedy(one, Door.TRAINER, workers=0)
    if not num_workers:
        return None
    half = num_workers // 2
    fewer = num_workers - half
    effect = f"starts {fewer} process{'es' if fewer > 1 else ''} less, and their share of data"
    return remedy(one, Door.TRAINER, effect, workers=half)


def _fewer_workers_of(one: Advice, cause: str, case: Case) -> Remedy | None:
    found = _fewer_workers(cause, case.argument("dataloader_num_workers", 0))
    host = case.record.host
    if found is None or cause == "shm" or host is None or not host.worker_bytes:
        return found
    # Read after the death: the dead worker's memory is free again.
    more = int(found.flags["dataloader_num_workers"]) - len(host.worker_bytes)
    needed = host.total_bytes - host.free_bytes + more * max(host.worker_bytes)
    effect = f"{found.effect}: {size(needed)} of {size(host.total_bytes)} of main memory in use"
    found = replace(found, grade="arithmetic", effect=effect, predicted_peak_bytes=needed)
    return replace(found, spare_bytes=host.total_bytes - needed)


def _is_zero3(case: Case) -> bool:
    return case.record.run.strategy is not None and case.record.run.strategy.zero_stage == 3


_FILLED: Mapping[Advice, Callable[[Advice, str, Case], Remedy | None]] = {
    advice.SMALLER_MICRO_BATCH: _smaller_micro_batch,
    advice.SURVIVE: _survive,
    advice.SHORTER_ROWS: _shorter_rows,
    advice.SDPA_ATTENTION: _suggest_without_table,
    advice.FLASH_ATTENTION: _suggest_without_table,
    advice.OUTPUTS_TO_MAIN_MEMORY: _outputs_to_main_memory,
    advice.SMALLER_EVAL_BATCH: _smaller_eval_batch,
    advice.SHORTER_ANSWERS: _shorter_answers,
    advice.FUSED_ADAMW: _smaller_states,
    advice.EIGHT_BIT_ADAMW: _smaller_states,
    advice.ADAFACTOR: _smaller_states,
    advice.COPY_IN_MAIN_MEMORY: _copy_in_main_memory,
    advice.LOAD_INTO_MAIN_MEMORY: _load_into_main_memory,
    advice.KEEP_NUMBERS: _keep_numbers,
    advice.SECOND_MODEL_IN_16_BITS: _suggest_16_bits,
    advice.END_PROCESS: _end_process,
    advice.OTHER_CARD: _suggest_relaunch,
    advice.SMALLER_ENGINE_SHARE: _smaller_engine_share,
    advice.FEWER_WORKERS: _fewer_workers_of,
}
_ALWAYS = (
    advice.PAD_TO_FEW_LENGTHS, advice.ARGMAX_LOGITS, advice.LOSS_ONLY, advice.METRICS_ON_CPU,
    advice.OFFLOADED_CACHE, advice.RESUME_WITHOUT_STATES, advice.FEWER_LIVE_PARAMETERS,
    advice.NO_PINNED_BATCHES, advice.HEADROOM, advice.SMALLER_NCCL_BUFFERS, advice.WATCH_THE_CARD,
    advice.MAPPING_LIMITS, advice.ROCM_MEMORY, advice.ROCM_LOG, advice.MORE_MAIN_MEMORY,
    advice.LARGER_SHM, advice.OWN_CARD_FIRST, advice.OWN_DEVICE_MAP, advice.LIGER,
    advice.RELEASED, advice.LIST_PROCESSES, advice.PRINT_SHAPES,
)  # fmt: skip
# Advice without values to fill in; advice not listed here does not apply to a run with a record.
_APPLIES: Mapping[Advice, Callable[[Case], bool]] = {
    **dict.fromkeys(_ALWAYS, lambda _: True),
    advice.EXPANDABLE_SEGMENTS: lambda case: not case.is_expandable,
    advice.PRECOMPUTED_REFERENCE: lambda case: any(
        each.holder.endswith(".ref_model") for each in case.second_models
    ),
    advice.CHECKPOINTING: lambda case: (
        not (
            is_asked(case.record.run.arguments)
            or (case.record.run.strategy and case.record.run.strategy.is_checkpointing)
        )
    ),
    advice.REDUCED_EACH_TIME: lambda case: (
        case.record.run.family == "FSDP" and keeps_whole_gradients(case.record.run.arguments)
    ),
    advice.SHARDED_SAVE: lambda case: case.record.run.family == "FSDP",
    advice.SAVE_WITHOUT_GATHER: _is_zero3,
    advice.SAVE_ONLY_MODEL: _saves_states,
    advice.OFFLOAD_OPTIMIZER: lambda case: case.record.run.family == "DeepSpeed",
    advice.HALF_PRECISION_WEIGHTS: lambda case: "float16" not in case.record.run.dtype,
    advice.FOUR_BITS: lambda case: "quantization_config" not in case.record.run.model_config,
    advice.LOAD_ON_ONE_RANK: lambda case: case.record.run.family == "FSDP",
    advice.NO_PINNED_OFFLOAD: lambda case: case.record.run.family == "DeepSpeed",
}
# Filled in from the error and its frames, as for a text.
_AS_IN_TEXTS = {advice.EXPANDABLE_SEGMENTS, advice.LIGER, advice.PRINT_SHAPES}
_EFFECTS: Mapping[Advice, Callable[[Case], str]] = {
    advice.LIST_PROCESSES: lambda case: (
        f"shows which process holds {size(case.foreign_bytes)}; end it, or wait"
    ),
    advice.RELEASED: lambda case: (
        f"releases {size(sum(each.num_bytes for each in case.alive.models[1:]))} of weights and"
        " what belongs to them; names what holds more"
    ),
}
