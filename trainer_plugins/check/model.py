"""Judge the model that is about to be trained."""

from collections.abc import Iterator
from importlib.metadata import version

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import (
    LITTLE,
    MUCH,
    Check,
    CheckLine,
    Facts,
    ModelFacts,
    ModelShape,
    severity_of,
)
from trainer_plugins.checkpointing import is_asked
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.planner.cards import Kernel, attention_kernel, prefers_cudnn
from trainer_plugins.strategy import keeps_whole_gradients
from trainer_plugins.units import percent, size

# The fewest copies of the trainable weights that an optimizer keeps; others are unknown.
_STATES = {"AdamW": 2.0, "Adam": 2.0, "SGD": 0.0, "Adafactor": 0.0}


def copies(facts: Facts) -> CheckLine | None:
    """Judge which other models are alive besides the one in training."""
    model = facts.model
    if not model.homes:
        return None
    found = [
        Finding.warning(
            code="second-copy",
            summary=f"a second model holds {size(other.num_bytes)} of the device: {other.name}",
            evidence=f"it shares no weights with the model in training; held by {other.holder}",
            remedy="If it is a reference model of TRL: train adapters (peft_config), or"
            f" {advice.PRECOMPUTED_REFERENCE.arguments}. Keep an average (EMA) on the CPU."
            " Otherwise delete it",
            amount=float(other.num_bytes),
        )
        for other in model.others
        if other.num_bytes >= LITTLE * _device(facts)
    ]
    return CheckLine("copies", f"one model of {size(sum(model.homes.values()))}", tuple(found))


def frozen(facts: Facts) -> CheckLine | None:
    """Judge whether frozen weights take twice the necessary memory."""
    model = facts.model
    if not sum(model.frozen_bytes.values()):
        return None
    wide = model.frozen_bytes.get("float32", 0)
    seen = f"{size(sum(model.frozen_bytes.values()))} of {', '.join(model.frozen_bytes)}"
    is_mixed = facts.run.flag("bf16") or facts.run.flag("fp16")
    if wide < LITTLE * _device(facts):
        return CheckLine("frozen weights", seen)
    finding = Finding(
        code="frozen-fp32",
        severity=Severity.WARNING if is_mixed else Severity.INFO,
        summary=f"frozen weights stay in float32: {size(wide / 2)} more than in bfloat16",
        evidence=f"{seen}; nothing updates them, and"
        f" {'matrix products run with 16 bits' if is_mixed else 'training runs in float32'}",
        remedy=f"Load the base with {advice.HALF_PRECISION_WEIGHTS.flag(Door.CODE)}",
        amount=float(wide),
    )
    return CheckLine("frozen weights", seen, (finding,))


def dtypes(facts: Facts) -> CheckLine | None:
    """Judge where the parameters are, and whether a gradient scaler can handle them."""
    model = facts.model
    if not model.homes:
        return None
    kinds = {**model.trainable_bytes, **model.frozen_bytes}
    seen = f"{', '.join(kinds)} on {', '.join(model.homes)}"
    found = tuple(_unfit(facts, model)) if _is_whole(facts) else ()
    return CheckLine("parameters", seen, found)


def checkpoints(facts: Facts) -> CheckLine | None:
    """Judge whether requested checkpointing is active."""
    model = facts.model
    if not model.homes:
        return None
    if not is_asked(facts.run.values):
        return CheckLine("checkpointing", "not requested")
    if not model.is_checkpointing:
        finding = Finding.warning(
            code="checkpointing-not-live",
            summary="gradient checkpointing is requested, but all activations are kept",
            evidence="no module of the model has it enabled",
            remedy=f"Let the Trainer enable it ({advice.CHECKPOINTING.flag(Door.TRAINER)}), and do"
            " not disable it afterwards",
        )
    elif model.is_cut_off:
        finding = Finding.error(
            code="checkpointing-without-gradients",
            summary="reentrant checkpointing computes no gradients here: no input requires one",
            evidence="checkpointing is reentrant, input embeddings are frozen (transformers#42489)",
            remedy=f"{advice.NON_REENTRANT.flag(Door.ARGUMENTS)}, or"
            f" {advice.INPUTS_REQUIRE_GRADS.flag(Door.CODE)}",
        )
    else:
        return CheckLine("checkpointing", "active")
    return CheckLine("checkpointing", "", (finding,))


def attention(facts: Facts) -> CheckLine | None:
    """Judge whether the attention kernel stores a score for each pair of tokens."""
    model, rows, longest = facts.model, facts.run.rows, max(facts.data.lengths, default=0)
    if model.shape is None or not model.attention:
        return None
    kernel = _kernel(facts, model, model.shape)
    seen = model.attention if kernel is None else f"{model.attention}: {kernel}"
    # A float32 softmax of the scores and a 16-bit copy stay alive through the backward pass.
    scores = rows * model.shape.num_heads * longest * longest * (4 + 2)
    falls_back = kernel == "all scores"
    if not (falls_back or model.attention == "eager") or scores < LITTLE * _device(facts):
        return CheckLine("attention", seen)
    part = scores / _device(facts)
    dtype = _dtype(facts, model)
    change, why = advice.CHECKPOINTING.flag(Door.TRAINER), ""
    if falls_back:
        why = f"; no other kernel takes {dtype} with heads of {model.shape.head_size} here"
    if falls_back and dtype == "bfloat16":
        change = f"--fp16 True instead of --bf16, or {change}"
    if model.attention == "eager" and model.takes_sdpa:
        change = f"{advice.SDPA_ATTENTION.flag(Door.CODE)}, or {change}"
    finding = Finding.warning(
        code="attention-stores-scores",
        summary=f"{model.attention} attention stores all scores: {size(scores)} per layer",
        evidence=f"{rows} row(s) x {model.shape.num_heads} heads x {longest:,} x"
        f" {longest:,} tokens, {percent(part)} of the device{why}",
        remedy=change,
        amount=float(scores),
        data={"bytes_a_layer": scores, "num_rows": rows, "num_tokens": longest, "fraction": part},
    )
    return CheckLine("attention", seen, (finding,))


def cache(facts: Facts) -> CheckLine | None:
    """Judge whether training forwards keep keys and values."""
    model = facts.model
    if model.shape is None or not model.homes:
        return None
    num_tokens = facts.run.rows * max(facts.data.lengths, default=0)
    need = num_tokens * model.shape.cache_bytes_a_token(2)
    if not model.uses_cache or need < LITTLE * _device(facts):
        return CheckLine("KV cache", f"{size(need)} in training" if model.uses_cache else "off")
    finding = Finding.warning(
        code="kv-cache-in-training",
        summary="each forward pass in training returns a KV cache that nothing reads",
        evidence=f"its config enables the cache: {size(need)} for the longest rows",
        remedy=advice.NO_CACHE_IN_TRAINING.flag(Door.CODE),
        data={"cache_bytes": need},
    )
    return CheckLine("KV cache", "", (finding,))


def logits(facts: Facts) -> CheckLine | None:
    """Judge the memory of a micro-batch's logits when the loss is computed."""
    model, rows, longest = facts.model, facts.run.rows, facts.data.longest_target
    if model.shape is None or not model.predicts_tokens or not longest:
        return None
    if model.makes_no_logits:
        return CheckLine("logits", "computed in parts")
    # transformers/loss/loss_utils.py, ForCausalLMLoss
    widths, why = [2, 4, 4], "logits, their float32 copy for the loss, and its gradient"
    if _dtype(facts, model) == "float32":
        widths, why = [4, 4], "logits in float32, and their gradient"
    need = rows * longest * model.shape.vocab_size * sum(widths)
    part, seen = need / _device(facts), size(need)
    if part < MUCH:
        return CheckLine("logits", seen)
    finding = Finding(
        code="logits-fp32",
        severity=Severity.ERROR if part > 1 else Severity.WARNING,
        summary=f"one micro-batch has at least {seen} of logits, {percent(part)} of the device",
        evidence=f"{rows} row(s) x {longest:,} tokens x {model.shape.vocab_size:,} words x"
        f" ({' + '.join(map(str, widths))}) bytes: {why}",
        remedy=f"{advice.LIGER.flag(Door.TRAINER)}, or {facts.fewer_rows}",
        amount=float(need),
        data={
            "logits_bytes": need,
            "num_rows": rows,
            "num_tokens": longest,
            "vocab_size": model.shape.vocab_size,
            "fraction": part,
        },
    )
    return CheckLine("logits", seen, (finding,))


def states(facts: Facts) -> CheckLine | None:
    """Judge whether gradients and optimizer states fit beside the weights."""
    model, free = facts.model, facts.device_free_bytes
    times = _STATES.get(model.optimizer)
    if free is None or times is None or not _is_whole(facts):
        return None
    trainable = sum(model.trainable_bytes.values())
    need = int(trainable * (1 + times)) - model.optimizer_state_bytes
    seen = f"{size(need)} for gradients and {model.optimizer}, {size(free)} free"
    if need <= free:
        return CheckLine("optimizer", seen, tuple(_find_strays(model)))
    finding = Finding.error(
        code="states-too-large",
        summary=f"gradients and optimizer states need {size(need)}, but {size(free)} is free",
        evidence=f"{size(trainable)} of trainable weights x {1 + times:.0f}, {model.optimizer}; the"
        " first step fails at any batch size",
        remedy=f"Train adapters, {advice.EIGHT_BIT_ADAMW.flag(Door.TRAINER)}, or several cards with"
        " ZeRO-3 or FSDP",
        amount=float(need),
        data={"needed_bytes": need, "free_bytes": free, "trainable_bytes": trainable},
    )
    return CheckLine("optimizer", seen, (finding, *_find_strays(model)))


def gradients(facts: Facts) -> CheckLine | None:
    """Judge whether full gradients, which FSDP keeps between micro-batches, fit on a card."""
    model, free, strategy = facts.model, facts.device_free_bytes, facts.run.strategy
    if free is None or strategy is None or strategy.family != "FSDP":
        return None
    if not keeps_whole_gradients(facts.run.values):
        return CheckLine("gradients", "divided among the cards")
    trainable = sum(model.trainable_bytes.values())
    need = trainable * strategy.world_size
    if need < MUCH * free:
        return CheckLine("gradients", "whole between the micro-batches of a step")
    change = advice.REDUCED_EACH_TIME
    finding = Finding(
        code="fsdp-whole-gradients",
        severity=severity_of(need, free),
        summary=f"whole gradients need {size(need)} on each card, but {size(free)} is free",
        evidence="under FSDP's no_sync, accelerate keeps them whole between the"
        f" {facts.run.values['gradient_accumulation_steps']} micro-batches of a step",
        remedy=f"{change.flag(Door.TRAINER)}: {change.price}",
        amount=float(need),
    )
    return CheckLine("gradients", "", (finding,))


CHECKS: tuple[Check, ...] = (
    copies, dtypes, frozen, states, gradients, checkpoints, attention, cache, logits,
)  # fmt: skip


def _device(facts: Facts) -> int:
    """Return the memory for training (a sleeping vLLM returns its share); if unknown, a PiB."""
    run, total = facts.run, facts.device_bytes or 1 << 50
    if run.flag("vllm_enable_sleep_mode"):
        return total
    return total - int(run.vllm_share * total)


def _dtype(facts: Facts, model: ModelFacts) -> str:
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if facts.run.flag(flag):
            return dtype
    return next(iter({**model.trainable_bytes, **model.frozen_bytes}), "float32")


def _kernel(facts: Facts, model: ModelFacts, shape: ModelShape) -> Kernel | None:
    """Return the kernel for these shapes; None if it is not torch's attention, or not on CUDA."""
    if model.attention != "sdpa" or facts.capability is None:
        return None
    data = facts.data  # rows of unequal lengths get a mask, and shared keys are then repeated
    are_padded = not data.is_packed and len(set(data.lengths)) > 1
    return attention_kernel(
        *(_dtype(facts, model), shape.head_size, facts.capability),
        has_mask=are_padded,
        asks_cudnn=prefers_cudnn(version("torch"), facts.capability),
    )


def _is_whole(facts: Facts) -> bool:
    """Return whether each rank has all weights, gradients and states on its card."""
    families = ("nothing", "DDP", "DataParallel")
    return facts.run.strategy is not None and facts.run.strategy.family in families


def _unfit(facts: Facts, model: ModelFacts) -> Iterator[Finding]:
    halves, empty = model.trainable_bytes.get("float16", 0), model.homes.get("meta", 0)
    if halves and facts.run.flag("fp16"):
        yield Finding.error(
            code="trainable-fp16",
            summary="--fp16 cannot train weights that are float16 already: the first step raises",
            evidence=f"{size(halves)} of them; torch: 'Attempting to unscale FP16 gradients.'",
            remedy="Load the model with dtype=torch.float32, or use --bf16",
        )
    if empty:
        yield Finding.error(
            code="weights-missing",
            summary=f"{size(empty)} of parameters have no values: they are on the meta device",
            evidence=f"parameters on {', '.join(model.homes)}",
            remedy="Load the checkpoint into the model before you build the Trainer",
        )
    elif len(model.homes) > 1:
        homes = model.homes.items()
        yield Finding.warning(
            code="mixed-devices",
            summary="the parameters of the model are on devices of different types",
            evidence=", ".join(f"{size(num_bytes)} on {home}" for home, num_bytes in homes),
            remedy="Load it without device_map, which leaves some weights on the CPU",
        )


def _find_strays(model: ModelFacts) -> Iterator[Finding]:
    if model.stray_bytes > LITTLE * sum(model.trainable_bytes.values()):
        yield Finding.warning(
            code="optimizer-of-other-tensors",
            summary=f"the optimizer updates {size(model.stray_bytes)} outside the model",
            evidence="parameters of the model were copied or replaced after it was created",
            remedy="Create the optimizer after the model is complete, or leave it to the Trainer",
            amount=float(model.stray_bytes),
        )
