"""Streams the frozen base of a Trainer's model, or explains why it cannot."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.streaming.layers import find_repeated_layers, frozen_weights
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.units import size
from trainer_plugins.wrapped import is_compiled, will_be_compiled


def stream_base(
    trainer: Trainer,
    *,
    resident_layers: int = 2,
    with_embeddings: bool = False,
    allow_generation: bool = False,
) -> Stream:
    """Keep the frozen base of a Trainer's model in main memory, with only a few layers on the card.

    Each layer is copied to the card before its forward pass and again before its backward pass,
    while the previous one computes. Weights, losses and gradients stay the same, bit for bit. Use
    it for LoRA and QLoRA: trainable parameters stay on the card.

    Cost: main memory the size of the base on each rank, pinned on CUDA. Each micro-batch copies the
    base over the bus twice, except for the resident layers, so prefer a larger micro-batch to
    gradient accumulation. An 8B on an H100 took 1.02 to 1.46 times as long
    (docs/internals/measured.md).

    Args:
        trainer: a `Trainer` of transformers or TRL, alone or under DDP. If the base does not fit
            on the card at all, use the callback `StreamBase`: a Trainer moves its model when it is
            built.
        resident_layers: the most layers on the card at once. From 2 on, the next one is copied
            while one computes.
        with_embeddings: stream the embeddings and the head too, unless they are tied, each as one
            more layer. They are large: consider them when you choose `resident_layers`.
        allow_generation: stream even if the run generates, which copies the base for each token.

    Returns:
        The stream. `remove()`, or the end of its `with` block, brings the base to the card and
        ends the streaming. `model.cpu()` ends it in main memory.

    Raises:
        ValueError: the run cannot be streamed; the message gives every reason. Nothing is changed.
    """
    reasons = refusals(trainer, trainer.model, resident_layers, allow_generation)
    if reasons:
        raise ValueError(f"stream_base cannot stream this run: {'; '.join(reasons)}")
    return Stream(trainer.model, trainer.args.device, resident_layers, with_embeddings)


def refusals(
    trainer: Trainer, model: nn.Module, resident_layers: int, allow_generation: bool
) -> list[str]:
    """List every reason why the base of a run cannot be streamed; empty if it can."""
    found = [*_find_refusals(trainer, allow_generation), *model_refusals(model, resident_layers)]
    return found or main_memory_lacks(model, trainer.args.device)


def model_refusals(model: nn.Module, resident_layers: int) -> Iterator[str]:
    """Yield every reason why the base of a model cannot be streamed in any run."""
    if stream_of(model) is not None:
        yield "its base is already streamed"
        return
    if any(one.device.type == "meta" for one in model.parameters()):
        yield "the model has weights on the meta device, which have no values yet"
        return
    placed = getattr(model, "hf_device_map", None) or {}
    if len({str(device) for device in placed.values()} - {"cpu", "disk"}) > 1:
        yield "the model is spread over several cards (hf_device_map)"
    if is_compiled(model):
        yield "parts of the model are compiled: torch.compile reads weights where they were"
    layers = find_repeated_layers(model)
    units = [weights for _, weights in frozen_weights(model)]
    if not layers:
        yield "the model has no repeated layers (no list of modules of one class)"
    elif not units and any(one.dtype == torch.int8 for one in model.parameters()):
        yield "its base is in int8 of bitsandbytes, which stays on the card: 4 bits can be streamed"
    elif not units:
        yield (
            f"none of its {len(layers)} layers has frozen weights: streaming is for LoRA and QLoRA,"
            " whose base is not trained"
        )
    elif not 1 <= resident_layers <= len(units):
        yield f"resident_layers is a number of layers from 1 to {len(units)}, got {resident_layers}"


def main_memory_lacks(model: nn.Module, device: torch.device) -> list[str]:
    """Return a reason if the copies do not fit into main memory; empty if they do."""
    is_copied = device.type == "cuda"  # to pinned memory, wherever they are
    weights = [one for _, layer in frozen_weights(model) for one in layer]
    needed_bytes = sum(one.nbytes for one in weights if is_copied or one.device.type != "cpu")
    free_bytes = open_device("cpu").read().free_bytes
    if needed_bytes <= free_bytes:
        return []
    return [
        f"main memory has {size(free_bytes)} free, and the base needs {size(needed_bytes)} there on"
        " each rank"
    ]


def report_begin(stream: Stream, why: str = "") -> Finding:
    """Report that a base is streamed, the cost, and `why` it began if the user did not ask."""
    once = stream.num_bytes - stream.resident_bytes
    return Finding(
        code="base-streamed",
        severity=Severity.WARNING if why else Severity.INFO,
        summary=f"the frozen base, {size(stream.num_bytes)} in {stream.num_layers} layers, waits in"
        f" main memory; {stream.resident_layers} of them are on the card",
        evidence=f"{f'{why}; ' if why else ''}a micro-batch copies {size(2 * once)} over the bus,"
        f" an evaluation batch {size(once)}",
        remedy="The results are the same, but it takes longer. Rows of a micro-batch share a copy:"
        " prefer them to gradient accumulation.",
        amount=float(stream.num_bytes),
        data={"base_bytes": stream.num_bytes, "bytes_a_micro_batch": 2 * once},
    )


def _find_refusals(trainer: Trainer, allow_generation: bool) -> Iterator[str]:
    args = trainer.args
    if args.device.type == "cpu":
        yield "training runs on the CPU: there is no GPU memory to save"
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed places the weights itself: ZeRO-3 has offload_param for this"
    if trainer.is_fsdp_enabled:
        yield "FSDP places the weights itself: it has cpu_offload for this"
    if args.n_gpu > 1:
        yield f"nn.DataParallel copies the model to {args.n_gpu} cards: start one process per card"
    if args.torch_compile or will_be_compiled():
        yield "torch.compile reads weights where they were when it compiled: turn it off"
    is_online = hasattr(trainer, "_generate_and_score_completions")
    if (is_online or getattr(args, "predict_with_generate", False)) and not allow_generation:
        yield (
            "this run generates, which copies the full base for each token: accept that with"
            " allow_generation=True"
        )
