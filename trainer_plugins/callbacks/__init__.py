"""Callbacks for `transformers.Trainer`. They translate its events into calls of the rooms below.

To add a callback, write it in a file of this folder. Name it here, in `trainer_plugins/__init__.py`
and in `trainer_plugins/presets.py`, and give it a file in `configs/hydra/trainer_plugins/callback/`
and a part of `docs/callbacks.md`. `tests/callbacks/test_contract.py` finds it automatically.
"""

from importlib import import_module

HOMES = {
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


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
