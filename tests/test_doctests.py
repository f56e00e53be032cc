"""The examples in docstrings say what happens, and a public name shows how it is called."""

import doctest
import importlib
from pathlib import Path

import pytest

import trainer_plugins

ROOT = Path(trainer_plugins.__file__).parent
FILES = [
    path.relative_to(ROOT.parent)
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]
MODULES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]

NEEDS_A_RUN = "attached calibrate draw generation_memory plan_run protect read_timeline released"
NEEDS_A_RUN += " stream_base survive_oom MemoryPlan NotPredicted PlanError PreflightError"
NO_ARGUMENTS = (
    "EvalGenerateCleanup KVCacheGuard ReleaseEarlierRuns ResumeGuard StrategyInForce detach"
)
CALLED = sorted(set(trainer_plugins.__all__).difference(NEEDS_A_RUN.split(), NO_ARGUMENTS.split()))


@pytest.mark.parametrize("name", MODULES)
def test_an_example_in_a_docstring(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.failed == 0


@pytest.mark.parametrize("name", CALLED)
def test_a_public_name_shows_a_call(name: str) -> None:
    """A module's examples lack those of context managers, whose code is contextlib's."""
    (shown, *_) = doctest.DocTestFinder(recurse=False).find(getattr(trainer_plugins, name), name)
    done = doctest.DocTestRunner().run(shown)
    assert (done.failed, done.attempted > 0) == (0, True)
    assert any(name in each.source for each in shown.examples)
