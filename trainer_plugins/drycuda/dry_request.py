"""Answers a PlanRequest on the dry card instead of on fake tensors: REQUEST ANSWER SECONDS.

A request has no command of its own: `inside/of_request.py` is what runs.
"""

import json
import pickle
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from trainer_plugins.drycuda.dry_plan import dry_plan
from trainer_plugins.drycuda.dry_run import Call, DryRun
from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import GPUS_PER_NODE, ConfigSource, PlanRequest, TrainerSource

_PROGRAM = "trainer_plugins.drycuda.inside.of_request"


def dry_run_of(request: PlanRequest, file: Path, timeout_seconds: float) -> DryRun:
    """Return what runs a request on dry cards; it is written to a file.

    Raises:
        NotPredicted: it is of a kind that has no dry run.
    """
    if why := why_not(request):
        raise NotPredicted(f"{why} on the dry card")
    assert request.card is not None
    file.write_bytes(pickle.dumps(request))
    is_divided = request.num_gpus > 1 or request.is_launched
    parts = request.source.device_map if isinstance(request.source, TrainerSource) else {}
    num_cards = max(min(request.num_gpus, GPUS_PER_NODE), 1 + max(parts.values(), default=0))
    settings = {"PYTORCH_ALLOC_CONF": request.allocator} if request.allocator else {}
    return DryRun(
        command=[sys.executable, "-m", _PROGRAM, str(file)],
        call=Call(_PROGRAM, [str(file)], _imports(request)),
        card=request.card,
        num_cards=num_cards,
        num_steps=request.num_steps,
        alone=is_divided,
        timeout_seconds=timeout_seconds,
        environment=settings,
    )


def _imports(request: PlanRequest) -> list[str]:
    """Return what a request needs of the installed packages, as far as none touches a card."""
    source, found = request.source, ["deepspeed"]  # which accelerate imports where it is there
    if isinstance(source, ConfigSource):
        found += ["peft"] * (source.peft is not None) + ["trl"] * (source.trainer is not None)
    return found


def why_not(request: PlanRequest) -> str:
    """Say what of a request has no dry run; empty if all has one."""
    if request.device != "cuda":
        return f"a plan for {request.device}"
    if request.card is None:
        return "a plan without a card (--gpu)"
    is_quantised = isinstance(request.source, ConfigSource) and request.source.quantisation
    if is_quantised and find_spec("bitsandbytes") is None:
        return "a base in 4 or 8 bits without its package (pip install bitsandbytes)"
    if request.resident_layers is not None:
        return "a streamed base"
    if request.host != HostLimits() or request.card.is_unified:
        return "limits of main memory"
    return ""


def main(asked: str, answered: str, seconds: str) -> None:
    """Write the plan of a pickled request, or why there is none, as JSON."""
    request: PlanRequest = pickle.loads(Path(asked).read_bytes())
    try:
        with by_any_signal():
            run = dry_run_of(request, Path(asked), float(seconds))
            plan = dry_plan(run, lambda text: None).plan
        answer: dict[str, object] = {"plan": asdict(plan)}
    except NotPredicted as refusal:
        answer = {"not_predicted": str(refusal).removeprefix("not predicted: ")}
    except PlanError as error:
        answer = {"error": str(error)}
    Path(answered).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
