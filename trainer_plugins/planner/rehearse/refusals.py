"""What nothing here can say anything about, by name.

Asked before and after the Trainer is built.
"""

import sys
from typing import Any

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS

_WITHOUT_RULE = {
    "flash_attention_2": "attention of the package flash-attn (attn_implementation=flash_attention_2)",
    "flash_attention_3": "attention of the package flash-attn (attn_implementation=flash_attention_3)",
    "flex_attention": "attn_implementation=flex_attention, which is compiled",
}

_OF_TRL = frozenset({"SFTTrainer", "DPOTrainer", "RewardTrainer"})
"""The Trainers of TRL that train on what their data set has; most others generate in their steps."""


def refuse_trainer(trainer: Any) -> None:
    """Look at the class of a Trainer, and at an optimizer that it was given.

    Raises:
        NotPredicted: it is one of TRL's whose steps are not known here, or the optimizer has
            kernels of its own.
    """
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if of_trl and of_trl[0] not in _OF_TRL:
        raise NotPredicted(f"TRL's {of_trl[0]}: of TRL only {', '.join(sorted(_OF_TRL))}")
    if (
        of_trl
        and of_trl[0] == "DPOTrainer"
        and not hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")
    ):
        raise NotPredicted(
            "DPO of a TRL without a head of its own, as 0.24: its loss keeps what masks pick"
        )
    home = type(trainer.optimizer).__module__.partition(".")[0]
    if home in ("bitsandbytes", "torchao", "galore_torch", "apollo_torch"):
        raise NotPredicted(
            f"an optimizer of {home} given to the Trainer: name it in TrainingArguments.optim"
        )


def refuse_arguments(args: Any) -> None:
    """Look at TrainingArguments.

    Raises:
        NotPredicted: they ask for kernels without a rule.
    """
    if getattr(args, "torch_compile", False):
        raise NotPredicted("torch.compile (torch_compile), which plans memory anew")
    if getattr(args, "use_liger_kernel", False):
        raise NotPredicted("Liger kernels (use_liger_kernel), which are written in Triton")
    if getattr(args, "use_cpu", False) or getattr(args, "no_cuda", False):
        raise NotPredicted("training on the CPU (use_cpu): there is no card to plan for")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in OPTIMIZERS:
        return
    for word in (
        "8bit",
        "4bit",
        "bnb",
        "paged",
        "apollo",
        "galore",
        "lomo",
        "grokadamw",
        "schedule_free",
        "stable_adamw",
    ):
        if word in optimizer:
            raise NotPredicted(f"the optimizer {optimizer}")


def fsdp_in_force(plugin: Any) -> str:
    """Say which FSDP a run has, where its arguments name none: that depends on the version of transformers."""
    import accelerate
    import transformers

    return (
        f"FSDP{plugin.fsdp_version}, which is what transformers {transformers.__version__} and accelerate "
        f"{accelerate.__version__} make of these arguments; transformers 4 makes FSDP1 unless fsdp_config has version 2"
    )


GIVE_A_TRAINER = "give plan_run a Trainer, whose collator knows its inputs"


def refuse_other_inputs(model: Any) -> None:
    """Look at what a model that is built from a config takes.

    Raises:
        NotPredicted: it takes pictures or sound, whose sizes no flag says.
    """
    if (takes := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise NotPredicted(
            f"{type(model).__name__} from a config alone, which takes {takes} and no tokens: {GIVE_A_TRAINER}"
        )


def refuse_attention(name: object) -> None:
    """Look at an attn_implementation.

    Raises:
        NotPredicted: its kernel has no rule.
    """
    if isinstance(name, str) and (name in _WITHOUT_RULE or "/" in name):
        raise NotPredicted(
            _WITHOUT_RULE.get(name, f"kernels from the hub (attn_implementation={name})")
        )


def refuse_model(model: Any) -> None:
    """Look at a model.

    Raises:
        NotPredicted: it has layers without a rule.
    """
    refuse_attention(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if (
        getattr(model, "is_quantized", False)
        or getattr(model, "quantization_method", None) is not None
    ):
        raise NotPredicted(
            f"a model quantized by {getattr(model, 'quantization_method', 'its own kernels')}"
        )
    for part in model.modules():
        home = type(part).__module__.partition(".")[0]
        if home in (
            "bitsandbytes",
            "flash_attn",
            "liger_kernel",
            "unsloth",
            "xformers",
            "mamba_ssm",
            "causal_conv1d",
        ):
            raise NotPredicted(f"layers of {home} ({type(part).__name__})")
