"""Finds the repeated layers of a model, and the frozen weights that only they use."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

# others (int8 of bitsandbytes, DTensor, torchao) keep further tensors with the weight
_KINDS = ("Parameter", "Params4bit")


def find_repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost module lists in which a class occurs twice."""
    found: list[nn.Module] = []
    for child in model.children():
        members = list(child.children())
        kinds = Counter(type(member) for member in members)
        if isinstance(child, nn.ModuleList) and kinds and kinds.most_common(1)[0][1] > 1:
            found += members
        else:
            found += find_repeated_layers(child)
    return found


def frozen_weights(
    model: nn.Module, with_embeddings: bool = False
) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    """Yield each layer that has frozen matrices, with those that no other module shares.

    If requested, untied embeddings and head come first and last. Vectors stay on the card. The
    scales of a 4-bit matrix are not parameters, and go with it.
    """
    layers = find_repeated_layers(model)
    if with_embeddings and layers:
        getters = "get_input_embeddings", "get_output_embeddings"
        first, last = (getattr(model, getter, lambda: None)() for getter in getters)
        layers = [each for each in (first, *layers, last) if isinstance(each, nn.Module)]
    inside = {id(part): number for number, layer in enumerate(layers) for part in layer.modules()}
    owners: dict[int, set[int]] = {}
    for part in model.modules():
        for weight in part.parameters(recurse=False):
            owners.setdefault(id(weight), set()).add(inside.get(id(part), -1))
    for layer in layers:
        weights = [weight for weight in dict.fromkeys(layer.parameters()) if is_streamable(weight)]
        own: list[torch.Tensor] = [weight for weight in weights if len(owners[id(weight)]) == 1]
        if own:
            states = (getattr(weight, "quant_state", None) for weight in own)  # one for 64 numbers
            yield layer, [*own, *(state.absmax for state in states if state is not None)]


def is_streamable(weight: nn.Parameter) -> bool:
    """Return whether a weight is a frozen matrix of a known kind."""
    is_quantised = getattr(weight, "bnb_quantized", True)  # if not, its first move quantises it
    is_known = type(weight).__name__ in _KINDS and weight.dtype != torch.int8
    return is_known and is_quantised and weight.ndim > 1 and not weight.requires_grad
