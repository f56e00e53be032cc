"""List the keys that accelerate and DeepSpeed read (renamed ones twice), and the type of each.

Sources: accelerate 1.15, commands/config/config_args.py and launch.py; DeepSpeed 0.19.8, runtime/.
"""

Keys = dict[str, str]  # the type of each key: a parameter name of `_keys`


def _keys(**names_by_kind: str) -> Keys:
    """Build a table from lists of names: `integer` allows 5e7 too, `anything` is not checked."""
    return {name: kind for kind, names in names_by_kind.items() for name in names.split()}


DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM",
)  # fmt: skip
ACCELERATE = _keys(
    text="""
        compute_environment distributed_type mixed_precision rdzv_backend main_process_ip
        main_training_function dynamo_backend tpu_name tpu_zone command_file
    """,
    boolean="use_cpu debug same_network enable_cpu_affinity tpu_use_cluster tpu_use_sudo fp16",
    integer="num_processes machine_rank num_machines main_process_port",
    mapping="""
        fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config
        dynamo_config
    """,
    sequence="commands tpu_vm tpu_env",
    anything="gpu_ids downcast_bf16",
)
ACCELERATE_DEEPSPEED = _keys(
    text="""
        deepspeed_config_file deepspeed_multinode_launcher deepspeed_hostfile
        deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names
        offload_optimizer_device offload_param_device offload_optimizer_nvme_path
        offload_param_nvme_path
    """,
    integer="zero_stage gradient_accumulation_steps",
    number="gradient_clipping",
    boolean="zero3_init_flag zero3_save_16bit_model",
)
# DeepSpeedPlugin._deepspeed_config_checks refuses these, and mixed_precision, next to a
# deepspeed_config_file.
REFUSED_BESIDE_JSON = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
# accelerate adds `fsdp_` to a key that lacks it.
ACCELERATE_FSDP = _keys(
    integer="fsdp_version fsdp_min_num_params",
    boolean="""
        fsdp_offload_params fsdp_forward_prefetch fsdp_use_orig_params
        fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing
        fsdp_activation_checkpointing_offload
    """,
    text="fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_state_dict_type",
    anything="""
        fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_transformer_layer_cls_to_wrap
        fsdp_ignored_modules
    """,
)
ACCELERATE_SECTIONS = {"deepspeed_config": ACCELERATE_DEEPSPEED, "fsdp_config": ACCELERATE_FSDP}

DEEPSPEED = _keys(
    integer="""
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
        vocabulary_size sequence_parallel_size
    """,
    number="gradient_clipping gradient_predivide_factor",
    boolean="""
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients
        disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown
        dataloader_drop_last managed_gradient_accumulation use_data_before_expert_parallelism
    """,
    text="""
        communication_data_type seq_parallel_communication_data_type gradient_allreduce_op log_level
    """,
    mapping="""
        zero_optimization bf16 bfloat16 fp16 torch_autocast optimizer scheduler aio checkpoint
        data_types activation_checkpointing flops_profiler tensorboard wandb csv_monitor comet
        comms_logger autotuning hybrid_engine pipeline data_efficiency compile timers
        tensor_parallel expert_parallel weight_quantization datastates_ckpt datastates_config
        checkpoint_engine
    """,
)
ZERO = _keys(
    integer="stage reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size",
    boolean="""
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
        overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
        zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
        cpu_offload cpu_offload_param cpu_offload_use_pin_memory
        stage3_gather_fp16_weights_on_model_save
    """,
    mapping="offload_param offload_optimizer zenflow leaf_module",
)
# Only for stage 3. DeepSpeed reads them without the prefix too; transformers and accelerate do not.
STAGE3 = _keys(
    integer="""
        prefetch_bucket_size param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance module_granularity_threshold
    """,
    boolean="""
        gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential
    """,
)
ZERO |= STAGE3
ZERO |= {f"stage3_{key}": kind for key, kind in STAGE3.items()}

BLOCKS: dict[str, Keys] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": _keys(
        text="device nvme_path", integer="buffer_count buffer_size max_in_cpu", boolean="pin_memory"
    ),
    "zero_optimization.offload_optimizer": _keys(
        text="device nvme_path",
        integer="buffer_count",
        number="ratio cpuadam_cores_perc",
        boolean="pin_memory pipeline_read pipeline_write fast_init super_offload",
    ),
    "zero_optimization.zenflow": _keys(
        number="topk_ratio auto_ratio pt_reserved_cores_perc",
        boolean="overlap_step offload",
        integer="full_warm_up_rounds steps_per_epoch",
        anything="select_strategy select_interval update_interval",
    ),
    "zero_optimization.leaf_module": _keys(anything="classes names name_suffixes"),
    "bf16": _keys(
        boolean="""
            enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
            bf16_optimizer_states
        """,
    ),
    "fp16": _keys(
        boolean="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        number="loss_scale",
        integer="initial_scale_power loss_scale_window hysteresis min_loss_scale",
    ),
    "aio": _keys(
        integer="block_size queue_depth intra_op_parallelism",
        boolean="single_submit overlap_events use_gds",
    ),
    "activation_checkpointing": _keys(
        boolean="""
            partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary
            profile cpu_checkpointing
        """,
        integer="number_checkpoints",
    ),
    "torch_autocast": _keys(
        boolean="enabled", text="dtype", sequence="lower_precision_safe_modules"
    ),
    "optimizer": _keys(text="type", mapping="params", boolean="legacy_fusion"),
    "scheduler": _keys(text="type", mapping="params"),
}
BLOCKS["bfloat16"] = BLOCKS["bf16"]
# DeepSpeed ignores unknown keys in these blocks, and refuses them in the others.
PASSED_OVER = frozenset(
    {"", "aio", "activation_checkpointing", "torch_autocast", "optimizer", "scheduler"}
)

# DeepSpeed raises for each: _REMOVED_..._CONFIG_KEYS of deepspeed/runtime/config.py.
REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning",
    "progressive_layer_drop", "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param",
)  # fmt: skip
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

# For these, accelerate replaces "auto" by its own default, which is rarely intended.
AUTO_IS_OFF = {
    "zero_optimization.stage": "2",
    "zero_optimization.offload_optimizer.nvme_path": '"none"',
    "zero_optimization.offload_param.nvme_path": '"none"',
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "false",
}
