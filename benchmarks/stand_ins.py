"""This compares plans that use a stand-in for a card with dry runs, where nothing stands in.

    python -m benchmarks.stand_ins [NAME...]

`benchmarks.judge` draws text models at random; here is one case for each file of planner/pretend
and planner/sharded that it does not draw.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.judge import _FSDP, _ZERO, Drawn, _config, _flags, compared, judged
from benchmarks.prediction import equip_dry_cards
from trainer_plugins.planner.inputs import ConfigInputs, RunInputs

_ARGUMENTS: dict[str, object] = {
    "output_dir": "judged",
    "bf16": True,
    "per_device_train_batch_size": 2,
    "optim": "adamw_torch_fused",
    "save_strategy": "no",
}
_FOUR: dict[str, object] = {"num_processes": 4, "machine_rank": 0, "num_machines": 1}
_FOUR |= {"mixed_precision": "bf16"}
_ONLINE = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 64}
_SOUND = {"seq_length": None, "sound_seconds": 10.0, "target_length": 100}
_SAVES = {"save_strategy": "epoch"}


def _fsdp(version: int, **fields: object) -> dict[str, Any]:
    usual: Any = _FSDP["fsdp_config"]
    changed = {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": version, **fields}
    return {**_FOUR, **_FSDP, "fsdp_config": {**usual, **changed}}


_ZERO3: dict[str, object] = {
    "zero_stage": 3,
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
}
_ZERO3 |= {"offload_optimizer_device": "none", "offload_param_device": "none"}
_CASES: dict[str, dict[str, Any]] = {
    "pretend/speech: wav2vec2 with CTC": {
        "kind": "wav2vec2",
        "config": {"architectures": ["Wav2Vec2ForCTC"]},
        **_SOUND,
    },
    "rehearse/sounds: whisper": {"kind": "whisper", "seq_length": None, "target_length": 100},
    "rehearse/evaluation: T5 that generates": {
        "kind": "t5",
        "config": {"decoder_start_token_id": 0, "num_decoder_layers": 2},
        "args": {"eval_strategy": "epoch", "predict_with_generate": True},
        "target_length": 64,
    },
    "rehearse/pictures: ViT": {
        "kind": "vit",
        "config": {"architectures": ["ViTForImageClassification"]},
        "num_labels": 10,
        "seq_length": None,
    },
    "rehearse/evaluation: BERT's classifier": {
        "kind": "bert",
        "config": {"architectures": ["BertForSequenceClassification"]},
        "num_labels": 3,
        "args": {"eval_strategy": "epoch"},
    },
    "pretend/attention: eager": {"attention": "eager"},
    "pretend/attention: rows with padding": {"padded": True},
    **{
        f"pretend/optimizers: {name}": {"args": {"optim": name}}
        for name in ("adalomo", "grokadamw", "schedule_free_radam")
    },
    **{
        f"pretend/eight_bit: {name}": {"args": {"optim": name}}
        for name in ("paged_lion_8bit", "ademamix_8bit")
    },
    "pretend/triton: SFT's chunked loss": {"trainer": "sft", "args": {"loss_type": "chunked_nll"}},
    **{
        f"pretend/triton: SFT packs ({how})": {
            "trainer": "sft",
            "args": {"packing": True, "packing_strategy": how},
        }
        for how in ("bfd", "wrapped")
    },
    "pretend/triton: DPO's reference": {"trainer": "dpo", "args": {"eval_strategy": "epoch"}},
    "pretend/triton: Reward": {"trainer": "reward"},
    "pretend/triton: KTO": {"trainer": "kto"},
    "rehearse/rollout: GRPO": {"trainer": "grpo", "args": _ONLINE},
    "rehearse/rollout: RLOO": {"trainer": "rloo", "args": _ONLINE},
    "sharded/fsdp1: whole checkpoint": {"file": _fsdp(1), "args": _SAVES},
    "sharded/fsdp1: no original parameters": {
        "file": _fsdp(1, fsdp_use_orig_params=False),
        "args": _SAVES,
    },
    "sharded/fsdp1: HYBRID_SHARD": {"file": _fsdp(1, fsdp_sharding_strategy="HYBRID_SHARD")},
    "sharded/fsdp1: SHARD_GRAD_OP, two micro-batches": {
        "file": _fsdp(1, fsdp_sharding_strategy="SHARD_GRAD_OP"),
        "args": {"gradient_accumulation_steps": 2},
    },
    "sharded/fsdp2: whole checkpoint": {"file": _fsdp(2), "args": _SAVES},
    "sharded/fsdp2: offload": {
        "file": _fsdp(2, fsdp_offload_params=True),
        "args": {"optim": "adamw_torch"},
    },
    "sharded/fsdp2: checkpointing of its own": {
        "file": _fsdp(2, fsdp_activation_checkpointing=True)
    },
    "sharded/fsdp2: weights kept": {
        "file": _fsdp(2, fsdp_reshard_after_forward=False),
        "args": {"gradient_accumulation_steps": 2},
    },
    "sharded/fsdp2: rows divided (cp_size 4)": {
        "file": {
            **_fsdp(2),
            "parallelism_config": {
                "parallelism_config_cp_size": 4,
                "parallelism_config_dp_shard_size": 1,
            },
        },
        "seq_length": 2048,
    },
    "sharded/tensors: tp_size 4": {
        "file": {
            **_FOUR,
            "distributed_type": "MULTI_GPU",
            "parallelism_config": {"parallelism_config_tp_size": 4},
        }
    },
    "sharded/zero_checkpoint: LoRA, ZeRO-3": {
        "file": {**_FOUR, **_ZERO, "deepspeed_config": _ZERO3},
        "peft_config": {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"},
        "args": _SAVES,
    },
}


def _case(
    name: str,
    folder: Path,
    kind: str = "qwen3",
    args: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    file: Mapping[str, Any] | None = None,
    *,
    padded: bool = False,
    **details: Any,
) -> Drawn:
    path = folder / "launch.yaml"
    if file is not None:
        path.write_text(json.dumps(file))
    arguments = {**_ARGUMENTS, **(args or {})}
    if details.get("trainer"):
        arguments["report_to"] = "none"
    inputs = ConfigInputs(
        training_args=tuple(_flags(arguments)),
        dtype="bfloat16",
        accelerate_config=path if file is not None else None,
        **{"seq_length": 512, "num_evaluation_batches": 4, **details},
    )
    run = RunInputs(
        gpu="h100-80gb",
        calibration=False,
        num_gpus=4 if file is not None else None,
        has_padding=padded or None,
    )
    return Drawn(0, name, {**_config(kind, 2), **(config or {})}, inputs, run)


def _lines(wanted: list[str]) -> Iterator[str]:
    for name, fields in _CASES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = judged(_case(name, Path(folder), **fields), Path(folder))
        if "dry" not in line or "fake" not in line:
            yield f"{name:50} plan: {line.get('refused', 'made')}; dry: {line.get('failed', 'ran')}"
            continue
        found = compared(line)
        share = found["allocated"] / found["of"]
        yield (
            f"{name:50} {found['of'] / 2**30:6.2f} GiB {found['allocated']:+12,} ({share:+.3%})"
            f"  reserved {found['reserved']:+.2%}"
        )


if __name__ == "__main__":
    equip_dry_cards()
    for each in _lines(sys.argv[1:]):
        print(each, flush=True)
