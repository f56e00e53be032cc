"""The pages in Chromium, with the network cut: drawn, readable on a telephone too, light and dark."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.browser import look, luminance
from tests.report.chromium import NEEDS_CHROMIUM
from tests.report.drawn import MOMENTS, draw_oom, plan_of
from tests.report.test_run_page import long_run
from tests.test_report import write
from trainer_plugins import draw
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.timeline import Entry, Failure, Remark

pytestmark = NEEDS_CHROMIUM


def page_of_run(folder: Path) -> str:
    """Two ranks, with findings at both ends of the run and in its middle, and a failure."""
    for rank in (0, 1):
        entries: list[Entry] = long_run(600, peak_at=420, rank=rank)
        pressure = Finding(
            code="memory-pressure", severity=Severity.WARNING, summary="cuda:0 was 91% full",
            evidence="peak allocated 60.00 GiB", remedy="Halve per_device_train_batch_size",
        )  # fmt: skip
        for number, code in ((3, pressure.code), (900, pressure.code), (400, "leak-tensors"), (700, "micro-batches-divided")):  # fmt: skip
            entries.append(
                Remark(
                    step=number,
                    finding=replace(pressure, code=code),
                    time_seconds=1e9 + number,
                )
            )
        entries.append(
            Failure(step=600, words="OutOfMemoryError: CUDA out of memory", time_seconds=1e9 + 900)
        )
        entries.sort(key=lambda entry: entry.time_seconds)
        write(folder, rank, [replace(entry, step=min(number, 600)) for number, entry in enumerate(entries)])  # fmt: skip
    return draw(folder)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "run": page_of_run(folder),
        "snapshot": draw_oom(folder)[1],
        "plan that fits": draw(plan_of(MOMENTS)),
        "plan that does not": draw(plan_of(MOMENTS, gpu_gib=5)),
    }


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.all(but=1)
def test_pages_are_readable(pages: dict[str, str], tmp_path: Path, is_dark: bool) -> None:
    found, console = look(tmp_path, pages, is_dark=is_dark)
    assert console == []
    for (name, width), seen in found.items():
        about = f"{name} at {width}: {seen}"
        assert seen["width"] == width, about
        assert seen["is_dark"] == is_dark, about
        low, high = sorted((luminance(seen["ink"]), luminance(seen["paper"])))
        assert (high + 0.05) / (low + 0.05) >= 7, about
        assert seen["wider_by"] <= 0, about
        assert seen["plots"], about
        assert all(num_colours >= 3 for num_colours in seen["plots"]), about
        assert (seen["unnamed"], seen["unreachable"]) == (0, 0), about
        assert seen["broken"] == [], about


def test_what_is_wrong_is_measured(pages: dict[str, str], tmp_path: Path) -> None:
    """A page that is spoilt on purpose fails in each way."""
    page = pages["snapshot"]
    spoilt = page.replace("</style>", "p { word-break: break-all; } h1 { width: 2000px; }"
                          " canvas { visibility: hidden; } </style>").replace(
        "</main>", '<script>alert()</script><img src="https://example.com/x.png"></main>').replace(
        "var(--ink)", "var(--paper)")  # fmt: skip
    found, console = look(tmp_path, {"spoilt": spoilt}, is_dark=False, widths=(390,))
    (seen,) = found.values()
    assert seen["wider_by"] > 0
    assert seen["broken"] != []
    assert seen["unreachable"] > 0
    assert len(console) >= 2, "neither the script nor the picture is taken"
