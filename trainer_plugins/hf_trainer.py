"""These protocols list the names of a Trainer that we use: mypy cannot read transformers in time.

A name is listed if every supported version has it (setup.cfg); others are read with `getattr`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class HfArguments(Protocol):
    """Lists the fields and properties of `TrainingArguments`."""

    auto_find_batch_size: bool
    average_tokens_across_devices: bool
    batch_eval_metrics: bool
    ddp_timeout: int
    deepspeed: object
    device: torch.device
    do_eval: bool
    eval_accumulation_steps: int | None
    eval_do_concat_batches: bool
    eval_on_start: bool
    fsdp: object
    gradient_accumulation_steps: int
    include_for_metrics: list[str]
    local_process_index: int
    n_gpu: int
    optim: object
    output_dir: str
    per_device_eval_batch_size: int
    per_device_train_batch_size: int
    process_index: int
    use_liger_kernel: bool
    world_size: int


class HfState(Protocol):
    """Lists the fields of a `TrainerState`."""

    global_step: int
    log_history: list[dict[str, float]]
    num_input_tokens_seen: int
    stateful_callbacks: dict[str, Any]


class HfCallbackHandler(Protocol):
    """Lists the names of a Trainer's `CallbackHandler`."""

    add_callback: Callable[[object], None]
    callbacks: list[Any]
    eval_dataloader: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    train_dataloader: Any


class HfAccelerator(Protocol):
    """Lists the names of accelerate's `Accelerator`."""

    backward: Callable[..., None]  # of a loss, with options that depend on the kind of run
    ddp_handler: object
    distributed_type: object
    free_memory: Callable[[], None]
    mixed_precision: str
    num_processes: int
    parallelism_config: Any  # none unless the run uses accelerate's parallelism config
    prepare_data_loader: Callable[[object], object]
    state: Any  # its plugins: `fsdp_plugin` is only there under FSDP
    sync_gradients: bool
    unwrap_model: Callable[..., torch.nn.Module]
    use_distributed: bool


class HfTrainer(Protocol):
    """Lists the names of a `Trainer`, including private ones that this package calls."""

    accelerator: HfAccelerator
    args: HfArguments
    callback_handler: HfCallbackHandler
    compute_loss: Callable[..., Any]
    compute_loss_context_manager: Callable[[], AbstractContextManager[object]]
    compute_loss_func: object  # the user's loss; TRL's GRPO trainer sets a string as a marker
    compute_metrics: Callable[[Any], dict[str, Any]] | None
    control: Any
    current_gradient_accumulation_steps: int  # the micro-batches of this step; set by training
    eval_dataset: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_in_train: bool
    is_model_parallel: bool
    lr_scheduler: Any
    model: Any
    model_accepts_loss_kwargs: bool
    model_init: object
    model_wrapped: torch.nn.Module
    neftune_noise_alpha: float | None
    optimizer: Any  # none before training; else accelerate's wrapper of an optimizer
    prediction_step: Callable[..., Any]
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    state: HfState
    train: Callable[[], object]
    training_step: Callable[..., Any]

    _prepare_inputs: Callable[[Any], Any]
    _train_batch_size: int
