"""The smallest model of any class of transformers: a config with every size cut down, whatever a family calls it."""

import inspect
import re
from typing import Any

import torch
import transformers
from torch import nn

SIZE, HEADS, LAYERS, VOCABULARY, LENGTH, IMAGE, PATCH = 32, 4, 2, 128, 64, 32, 8

_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(
        (
            *(
                "hidden_size",
                "d_model",
                "n_embd",
                "dim",
                "embed_dim",
                "hidden_dim",
                "embedding_size",
                "d_embed",
            ),
            *(
                "word_embed_proj_dim",
                "encoder_hidden_size",
                "decoder_hidden_size",
                "projection_dim",
                "out_hidden_size",
            ),
            *(
                "encoder_hidden_dim",
                "text_hidden_size",
                "attention_hidden_size",
                "emb_dim",
                "output_dim",
                "d_inner",
            ),
            *(
                "intermediate_size",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
                "d_ff",
                "ffn_dim",
            ),
            *(
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "mlp_dim",
                "ffn_hidden_size",
                "n_inner",
                "shared_intermediate_size",
            ),
            *(
                "lru_width",
                "classifier_proj_size",
                "output_hidden_size",
                "projector_hidden_size",
                "d_latents",
            ),
            *(
                "moe_shared_expert_intermediate_size",
                "intermediate_size_mlp",
                "expert_ffn_hidden_size",
                "embedding_dim",
            ),
            *(
                "hidden_size_per_layer_input",
                "num_hidden_groups_size",
                "adapter_hidden_size",
                "dim_ff",
            ),
            *(
                "vision_hidden_size",
                "vocab_hidden_size",
                "pooler_hidden_size",
                "dense_intermediate_size",
            ),
            *(
                "index_head_size",
                "lm_hidden_size",
                "qformer_hidden_size",
                "vlm_hidden_size",
                "resampler_hidden_size",
            ),
            *(
                "num_channels_latent",
                "hidden_channels",
                "fusion_hidden_size",
                "decoder_dim",
                "encoder_dim",
            ),
        ),
        SIZE,
    ),
    **dict.fromkeys(
        (
            *(
                "num_attention_heads",
                "num_key_value_heads",
                "num_heads",
                "n_head",
                "n_heads",
                "attention_heads",
            ),
            *(
                "encoder_attention_heads",
                "decoder_attention_heads",
                "num_kv_heads",
                "linear_num_key_heads",
            ),
            *(
                "linear_num_value_heads",
                "swa_num_attention_heads",
                "swa_num_key_value_heads",
                "num_decoder_heads",
            ),
            *(
                "decoder_num_attention_heads",
                "decoder_num_key_value_heads",
                "encoder_num_attention_heads",
            ),
            *(
                "encoder_num_key_value_heads",
                "resampler_n_heads",
                "num_global_key_value_heads",
                "mamba_n_heads",
            ),
            *(
                "num_self_attention_heads",
                "num_cross_attention_heads",
                "linear_num_heads",
                "index_n_heads",
            ),
        ),
        HEADS,
    ),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), 8
    ),
    **dict.fromkeys(
        ("attention_head_dim", "swa_head_dim", "global_head_dim", "dim_head", "linear_head_dim"), 8
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "rotary_dim": 4,
    "index_head_dim": 8,
    "qk_head_dim": 16,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_topk", "attention_rank"), 16),
    **dict.fromkeys(
        (
            *(
                "num_hidden_layers",
                "num_layers",
                "n_layer",
                "n_layers",
                "encoder_layers",
                "decoder_layers",
                "depth",
            ),
            *(
                "num_decoder_layers",
                "num_encoder_layers",
                "decoder_num_hidden_layers",
                "encoder_num_hidden_layers",
            ),
            *("resampler_depth", "num_blocks"),
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "encoder_vocab_size", "decoder_vocab_size"),
        VOCABULARY,
    ),
    **dict.fromkeys(
        (
            *(
                "max_position_embeddings",
                "n_positions",
                "max_source_positions",
                "max_target_positions",
                "n_ctx",
            ),
            *(
                "max_seq_len",
                "max_sequence_length",
                "max_encoder_position_embeddings",
                "seq_length",
                "max_seq_length",
            ),
            *("max_decoder_position_embeddings", "context_length", "max_length_positions"),
        ),
        LENGTH,
    ),
    **dict.fromkeys(("image_size", "input_size"), IMAGE),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "n_shared_experts",
            "num_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(("moe_num_shared_experts",), 1),
    "sliding_window": 16,
    "attention_window": 8,
    "window_size": 2,
    "coordinate_size": 4,
    "shape_size": 8,
    "num_mel_bins": 16,
    "num_labels": 3,
    "num_kv_shared_layers": 0,
    "mamba_d_state": 8,
    "state_size": 8,
    "mamba_d_head": 8,
    "mamba_expand": 1,
    "num_nextn_predict_layers": 0,
    "num_queries": 5,
    "type_vocab_size": 2,
    "encoder_sparse_step": 1,
    "decoder_sparse_step": 1,
    "expert_capacity": 3,
    "d_state": 8,
    "entity_vocab_size": 40,
    "entity_emb_size": SIZE,
}
_WHERE_NONE = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "ASTConfig": {"max_length": 32},
    "BrosConfig": {"hidden_size": 64},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "LiltConfig": {"hidden_size": 48},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mistral4Config": {"head_dim": 16},
    "EsmConfig": {"mask_token_id": 4, "pad_token_id": 0},
    "DistilBertConfig": {"num_labels": 2},
    "BridgeTowerConfig": {
        "hidden_size": 64,
        "contrastive_hidden_size": 16,
        "logit_scale_init_value": 2.6,
    },
    "BridgeTowerTextConfig": {"hidden_size": 64},
    "BridgeTowerVisionConfig": {"hidden_size": 64},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "ConvNextConfig": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "ConvNextV2Config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 8},
    "InformerConfig": {"prediction_length": 8},
    "TimeSeriesTransformerConfig": {"prediction_length": 8},
    "Emu3Config": {"vocabulary_map": {"<image>": 5}},
    "PerceiverConfig": {"num_self_attention_heads": 1, "num_cross_attention_heads": 1},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 6, "audio_start_token_id": 7},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 6, "audio_start_token_id": 7},
    "ReformerConfig": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4)},
    "SeamlessM4Tv2Config": {"feature_projection_input_dim": 2 * LENGTH},
    "SegformerConfig": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [8, 16],
        "num_attention_heads": [1, 2],
    },
    "Speech2TextConfig": {"input_feat_per_channel": 2 * LENGTH},
    "Step3p7TextConfig": {"sliding_window": 16},
    "Wav2Vec2BertConfig": {"feature_projection_input_dim": 2 * LENGTH},
    "XmodConfig": {"languages": ["en_XX"], "default_language": "en_XX"},
    "Zamba2Config": {"attention_hidden_size": 2 * SIZE, "attention_head_dim": 16},
}
"""What a family of models wants besides, and its default config has not."""

_HAS_SECTIONS = re.compile(r"VL|PaddleOCR|4v|46V|Omni|Ocr|GlmImage|Qwen3_5")
"""Models with a rotary embedding for time, height and width, each with its share of the frequencies."""

_ZERO = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")
"""What draws random numbers is off, by its name."""


def tiny_config(config_class: type, **also: Any) -> Any:
    """With each size of this config, and of those inside it, cut down; what draws random numbers is off."""
    default = config_class()
    sizes = {
        name: small
        for name, value in vars(default).items()
        if (small := _small(name, value)) is not None
    }
    inner = {
        name: tiny_config(type(value)) for name, value in vars(default).items() if _is_config(value)
    }
    depth = next(
        (d for n in ("num_hidden_layers", "num_layers") if (d := getattr(default, n, None))), 0
    )
    for name, value in vars(default).items():  # one a layer
        if isinstance(value, list | tuple) and len(value) == depth > LAYERS:
            sizes[name] = sizes.get(name, value)[:LAYERS]
    rope = getattr(default, "rope_parameters", None)
    if (
        isinstance(rope, dict)
        and "rope_type" in rope
        and _HAS_SECTIONS.search(config_class.__name__)
    ):
        half = int(8 * rope.get("partial_rotary_factor", 1.0)) // 2
        sizes["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        }
    wanted = {**sizes, **inner, **also}
    known = set(inspect.signature(config_class.__init__).parameters)  # type: ignore[misc]
    known |= set(vars(default)) | {"num_labels"}
    wanted = {name: value for name, value in wanted.items() if name in known}
    return config_class(**{**wanted, **_OF_A_FAMILY.get(config_class.__name__, {})})


def tiny_model(model_class: type, **also: Any) -> nn.Module:
    """In float64, the same weights every time; no random numbers are drawn when it is computed in training."""
    num = 2 if "QuestionAnswering" in model_class.__name__ else 3  # where an answer begins and ends
    config = tiny_config(model_class.config_class, **{"num_labels": num, **also})  # type: ignore[attr-defined]
    _compute_experts_in_a_loop(config)
    for one in (config, config.get_text_config()):
        if getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
        if (
            getattr(one, "is_encoder_decoder", False)
            and getattr(one, "decoder_start_token_id", None) is None
        ):
            one.decoder_start_token_id = 0
    torch.manual_seed(0)
    model: nn.Module = model_class(config).double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _compute_experts_in_a_loop(config: Any) -> None:
    """The grouped product of matrices knows no float64."""
    config._experts_implementation = "eager"
    for value in vars(config).values():
        if _is_config(value):
            _compute_experts_in_a_loop(value)


def _small(name: str, value: Any) -> Any:
    if value is None:
        return _BY_NAME[name] if name in _WHERE_NONE else None
    if isinstance(value, bool | str):
        return None
    if name in _BY_NAME:
        return _like(value, _BY_NAME[name])
    if any(part in name for part in _ZERO) and isinstance(value, int | float):
        return type(value)(0)
    if name == "patch_size":
        return _like(value, min(PATCH, value) if isinstance(value, int) else PATCH)
    if (
        name.endswith(("_token_id", "_token_index"))
        and isinstance(value, int)
        and value >= VOCABULARY
    ):
        return VOCABULARY - 1 - sum(map(ord, name)) % 40
    if name == "eos_token_id" and isinstance(value, list):
        return 2
    if name in (
        "layer_types",
        "mlp_layer_types",
        "layers_block_type",
        "indexer_types",
        "attention_types",
    ):
        kinds = [kind for n, kind in enumerate(value) if kind not in value[:n]]
        return (kinds * LAYERS)[:LAYERS]
    if name == "depths":
        return type(value)(1 for _ in value)
    return None


def _like(value: Any, small: int) -> Any:
    """As many as the default has; no larger than it, where it is one number."""
    if isinstance(value, list | tuple):
        return type(value)(small for _ in value)
    return min(small, value) if isinstance(value, int) and value > 0 else small


def _is_config(value: Any) -> bool:
    return isinstance(value, transformers.PretrainedConfig)
