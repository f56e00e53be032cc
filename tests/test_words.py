"""What a person reads is plain English: the turns below stand nowhere in messages, help or pages.

`python -m tests.test_words [PATH ...]` lists where they stand, each with what to write in its place.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PLAIN = {
    r"nobody('s)?|no one's": "name what is missing: 'unknown', 'not used', 'no process'",
    r"somebody('s)?": "someone, or name them: 'another process', 'the user'",
    r"whoever|whomever": "anyone who; code that; a program that",
    r"whichever": "any; the one that",
    r"anew": "again; from scratch",
    r"so (many|much)(?! (as|that|more|less|of a|faster|slower))": "this many; name the number",
    r"by which|of whom|to whom|whose doing": "a verb: 'uses', 'shows'; a second sentence",
    r"(is|are|was|and|be) said|(is|are|was) told(?! (to|not)\b)|told apart": (
        "reports, logs, warns, prints; distinguishes"
    ),
    r"hear(s|d)? of": "get a warning; know about",
    r"(held|hold|holds) against": "compared with",
    r"of (one|its user|the user)'s own": "your own; custom",
    r"all the same": "still; anyway",
    r"but for (?!example)": "except",
    r"in place of": "instead of",
    r"for good(?! reason)": "permanently",
    r"once more": "again",
    r"foretell(s|ing)?|foretold": "predict",
    r"likewise|hence|thus|thereby|wherewith|thereof|whereupon": "so; also; nothing",
    r"if (it is )?not given": "default: ...",
    r"let(s|ting)? go of": "releases; frees",
    r"owes?|owed": "needs; has to",
    r"what is so": "what is wrong; what happened",
    r"makes? good": "repairs",
    r"as (good|well) as (nothing|none)": "almost nothing",
    r"at the most": "at most",
    r"(want|wants|wish|wishes) to (hear|be told)": "want a warning",
    r"lag(s)? behind the program": "run later than the program",
    r"to be looked (at|up)": "see; read",
    r"nothing has to be done": "no action needed",
}
"""Each turn, a pattern that a word's boundary ends, and what a native writer would say."""

TURNS = re.compile("|".join(rf"\b(?:{turn})\b" for turn in PLAIN), re.IGNORECASE)
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", "docs/**/*.md")
CODE = ("trainer_plugins/**/*.py", "hydra_plugins/**/*.py", "examples/*.py")
FILES = ("configs/**/*.yaml", "scripts/*", ".ci/run")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """What a person reads of a file: all of a page, strings and comments of code."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    read = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in read:
            # A phrase is found across the end of a line too.
            yield token.start[0], " ".join(token.string.split())


def turns_in(path: Path) -> list[str]:
    found = []
    for number, line in lines_of(path):
        for turn in TURNS.finditer(line):
            plain = next(say for words, say in PLAIN.items() if re.fullmatch(words, turn[0], re.I))
            found.append(f"{path.relative_to(ROOT)}:{number}: {turn[0]!r}: {plain}")
    return found


def paths(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())


@pytest.mark.parametrize("patterns", [PAGES, CODE, FILES], ids=["pages", "code", "files"])
def test_no_turn_of_the_dialect_is_left(patterns: tuple[str, ...]) -> None:
    files = paths(*patterns)
    assert len(files) >= 15
    assert [turn for path in files for turn in turns_in(path)] == []


@pytest.mark.parametrize(
    ("said", "is_dialect"),
    [
        ("the largest tensors of nobody", True),
        ("Train a classifier of so many labels; if not given, as the config says.", True),
        ("it is survived, and said", True),
        ("they are told to stop", False),
        ("Call prepare_model_for_kbit_training (default: yes)", False),
        ("so much that it does not fit", False),
    ],
)
def test_the_turns_are_found_and_plain_words_are_not(said: str, is_dialect: bool) -> None:
    assert bool(TURNS.search(said)) == is_dialect


if __name__ == "__main__":
    chosen = [Path(each).resolve() for each in sys.argv[1:]]
    for file in paths(*PAGES, *CODE, *FILES):
        if not chosen or any(file.is_relative_to(each) for each in chosen):
            for found in turns_in(file):
                print(found)
