"""The versions that the planner says it was tried with are those of its page, and those that CI installs."""

import re
from pathlib import Path

from trainer_plugins.planner.tried import TRIED, name_untried

ROOT = Path(__file__).parent.parent.parent


def test_the_page_says_the_same():
    page = (ROOT / "docs" / "plan.md").read_text()
    (row,) = re.findall(r"we test\s+with (.*?)\. With other", page, re.DOTALL)
    said = {}
    for part in row.split(";"):
        name, versions = part.split(None, 1)
        said[name] = set(re.findall(r"(\d+\.\d+)\.\d+", versions))
    assert {name: set(TRIED[name]) for name in said} == said
    assert {"torch", "transformers"} <= set(said)


def test_what_ci_installs_has_been_tried():
    for file in ("constraints.txt", "constraints-oldest.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / file).read_text(), re.MULTILINE))
        assert set(TRIED) <= set(pins), file
        assert name_untried(pins) == [], file
