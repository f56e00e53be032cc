"""Turn the errors of a rehearsal into one line for the user. Imports torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch._subclasses import fake_tensor

from trainer_plugins.planner.plan import NotPredicted, PlanError

_Result = TypeVar("_Result")

_WHY = {
    "does not require grad and does not have a grad_fn": (
        "the loss depends on nothing that is trained. Reentrant checkpointing does that if a "
        "layer's input needs no gradient, as after frozen embeddings (LoRA): pass "
        "--gradient_checkpointing_kwargs '{\"use_reentrant\": false}', or call "
        "model.enable_input_require_grads() before the Trainer is made. Without checkpointing, no "
        "tensor behind the loss has requires_grad"
    ),
    "Expected to mark a variable ready only once": (
        "DDP looks for unused parameters, which the Trainer lets it do for an adapter of PEFT, and "
        "with reentrant checkpointing, which prepare_model_for_kbit_training switches on, it finds "
        'parameters twice ("Expected to mark a variable ready only once"): pass '
        "--ddp_find_unused_parameters False, or --gradient_checkpointing True "
        "--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'"
    ),
}
"""What stands in the errors of runs that fail on a card too, as real ranks did in the tests, and
why they do and what to pass."""


def told_in_one_line(work: Callable[[], _Result]) -> _Result:
    """Run a part of the rehearsal, and turn what it raises into one line.

    Raises:
        NotPredicted: an operation needs values, which the rehearsal does not have.
        PlanError: the part raised another error.
    """
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
            raise PlanError(f"the rehearsal of the run failed, as the run will: {why}") from error
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
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if (
            "/torch/" not in code.co_filename
            and "/trainer_plugins/planner/" not in code.co_filename
        ):
            place = f" (in {Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place
