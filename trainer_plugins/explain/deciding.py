"""DECIDING: the TrainingArguments that decide about memory; others need data or accounts."""

DECIDING = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs", "optim",
    "optim_args", "optim_target_modules", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval",
    "use_liger_kernel", "torch_compile", "max_grad_norm", "label_smoothing_factor", "deepspeed",
    "fsdp", "fsdp_config", "eval_strategy", "do_eval", "prediction_loss_only",
    "batch_eval_metrics", "predict_with_generate", "generation_max_length",
    "generation_num_beams", "save_strategy", "save_only_model", "neftune_noise_alpha",
)  # fmt: skip
