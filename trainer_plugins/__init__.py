"""Predicts the memory of Hugging Face Trainer runs, helps them survive OOM, and explains both.

`from trainer_plugins import MemoryWatchdog` imports that class on demand; this module alone imports
neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trainer_plugins.callbacks import HOMES as CALLBACKS

__version__ = "0.1.0"

# Each public name and the module it comes from (PEP 562, as transformers does it).
_HOMES = dict.fromkeys(CALLBACKS, "callbacks") | {
    "Finding": "finding",
    "MemoryArguments": "plug_in.options",
    "MemoryPlan": "planner.plan",
    "NotPredicted": "planner.plan",
    "PlanError": "planner.plan",
    "SurviveOOM": "survival",
    "attach": "plug_in.attachment",
    "attached": "plug_in.attachment",
    "calibrate": "planner.calibrate",
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

__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # the same names, for type checkers
    from trainer_plugins.callbacks.cuda_cache import CudaCacheCallback as CudaCacheCallback
    from trainer_plugins.callbacks.eval_cleanup import EvalGenerateCleanup as EvalGenerateCleanup
    from trainer_plugins.callbacks.evaluation_guard import EvaluationGuard as EvaluationGuard
    from trainer_plugins.callbacks.headroom import Headroom as Headroom
    from trainer_plugins.callbacks.kv_cache_guard import KVCacheGuard as KVCacheGuard
    from trainer_plugins.callbacks.memory_watchdog import MemoryWatchdog as MemoryWatchdog
    from trainer_plugins.callbacks.oom_reporter import OOMReporter as OOMReporter
    from trainer_plugins.callbacks.preflight import Preflight as Preflight
    from trainer_plugins.callbacks.preflight import PreflightError as PreflightError
    from trainer_plugins.callbacks.release_earlier_runs import (
        ReleaseEarlierRuns as ReleaseEarlierRuns,
    )
    from trainer_plugins.callbacks.resume_guard import ResumeGuard as ResumeGuard
    from trainer_plugins.callbacks.strategy_in_force import StrategyInForce as StrategyInForce
    from trainer_plugins.callbacks.stream_base import StreamBase as StreamBase
    from trainer_plugins.drycuda.predict import plan_run as plan_run
    from trainer_plugins.finding import Finding as Finding
    from trainer_plugins.oom import classify as classify
    from trainer_plugins.planner.calibrate import calibrate as calibrate
    from trainer_plugins.planner.plan import MemoryPlan as MemoryPlan
    from trainer_plugins.planner.plan import NotPredicted as NotPredicted
    from trainer_plugins.planner.plan import PlanError as PlanError
    from trainer_plugins.plug_in.attachment import attach as attach
    from trainer_plugins.plug_in.attachment import attached as attached
    from trainer_plugins.plug_in.attachment import detach as detach
    from trainer_plugins.plug_in.attachment import protect as protect
    from trainer_plugins.plug_in.options import MemoryArguments as MemoryArguments
    from trainer_plugins.plug_in.options import callbacks_from_args as callbacks_from_args
    from trainer_plugins.record.timeline import read_timeline as read_timeline
    from trainer_plugins.report.html.run_page import draw as draw
    from trainer_plugins.streaming.attach import stream_base as stream_base
    from trainer_plugins.survival import SurviveOOM as SurviveOOM
    from trainer_plugins.survival import survive_oom as survive_oom
    from trainer_plugins.upkeep.generation import generation_memory as generation_memory
    from trainer_plugins.upkeep.post_mortem import report_oom as report_oom
    from trainer_plugins.upkeep.released import released as released


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
