"""The keys that accelerate and DeepSpeed read, and what each may hold.

Sources, of accelerate 1.15 and DeepSpeed 0.19.8: `ClusterConfig`
(accelerate/commands/config/config_args.py), the arguments of `accelerate launch`
(accelerate/commands/launch.py), `DeepSpeedConfig` and its constants (deepspeed/runtime/config.py,
constants.py), `DeepSpeedZeroConfig` (runtime/zero/config.py) with offload_config.py,
precision_config.py, zenflow_config.py, leaf_module_config.py, and swap_tensor/constants.py for
`aio`.

The kind of a value is one letter: b a bool, i an integer (5e7 counts), f a number, s text, m a
mapping, l a list, and * for anything. A key that DeepSpeed reads under two names is listed twice.
"""

Keys = dict[str, str]


def _keys(kind: str, names: str) -> Keys:
    return dict.fromkeys(names.split(), kind)


ACCELERATE: Keys = {
    **_keys(
        "s", "compute_environment distributed_type mixed_precision rdzv_backend main_process_ip"
    ),
    **_keys("s", "main_training_function dynamo_backend tpu_name tpu_zone command_file"),
    **_keys(
        "b", "use_cpu debug same_network enable_cpu_affinity tpu_use_cluster tpu_use_sudo fp16"
    ),
    **_keys("i", "num_processes machine_rank num_machines main_process_port"),
    **_keys("m", "fp8_config deepspeed_config fsdp_config parallelism_config"),
    **_keys("m", "megatron_lm_config mpirun_config"),
    **_keys("m", "dynamo_config"),
    **_keys("l", "commands tpu_vm tpu_env"),
    **_keys("*", "gpu_ids downcast_bf16"),
}
ACCELERATE_DEEPSPEED: Keys = {
    **_keys("s", "deepspeed_config_file deepspeed_multinode_launcher deepspeed_hostfile"),
    **_keys("s", "deepspeed_exclusion_filter deepspeed_inclusion_filter"),
    **_keys("s", "deepspeed_moe_layer_cls_names offload_optimizer_device"),
    **_keys("s", "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path"),
    **_keys("i", "zero_stage gradient_accumulation_steps"),
    **_keys("f", "gradient_clipping"),
    **_keys("b", "zero3_init_flag zero3_save_16bit_model"),
}
# DeepSpeedPlugin._deepspeed_config_checks raises for these beside a deepspeed_config_file, whatever
# their values.
REFUSED_BESIDE_JSON = frozenset(
    [
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_param_nvme_path",
        "offload_optimizer_nvme_path",
        "zero3_save_16bit_model",
        "mixed_precision",
    ]
)
# accelerate adds `fsdp_` to a key that lacks it.
ACCELERATE_FSDP: Keys = {
    **_keys("i", "fsdp_version fsdp_min_num_params"),
    **_keys("b", "fsdp_offload_params fsdp_forward_prefetch fsdp_use_orig_params"),
    **_keys("b", "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states"),
    **_keys("b", "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"),
    **_keys("s", "fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_state_dict_type"),
    **_keys(
        "*", "fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_transformer_layer_cls_to_wrap"
    ),
    **_keys("*", "fsdp_ignored_modules"),
}

DEEPSPEED: Keys = {
    **_keys("i", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **_keys("i", "steps_per_print"),
    **_keys("i", "vocabulary_size sequence_parallel_size"),
    **_keys("f", "gradient_clipping gradient_predivide_factor"),
    **_keys("b", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients"),
    **_keys("b", "disable_allgather dump_state disable_python_gc wall_clock_breakdown"),
    **_keys("b", "memory_breakdown dataloader_drop_last"),
    **_keys("b", "managed_gradient_accumulation use_data_before_expert_parallelism"),
    **_keys("s", "communication_data_type seq_parallel_communication_data_type"),
    **_keys("s", "gradient_allreduce_op log_level"),
    **_keys("m", "zero_optimization bf16 bfloat16 fp16 torch_autocast optimizer scheduler aio"),
    **_keys("m", "checkpoint data_types activation_checkpointing flops_profiler tensorboard wandb"),
    **_keys("m", "csv_monitor comet comms_logger autotuning hybrid_engine pipeline"),
    **_keys("m", "data_efficiency compile timers tensor_parallel expert_parallel"),
    **_keys("m", "weight_quantization datastates_ckpt datastates_config checkpoint_engine"),
}
ZERO: Keys = {
    **_keys("i", "stage reduce_bucket_size allgather_bucket_size sub_group_size"),
    **_keys("i", "zero_hpz_partition_size"),
    **_keys("b", "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce"),
    **_keys("b", "allgather_partitions overlap_comm compute_grad_norm load_from_fp32_weights"),
    **_keys("b", "elastic_checkpoint ignore_unused_parameters legacy_stage1"),
    **_keys("b", "round_robin_gradients parameter_alignment zero_quantized_weights"),
    **_keys("b", "zero_quantized_gradients zero_quantized_nontrainable_weights"),
    **_keys("b", "memory_efficient_linear pipeline_loading_checkpoint override_module_apply"),
    **_keys("b", "log_trace_cache_warnings enable_sanity_checks"),
    **_keys("b", "save_muon_momentum_buffer_in_memory cpu_offload cpu_offload_param"),
    **_keys("b", "cpu_offload_use_pin_memory"),
    **_keys("b", "stage3_gather_fp16_weights_on_model_save"),
    **_keys("m", "offload_param offload_optimizer zenflow leaf_module"),
}
# Keys of stage 3 alone. DeepSpeed reads them with and without the prefix, transformers and
# accelerate only with it.
STAGE3: Keys = {
    **_keys("i", "prefetch_bucket_size param_persistence_threshold model_persistence_threshold"),
    **_keys("i", "max_live_parameters max_reuse_distance module_granularity_threshold"),
    **_keys("b", "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params"),
    **_keys("b", "allgather_sequential"),
}
ZERO.update(STAGE3)
ZERO.update({f"stage3_{key}": kind for key, kind in STAGE3.items()})

BLOCKS: dict[str, Keys] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": {
        **_keys("s", "device nvme_path"),
        **_keys("i", "buffer_count buffer_size max_in_cpu"),
        **_keys("b", "pin_memory"),
    },
    "zero_optimization.offload_optimizer": {
        **_keys("s", "device nvme_path"),
        **_keys("i", "buffer_count"),
        **_keys("f", "ratio cpuadam_cores_perc"),
        **_keys("b", "pin_memory pipeline_read pipeline_write fast_init super_offload"),
    },
    "zero_optimization.zenflow": {
        **_keys("f", "topk_ratio auto_ratio pt_reserved_cores_perc"),
        **_keys("b", "overlap_step offload"),
        **_keys("i", "full_warm_up_rounds steps_per_epoch"),
        **_keys("*", "select_strategy select_interval update_interval"),
    },
    "zero_optimization.leaf_module": _keys("*", "classes names name_suffixes"),
    "bf16": {
        **_keys("b", "enabled immediate_grad_update check_grad_overflow"),
        **_keys("b", "bf16_master_weights_and_grads bf16_optimizer_states"),
    },
    "fp16": {
        **_keys("b", "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
        **_keys("f", "loss_scale"),
        **_keys("i", "initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    },
    "aio": {
        **_keys("i", "block_size queue_depth intra_op_parallelism"),
        **_keys("b", "single_submit overlap_events use_gds"),
    },
    "activation_checkpointing": {
        **_keys("b", "partition_activations contiguous_memory_optimization"),
        **_keys("b", "synchronize_checkpoint_boundary profile cpu_checkpointing"),
        **_keys("i", "number_checkpoints"),
    },
    "torch_autocast": {
        **_keys("b", "enabled"),
        **_keys("s", "dtype"),
        **_keys("l", "lower_precision_safe_modules"),
    },
    "optimizer": {**_keys("s", "type"), **_keys("m", "params"), **_keys("b", "legacy_fusion")},
    "scheduler": {**_keys("s", "type"), **_keys("m", "params")},
}
BLOCKS["bfloat16"] = BLOCKS["bf16"]
# In these blocks DeepSpeed reads the keys it knows and ignores the rest; in the others it refuses
# unknown keys.
PASSED_OVER = frozenset(
    {"", "aio", "activation_checkpointing", "torch_autocast", "optimizer", "scheduler"}
)

# _REMOVED_TOP_LEVEL_CONFIG_KEYS and _REMOVED_ZERO_CONFIG_KEYS of deepspeed/runtime/config.py:
# DeepSpeed raises for each.
REMOVED = frozenset(
    [
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "elasticity",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
        "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.zeropp_loco_param",
    ]
)
DEPRECATED = {
    "zero_optimization.cpu_offload": 'zero_optimization.offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'zero_optimization.offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": (
        "pin_memory inside offload_optimizer and offload_param"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save"
    ),
    "bfloat16": "bf16, the only name that transformers and accelerate look for",
}

# Keys whose "auto" transformers (HfTrainerDeepSpeedConfig) and accelerate (DeepSpeedPlugin,
# _prepare_deepspeed) replace.
AUTO = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ]
)
# For these accelerate fills in its own default, which is seldom what "auto" was meant to be.
AUTO_IS_OFF = {
    "zero_optimization.stage": "2",
    "zero_optimization.offload_optimizer.device": '"none"',
    "zero_optimization.offload_param.device": '"none"',
    "zero_optimization.offload_optimizer.nvme_path": '"none"',
    "zero_optimization.offload_param.nvme_path": '"none"',
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "false",
}
