"""Switches that help whatever was read, a text, a record or a snapshot: each as one types it."""

from trainer_plugins.explain.answer import Remedy
from trainer_plugins.units import size

NO_WORKERS = Remedy(
    do="--dataloader_num_workers 0",
    effect="no worker holds batches, libraries or a copy of the data set, nor uses /dev/shm",
    grade="known",
    price="loading is not done beside the training",
)
NO_PINNED_BATCHES = Remedy(
    do="--dataloader_pin_memory False",
    effect="batches are not page-locked",
    grade="known",
    price="copies to the card do not overlap with computing",
)
SHARDED_SAVE = Remedy(
    do="fsdp_state_dict_type: SHARDED_STATE_DICT",
    effect="each rank saves its own part (in accelerate's file); nothing is gathered on a card",
    grade="known",
    price="`accelerate merge-weights` joins the parts afterwards",
)
SAVE_WITHOUT_GATHER = Remedy(
    do='"stage3_gather_16bit_weights_on_model_save": false',
    effect="each rank saves its own part, and nothing is gathered (in DeepSpeed's file)",
    grade="known",
    price="`zero_to_fp32.py` joins the parts on the CPU",
)
LOAD_ON_ONE_RANK = Remedy(
    do="fsdp_cpu_ram_efficient_loading: true   # with fsdp_sync_module_states: true",
    effect="one rank loads the model into main memory, and the others get their shards (in"
    " accelerate's file); do not move the model to a card before",
    grade="known",
    price="a slower start",
)
FEWER_LIVE_PARAMETERS = Remedy(
    do='"stage3_max_live_parameters": 1e8, "stage3_prefetch_bucket_size": 1e7',
    effect="fewer parameters are gathered at once than DeepSpeed's default of 1e9, which are 2 GB"
    " in half precision (in its file)",
    grade="known",
    price="they are gathered more often, with less overlap of sending and computing",
)
RELEASED = "from trainer_plugins import released; released(trainer)"
"""Empties the card of a Trainer of this process, and names who holds the rest."""

FUSED_ADAMW = "--optim adamw_torch_fused"
"""Takes one kernel for the step, and makes no temporaries of the size of the weights."""

OUTPUTS_TO_MAIN_MEMORY = "--eval_accumulation_steps 1"
"""Moves what an evaluation keeps to main memory after each batch."""

BEST_WORDS = (
    "Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: "
    "(logits[0] if isinstance(logits, tuple) else logits).argmax(-1))"
)
"""Keeps a number a token in place of its logits; T5 and others return a tuple."""

DECIDING = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs", "optim",
    "optim_args", "optim_target_modules", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval",
    "use_liger_kernel", "torch_compile", "max_grad_norm", "label_smoothing_factor", "deepspeed",
    "fsdp", "fsdp_config", "eval_strategy", "do_eval", "prediction_loss_only",
    "batch_eval_metrics", "predict_with_generate", "generation_max_length",
    "generation_num_beams", "save_strategy", "save_only_model", "neftune_noise_alpha",
)  # fmt: skip
"""The TrainingArguments that decide about memory; others need data, accounts or folders."""


def survive(launched: str) -> Remedy:
    """Finish a micro-batch that does not fit in pieces, under the command that starts the run."""
    return Remedy(
        do=f"trainer-plugins exec --preset survive -- {launched}",
        effect="a micro-batch that does not fit is finished in pieces, with the same gradient",
        grade="known",
        price="time for the micro-batches that are divided; nothing for the others",
    )


def checkpointing(do: str = "--gradient_checkpointing True") -> Remedy:
    """Compute activations twice instead of keeping them."""
    return Remedy(
        do=do,
        effect="only the inputs of layers are kept for the backward pass",
        grade="known",
        price="each forward is computed twice, about a third more time",
    )


def liger(num_bytes: int | None) -> Remedy:
    """Never make the logits whole; `num_bytes` is what was asked for where they are made."""
    return Remedy(
        do="--use_liger_kernel True",
        effect=f"the logits ({size(num_bytes)} at that place, more than once) are never whole"
        if num_bytes
        else "the logits are never whole",
        grade="arithmetic" if num_bytes else "known",
        price="needs liger-kernel, and a model that it knows; rounding differs a little",
    )
