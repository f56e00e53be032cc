"""Gives each use of memory one colour, on whatever page it is drawn."""

_COLOURS = {
    "weights": "weights",
    "parameter": "weights",
    "parameters": "weights",
    "frozen weights": "frozen",
    "buffer": "frozen",
    "gradient": "gradients",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "optimizer states": "optimizer",
    "activation": "activations",
    "activations": "activations",
    "saved by autograd": "saved",
    "autocast copies of weights": "saved",
    "temporaries": "temporaries",
    "logits": "logits",
    "logits and loss": "logits",
    "KV cache": "cache",
    "sharding buffers": "buffers",
    "waiting": "buffers",
    "train": "train",
    "eval": "eval",
    "evaluation": "eval",
    "predict": "eval",
    "generate": "generate",
    "generation": "generate",
    "save": "save",
    "forward": "first",
    "backward": "second",
    "optimizer step": "third",
}


def colour_of(name: str) -> str:
    """Return the class in the style sheet for a category or a moment; the rest is grey.

    >>> colour_of("parameters"), colour_of("workspaces")
    ('c-weights', 'c-other')
    """
    return f"c-{_COLOURS.get(name, 'other')}"
