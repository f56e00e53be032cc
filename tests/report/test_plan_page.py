"""The page of a plan: every figure of the JSON is on it, and it loads nothing."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from tests.models import SMALL_GPT2
from trainer_plugins.cli import app
from trainer_plugins.planner import MemoryPlan

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """What is on it, and whether each element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: set[int] = set()
        self.words = ""
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.paths: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        given = dict(attrs)
        if tag == "data":
            self.figures.add(int(given["value"]))
        if tag == "path":
            self.paths[given["class"]] = given["d"]
        assert tag not in ("script", "link", "img", "iframe", "object")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words += data


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
        "600MiB",
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
    page = Page(text)
    fields = json.loads(plan.to_json())
    del fields["timeline"]
    for tensor in fields["top_tensors"]:
        shape = tensor.pop("shape")
        assert not shape or f"{tensor['dtype']}{shape}" in page.words
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
    page = Page(text)
    (top,) = re.findall(r'<svg[^>]*viewBox="-80 -10 [\d.]+ ([\d.]+)"', text)
    height = float(top) - 40
    assert plan.capacity_bytes is not None
    scale = 1.05 * max(plan.capacity_bytes - plan.context_bytes, plan.reserved_peak_bytes)
    for name, peak in (
        ("allocated", plan.allocated_peak_bytes),
        ("reserved", plan.reserved_peak_bytes),
    ):
        lowest = min(float(y) for y in re.findall(r"V([\d.]+)", page.paths[name]))
        assert height - lowest == pytest.approx(height * peak / scale, abs=0.1)
    names = [moment for moment, *_ in plan.timeline]
    changes = sum(before != after for before, after in itertools.pairwise(names))
    assert text.count("<title>") == changes + 2  # one for each stretch, and the page's own


def test_it_loads_nothing(written):
    _, text = written
    page = Page(text)
    assert "http" not in text.replace("http-equiv", "")
    assert not [
        name for name, _ in page.attributes if name in ("src", "href", "action", "data", "srcset")
    ]
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_text_of_the_user_is_text(written):
    from trainer_plugins.report.plan_html import plan_page

    plan, _ = written
    fields = json.loads(plan.to_json())
    fields |= {"gpu": "<b>card</b>", "capacity_bytes": None, "fits": None, "timeline": []}
    page = Page(
        plan_page(
            MemoryPlan.from_json(
                json.dumps(fields | {"not_reliable": ["<script>alert()</script>"]})
            )
        )
    )
    assert "<script>alert()</script>" in page.words
    assert page.paths == {}


def test_a_place_that_is_none_is_said_before_anything_is_predicted(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere" / "plan.html"):
        done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--html", str(place)])
        assert done.exit_code == 2
        assert "--html" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
