"""Memory care for Hugging Face Trainer runs.

`from trainer_plugins import MemoryWatchdog` works, and imports what it needs only then: this module
alone imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and its home (PEP 562, as transformers does it).
_HOMES = {
    "CudaCacheCallback": "callbacks",
    "EvalGenerateCleanup": "callbacks",
    "KVCacheGuard": "callbacks",
    "MemoryArguments": "plug_in.options",
    "MemoryPlan": "planner",
    "MemoryWatchdog": "callbacks",
    "StrategyInForce": "callbacks",
    "SurviveOOM": "survival",
    "attach": "plug_in.attachment",
    "attached": "plug_in.attachment",
    "callbacks_from_args": "plug_in.options",
    "detach": "plug_in.attachment",
    "generation_memory": "upkeep.generation",
    "plan_run": "planner",
    "protect": "plug_in.protection",
    "survive_oom": "survival",
}

__all__ = [
    "CudaCacheCallback",
    "EvalGenerateCleanup",
    "KVCacheGuard",
    "MemoryArguments",
    "MemoryPlan",
    "MemoryWatchdog",
    "StrategyInForce",
    "SurviveOOM",
    "attach",
    "attached",
    "callbacks_from_args",
    "detach",
    "generation_memory",
    "plan_run",
    "protect",
    "survive_oom",
]

if TYPE_CHECKING:
    from trainer_plugins.callbacks import (
        CudaCacheCallback,
        EvalGenerateCleanup,
        KVCacheGuard,
        MemoryWatchdog,
        StrategyInForce,
    )
    from trainer_plugins.planner import MemoryPlan, plan_run
    from trainer_plugins.plug_in.attachment import attach, attached, detach
    from trainer_plugins.plug_in.options import MemoryArguments, callbacks_from_args
    from trainer_plugins.plug_in.protection import protect
    from trainer_plugins.survival import SurviveOOM, survive_oom
    from trainer_plugins.upkeep.generation import generation_memory


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
