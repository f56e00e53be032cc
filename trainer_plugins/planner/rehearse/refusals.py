"""Refuse by name what the planner cannot predict, before and after the Trainer is built."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.pretend import quantised
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS
from trainer_plugins.planner.pretend.optimizers import PACKAGES
from trainer_plugins.planner.rehearse import rollout
from trainer_plugins.planner.trainer import Arguments, TrainerLike, optimizer_name
from trainer_plugins.units import size

_FLASH_ATTN = "attention of the package flash-attn"
_WITHOUT_RULE = {
    "flash_attention_3": f"{_FLASH_ATTN} (attn_implementation=flash_attention_3)",
    "flex_attention": "attn_implementation=flex_attention, which is compiled",
}

_OF_TRL = frozenset(
    f"{name}Trainer"
    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "GMPO", "ORPO", "CPO", "TPO")
)
"""The Trainers of TRL that are planned. Most others generate in ways of their own."""

_OF_OLDER_TRL = frozenset({"SFTTrainer", "RewardTrainer"})
"""Those of them whose loss does not keep what masks pick if TRL has no head of its own."""


def refuse_trainer(trainer: TrainerLike) -> None:
    """Check the class of a Trainer, and an optimizer that it was given.

    Raises:
        NotPredicted: it is a Trainer of TRL that is not supported, or the optimizer has kernels of
            its own.
    """
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if of_trl and of_trl[0] not in _OF_TRL:
        raise NotPredicted(f"TRL's {of_trl[0]}: of TRL only {', '.join(sorted(_OF_TRL))}")
    if (
        of_trl
        and of_trl[0] not in _OF_OLDER_TRL
        and not hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")
    ):
        raise NotPredicted(
            f"{of_trl[0].removesuffix('Trainer')} of a TRL without its own head, as 0.24: what its "
            "loss keeps depends on masks"
        )
    if rollout.generates(trainer):
        rollout.refuse(trainer)
    if getattr(trainer, "generate_during_eval", False):  # of TRL's ORPO and CPO
        raise NotPredicted("generate_during_eval, which generates from rows chosen at random")
    home = type(trainer.optimizer).__module__.partition(".")[0]
    if home in ("bitsandbytes", "torchao", "galore_torch", "apollo_torch"):
        raise NotPredicted(
            f"an optimizer of {home} given to the Trainer: name it in TrainingArguments.optim"
        )


def refuse_arguments(args: Arguments, device: str) -> None:
    """Check TrainingArguments, for a type of device.

    Raises:
        NotPredicted: they ask for kernels whose memory is not known here.
    """
    if getattr(args, "torch_compile", False):
        raise NotPredicted(
            "torch.compile (torch_compile), which changes the memory of every operation"
        )
    if getattr(args, "use_liger_kernel", False):
        refuse_liger(device)
    if getattr(args, "use_cpu", False) or getattr(args, "no_cuda", False):
        raise NotPredicted("training on the CPU (use_cpu): there is no card to plan for")
    optimizer = optimizer_name(args)
    if optimizer in OPTIMIZERS or optimizer in PACKAGES:
        return
    for word in ("8bit", "4bit", "bnb", "paged", "galore", "stable_adamw"):
        if word in optimizer:
            raise NotPredicted(f"the optimizer {optimizer}")


def refuse_liger(device: str) -> None:
    """Refuse Liger's kernels without their code, and on another device than CUDA.

    Raises:
        NotPredicted: what they take cannot be known.
    """
    if find_spec("liger_kernel") is None:
        raise NotPredicted(
            "Liger kernels without their code, which says what they take: "
            "pip install --no-deps liger-kernel (to plan it, Triton and a card are not needed)"
        )
    if device != "cuda":
        raise NotPredicted(f"Liger kernels on {device}: they need CUDA")


def fsdp_in_force(plugin: Any) -> str:
    """Say which version of FSDP a run has: without one in its arguments, transformers decides."""
    import accelerate
    import transformers

    return (
        f"FSDP{plugin.fsdp_version}, which is what transformers {transformers.__version__} and "
        f"accelerate {accelerate.__version__} make of these arguments; transformers 4 makes FSDP1 "
        "unless fsdp_config has version 2"
    )


GIVE_A_TRAINER = "give plan_run a Trainer, whose collator knows its inputs"


def refuse_attention(name: object) -> None:
    """Check an attn_implementation.

    Raises:
        NotPredicted: the memory of its kernel is not known here.
    """
    import transformers

    if name == "flash_attention_2" and transformers.__version__.startswith("4."):
        raise NotPredicted(
            f"{_FLASH_ATTN} with transformers {transformers.__version__}: plan with transformers 5"
        )
    if isinstance(name, str) and (name in _WITHOUT_RULE or "/" in name):
        raise NotPredicted(
            _WITHOUT_RULE.get(name, f"kernels from the hub (attn_implementation={name})")
        )


_BITS = {"fp8": 8, "fbgemm_fp8": 8, "eetq": 8, "mxfp8": 8, "bitnet": 2}
"""Bits of a weight, where the fields of a quantization_config do not say them."""


def known_quantisation(model: torch.nn.Module, fields: object) -> dict[str, object]:
    """Return the fields of a quantization_config of bitsandbytes.

    Of other packages, only the sizes of weights are known here.

    Raises:
        PlanError: nobody knows such a quantisation, or a field is wrong.
        NotPredicted: its kernels are not those of bitsandbytes, or it trains them.
    """
    import transformers
    from transformers.utils.quantization_config import QuantizationMethod

    if not isinstance(fields, Mapping):
        raise PlanError(f"quantization_config is a mapping, got {fields!r}")
    of_bitsandbytes = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    method = "bitsandbytes" if of_bitsandbytes else fields.get("quant_method")
    known = [each.value for each in QuantizationMethod]
    if method not in known:
        raise PlanError(
            f"quantization_config: no quantisation is named {method!r} (quant_method); "
            f"transformers {transformers.__version__} knows {', '.join(known)}"
        )
    if not of_bitsandbytes:
        raise NotPredicted(_of_other_kernels(model, str(method), fields))
    if transformers.__version__.startswith("4."):
        raise NotPredicted(
            f"a base quantised by bitsandbytes with transformers {transformers.__version__}, whose "
            "loader is only there with the package installed: plan it with transformers 5"
        )
    if fields.get("llm_int8_has_fp16_weight"):
        raise NotPredicted("llm_int8_has_fp16_weight, which quantises anew in each step")
    if fields.get("llm_int8_enable_fp32_cpu_offload"):
        raise NotPredicted("llm_int8_enable_fp32_cpu_offload, which leaves layers on the host")
    return dict(fields)


def _of_other_kernels(model: torch.nn.Module, method: str, fields: Mapping[str, object]) -> str:
    """Say how large the weights are, and what comes near."""
    said = next((fields[name] for name in ("bits", "w_bit", "nbits") if name in fields), None)
    bits = said if isinstance(said, int) else _BITS.get(method, 0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    elements = sum(layer.weight.numel() for layer in layers if layer is not head)
    weights = f"; its {bits}-bit weights alone are {size(elements * bits / 8)}" if bits else ""
    instead = "--load-in-8bit" if bits == 8 else "--load-in-4bit"
    return (
        f"a base quantised by {method}, whose kernels are not known here{weights}. A plan of its "
        f"config without quantization_config and with {instead} comes near"
    )


def refuse_divided(model: torch.nn.Module) -> None:
    """Refuse a model of a Trainer whose tensors are divided among cards.

    Raises:
        NotPredicted: they are; only a model that is built from its config can be divided here.
    """
    if (size := getattr(model, "_tp_size", None)) not in (None, 1):
        raise NotPredicted(
            f"tensor parallelism (tp_size {size} in the model of a Trainer): a plan of its config "
            "is, with tp_size in --accelerate-config"
        )


def refuse_model(model: torch.nn.Module) -> None:
    """Check a model and its layers.

    Raises:
        NotPredicted: it is quantized, or has layers whose memory is not known here.
    """
    refuse_attention(getattr(getattr(model, "config", None), "_attn_implementation", None))
    is_quantised = getattr(model, "is_quantized", False) or (
        getattr(model, "quantization_method", None) is not None
    )
    if is_quantised and not quantised.bits_of(model):
        raise NotPredicted(
            f"a model quantized by {getattr(model, 'quantization_method', 'its own kernels')} in a "
            "Trainer; a plan of its config with --load-in-4bit or --load-in-8bit is"
        )
    for part in model.modules():
        home = type(part).__module__.partition(".")[0]
        if home in (
            "bitsandbytes",
            "flash_attn",
            "unsloth",
            "xformers",
            "mamba_ssm",
            "causal_conv1d",
        ):
            raise NotPredicted(f"layers of {home} ({type(part).__name__})")
