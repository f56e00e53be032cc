"""The pages of a run and of a plan as a person uses them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.chromium import NEEDS_CHROMIUM, Tab, chromium
from tests.report.drawn import MOMENTS, plan_of
from tests.report.test_browser import page_of_run
from tests.report.test_run_page import long_run
from tests.test_report import write
from trainer_plugins import draw
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.timeline import Failure, Remark, Sample

pytestmark = NEEDS_CHROMIUM
MEMORY, PACE = 'figure[data-chart="memory-0"]', 'figure[data-chart="pace-0"]'


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as one:
        yield one
        assert one.console == []


@pytest.fixture
def run(tab: Tab, tmp_path: Path) -> Tab:
    tab.show(tmp_path, page_of_run(tmp_path))
    return tab


def test_the_figures_of_a_moment_are_shown_where_one_points(run: Tab) -> None:
    key = run.text(f"{MEMORY} .key")
    assert "more within a step 40.00 GiB" in key, "the peak's"
    assert "eval (60)" in key
    _, _, width, _ = run.box(f"{MEMORY} canvas")
    run.point(f"{MEMORY} canvas", (58 + 0.01 * (width - 58)) / width, 0.3)
    assert "step" in run.text(f"{MEMORY} .said")
    now = run.text(f"{MEMORY} .key")
    assert "tensors between steps 20.00 GiB" in now
    assert "more within a step 40.00 GiB" not in now


def test_all_charts_of_a_run_are_zoomed_together(run: Tab) -> None:
    run.point(f"{PACE} canvas", 0.12, 0.3)
    before = run.text(f"{PACE} .said")
    run.drag(f"{MEMORY} canvas", 0.4, 0.6)
    run.point(f"{PACE} canvas", 0.12, 0.3)
    assert run.text(f"{PACE} .said") != before
    run.press("Escape")
    run.point(f"{PACE} canvas", 0.12, 0.3)
    assert run.text(f"{PACE} .said") == before


def test_a_mark_leads_to_its_finding(run: Tab) -> None:
    for number in (1, 2, 3):
        run.click(f"{MEMORY} .mark[href='#finding-{number}']")
        assert run.run("location.hash") == f"#finding-{number}"
        assert run.run("document.querySelector(':target') !== null")
    assert "✕" in run.text(f"{MEMORY} .marks")
    hidden = f"document.querySelector(`{MEMORY} .mark[href='#finding-2']`).hidden"
    assert not run.run(hidden)
    run.drag(f"{MEMORY} canvas", 0.8, 0.95)
    assert run.run(hidden), "it lies outside of what is shown"


WATCHED = """
window.written = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.written.push([text, x, y]);
  write.call(this, text, x, y);
};
addEventListener("DOMContentLoaded", () => {
  const canvases = [...document.querySelectorAll("canvas:not(.over)")];
  window.at_once = canvases.filter(each => each.style.height).length - canvases.length;
});
"""


def test_a_chart_counts_steps_shows_its_maximum_and_is_drawn_at_once(
    tab: Tab, tmp_path: Path
) -> None:
    entries = long_run(60, peak_at=7)
    slow = [  # step 40 took a minute
        replace(each, time_seconds=each.time_seconds + (60 if each.step >= 40 else 0))
        for each in entries
    ]
    far = Finding(code="far", severity=Severity.ERROR, summary="s", evidence="e", remedy="a" * 300)
    last = slow[-1].time_seconds
    write(tmp_path, 0, [*slow, Remark(step=59, finding=far, time_seconds=last),
                        Failure(step=59, words="OOM", record="", time_seconds=last)])  # fmt: skip
    watched = tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
    tab.show(tmp_path, draw(tmp_path))
    tab.ask("Page.removeScriptToEvaluateOnNewDocument", **watched)

    assert tab.run("at_once") == 0, "no picture waits for a frame"
    written = [(text, y) for text, _, y in tab.run("written")]
    steps = {int(text) for text, _ in written if text.isdigit()}
    assert {10, 20, 30, 50} <= steps, "step 40 ends where 39 does, but for its minute"
    assert max(steps) <= 59
    assert ("↑ 61 s" in dict(written)) or ("↑ 62 s" in dict(written))
    assert min(y for text, y in written if text.startswith("↑")) >= 0, "it is in the picture"
    marks = tab.run(f"[...document.querySelectorAll('{MEMORY} .marks .mark')].map(each => {{"
                    " const box = each.getBoundingClientRect(); return [box.top, box.right]; })")  # fmt: skip
    assert len(marks) == 2
    top = tab.run(f"document.querySelector('{MEMORY} .marks').getBoundingClientRect().top")
    assert min(above for above, _ in marks) == top, "no row above them is empty"
    assert len({above for above, _ in marks}) == 2, "they would touch"
    assert max(right for _, right in marks) <= tab.run(
        "document.querySelector('main').getBoundingClientRect().right"
    )


def test_the_rank_that_differs_is_named(tab: Tab, tmp_path: Path) -> None:
    for rank in range(4):
        entries = long_run(60, peak_at=7 if rank == 2 else -1, rank=rank)
        write(tmp_path, rank, entries)
    tab.show(tmp_path, draw(tmp_path))
    assert "Rank 2 differs: 60.00 GiB at its peak, where most have 3" in tab.text("main")
    assert tab.run("document.querySelectorAll('.many canvas:not(.over)').length") == 4
    assert "rank 2: 60.00 GiB" in tab.text(".many")


def test_the_planned_peak_is_beside_what_was_measured(tab: Tab, tmp_path: Path) -> None:
    write(tmp_path, 0, [each for each in long_run(60, peak_at=7) if isinstance(each, Sample)])
    tab.show(tmp_path, draw(tmp_path, plan_of(MOMENTS, gpu_gib=80)))
    tab.point(f"{MEMORY} canvas", 0.3, 0.3)
    assert "planned peak 6.50 GiB" in tab.text(f"{MEMORY} .key")


def test_a_plan_names_the_moment_under_the_pointer(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path, draw(plan_of(MOMENTS, gpu_gib=5)))
    chart = "figure[data-chart='plan']"
    tab.point(f"{chart} canvas", 0.98, 0.3)
    assert tab.text(f"{chart} .said") == "save"
    tab.point(f"{chart} canvas", 0.07, 0.3)
    assert tab.text(f"{chart} .said") == "load"
