"""Callbacks for `transformers.Trainer`. They translate its events into calls of the rooms below.

To add a callback, write it in a file of this folder. Name it here, in `trainer_plugins/__init__.py`
and in `trainer_plugins/presets.py`, and give it a file in `configs/hydra/trainer_plugins/callback/`
and a part of `docs/callbacks.md`. `tests/callbacks/test_contract.py` finds it automatically.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "CudaCacheCallback": "cuda_cache",
    "EvalGenerateCleanup": "eval_cleanup",
    "EvaluationGuard": "evaluation_guard",
    "Headroom": "headroom",
    "KVCacheGuard": "kv_cache_guard",
    "MemoryWatchdog": "memory_watchdog",
    "OOMReporter": "oom_reporter",
    "Preflight": "preflight",
    "PreflightError": "preflight",
    "ReleaseEarlierRuns": "release_earlier_runs",
    "ResumeGuard": "resume_guard",
    "StrategyInForce": "strategy_in_force",
    "StreamBase": "stream_base",
}  # each class and its file, imported on first use

if TYPE_CHECKING:
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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
