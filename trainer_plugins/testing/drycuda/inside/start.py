"""start() prepares a Python process that has the dry libraries. Imports torch."""

import os
import sys

import torch

from trainer_plugins.plug_in._site.trainer_plugins_on_import import when_imported
from trainer_plugins.testing.drycuda.inside import alone, cheap, safety
from trainer_plugins.testing.drycuda.inside.values import Values


def start() -> None:
    """Prepare this process; it says what it is on stderr.

    Raises:
        RuntimeError: torch has found another card than the dry one.
    """
    if not is_dry():
        raise RuntimeError("TRAINER_PLUGINS_DRYCUDA is set, and torch has not loaded the dry card")
    say("this process runs on a card that computes nothing: its losses, metrics and texts mean nothing")
    cheap.skip_initialisation()
    safety.protect()
    Values(all_numbers=os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1").__enter__()
    alone.let_the_store_be_alone()
    when_imported("transformers.modeling_utils", _with_weights)
    when_imported("transformers.generation.stopping_criteria", _longest)
    when_imported("transformers.training_args", safety.protect_arguments)


def is_dry() -> bool:
    """Return whether torch's CUDA runtime here is the dry one."""
    return hasattr(_runtime(), "drycuda_counters")


def counters() -> dict[str, int]:
    """Return what the libraries have counted in this process, by name."""
    import ctypes

    library = _runtime()
    library.drycuda_counters.restype = ctypes.c_char_p
    lines = (line.partition(" ") for line in library.drycuda_counters().decode().splitlines())
    return {name: int(number) for number, _, name in lines}


def say(text: str) -> None:
    """Write a line to stderr, once for each process."""
    rank = os.environ.get("RANK")
    sys.stderr.write(f"dry CUDA{f' (rank {rank})' if rank else ''}: {text}\n")


def _runtime():  # type: ignore[no-untyped-def]
    import ctypes

    return ctypes.CDLL(None)


def _with_weights() -> None:
    from trainer_plugins.testing.drycuda.inside import weights

    weights.make_those_that_are_missing()


def _longest() -> None:
    """Let a generation run to its longest: no token of it is chosen by the model."""
    from transformers.generation import stopping_criteria

    def never(self: object, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    stopping_criteria.EosTokenCriteria.__call__ = never
