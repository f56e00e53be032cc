"""Knows what axolotl, LLaMA-Factory and TRL's programs make of their settings.

axolotl of July 2026: loaders/model.py, utils/config and core/builders/base.py. LLaMA-Factory of
August 2026: model/adapter.py, model_utils/quantization.py and checkpointing.py. TRL 1.16:
trainer/utils.py.
"""

from collections.abc import Mapping
from typing import Any

from trainer_plugins.cli.foreign.reading import Reading, finish, is_true
from trainer_plugins.cli.foreign.spellings import OF_PEFT_SFT, Script

_AXOLOTL = {
    "micro_batch_size": 1,
    "sequence_len": 512,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
}
_LLAMA_FACTORY = {"cutoff_len": 2048, "stage": "sft", "finetuning_type": "lora"}
_RUN_IT = (
    " loss is not TRL's of this machine. Run it on cards that compute nothing: trainer-plugins plan"
    " --gpu CARD --"
)
_NOT_LORA = "only LoRA and full fine-tuning are planned"


def of_axolotl(values: Mapping[str, Any]) -> Reading:
    """Understand axolotl's YAML."""
    reading = Reading({**_AXOLOTL, **{k: v for k, v in values.items() if v is not None}})
    _axolotl_precision(reading)
    _refuse_its_losses(reading)
    adapter = reading.take("adapter")
    if adapter is None:
        reading.forget("lora_")
    elif adapter in ("lora", "qlora"):
        reading.values["use_peft"] = True
        if reading.is_on("lora_target_linear"):
            reading.values["lora_target"] = "all-linear"
        reading.values.setdefault("lora_dropout", 0.0)
    else:
        reading.refuse("adapter", f"{adapter}: {_NOT_LORA}")
    if is_true(reading.values.get("load_in_4bit")):
        if adapter != "qlora":  # loaders/model.py quantises nothing then
            reading.take("load_in_4bit")
        reading.values |= {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": reading.options["dtype"],
            "bnb_4bit_quant_storage": "bfloat16",
            **(reading.take("bnb_config_kwargs") or {}),
        }
    if adapter is not None and any(
        is_true(reading.values.get(name)) for name in ("load_in_4bit", "load_in_8bit")
    ):
        reading.values["prepare_kbit"] = False
        reading.said.append("norms and embeddings are in the dtype of the base (axolotl)")
    _axolotl_data(reading)
    _plugins(reading)
    if reading.is_on("activation_offloading"):
        reading.refuse("activation_offloading", "activations in main memory")
    reading.values.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": False})
    _axolotl_fsdp(reading)
    _front_ends_checkpointing(reading, adapter is not None)
    return finish(reading)


def _axolotl_precision(reading: Reading) -> None:
    """Weights have the dtype that the run computes in (utils/config, resolve_dtype)."""
    half = reading.is_on("fp16") or reading.is_on("float16")
    full = str(reading.values.get("bf16")) == "full"
    brain = reading.is_on("bf16") or reading.is_on("bfloat16")
    brain = brain and not (half and not full)
    reading.take("float32")
    reading.options["dtype"] = "bfloat16" if brain else "float16" if half else "float32"
    reading.flags |= {"bf16": brain and not full, "fp16": half and not brain}


def _refuse_its_losses(reading: Reading) -> None:
    """Refuse what axolotl trains by a loss of its own, or by that of the TRL that it brings."""
    for name in ("rl", "reward_model"):
        value = reading.take(name)
        if value is not None and is_true(value):
            reading.refuse(name, f"{value}: axolotl's{_RUN_IT} axolotl train FILE")


def _axolotl_data(reading: Reading) -> None:
    rows = reading.values["per_device_train_batch_size"]
    evaluates = any(is_true(reading.take(name)) for name in ("val_set_size", "test_datasets"))
    asks = [reading.take(name) for name in ("evals_per_epoch", "eval_steps", "eval_strategy")]
    if evaluates and any(is_true(each) for each in asks):
        reading.flags["eval_strategy"] = "steps"
        reading.values.setdefault("per_device_eval_batch_size", rows)
    if reading.is_on("sample_packing"):
        _pack(reading)


def _plugins(reading: Reading) -> None:
    for plugin in reading.take("plugins", []):
        if plugin.endswith("LigerPlugin"):
            reading.flags["use_liger_kernel"] = True
            reading.said.append("Liger's usual kernels are planned, not those of its switches")
        else:
            reading.refuse("plugins", f"{plugin.rpartition('.')[2]}: its memory is not known here")
    reading.forget("liger_")


def _axolotl_fsdp(reading: Reading) -> None:
    config, version = reading.take("fsdp_config"), reading.take("fsdp_version")
    asked = reading.take("fsdp")
    if not config and not asked:
        return
    config = {name.removeprefix("fsdp_"): value for name, value in (config or {}).items()}
    version = version or config.get("version") or 1
    words = asked if isinstance(asked, list) else ["full_shard", "auto_wrap"]
    reading.flags["fsdp"] = " ".join(words)
    reading.flags["fsdp_config"] = {**config, "version": int(version)}


def of_llama_factory(values: Mapping[str, Any]) -> Reading:
    """Understand LLaMA-Factory's YAML, or its flags."""
    reading = Reading({**_LLAMA_FACTORY, **{k: v for k, v in values.items() if v is not None}})
    stage, kind = reading.take("stage"), reading.take("finetuning_type")
    if stage not in ("sft", "pt"):
        reading.refuse("stage", f"{stage}: LLaMA-Factory's{_RUN_IT} llamafactory-cli train FILE")
    if kind not in ("lora", "full"):
        reading.refuse("finetuning_type", f"{kind}: {_NOT_LORA}")
    brain = reading.is_on("bf16")
    pure = reading.is_on("pure_bf16")
    compute = "bfloat16" if brain or pure else "float16" if reading.is_on("fp16") else "float32"
    reading.flags |= {"bf16": brain, "fp16": compute == "float16"}
    divides = any(name in reading.values for name in ("deepspeed", "fsdp"))
    is_upcast = kind == "full" and not pure and not divides
    reading.options["dtype"] = "float32" if is_upcast else compute
    if kind == "lora":
        reading.values["use_peft"] = True
        reading.values.setdefault("lora_r", 8)
        reading.values.setdefault("lora_target", "all")
        reading.values.setdefault("lora_dropout", 0.0)
    else:
        reading.forget("lora_")
    _llama_factory_base(reading, compute)
    packing = reading.take("packing", stage == "pt")
    if is_true(packing):
        _pack(reading)
    reading.values["gradient_checkpointing"] = not reading.is_on("disable_gradient_checkpointing")
    reentrant = {"use_reentrant": reading.is_on("use_reentrant_gc", default=True)}
    reading.values.setdefault("gradient_checkpointing_kwargs", reentrant)
    for name in ("val_size", "upcast_layernorm"):
        reading.take(name)
    _front_ends_checkpointing(reading, kind == "lora")
    return finish(reading)


def _llama_factory_base(reading: Reading, compute: str) -> None:
    bits, method = reading.take("quantization_bit"), reading.take("quantization_method", "bnb")
    reading.take("quantization_device_map")
    if bits is None:
        return
    if method not in ("bnb", "bitsandbytes"):
        reading.refuse("quantization_method", f"{method}, whose kernels are not known here")
    if str(bits) not in ("4", "8"):
        reading.refuse("quantization_bit", f"{bits}, which bitsandbytes does not have")
    reading.values[f"load_in_{bits}bit"] = True
    reading.values.setdefault("bnb_4bit_quant_type", "nf4")
    reading.values.setdefault("bnb_4bit_use_double_quant", True)
    reading.values |= {"bnb_4bit_compute_dtype": compute, "bnb_4bit_quant_storage": compute}
    reading.values["prepare_kbit"] = False
    reading.said.append("norms and embeddings are in the dtype of the base (LLaMA-Factory)")


def _pack(reading: Reading) -> None:
    reading.options["padding"] = False
    reading.said.append("packed rows are planned as full rows without padding")


def _front_ends_checkpointing(reading: Reading, has_adapter: bool) -> None:
    """Both let the inputs of an adapter's base need gradients, which the Trainer alone does not."""
    checkpoints = reading.take("gradient_checkpointing", False)
    kwargs = dict(reading.take("gradient_checkpointing_kwargs", {}))
    if str(checkpoints).startswith("offload") or checkpoints == "unsloth":
        reading.refuse("gradient_checkpointing", f"{checkpoints}: checkpoints in main memory")
    reading.flags["gradient_checkpointing"] = is_true(checkpoints)
    if not is_true(checkpoints):
        return
    if has_adapter and kwargs.get("use_reentrant"):
        reading.said.append("checkpointing is planned as the one that is not reentrant")
        kwargs["use_reentrant"] = False
    if kwargs:
        reading.flags["gradient_checkpointing_kwargs"] = kwargs


def of_flags(values: Mapping[str, Any], script: Script) -> Reading:
    """Understand the flags of TRL's programs, of PEFT's and transformers' examples, or of yours."""
    defaults = dict(script.defaults)
    trainer = script.trainer
    if "use_peft_lora" in values:
        trainer, defaults = "sft", {**OF_PEFT_SFT, **defaults}
    given = Reading({**values}).values  # under the names that are used here
    reading = Reading({**Reading(defaults).values, **given}, trainer)
    if "batch_size" in reading.values:  # PEFT's examples: of one card
        reading.values.setdefault("per_device_train_batch_size", reading.take("batch_size"))
    if "use_peft_lora" in values:
        # the base is loaded in what its storage is made of, else in float32
        storage = reading.values.get("bnb_4bit_quant_storage")
        reading.values.setdefault("dtype", storage or "float32")
    elif trainer is not None:
        reading.values.setdefault("use_peft", False)
    return finish(reading)
