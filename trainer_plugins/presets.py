"""Presets name sets of callbacks: those of `PRESETS`, and entry points of installed packages."""

from difflib import get_close_matches
from typing import NamedTuple

GROUP = "trainer_plugins.presets"  # the entry points that offer a `Preset`
CUDA_CACHE = "trainer_plugins.callbacks.CudaCacheCallback"
EVAL_CLEANUP = "trainer_plugins.callbacks.EvalGenerateCleanup"
EVALUATION = "trainer_plugins.callbacks.EvaluationGuard"
EARLIER_RUNS = "trainer_plugins.callbacks.ReleaseEarlierRuns"
KV_CACHE = "trainer_plugins.callbacks.KVCacheGuard"
RESUME = "trainer_plugins.callbacks.ResumeGuard"
WATCHDOG = "trainer_plugins.callbacks.MemoryWatchdog"
REPORTER = "trainer_plugins.callbacks.OOMReporter"
PREFLIGHT = "trainer_plugins.callbacks.Preflight"
STRATEGY = "trainer_plugins.callbacks.StrategyInForce"
SURVIVE = "trainer_plugins.survival.SurviveOOM"
STREAM = "trainer_plugins.callbacks.StreamBase"

_GUARDS = (EARLIER_RUNS, CUDA_CACHE, EVAL_CLEANUP, EVALUATION, KV_CACHE, RESUME)
_SAFE = (STRATEGY, PREFLIGHT, *_GUARDS, WATCHDOG, REPORTER)


class Preset(NamedTuple):
    """Names callbacks that belong together, by dotted class name: reading one needs no torch."""

    name: str
    summary: str
    callbacks: tuple[str, ...]


PRESETS = (
    Preset(
        "observe",
        "checks before step 1, the strategy in force, watchdog, timeline and OOM records;"
        " changes nothing",
        (STRATEGY, PREFLIGHT, WATCHDOG, REPORTER),
    ),
    Preset("memory_safe", "observe plus all guards: suits any run, and is the default", _SAFE),
    Preset(
        "survive",
        "memory_safe, and splits a micro-batch that does not fit: for runs that must not die."
        " It is a preset of its own because it replaces two methods of the Trainer, and warns"
        " about each run that it cannot help",
        (*_SAFE, SURVIVE),
    ),
)


def preset(name: str) -> Preset:
    """Return a built-in or an installed package's preset, or raise ValueError."""
    if (ours := next((each for each in PRESETS if each.name == name), None)) is not None:
        return ours
    from importlib.metadata import entry_points

    offered = entry_points(group=GROUP)
    if name not in offered.names:
        names = [each.name for each in PRESETS] + sorted(offered.names)
        raise ValueError(
            f"there is no preset {name!r}.{nearest(name, names)} Known presets: {', '.join(names)}"
        )
    offer = offered[name].value
    try:
        theirs = offered[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the preset {name!r} cannot be loaded from {offer}: {error}") from error
    if not isinstance(theirs, Preset):
        what = f"the preset {name!r}, but it is not a Preset: {theirs!r}"
        raise ValueError(f"{offer} is offered as {what}")
    return theirs


def nearest(name: str, names: list[str]) -> str:
    """Suggest the nearest name, as a sentence; empty if none is close.

    >>> nearest("memory-safe", ["observe", "memory_safe"]), nearest("x", ["observe"])
    (' Did you mean memory_safe?', '')
    """
    close = get_close_matches(str(name), names, n=1)
    return f" Did you mean {close[0]}?" if close else ""
