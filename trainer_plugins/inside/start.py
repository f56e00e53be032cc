"""start() prepares a Python process that has the dry libraries. Imports torch."""

import atexit
import functools
import os
import sys
import time
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.inside import alone, cheap, observe, safety, shapes
from trainer_plugins.inside.process import has_numbers, is_dry, say
from trainer_plugins.inside.values import Values, see_into_operators
from trainer_plugins.patched import Patches


def start() -> None:
    """Prepare this process, and describe it on stderr.

    Raises:
        RuntimeError: the card was made for another torch, or as for `begin`.
    """
    made_for = os.environ["TRAINER_PLUGINS_DRYCUDA_TORCH"]
    if not os.path.samefile(os.path.dirname(torch.__path__[0]), made_for):
        raise RuntimeError(
            f"the torch of this Python ({sys.executable}) is {torch.__path__[0]}, and the dry card"
            f" was built for {made_for}: plan with the Python that runs your command"
        )
    if not is_dry():
        raise RuntimeError(
            "the dry card's libraries are not loaded: keep LD_PRELOAD in the command's environment"
        )
    if has_numbers():
        # The CPU has no code for cuDNN's operators and fused attention.
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        cheap.skip_initialisation()
        cheap.read_no_weights()
        safety.save_no_bytes()
    shapes.compute_on_the_host()
    values = Values()
    see_into_operators(values)
    values.__enter__()  # type: ignore[no-untyped-call] # for the rest of the process
    if served := os.environ.get("DRYCUDA_SERVES"):
        _answer_for_a_card(*map(int, served.split()))  # each process that it forks calls begin
    else:
        begin()


_answers = Patches()


def _answer_for_a_card(major: int, minor: int) -> None:
    """Report a card to modules during import, though this process must not touch one.

    bitsandbytes looks for its library during import. It and DeepSpeed mark functions for
    compilation, which would import all of torch's compiler.
    """
    _answers.set(torch, "compile", functools.partial(_compile_later, torch.compile))
    cards: Any = torch.cuda
    _answers.set(cards, "is_available", lambda: True)
    _answers.set(cards, "device_count", lambda: 1)
    _answers.set(cards, "get_device_capability", lambda *_: (major, minor))


def _compile_later(compile: Any, model: Any = None, **options: Any) -> Any:
    """Act as `torch.compile`, but compile a function only when it is first called."""
    if model is None:
        return functools.partial(_compile_later, compile, **options)
    if not isinstance(model, FunctionType):
        return compile(model, **options)
    compiled = functools.cache(functools.partial(compile, model, **options))
    return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))


@functools.cache  # where forking was impossible, `start` has begun already
def begin() -> None:
    """Begin the run of this process, on the cards that its environment names.

    Raises:
        RuntimeError: the program sees none of them.
    """
    _answers.close()
    if "TRAINER_PLUGINS_DRY_STEPS" in os.environ and torch.cuda.device_count() == 0:
        raise RuntimeError(
            f"the program's choice of devices, {os.environ.get('CUDA_VISIBLE_DEVICES')!r}, hides"
            " every dry card: plan with more of them, as in --num-gpus 2"
        )
    if has_numbers():
        say("there is no GPU here: the CPU computes every operator")
    else:
        say("this GPU computes nothing: losses, metrics and generated text are meaningless")
    atexit.register(_wait_for_autograd)
    alone.be_all_ranks()
    observe.record()


def _wait_for_autograd() -> None:
    """Wait until autograd's threads have left their dispatch mode, which is a Python object.

    A thread that still has to leave it when Python ends would abort the process. The threads have
    finished before this function's own backward pass, but release their references a moment later.
    """
    cards: Any = torch.cuda
    with _disable_current_modes(), suppress(RuntimeError):
        for index in range(cards.device_count() if cards.is_initialized() else 0):
            if cards.memory_reserved(index):
                zero = torch.zeros((), device=f"cuda:{index}", requires_grad=True)
                torch.autograd.backward(zero)
                time.sleep(0.02)
