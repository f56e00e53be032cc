"""Callbacks for `transformers.Trainer`. Each translates its events into calls on the floors below."""

from trainer_plugins.callbacks.cuda_cache import CudaCacheCallback
from trainer_plugins.callbacks.eval_cleanup import EvalGenerateCleanup
from trainer_plugins.callbacks.kv_cache_guard import KVCacheGuard
from trainer_plugins.callbacks.memory_watchdog import MemoryWatchdog

__all__ = ["CudaCacheCallback", "EvalGenerateCleanup", "KVCacheGuard", "MemoryWatchdog"]
