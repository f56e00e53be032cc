"""Count the CPU seconds of the tests by folder, file and test, with all their processes.

    scripts/test -p benchmarks.suite

prints them after the tests. `tests/seconds.txt` holds the files' seconds.
"""

import resource
from collections import defaultdict
from collections.abc import Iterator

import psutil
import pytest

_ME = psutil.Process()
_FILES: dict[str, float] = defaultdict(float)
_TESTS: dict[str, float] = defaultdict(float)
_LEAST_SECONDS = 5
_told = 0.0


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all below it, including ended ones."""
    own, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for each in _ME.children(recursive=True):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue  # it has ended meanwhile
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Put the seconds since the last report into this one, which may go to another process."""
    global _told
    outcome = yield
    now = cpu_seconds()
    outcome.get_result().cpu_seconds = max(0.0, now - _told)  # type: ignore[attr-defined]
    _told = now


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds in the reports."""
    seconds = getattr(report, "cpu_seconds", 0.0)
    _FILES[report.nodeid.partition("::")[0]] += seconds
    _TESTS[report.nodeid] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each folder, and of files and tests that take some."""
    folders: dict[str, float] = defaultdict(float)
    for name, seconds in _FILES.items():
        folders["/".join(name.split("/")[:-1][:2])] += seconds
    terminalreporter.section(f"CPU seconds: {sum(_FILES.values()):.0f}")
    for counted in (folders, _FILES, _TESTS):
        for name, seconds in sorted(counted.items(), key=lambda each: -each[1]):
            if seconds >= _LEAST_SECONDS:
                terminalreporter.write_line(f"{seconds:.0f} {name}")
