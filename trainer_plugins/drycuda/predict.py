"""Predict runs on dry cards, for this process and for callers of `plan_run`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from trainer_plugins.drycuda.dry_run import dry_run_of
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.planner.before import remember
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.options import RunOptions
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.request import PlanRequest

DEFAULT_TIMEOUT_SECONDS = 600


def plan_run(
    trainer_or_config: object,
    training_args: object = None,
    *,
    seq_length: int | None = None,
    target_length: int | None = None,
    dtype: str | None = None,
    peft_config: object = None,
    quantization_config: object = None,
    prepare_kbit: bool | None = None,
    gpu: str | None = None,
    allocator: str | None = None,
    num_gpus: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    padding: bool | None = None,
    host_memory: str | None = None,
    pinned_memory: str | None = None,
    calibration: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> MemoryPlan:
    """Predict how much GPU memory a run will need, without a GPU.

    The unmodified Trainer runs three steps in another process, with torch's own CUDA code, on a
    card that computes nothing (docs/dry.md). The first plan of a process takes twelve seconds or
    more, six of which import torch and transformers; each further one takes less. If the installed
    torch was not built for CUDA, the first plan on a machine downloads the build that is (700 MB),
    unless TRAINER_PLUGINS_FETCH is "never".

    Args:
        trainer_or_config: a Trainer before training, which is not changed; or a model's config: the
            config object, a dict, the path of its file or folder, or a name in the hub's cache.
        training_args: with a config: TrainingArguments, or a dict of their fields.
        seq_length: with a config: tokens in each row (default: TRL's `max_length` in
            `training_args`, else 2048).
        target_length: with an encoder-decoder's config: tokens in each label (default:
            `seq_length`).
        dtype: with a config: for example "bfloat16" (default: as `from_pretrained` chooses).
        peft_config: with a config: a PeftConfig, or a dict of its fields.
        quantization_config: with a config: a BitsAndBytesConfig, or a dict of its fields.
        prepare_kbit: whether `prepare_model_for_kbit_training` is called on a quantised model
            (default: yes).
        gpu: a card by name or size, for example "h100-80gb" or "24GiB" (default: the Trainer's
            card). Without a card, the plan gives the memory of the run, but not whether it fits.
        allocator: the text of PYTORCH_ALLOC_CONF (default: the settings of this process).
        num_gpus: cards that train together (default: the Trainer's ranks, else from
            `accelerate_config`, else 1).
        accelerate_config: with a config: the file for `accelerate launch`.
        padding: with a config: whether batches have padding (default: if a batch has two rows or
            more).
        host_memory: the machine's main memory, for example "252GB", into which all its ranks must
            fit (default: that of this machine if the plan is for the Trainer's own card).
        pinned_memory: how much of it can be pinned, for example "2GiB" (default: all of it).
        calibration: whether to use the context that `calibrate` measured on this machine.
        timeout_seconds: the time limit of the prediction.

    Raises:
        PlanError: the input is wrong, or the run ended before it trained. It is a ValueError.
        NotPredicted: the input is valid, but has no dry run. It is a PlanError.
    """
    run = RunOptions(
        training_args=training_args,
        seq_length=seq_length,
        target_length=target_length,
        dtype=dtype,
        peft_config=peft_config,
        quantization_config=quantization_config,
        prepare_kbit=prepare_kbit,
        gpu=gpu,
        allocator=allocator,
        num_gpus=num_gpus,
        accelerate_config=None if accelerate_config is None else Path(accelerate_config),
        padding=padding,
        host_memory=host_memory,
        pinned_memory=pinned_memory,
        calibration=calibration,
    )
    plan = predict_one(request_of(trainer_or_config, run), timeout_seconds)
    if hasattr(trainer_or_config, "training_step"):
        remember(trainer_or_config, plan)
    return plan


def predict_one(
    request: PlanRequest, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> MemoryPlan:
    """Predict one run, with changes that would make it fit if the request asks for them."""
    variations = Variations(dry_run_of(request, timeout_seconds), lambda _: None)
    return variations.proposals() if request.proposes else variations.plan


def predict_all(
    requests: Sequence[PlanRequest], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> list[MemoryPlan | PlanError]:
    """Predict runs one after the other, within one time limit: plans, or why there is none."""
    until = time.monotonic() + timeout_seconds
    return [_plan_or_error(request, until) for request in requests]


def _plan_or_error(request: PlanRequest, until: float) -> MemoryPlan | PlanError:
    try:
        return predict_one(request, max(1, until - time.monotonic()))
    except PlanError as error:
        return error
