"""Predicts the memory of Hugging Face Trainer runs, helps them survive OOM, and explains both.

`from trainer_plugins import MemoryWatchdog` imports what it needs at that moment; this module alone
imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Each public name and the module it comes from (PEP 562, as transformers does it).
_HOMES = {
    "CudaCacheCallback": "callbacks",
    "EvalGenerateCleanup": "callbacks",
    "EvaluationGuard": "callbacks",
    "Finding": "finding",
    "Headroom": "callbacks",
    "KVCacheGuard": "callbacks",
    "MemoryArguments": "plug_in.options",
    "MemoryPlan": "planner",
    "MemoryWatchdog": "callbacks",
    "NotPredicted": "planner",
    "OOMReporter": "callbacks",
    "PlanError": "planner",
    "Preflight": "callbacks",
    "PreflightError": "callbacks",
    "ReleaseEarlierRuns": "callbacks",
    "ResumeGuard": "callbacks",
    "StrategyInForce": "callbacks",
    "StreamBase": "callbacks",
    "SurviveOOM": "survival",
    "attach": "plug_in.attachment",
    "attached": "plug_in.attachment",
    "callbacks_from_args": "plug_in.options",
    "classify": "oom",
    "detach": "plug_in.attachment",
    "draw": "report.html.run_page",
    "generation_memory": "upkeep.generation",
    "plan_run": "drycuda.predict",
    "protect": "plug_in.attachment",
    "read_timeline": "record.timeline",
    "released": "upkeep.released",
    "report_oom": "upkeep.post_mortem",
    "stream_base": "streaming.attach",
    "survive_oom": "survival",
}

__all__ = [
    "CudaCacheCallback",
    "EvalGenerateCleanup",
    "EvaluationGuard",
    "Finding",
    "Headroom",
    "KVCacheGuard",
    "MemoryArguments",
    "MemoryPlan",
    "MemoryWatchdog",
    "NotPredicted",
    "OOMReporter",
    "PlanError",
    "Preflight",
    "PreflightError",
    "ReleaseEarlierRuns",
    "ResumeGuard",
    "StrategyInForce",
    "StreamBase",
    "SurviveOOM",
    "attach",
    "attached",
    "callbacks_from_args",
    "classify",
    "detach",
    "draw",
    "generation_memory",
    "plan_run",
    "protect",
    "read_timeline",
    "released",
    "report_oom",
    "stream_base",
    "survive_oom",
]

if TYPE_CHECKING:
    from trainer_plugins.callbacks import (
        CudaCacheCallback,
        EvalGenerateCleanup,
        EvaluationGuard,
        Headroom,
        KVCacheGuard,
        MemoryWatchdog,
        OOMReporter,
        Preflight,
        PreflightError,
        ReleaseEarlierRuns,
        ResumeGuard,
        StrategyInForce,
        StreamBase,
    )
    from trainer_plugins.drycuda.predict import plan_run
    from trainer_plugins.finding import Finding
    from trainer_plugins.oom import classify
    from trainer_plugins.planner import MemoryPlan, NotPredicted, PlanError
    from trainer_plugins.plug_in.attachment import attach, attached, detach, protect
    from trainer_plugins.plug_in.options import MemoryArguments, callbacks_from_args
    from trainer_plugins.record.timeline import read_timeline
    from trainer_plugins.report.html.run_page import draw
    from trainer_plugins.streaming.attach import stream_base
    from trainer_plugins.survival import SurviveOOM, survive_oom
    from trainer_plugins.upkeep.generation import generation_memory
    from trainer_plugins.upkeep.post_mortem import report_oom
    from trainer_plugins.upkeep.released import released


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
