"""Lists what other programs call a run's options, and which memory does not depend on.

Read in the files named here, of TRL 1.16 (trl/trainer/model_config.py, trl/scripts/utils.py), PEFT
0.21 (examples/sft/train.py, examples/*_finetuning), transformers 5.23 (examples/pytorch), axolotl
of July 2026 (src/axolotl/utils/schemas), LLaMA-Factory of August 2026 (src/llamafactory/hparams).
"""

from collections.abc import Mapping
from typing import NamedTuple


def names(text: str) -> frozenset[str]:
    """Return the words of a text.

    >>> sorted(names("b a"))
    ['a', 'b']
    """
    return frozenset(text.split())


SAME: Mapping[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",  # transformers 5.23
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "model_name_or_path": "model",  # TRL, transformers, LLaMA-Factory
    "base_model": "model",  # axolotl, PEFT
    "base_model_name_or_path": "model",
    "residual_model_name_or_path": "model",
    "torch_dtype": "dtype",
    "max_seq_length": "seq_length",
    "max_seq_len": "seq_length",
    "seq_len": "seq_length",
    "sequence_len": "seq_length",  # axolotl
    "cutoff_len": "seq_length",  # LLaMA-Factory
    "block_size": "seq_length",  # transformers: run_clm.py
    "max_source_length": "seq_length",
    "max_target_length": "target_length",
    "max_answer_length": "target_length",
    "max_duration_in_seconds": "sound_seconds",
    "micro_batch_size": "per_device_train_batch_size",  # axolotl
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "evaluation_strategy": "eval_strategy",  # transformers 4
    "enable_liger_kernel": "use_liger_kernel",  # LLaMA-Factory
    "lora_rank": "lora_r",
    "lora_target_modules": "lora_target",
    "additional_target": "lora_modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "use_peft_lora": "use_peft",  # PEFT: examples/sft/train.py
    "use_4bit_quantization": "load_in_4bit",
    "use_8bit_quantization": "load_in_8bit",
    "use_nested_quant": "bnb_4bit_use_double_quant",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",  # TRL
    "double_quantization": "bnb_4bit_use_double_quant",
    "quantization_type": "bnb_4bit_quant_type",
    "bnb_4bit_quant_storage_dtype": "bnb_4bit_quant_storage",
}
"""Names that mean an option of `plan`, a field of TrainingArguments, or what `adapters` reads."""

NO_INFLUENCE = names(
    """
    adam_eps add_special_tokens add_tokens answer_column append_concat_token cache_dir
    chars_to_ignore chat_template chat_template_format chat_template_path context_column
    convert_pissa_to_lora cosine_constant_lr_ratio cosine_min_lr_ratio data_files data_path
    data_seed dataset dataset_config dataset_config_name dataset_dir dataset_field
    dataset_keep_in_memory dataset_kwargs dataset_name dataset_num_proc dataset_prepared_path
    dataset_processes dataset_split dataset_streaming dataset_test_split dataset_text_field
    dataset_train_split datasets device device_map doc_stride dpo_label_smoothing eos_token
    eval_dataset eval_metrics eval_sample_packing eval_split_name eval_step field_messages
    flex_attn_compile_kwargs fp8_backend fp8_enable_fsdp_float8_all_gather gptq_disable_exllama
    group_by_length hf_use_auth_token hub_model_id hub_private_repo hub_strategy hub_token
    ignore_bias_buffers ignore_mismatched_sizes image_column_name kto_desirable_weight
    kto_undesirable_weight label_column_name language layerdrop length_column_name line_by_line
    logging_dir lora_alpha lora_fan_in_fan_out lora_model_dir loss_watchdog_patience
    loss_watchdog_threshold lr_quadratic_warmup mask_history max_eval_samples
    max_predict_samples max_samples max_span_length max_train_samples media_dir merge_and_save
    mlm_probability model_revision model_type output_dir overwrite_cache overwrite_output_dir
    pad_to_max_length pad_to_sequence_len pad_token plm_probability plot_loss pref_beta pref_loss
    preprocessing_num_workers pretraining_dataset push_dataset_to_hub push_to_hub
    push_to_hub_model_id question_column ray_init_kwargs reinit_weights report_to
    resize_token_embeddings_to_32x resume_from_checkpoint rl_beta run_name
    sample_packing_sequentially save_first_step save_safetensors save_step saves_per_epoch seed
    shuffle_buffer_size shuffle_merged_datasets source_lang source_prefix special_tokens split
    splits streaming strict summary_column target_lang task_name template test_datasets
    test_file text_column text_column_name tokenized_path tokenizer_config tokenizer_legacy
    tokenizer_name tokenizer_type tokenizer_use_fast tokens torchdistx_path train_dir train_file
    train_language train_on_inputs train_on_prompt train_split_name train_val_split
    trust_remote_code use_fast_tokenizer use_rslora use_swanlab val_set_size validation_dir
    validation_file version_2_with_negative wandb_entity wandb_log_model wandb_name
    wandb_project wandb_watch warmup_ratio
    """
)
"""Names of data, texts, seeds, the hub, logs and learning rates."""

_OF_OTHERS = "an optimizer of LLaMA-Factory's own"
_NOT_LORA = "an adapter that is not LoRA: give its adapter_config.json as --peft-config"

NOT_PLANNED: Mapping[str, str] = {
    "fp8": "training in FP8, for which TrainingArguments have no such switch",
    "use_unsloth": "unsloth, whose layers are its own",
    "use_unsloth_gc": "unsloth's checkpointing",
    "gptq": "a base quantised by GPTQ, whose kernels are not known here",
    "unfrozen_parameters": "a model of which only parameters that match patterns are trained",
    "relora": "ReLoRA, which merges its adapter while it trains",
    "qat": "training that is aware of quantisation",
    "use_kt": "KTransformers, whose experts are on the CPU",
    "use_galore": "GaLore",
    "use_apollo": "APOLLO with LLaMA-Factory's own settings: see --optim apollo_adamw",
    "use_badam": "BAdam, " + _OF_OTHERS,
    "use_muon": "Muon, " + _OF_OTHERS,
    "use_adam_mini": "Adam-mini, " + _OF_OTHERS,
    "use_mca": "Megatron",
    "use_megatron_bridge": "Megatron",
    "use_llama_pro": "a model of which only added layers are trained",
    "mixture_of_depths": "a mixture of depths",
    "shift_attn": "shifted attention",
    **dict.fromkeys(
        ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_eaft", "chunked_cross_entropy"),
        "a loss of that program's own: run the command after --",
    ),
    "neat_packing": "rows in which a mask of LLaMA-Factory's own tells texts apart",
    "ray_num_workers": "workers of Ray: say how many cards train (--num-gpus)",
    "tiled_mlp": "a tiled MLP",
    "process_reward_model": "a process reward model",
    "gradient_checkpointing_offload": "checkpoints in main memory",
    "layer_offloading": "layers in main memory",
    "lora_mlp_kernel": "axolotl's own kernels for LoRA",
    "lora_qkv_kernel": "axolotl's own kernels for LoRA",
    "lora_o_kernel": "axolotl's own kernels for LoRA",
    "tensor_parallel_size": "tensor parallelism of axolotl: see tp_size in --accelerate-config",
    "context_parallel_size": "context parallelism of axolotl: see cp_size in --accelerate-config",
    "model_config": "a config that is changed while it is read: change it in the config.json",
    "config_overrides": "a config that is changed while it is read: change it in the config.json",
    "adapter_name_or_path": "an adapter that is continued: give its config as --peft-config",
    **dict.fromkeys(("miss_r", "hira_r", "randlora_alpha", "delora_lambda", "oft_rank"), _NOT_LORA),
}
"""Names of what memory depends on and what is not planned, with what they ask for."""


class Script(NamedTuple):
    """Says what a program of other projects trains, beyond its flags."""

    trainer: str | None = None  # of TRL
    defaults: Mapping[str, object] = {}
    not_planned: str = ""


_BLOCKS = {"padding": False}  # all rows are cut from one text
_PROJECTIONS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_TRANSLATES = {"max_source_length": 1024, "max_target_length": 128}
_PISSA = {"use_peft": True, "lora_r": 16, "lora_dropout": 0, "lora_target": _PROJECTIONS}

SCRIPTS: Mapping[str, Script] = {
    **{name: Script(name) for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo")},
    **{name: Script(name) for name in ("cpo", "orpo", "tpo")},
    "reward_modeling": Script("reward"),
    "gspo": Script("grpo", {"importance_sampling_level": "sequence"}),
    "sft_gpt_oss": Script("sft"),
    "run_clm": Script(defaults={"block_size": 1024, **_BLOCKS}),
    "run_mlm": Script(defaults={"max_seq_length": 512, **_BLOCKS}),
    "run_plm": Script(not_planned="its collator makes what XLNet's loss needs"),
    "run_glue": Script(defaults={"max_seq_length": 128, "metrics": True, "num_labels": 2}),
    "run_xnli": Script(defaults={"max_seq_length": 128, "metrics": True, "num_labels": 3}),
    "run_qa": Script(defaults={"max_seq_length": 384, "head": "QuestionAnswering"}),
    "run_ner": Script(
        defaults={"max_seq_length": 512, "metrics": True, "head": "TokenClassification"}
    ),
    "run_seq2seq_qa": Script(defaults={"max_seq_length": 384, "max_answer_length": 30}),
    "run_summarization": Script(defaults=_TRANSLATES),
    "run_translation": Script(defaults=_TRANSLATES),
    "run_image_classification": Script(
        defaults={
            "model_name_or_path": "google/vit-base-patch16-224-in21k",
            "metrics": True,
            "head": "ImageClassification",
        }
    ),
    "run_speech_recognition_ctc": Script(
        defaults={"max_duration_in_seconds": 20, "metrics": True, "head": "CTC"}
    ),
    "dora_finetuning": Script(
        defaults={
            "use_peft": True,
            "lora_r": 8,
            "lora_dropout": 0.05,
            "lora_target": _PROJECTIONS,
            "batch_size": 1,
            "cutoff_len": 512,
            "fp16": True,
            "eval_strategy": "steps",
        }
    ),
    "olora_finetuning": Script(
        defaults={
            "use_peft": True,
            "lora_r": 32,
            "lora_dropout": 0.05,
            "batch_size": 16,
            "cutoff_len": 256,
            "dtype": "float16",
            "prepare_kbit": False,
            "init_lora_weights": "olora",
            "eval_strategy": "steps",
        }
    ),
    "pissa_finetuning": Script("sft", {**_PISSA, "init_lora_weights": "pissa"}),
    "corda_finetuning": Script("sft", {**_PISSA, "lora_r": 128}),
}
"""The programs whose defaults are known, by the names of their files."""

OF_PEFT_SFT: Mapping[str, object] = {
    "lora_r": 64,
    "lora_dropout": 0.1,
    "lora_target": _PROJECTIONS,
    "bnb_4bit_compute_dtype": "float16",
}
"""The defaults of PEFT's examples/sft/train.py, which is known by its `--use_peft_lora`."""

OTHER_TRAINERS = names(
    """
    bco dpo_vlm gkd gold grpo_vlm mpo_vlm nash_md online_dpo online_dpo_vlm ppo ppo_tldr prm
    rloo_vlm sdft sdpo sft_vlm sft_vlm_gemma3 xpo
    """
)
"""Programs of TRL whose Trainers, or whose pictures, are not planned from a config."""
