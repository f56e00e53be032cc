"""Refuse by name what the planner cannot predict, and turn errors into one line. Imports torch."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._subclasses import fake_tensor

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.hf_trainer import HfArguments, HfTrainer
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.kind import Kind
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.tried import is_transformers_4
from trainer_plugins.units import size

_Result = TypeVar("_Result")

_FLASH_ATTN = "attention of the package flash-attn"
_WITHOUT_RULE = {
    "flash_attention_3": f"{_FLASH_ATTN} (attn_implementation=flash_attention_3)",
    "flex_attention": "attn_implementation=flex_attention, which is compiled",
}

_OF_TRL = tuple(
    f"{name}Trainer"
    for name in ("CPO", "DPO", "GMPO", "GRPO", "KTO", "ORPO", "RLOO", "Reward", "SFT", "TPO")
)  # most others generate in ways of their own

# without a head of its own, only their loss does not keep what masks pick
_OF_OLDER_TRL = ("SFTTrainer", "RewardTrainer")

_PACKAGES_OF_LAYERS = (
    "bitsandbytes",
    "flash_attn",
    "unsloth",
    "xformers",
    "mamba_ssm",
    "causal_conv1d",
)

# of a weight, where a quantization_config does not say them
_BITS = {"fp8": 8, "fbgemm_fp8": 8, "eetq": 8, "mxfp8": 8, "bitnet": 2}

GIVE_A_TRAINER = "give plan_run a Trainer: its collator knows the inputs"

_NON_REENTRANT = advice.NON_REENTRANT.flag(Door.TRAINER)
_WHY = {
    "does not require grad and does not have a grad_fn": (
        "the loss depends on nothing that is trained. Reentrant checkpointing does that if a "
        f"layer's input needs no gradient, as after frozen embeddings (LoRA): pass {_NON_REENTRANT}"
        f", or call {advice.INPUTS_REQUIRE_GRADS.flag(Door.CODE)} before the Trainer is made. "
        "Without checkpointing, no tensor behind the loss has requires_grad"
    ),
    "Expected to mark a variable ready only once": (
        "DDP looks for unused parameters, which the Trainer lets it do for an adapter of PEFT, and "
        "with reentrant checkpointing, which prepare_model_for_kbit_training switches on, it finds "
        'parameters twice ("Expected to mark a variable ready only once"): pass '
        "--ddp_find_unused_parameters False, or "
        f"{advice.CHECKPOINTING.flag(Door.TRAINER)} {_NON_REENTRANT}"
    ),
    'unscale_cuda" not implemented for': (
        "with --fp16 gradients are scaled, which CUDA does not do for those of bfloat16 weights "
        "(not implemented for 'BFloat16'): pass --bf16 instead, or load the weights as float32"
    ),
}  # words in the errors of runs that fail on a card too, and what to pass


def told_in_one_line(work: Callable[[], _Result]) -> _Result:
    """Run a part of the rehearsal, and turn what it raises into a PlanError or NotPredicted."""
    try:
        return work()
    except PlanError:
        raise
    except (
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        raise NotPredicted(f"{error.func}, whose result depends on values") from error
    except fake_tensor.DataDependentOutputException as error:
        raise NotPredicted(f"{error.func}, which asks for a value") from error
    except Exception as error:  # the user's own code runs here, and may raise anything
        why = next((why for words, why in _WHY.items() if words in str(error)), None)
        if why is not None:
            raise PlanError(
                f"the rehearsal of the run failed, and so will the run: {why}"
            ) from error
        raise PlanError(
            f"the rehearsal of the run failed: {type(error).__name__}: "
            f"{first_line(error)}{_where(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error in one line; add its second line if the first only announces it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def _where(error: BaseException) -> str:
    """Name the innermost line that is neither torch's nor the planner's."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/trainer_plugins/planner/" not in file:
            place = f" (in {Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def refuse_trainer(trainer: HfTrainer, kind: Kind) -> None:
    """Refuse Trainers of TRL that are not supported, and optimizers with kernels of their own."""
    of_trl = [each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    if of_trl and of_trl[0] not in _OF_TRL:
        raise NotPredicted(f"TRL's {of_trl[0]}: the planner supports only {', '.join(_OF_TRL)}")
    has_head = hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")
    if of_trl and of_trl[0] not in _OF_OLDER_TRL and not has_head:
        raise NotPredicted(
            f"{of_trl[0].removesuffix('Trainer')} of a TRL without its own head, as 0.24: what its "
            "loss keeps depends on masks"
        )
    if kind.trains_on_completions:
        from trainer_plugins.planner.rehearse import rollout

        rollout.refuse(trainer)
    if getattr(trainer, "generate_during_eval", False):  # of TRL's ORPO and CPO
        raise NotPredicted("generate_during_eval, which generates from rows chosen at random")
    home = type(trainer.optimizer).__module__.partition(".")[0]
    if home in ("bitsandbytes", "torchao", "galore_torch", "apollo_torch"):
        raise NotPredicted(
            f"an optimizer of {home} given to the Trainer: name it in TrainingArguments.optim"
        )


def refuse_arguments(args: HfArguments, kind: Kind, card: Card | None) -> None:
    """Refuse TrainingArguments that ask for kernels whose memory is not known here."""
    if args.torch_compile:
        raise NotPredicted(
            "torch.compile (torch_compile), which changes the memory of every operation"
        )
    if args.use_liger_kernel:
        from trainer_plugins.planner.rehearse.liger import refuse_liger

        refuse_liger(kind.device)
    if getattr(args, "use_cpu", False) or getattr(args, "no_cuda", False):
        raise NotPredicted("training on the CPU (use_cpu): there is no card to plan for")
    if kind.trains_on_completions:
        from trainer_plugins.planner.rehearse import rollout

        rollout.check_card(args, card)
    if kind.is_of_bitsandbytes or kind.is_of_a_package:
        return
    for word in ("8bit", "4bit", "bnb", "paged", "galore", "stable_adamw"):
        if word in kind.optimizer:
            raise NotPredicted(f"the optimizer {kind.optimizer}")


def fsdp_in_force(plugin: Any) -> str:
    """Say which version of FSDP a run has: without one in its arguments, transformers decides."""
    import accelerate
    import transformers

    return (
        f"FSDP{plugin.fsdp_version}, which is what transformers {transformers.__version__} and "
        f"accelerate {accelerate.__version__} make of these arguments; transformers 4 makes FSDP1 "
        "unless fsdp_config has version 2"
    )


def refuse_attention(name: object) -> None:
    """Refuse an attn_implementation if the memory of its kernel is not known here."""
    import transformers

    if name == "flash_attention_2" and is_transformers_4():
        raise NotPredicted(
            f"{_FLASH_ATTN} with transformers {transformers.__version__}: plan with transformers 5"
        )
    if isinstance(name, str) and (name in _WITHOUT_RULE or "/" in name):
        raise NotPredicted(
            _WITHOUT_RULE.get(name, f"kernels from the hub (attn_implementation={name})")
        )


def known_quantisation(model: torch.nn.Module, given: object) -> dict[str, object]:
    """Return the fields of a quantization_config of bitsandbytes, and refuse any other."""
    import transformers
    from transformers.utils.quantization_config import QuantizationMethod

    if not isinstance(given, Mapping):
        raise PlanError(f"quantization_config is a mapping, got {given!r}")
    is_of_bitsandbytes = given.get("load_in_4bit") or given.get("load_in_8bit")
    method = "bitsandbytes" if is_of_bitsandbytes else given.get("quant_method")
    known = [each.value for each in QuantizationMethod]
    if method not in known:
        raise PlanError(
            f"quantization_config: no quantisation is named {method!r} (quant_method); "
            f"transformers {transformers.__version__} knows {', '.join(known)}"
        )
    if not is_of_bitsandbytes:
        raise NotPredicted(_other_kernels(model, str(method), given))
    if is_transformers_4():
        raise NotPredicted(
            f"a base quantised by bitsandbytes with transformers {transformers.__version__}, whose "
            "loader is only there with the package installed: plan it with transformers 5"
        )
    if given.get("llm_int8_has_fp16_weight"):
        raise NotPredicted("llm_int8_has_fp16_weight, which quantises again in each step")
    if given.get("llm_int8_enable_fp32_cpu_offload"):
        raise NotPredicted("llm_int8_enable_fp32_cpu_offload, which leaves layers on the host")
    return dict(given)


def _other_kernels(model: torch.nn.Module, method: str, given: Mapping[str, object]) -> str:
    """Say how large the weights are, and which plan comes near."""
    said = next((given[name] for name in ("bits", "w_bit", "nbits") if name in given), None)
    bits = said if isinstance(said, int) else _BITS.get(method, 0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    elements = sum(layer.weight.numel() for layer in layers if layer is not head)
    weights = f"; its {bits}-bit weights alone are {size(elements * bits / 8)}" if bits else ""
    instead = "--load-in-8bit" if bits == 8 else "--load-in-4bit"
    return (
        f"a base quantised by {method}, whose kernels are not known here{weights}. A plan of its "
        f"config without quantization_config and with {instead} is close"
    )


def refuse_divided(model: torch.nn.Module) -> None:
    """Refuse a Trainer's model whose tensors are divided: only one built from its config can be."""
    if (num_cards := getattr(model, "_tp_size", None)) not in (None, 1):
        raise NotPredicted(
            f"tensor parallelism (tp_size {num_cards} in the model of a Trainer): plan its "
            "config instead, with tp_size in --accelerate-config"
        )


def refuse_model(model: torch.nn.Module, kind: Kind) -> None:
    """Refuse a model that another package quantised, or layers whose memory is not known here."""
    refuse_attention(getattr(getattr(model, "config", None), "_attn_implementation", None))
    method = getattr(model, "quantization_method", None)
    is_quantised = getattr(model, "is_quantized", False) or method is not None
    if is_quantised and not _is_of_bitsandbytes(model, kind):
        raise NotPredicted(
            f"a model quantised by {method or 'kernels of its own'} in a Trainer: plan its "
            "config with --load-in-4bit or --load-in-8bit instead"
        )
    for part in model.modules():
        home = type(part).__module__.partition(".")[0]
        if home in _PACKAGES_OF_LAYERS:
            raise NotPredicted(f"layers of {home} ({type(part).__name__})")


def _is_of_bitsandbytes(model: torch.nn.Module, kind: Kind) -> bool:
    if not kind.is_quantised:
        return False
    from trainer_plugins.planner.pretend import quantised

    return quantised.bits_of(model) > 0
