"""Every finding has its entry in docs/findings.md, and every entry its finding."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import trainer_plugins
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.watch.leak import KINDS

ROOT = Path(trainer_plugins.__file__).parent
PAGE = (ROOT.parent / "docs" / "findings.md").read_text()


def paths() -> list[Path]:
    # The causes of `explain` have a page of their own: docs/explain.md. How a run ended is a finding.
    explain = ROOT / "explain"
    found = [path for path in ROOT.rglob("*.py") if explain not in path.parents]
    return [*found, explain / "run" / "ending.py"]


def codes_and_severities(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """The code of each finding that is built, and the severities that its call names.

    A severity that the call takes from a function or a variable may be a WARNING or an ERROR.
    """
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = {each.arg: each.value for each in call.keywords}
        how = ast.unparse(call.func).removeprefix(f"{Finding.__name__}.").upper()
        match given.get("code"):
            case ast.Constant(value=str(code)) if "remedy" in given:
                codes = [code]
            case ast.JoinedStr():
                codes = [f"leak-{kind.replace('_', '-')}" for kind in KINDS]
            case _:
                continue
        said = ast.unparse(given["severity"]) if "severity" in given else how
        named = {each.name for each in Severity if re.search(rf"\b{each.name}\b", said)}
        for code in codes:
            yield code, named or {"WARNING", "ERROR"}


def test_the_page_and_the_code_agree() -> None:
    code = "\n".join(path.read_text() for path in paths())
    said = set(re.findall(r'code="([a-z0-9-]+)"', code)) | {
        f"leak-{kind.replace('_', '-')}" for kind in KINDS
    }

    assert len(said) >= 10
    assert set(re.findall(r"^### `([a-z0-9-]+)`", PAGE, re.MULTILINE)) == said


def test_the_index_has_the_severities_of_each_code() -> None:
    built: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths():
        for code, severities in codes_and_severities(ast.parse(path.read_text())):
            built[code] |= severities
    built["leak-cache"] = {"WARNING"}  # a full cache does not end a run

    index = re.findall(r"^\| \[`([a-z0-9-]+)`\]\(#\1\) \| ([A-Z, ]+) \|$", PAGE, re.MULTILINE)
    assert {code: set(words.split(", ")) for code, words in index} == built
    assert [code for code, _ in index] == re.findall(r"^### `([a-z0-9-]+)`", PAGE, re.MULTILINE)
