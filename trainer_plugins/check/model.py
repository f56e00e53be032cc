"""Judges the model that is about to be trained, by what its objects show."""

from collections.abc import Callable, Iterator

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import (
    LITTLE,
    MUCH,
    Facts,
    Line,
    ModelFacts,
    OtherModel,
    Shape,
)
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.planner.kernels import Kernel, attention_kernel
from trainer_plugins.units import percent, size

_STATES = {"AdamW": 2.0, "Adam": 2.0, "SGD": 0.0, "Adafactor": 0.0}
"""Copies of the trainable weights that an optimizer keeps, at least; of others nothing is known."""


def copies(facts: Facts) -> Line | None:
    """Judge what other models are alive beside the one in training."""
    model = facts.model
    if model is None or not model.homes:
        return None
    own = sum(model.homes.values())
    found = [
        _second_copy(each) for each in model.others if each.num_bytes >= LITTLE * _device(facts)
    ]
    return Line("copies", f"one model of {size(own)}", tuple(found))


def frozen(facts: Facts) -> Line | None:
    """Judge whether frozen weights take twice what they need."""
    model = facts.model
    if model is None or not sum(model.frozen_bytes.values()):
        return None
    wide = model.frozen_bytes.get("float32", 0)
    seen = f"{size(sum(model.frozen_bytes.values()))} of {', '.join(model.frozen_bytes)}"
    is_mixed = facts.run is not None and (facts.run.flag("bf16") or facts.run.flag("fp16"))
    if wide < LITTLE * _device(facts):
        return Line("frozen weights", seen)
    finding = Finding(
        code="frozen-fp32",
        severity=Severity.WARNING if is_mixed else Severity.INFO,
        summary=f"frozen weights are kept in float32: {size(wide / 2)} more than in bfloat16",
        evidence=f"{seen}; nothing updates them, and "
        + ("matrix products run with 16 bits" if is_mixed else "training runs in float32"),
        remedy="Load the base with dtype=torch.bfloat16",
        amount=float(wide),
    )
    return Line("frozen weights", seen, (finding,))


def dtypes(facts: Facts) -> Line | None:
    """Judge where the parameters are, and whether a scaler can work with them."""
    model = facts.model
    if model is None or not model.homes:
        return None
    kinds = {**model.trainable_bytes, **model.frozen_bytes}
    seen = f"{', '.join(kinds) or 'no parameters'} on {', '.join(model.homes) or 'no device'}"
    findings = [*_unscalable(facts, model), *_scattered(facts, model)]
    return Line("parameters", seen, tuple(findings))


def checkpoints(facts: Facts) -> Line | None:
    """Judge whether checkpointing that was asked for is live."""
    if facts.model is None or not facts.model.homes or facts.run is None:
        return None
    asked = facts.run.flag("gradient_checkpointing") or facts.run.flag("activation_checkpointing")
    if not asked:
        return Line("checkpointing", "not asked for")
    return Line("checkpointing", "live", tuple(_checkpointing(facts.model)))


def attention(facts: Facts) -> Line | None:
    """Judge whether attention stores a score for each pair of tokens, by the kernel it gets."""
    model, longest = facts.model, _longest(facts)
    if model is None or model.shape is None or not model.attention:
        return None
    kernel = _kernel(facts, model, model.shape)
    seen = model.attention if kernel is None else f"{model.attention}: {kernel}"
    # Of the scores, a softmax in float32 and a copy with 16 bits live through the backward pass.
    scores = _rows(facts) * model.shape.num_heads * longest * longest * (4 + 2)
    falls_back = kernel == "all scores"
    if not (falls_back or model.attention == "eager") or scores < LITTLE * _device(facts):
        return Line("attention", seen)
    part = scores / _device(facts)
    dtype = _dtype(facts, model)
    change = advice.CHECKPOINTING.flag(Door.TRAINER)
    if falls_back and dtype == "bfloat16":
        change = f"--fp16 True in place of --bf16, or {change}"
    if model.attention == "eager" and model.takes_sdpa:
        change = f"Load it with attn_implementation='sdpa', or {change}"
    finding = Finding(
        code="attention-stores-scores",
        severity=Severity.WARNING,
        summary=f"{model.attention} attention stores a score for each pair of tokens here:"
        f" {size(scores)} a layer",
        evidence=f"{_rows(facts)} row(s) x {model.shape.num_heads} heads x {longest:,} x"
        f" {longest:,} tokens, {percent(part)} of the device, in {model.shape.num_layers} layers"
        + f"; no other kernel takes {dtype} with heads of {model.shape.head_size} here"
        * falls_back,
        remedy=change,
        amount=float(scores),
    )
    return Line("attention", seen, (finding,))


def cache(facts: Facts) -> Line | None:
    """Judge whether training forwards keep keys and values."""
    model = facts.model
    if model is None or model.shape is None or not model.homes:
        return None
    need = cache_bytes(facts, _rows(facts), 2)
    if not model.uses_cache or need < LITTLE * _device(facts):
        return Line("KV cache", f"{size(need)} in training" if model.uses_cache else "off")
    finding = Finding(
        code="kv-cache-in-training",
        severity=Severity.WARNING,
        summary="each training forward returns a cache of keys and values that nothing reads",
        evidence=f"config.use_cache is true: {size(need)} for the longest rows",
        remedy="model.config.use_cache = False",
    )
    return Line("KV cache", "", (finding,))


def logits(facts: Facts) -> Line | None:
    """Judge what the logits of a micro-batch take where the loss is computed."""
    model, longest = facts.model, 0 if facts.data is None else facts.data.longest_target
    if model is None or model.shape is None or not model.predicts_tokens or not longest:
        return None
    if model.makes_no_logits:
        return Line("logits", "never whole")
    # transformers/loss/loss_utils.py, ForCausalLMLoss: 16 bits, a float32 copy and its gradient;
    # what is float32 already is not copied.
    widths, why = "2 + 4 + 4", "float32 is made for the loss, and its gradient"
    if _dtype(facts, model) == "float32":
        widths, why = "4 + 4", "logits in float32, and their gradient"
    need = _rows(facts) * longest * model.shape.vocab_size * sum(map(int, widths.split(" + ")))
    part, seen = need / _device(facts), size(need)
    if part < MUCH:
        return Line("logits", seen)
    finding = Finding(
        code="logits-fp32",
        severity=Severity.ERROR if part > 1 else Severity.WARNING,
        summary=f"the logits of one micro-batch take at least {size(need)}, {percent(part)} of the"
        " device",
        evidence=f"{_rows(facts)} row(s) x {longest:,} tokens x {model.shape.vocab_size:,} words x"
        f" ({widths}) bytes: {why}",
        remedy=f"{advice.LIGER.flag(Door.TRAINER)}, or fewer rows with more accumulation",
        amount=float(need),
    )
    return Line("logits", seen, (finding,))


def states(facts: Facts) -> Line | None:
    """Judge whether gradients and the optimizer's states fit beside the weights."""
    model, free = facts.model, facts.device_free_bytes
    times = None if model is None else _STATES.get(model.optimizer)
    if model is None or free is None or times is None or not _is_whole(facts):
        return None
    trainable = sum(model.trainable_bytes.values())
    need = int(trainable * (1 + times)) - model.optimizer_state_bytes
    seen = f"{size(need)} for gradients and {model.optimizer}, {size(free)} free"
    if need <= free:
        return Line("optimizer", seen, tuple(_strayed(model)))
    finding = Finding(
        code="states-too-large",
        severity=Severity.ERROR,
        summary=f"gradients and the states of {model.optimizer} take {size(need)}, and {size(free)}"
        " is free: the first step fails, whatever the batch",
        evidence=f"{size(trainable)} of trainable weights x {1 + times:.0f}",
        remedy="Train adapters, take --optim adamw_bnb_8bit, or several cards with ZeRO-3 or FSDP",
        amount=float(need),
    )
    return Line("optimizer", seen, (finding, *_strayed(model)))


CHECKS: tuple[Callable[[Facts], Line | None], ...] = (
    copies,
    dtypes,
    frozen,
    states,
    checkpoints,
    attention,
    cache,
    logits,
)


def cache_bytes(facts: Facts, rows: int, width: int, length: int | None = None) -> int:
    """Return what keys and values of all layers take for so many rows."""
    shape = None if facts.model is None else facts.model.shape
    if shape is None:
        return 0
    per_token = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_size * width
    return rows * per_token * (_longest(facts) if length is None else length)


def _device(facts: Facts) -> int:
    """Return what the device has for the training; where it is unknown, more than any has.

    A vLLM beside it that sleeps gives its part back.
    """
    run, total = facts.run, facts.device_bytes or 1 << 50
    if run is None or run.flag("vllm_enable_sleep_mode"):
        return total
    return total - int(run.vllm_share * total)


def _longest(facts: Facts) -> int:
    return max(facts.data.lengths, default=0) if facts.data is not None else 0


def _rows(facts: Facts) -> int:
    return 1 if facts.run is None else facts.run.number("per_device_train_batch_size", 8)


def _dtype(facts: Facts, model: ModelFacts) -> str:
    """Return what matrix products are computed in."""
    for flag, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        if facts.run is not None and facts.run.flag(flag):
            return kind
    return next(iter({**model.trainable_bytes, **model.frozen_bytes}), "float32")


def _kernel(facts: Facts, model: ModelFacts, shape: Shape) -> Kernel | None:
    """Return the kernel of these shapes; None if it is not torch's attention, or not on CUDA.

    Rows that differ in length come with a mask; with one, transformers repeats shared keys.
    """
    if model.attention != "sdpa" or facts.capability is None:
        return None
    data = facts.data
    are_padded = data is not None and not data.is_packed and len(set(data.lengths)) > 1
    dtype, head = _dtype(facts, model), shape.head_size
    return attention_kernel(dtype, head, head, facts.capability, has_mask=are_padded)


def _is_whole(facts: Facts) -> bool:
    """Return whether each rank has all weights, gradients and states on its card."""
    strategy = None if facts.run is None else facts.run.strategy
    return strategy is not None and strategy.family in ("nothing", "DDP", "DataParallel")


def _second_copy(other: OtherModel) -> Finding:
    return Finding(
        code="second-copy",
        severity=Severity.WARNING,
        summary=f"a second model takes {size(other.num_bytes)} of the device: {other.name}",
        evidence=f"none of it is shared with the model in training; held by {other.holder}",
        remedy="If it is a reference model of TRL: train adapters (peft_config), or"
        " precompute_ref_log_probs=True. An average (EMA) can stay on the CPU. Else delete it",
        amount=float(other.num_bytes),
    )


def _checkpointing(model: ModelFacts) -> Iterator[Finding]:
    if model.not_live:
        yield Finding(
            code="checkpointing-not-live",
            severity=Severity.WARNING,
            summary="gradient checkpointing was asked for, but all activations are kept",
            evidence=model.not_live,
            remedy="Leave it to the Trainer (--gradient_checkpointing True), and switch nothing off"
            " afterwards",
        )
    elif model.is_cut_off:
        yield Finding(
            code="checkpointing-without-gradients",
            severity=Severity.ERROR,
            summary="reentrant checkpointing gives no gradient here: its inputs need none",
            evidence="use_reentrant is true and the input embeddings are frozen"
            " (transformers#42489)",
            remedy="gradient_checkpointing_kwargs={'use_reentrant': False}, or"
            " model.enable_input_require_grads()",
        )


def _unscalable(facts: Facts, model: ModelFacts) -> Iterator[Finding]:
    halves = model.trainable_bytes.get("float16", 0)
    if halves and facts.run is not None and facts.run.flag("fp16") and _is_whole(facts):
        yield Finding(
            code="trainable-fp16",
            severity=Severity.ERROR,
            summary="--fp16 cannot train weights that are float16 already: the first step raises",
            evidence=f"{size(halves)} of them; torch/amp/grad_scaler.py: 'Attempting to unscale"
            " FP16 gradients.'",
            remedy="Load the model with dtype=torch.float32, or take --bf16",
        )


def _scattered(facts: Facts, model: ModelFacts) -> Iterator[Finding]:
    empty = model.homes.get("meta", 0)
    if empty and _is_whole(facts):
        yield Finding(
            code="weights-missing",
            severity=Severity.ERROR,
            summary=f"{size(empty)} of parameters have no bytes: they are on the device meta",
            evidence=f"parameters on {', '.join(model.homes)}",
            remedy="Load the checkpoint into the model before the Trainer is made",
        )
    elif len(model.homes) > 1 and _is_whole(facts):
        where = ", ".join(f"{size(num_bytes)} on {home}" for home, num_bytes in model.homes.items())
        yield Finding(
            code="mixed-devices",
            severity=Severity.WARNING,
            summary="the parameters of the model are on devices of different kinds",
            evidence=where,
            remedy="Load it without device_map, which leaves on the CPU what does not fit",
        )


def _strayed(model: ModelFacts) -> Iterator[Finding]:
    if model.stray_bytes > LITTLE * sum(model.trainable_bytes.values()):
        yield Finding(
            code="optimizer-of-other-tensors",
            severity=Severity.WARNING,
            summary=f"the optimizer updates {size(model.stray_bytes)} that is no part of the model",
            evidence="none of that is a parameter of the model: it was copied or replaced since",
            remedy="Make it after the model is complete, or leave it to the Trainer",
            amount=float(model.stray_bytes),
        )
