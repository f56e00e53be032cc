"""The page of a plan: every figure of the JSON is on it, and what to do stands before the picture."""

import itertools
import json

import pytest
from click.testing import CliRunner

from tests.models import SMALL_GPT2
from tests.report.drawn import MOMENTS, Read, highest, loads_nothing, plan_of
from trainer_plugins.cli import app
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.html.chart import draw_limit
from trainer_plugins.report.html.plan_page import plan_chart, plan_page
from trainer_plugins.units import GIB


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[MemoryPlan, str]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "config.json").write_text(json.dumps(SMALL_GPT2))
    asked = [
        "--model",
        str(folder),
        "--seq-length",
        "64",
        "--gpu",
        "8GiB",
        "--eval_strategy",
        "epoch",
        "--json",
    ]
    done = CliRunner().invoke(app, ["plan", *asked, "--html", str(folder / "plan.html")])
    assert done.exit_code in (0, 3), done.output
    return MemoryPlan.from_json(done.stdout), (folder / "plan.html").read_text(encoding="utf-8")


def _numbers(value) -> set[int]:
    if isinstance(value, dict):
        return {number for each in value.values() for number in _numbers(each)}
    if isinstance(value, list):
        return {number for each in value for number in _numbers(each)}
    return {value} if isinstance(value, int) and not isinstance(value, bool) else set()


def test_every_figure_is_on_the_page(written):
    plan, text = written
    page = Read(text)
    fields = json.loads(plan.to_json())
    del fields["timeline"], fields["host_process_bytes_per_node"]  # two that are there differ by it
    assert _numbers(fields) <= page.figures
    assert plan.margin_bytes in page.figures
    for words in (
        *plan.assumptions,
        *plan.versions,
        plan.known_error,
        *plan.breakdown,
        *plan.moments,
    ):
        assert words in page.words


def test_the_chart_is_as_high_as_the_peaks(written):
    plan, text = written
    page = Read(text)
    outside = plan.context_bytes
    # Of a block that is not split the events do not have the rest.
    assert highest(page, "within") == pytest.approx(plan.allocated_peak_bytes + outside, rel=1e-4)
    assert highest(page, "cached") == plan.reserved_peak_bytes + outside
    chart = page.data["charts"]["plan"]
    assert chart["top"] == draw_limit(plan.reserved_peak_bytes + outside, plan.capacity_bytes)[0]
    names = [moment for moment, *_ in plan.timeline]
    changes = sum(before != after for before, after in itertools.pairwise(names))
    assert len(chart["words"]) == changes + 1, "each stretch is named"


def test_it_loads_nothing(written):
    _, text = written
    assert loads_nothing(text)
    assert "http" not in text.replace("http-equiv", "")


def test_what_would_fit_comes_first_and_every_moment_is_named():
    plan = plan_of(MOMENTS, gpu_gib=5)
    text = plan_page(plan)
    assert loads_nothing(text)
    flags = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    assert text.index(flags) < text.index("data-chart") < text.index("<table>")
    page = Read(text)
    (chart,) = page.data["charts"].values()
    assert [area["colour"] for area in chart["areas"]] == ["outside", "kept", "within", "cached"]
    assert [text for _, text in chart["words"]].count("4 optimizer") == 3
    assert chart["limit"]["text"] == "the card: 5.00 GiB"


def test_a_limit_is_on_the_picture_where_it_has_room_and_else_in_the_key():
    for gpu_gib, is_on_it in ((5, True), (8, True), (80, False)):
        chart = plan_chart(plan_of(MOMENTS, gpu_gib=gpu_gib))
        assert chart is not None
        assert (chart.limit is not None) == is_on_it
        assert any(key.colour == "limit" for key in chart.others) != is_on_it


def test_a_plan_that_was_searched_for_nothing_says_how_to_search():
    fields = json.loads(plan_of(MOMENTS, gpu_gib=5).to_json()) | {"proposals": []}
    assert "--search" in Read(plan_page(MemoryPlan.from_json(json.dumps(fields)))).words
    assert "--search" not in Read(plan_page(plan_of(MOMENTS))).words


def test_a_plan_of_one_moment_without_a_card_is_drawn():
    fields = json.loads(plan_of([("forward", 2)]).to_json())
    fields |= {"capacity_bytes": None, "fits": None, "gpu": None, "context_bytes": 0}
    page = Read(plan_page(MemoryPlan.from_json(json.dumps(fields))))
    assert page.titles[0] == "Memory plan: Needs 2.00 GiB, in the forward pass"
    assert 2 * GIB in page.figures


def test_text_of_the_user_is_text():
    fields = json.loads(plan_of(MOMENTS).to_json())
    fields |= {"gpu": "<b>card</b>", "timeline": [], "not_reliable": ["<script>alert()</script>"]}
    page = Read(plan_page(MemoryPlan.from_json(json.dumps(fields))))
    assert "<b>card</b>" in page.words
    assert "<script>alert()</script>" in page.words
    assert page.data["charts"] == {}


def test_a_place_that_is_none_is_said_before_anything_is_predicted(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere" / "plan.html"):
        done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--html", str(place)])
        assert done.exit_code == 2
        assert "--html" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
