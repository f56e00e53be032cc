"""Ask other estimators about the published rows: `python -m benchmarks.prediction_peers NAME`.

It prints JSON.

Each is called as in its own documentation, with the row's architecture from a file and not from the
Hub. Rows that it cannot be asked about are left out. Their numbers differ in meaning: the tensors,
or all of a process.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.published import Row, published

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


class UnaskableError(Exception):
    """The estimator cannot express this row."""


def adapter(row: Row) -> dict[str, Any]:
    """Return the LoRA configuration of the row, empty for a full fine-tune.

    Raises:
        UnaskableError: another method of PEFT.
    """
    peft: dict[str, Any] = row.settings.get("peft_config", {})
    if peft and (
        peft["type"] != "LORA"
        or peft.keys() - {"type", "r", "lora_alpha", "lora_dropout", "target_modules"}
    ):
        raise UnaskableError
    return peft


def parameters(row: Row) -> int:
    """Count the model's weights, without building it."""
    return int(sum(weight.numel() for weight in empty(row).parameters()))


def empty(row: Row) -> Any:
    """Build the model without memory."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**row.architecture)
    cls = getattr(transformers, row.architecture["architectures"][0])
    with torch.device("meta"):
        return cls(config).to(getattr(torch, row.settings["dtype"]))


def vramcalc(row: Row) -> int:
    """Estimate the tensors: one formula per term, LoRA on the four projections of attention."""
    from vramcalc import estimate

    peft = adapter(row)
    if "quantization" in row.settings or (peft and set(peft["target_modules"]) != ATTENTION):
        raise UnaskableError
    pure = "autocast" not in row.settings
    try:
        found = estimate(
            row.architecture,
            mode="train",
            dtype={"bfloat16": "bf16", "float16": "fp16"}[
                row.settings["dtype"] if pure else row.settings["autocast"]
            ],
            batch=row.settings["batch"],
            seq_len=row.settings["seq_length"],
            lora_rank=peft.get("r"),
            grad_checkpoint=row.settings.get("checkpointing", False),
            precision="pure" if pure else "amp",
            attn_impl="eager" if row.settings["attention"] == "eager" else "sdpa",
        )
    except ValueError:
        raise UnaskableError from None
    return int(found.total)


def fitcheck(row: Row) -> int:
    """Estimate the tensors: its total without its overhead, as its own README compares them."""
    from fitcheck import config_parser
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import get_gpu

    peft = adapter(row)
    if "autocast" in row.settings:
        raise UnaskableError
    raw = row.architecture
    fields = config_parser._parse_fields(raw)
    config = config_parser.ModelConfig(
        row.name,
        config_parser._count_params(fields),
        *(getattr(fields, name) for name in fields.__dataclass_fields__),
    )
    training = TrainingConfig(
        precision={"bfloat16": "bf16", "float16": "fp16"}[row.settings["dtype"]],
        quantization=row.settings.get("quantization", "none"),
        optimizer_dtype="fp32" if peft else "bf16",
        batch_size=row.settings["batch"],
        seq_len=row.settings["seq_length"],
        lora_rank=peft.get("r"),
        lora_targets=list(peft.get("target_modules", ())) or ["q_proj"],
        grad_checkpoint=row.settings.get("checkpointing", False),
        flash_attn=row.settings["attention"] != "eager",
    )
    found = estimate(config, training, get_gpu("t4", None))
    return int((found.total_mib - found.overhead_mib) * 2**20)


def kitsune(row: Row) -> int:
    """Estimate the process: the findings of its meta hooks, plus 15 %."""
    from kitsune.predict.estimator import predict_memory
    from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory

    peft = adapter(row)
    asked: dict[str, Any] = {
        "model": empty(row),
        "input_shape": (row.settings["seq_length"],),
        "batch_size": row.settings["batch"],
        "dtype": row.settings.get("autocast", row.settings["dtype"]),
    }
    if not peft:
        return int(predict_memory(**asked, optimizer="adamw", training=True).total_bytes)
    lora = LoRAConfig(
        rank=peft["r"],
        target_modules=list(peft["target_modules"]),
        use_qlora="quantization" in row.settings,
        optimizer="adamw",
    )
    if lora.use_qlora:  # "full precision, not yet quantized"
        asked["model"].float()
    return int(estimate_lora_memory(**asked, config=lora).total_bytes)


def memguard(row: Row) -> int:
    """Estimate the process: a formula, plus 25 % and 400 MB."""
    from memory_guard.estimator import (
        FinetuneMethod,
        ModelSpec,
        TrainSpec,
        estimate_training_memory,
    )

    peft, of = adapter(row), row.architecture
    bits = {"float32": 32}.get(row.settings["dtype"], 16)
    quantized = row.settings.get("quantization") == "nf4"
    model = ModelSpec(
        params=parameters(row),
        hidden_dim=of["hidden_size"],
        num_heads=of["num_attention_heads"],
        num_kv_heads=of["num_key_value_heads"],
        num_layers=of["num_hidden_layers"],
        intermediate_dim=of["intermediate_size"],
        bits=4 if quantized else bits,
    )
    lora = FinetuneMethod.QLORA if quantized else FinetuneMethod.LORA
    train = TrainSpec(
        method=lora if peft else FinetuneMethod.FULL,
        batch_size=row.settings["batch"],
        seq_length=row.settings["seq_length"],
        lora_rank=peft.get("r", 8),
        lora_layers=of["num_hidden_layers"],
        lora_targets=len(peft.get("target_modules", "4444")),
        optimizer="adamw",
        grad_checkpoint=row.settings.get("checkpointing", False),
        mixed_precision=row.settings["dtype"] != "float32" or "autocast" in row.settings,
        flash_attention=row.settings["attention"] != "eager",
    )
    return int(estimate_training_memory(model, train).total_mb * 2**20)


def hf_vram_calc(row: Row) -> int:
    """Estimate the process: weights times a factor; it takes neither batch nor length."""
    from hf_vram_calc.calculator import VRAMCalculator
    from hf_vram_calc.config import ConfigManager

    peft = adapter(row)
    if "quantization" in row.settings:
        raise UnaskableError
    calculator: Any = VRAMCalculator(ConfigManager())
    count = parameters(row)
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[row.settings["dtype"]]
    weights = calculator.calculate_model_memory(count, dtype)
    if peft:
        return int(calculator.calculate_lora_memory(weights, count, peft["r"]) * 2**30)
    return int(calculator.calculate_training_memory(weights) * 2**30)


def accelerate(row: Row) -> int:
    """Estimate weights, gradients, Adam: "Training using Adam" of `accelerate estimate-memory`."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if "peft_config" in row.settings:
        raise UnaskableError
    import torch

    size, _ = calculate_maximum_sizes(empty(row).to(torch.float32))
    dtype = "float16" if "autocast" in row.settings else row.settings["dtype"]
    return int(
        max(estimate_training_usage(size, {"bfloat16": "float16"}.get(dtype, dtype)).values())
    )


def deepspeed(row: Row) -> int:
    """Estimate weights, gradients and Adam in mixed precision, on one card.

    The function is `estimate_zero2_model_states_mem_needs`.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if "peft_config" in row.settings or "autocast" not in row.settings:
        raise UnaskableError
    return int(estimate_zero2_model_states_mem_needs(parameters(row), 1, 1, cpu_offload=False)[1])


PEERS: dict[str, tuple[str, Callable[[Row], int], str]] = {
    "vramcalc": ("vramcalc==0.1.2", vramcalc, "allocated"),
    "fitcheck": ("fitcheck-llm==0.3.1", fitcheck, "allocated"),
    "kitsune": ("torch-kitsune==0.7.0", kitsune, "nvidia_smi"),
    "memguard": ("ml-memguard==0.5.0", memguard, "nvidia_smi"),
    "hf-vram-calc": ("hf-vram-calc==1.0.9", hf_vram_calc, "nvidia_smi"),
    "accelerate": ("", accelerate, "allocated"),
    "deepspeed": ("", deepspeed, "allocated"),
}
"""By name: the package to install (empty if it is installed here), how to ask, its counter."""


def answer(name: str, row: Row) -> int | None:
    """Return bytes; None if the estimator cannot be asked about such a row."""
    try:
        return PEERS[name][1](row)
    except UnaskableError:
        return None


def main(name: str, keys: Iterable[str]) -> None:
    """Print this estimator's answers, by the key of a row."""
    wanted = set(keys)
    found = {row.key: answer(name, row) for row in published() if row.key in wanted}
    print(json.dumps({key: size for key, size in found.items() if size is not None}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
