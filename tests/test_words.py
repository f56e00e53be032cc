"""Pages, docstrings and comments speak as a person does: figures with goals, and no sentence that readers found odd."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
CODE = [
    *sorted((ROOT / "trainer_plugins").rglob("*.py")),
    *sorted((ROOT / "hydra_plugins").rglob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]
FILES = [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "scripts").glob("[a-z]*"))]

# In 1000 words; the docs of httpx and structlog have 16.4 and 27.8 "you", and 0.7 and 1.3 "what".
LEAST_YOU = 10
MOST_WHAT_IN_PAGES = 2
MOST_WHAT_IN_CODE = 2  # docstrings and comments: 0.6 in httpx, 0.1 in structlog
WIDEST = 88  # columns of a block of code: wider ones scroll on the site

YOU = re.compile(r"\b(?:you|yours?)\b", re.IGNORECASE)
# "the memory of a step" is a noun, "what a step needs" a clause; "what to do" is fine.
WHAT = re.compile(r"\b(?:what|whatever|that which)\b(?! (?:to|if|is new|it is)\b)", re.IGNORECASE)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)

ODD = """
A plan that does not fit has what would instead
no 1.96 GiB in one piece
if there is enough
which a healthy run often has
Return what the request lacked
Return what is trained
all of them ask
the ranks that are not there
default: the fullest visible
Words that people take for
The error goes on unchanged
it is ended, and named
gain or no gain
on no index yet
Say whose the card's memory is
Sure 2 assumptions
the largest tensors of nobody
it is survived, and said
if not given, as the config says
The plan says, by category and by moment
says what it saves; if weights are most of the memory, little
Not the batch but the loss's
by a rule, or what it is instead
Then look which case is yours
A gradient on its way to the other ranks
It refuses arguments that only a config needs
What runs is not what was asked for
""".strip().splitlines()
"""Each was found by somebody who read it for the first time, and had to read it twice."""


def prose(page: Path) -> str:
    """A page without blocks of code, code in lines, and targets of links."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", FENCE.sub(" ", page.read_text()))


def prose_of_code(path: Path) -> Iterator[str]:
    """Docstrings and comments."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def in_thousand(pattern: re.Pattern[str], text: str) -> float:
    assert len(text.split()) > 10_000
    return 1000 * len(pattern.findall(text)) / len(text.split())


def words_only(text: str) -> str:
    """One line without quotes, so that a sentence is found across the strings of a message."""
    return " ".join(re.sub(r"[\"'`#\\]", " ", text).split()).lower()


def test_pages_and_docstrings_speak_to_the_reader() -> None:
    pages = "\n".join(map(prose, PAGES))
    code = "\n".join(line for path in CODE for line in prose_of_code(path))
    assert in_thousand(YOU, pages) >= LEAST_YOU
    assert in_thousand(WHAT, pages) <= MOST_WHAT_IN_PAGES
    assert in_thousand(WHAT, code) <= MOST_WHAT_IN_CODE


def test_no_block_of_code_scrolls() -> None:
    wide, num_blocks = [], 0
    for page in (*PAGES, *OTHER_PAGES):
        for block in FENCE.findall(page.read_text()):
            num_blocks += 1
            lines = (line for line in block.splitlines() if len(line) > WIDEST)
            wide += [f"{page.relative_to(ROOT)}: {line}" for line in lines]
    assert num_blocks > 150
    assert wide == []


def test_no_odd_sentence_is_left() -> None:
    found = []
    for path in (*PAGES, *OTHER_PAGES, *CODE, *FILES):
        text = words_only(path.read_text())
        found += [f"{path.relative_to(ROOT)}: {odd}" for odd in ODD if words_only(odd) in text]
    assert found == []
