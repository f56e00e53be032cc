"""docs/remedies.md is the table of today, and the answers in full of the FAQ set what the table sets."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.advice.page import PAGE, page
from trainer_plugins import advice
from trainer_plugins.advice.entry import BLANKS

PAGES = [PAGE, PAGE.with_name("faq.md")]
SET = re.compile(r"(?<![\w-])(?:--)?([a-z]\w*_\w+|[A-Z]+_[A-Z_]+)(?:=| |\"?: )([^\s,`)]+)")


def settings(text: str) -> list[tuple[str, str]]:
    """Names and values that a text sets."""
    return [(name, value.strip("\"'})").lower()) for name, value in SET.findall(text)]


def allowed() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for each in advice.ALL.values():
        for text in each.spellings.values():
            for name, value in settings(text):
                found[name].add(value)
    return found


def test_the_page_of_flags_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.advice.page writes it"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_of_remedies_sets_what_the_table_sets(path: Path) -> None:
    table, blanks = allowed(), {each.lower() for each in BLANKS}
    text = path.read_text().partition("## Settings in full")
    spans = re.findall(r"```.*?```|`[^`]+`", text[2] or text[0], re.DOTALL)
    said = {pair for span in spans for pair in settings(span) if pair[0] in table}
    if path != PAGE:
        assert said
    wrong = {
        (name, value)
        for name, value in said
        if not table[name] & blanks and value not in table[name] and not value.startswith("--")
    }
    assert not wrong
