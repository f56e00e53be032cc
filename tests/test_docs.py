"""The pages: each link leads somewhere, and each command exists."""

import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

import trainer_plugins
from tests import commands
from trainer_plugins.cli.spelled import _SAME

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]
LONG = {"findings.md", "faq.md", "commands.md"}
"""They have an entry for each code, question or flag, which a reader looks up; a program writes the last."""


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What a link may name: the anchors that GitHub and the site make alike of a heading."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", title.lower()).strip()
        if words.replace(" ", "-") == re.sub(r"[-\s]+", "-", words):
            found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_resolves(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_a_heading_by_accident(page: Path) -> None:
    """The site makes a heading of a line that begins with an issue's number: `#1797).`"""
    assert re.findall(r"^#+[^# ].*$", prose(page), re.MULTILINE) == []


def test_a_page_is_short() -> None:
    lengths = {page.name: len(page.read_text().splitlines()) for page in DOCS.rglob("*.md")}
    assert {name for name, length in lengths.items() if length > 150} <= LONG
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_every_command_and_flag_of_the_pages_exists() -> None:
    known: dict[str, set[str]] = {"configs": {"--help"}}
    for name, command in commands.commands():
        known[name] = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        known[name] |= {"--help"}
    kinds = (TrainingArguments, SFTConfig, DPOConfig, GRPOConfig)
    training = {field.name for kind in kinds for field in fields(kind)} | {"gradient_checkpointing"}
    training |= {"use_peft", *_SAME, *(name[2:].replace("-", "_") for name in known["plan"])}
    known["plan"] |= {f"--{name}" for name in training}
    known["plan"] |= {f"--{name.replace('_', '-')}" for name in training}
    known["check"] |= known["plan"]
    wrong = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # it tells of the past
        text = page.read_text().replace("\\\n", " ")
        for said in re.findall(r"trainer-plugins ([a-z][^\n`#|)\]]*)", text):
            words = re.sub(r"'[^']*'", "QUOTED", said).split()
            name = next((name for name in (" ".join(words[:2]), words[0]) if name in known), "?")
            if name == "plan" and "--" in words:  # what follows is the user's command
                words = words[: words.index("--")]
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            # What follows `exec` belongs to the command under it, or is tested by test_exec.py.
            if name == "?" or (name != "exec" and flags - known[name] - {"--"}):
                wrong.append(f"{page.name}: trainer-plugins {said}")
    assert wrong == []


def test_the_page_of_commands_is_their_help() -> None:
    assert commands.PAGE.read_text() == commands.page(), "python -m tests.commands writes it"


def test_the_reference_has_the_first_sentence_of_each_public_name() -> None:
    page = " ".join((DOCS / "reference.md").read_text().split())
    for name in trainer_plugins.__all__:
        (first, *_) = (getattr(trainer_plugins, name).__doc__ or "").strip().splitlines()
        assert f" - `{name}`: {first} " in page
