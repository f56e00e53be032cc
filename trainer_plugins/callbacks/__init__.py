"""Callbacks for `transformers.Trainer`.

Each translates its events into calls on the floors below.
"""

from trainer_plugins.callbacks.cuda_cache import CudaCacheCallback
from trainer_plugins.callbacks.eval_cleanup import EvalGenerateCleanup
from trainer_plugins.callbacks.evaluation_guard import EvaluationGuard
from trainer_plugins.callbacks.headroom import Headroom
from trainer_plugins.callbacks.kv_cache_guard import KVCacheGuard
from trainer_plugins.callbacks.memory_watchdog import MemoryWatchdog
from trainer_plugins.callbacks.oom_reporter import OOMReporter
from trainer_plugins.callbacks.preflight import Preflight, PreflightError
from trainer_plugins.callbacks.release_earlier_runs import ReleaseEarlierRuns
from trainer_plugins.callbacks.resume_guard import ResumeGuard
from trainer_plugins.callbacks.strategy_in_force import StrategyInForce
from trainer_plugins.callbacks.stream_base import StreamBase

__all__ = [
    "CudaCacheCallback",
    "EvalGenerateCleanup",
    "EvaluationGuard",
    "Headroom",
    "KVCacheGuard",
    "MemoryWatchdog",
    "OOMReporter",
    "Preflight",
    "PreflightError",
    "ReleaseEarlierRuns",
    "ResumeGuard",
    "StrategyInForce",
    "StreamBase",
]
