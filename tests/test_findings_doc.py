"""Every finding has its entry in docs/findings.md, and every entry its finding."""

import re
from pathlib import Path

import trainer_plugins
from trainer_plugins.watch.leak import KINDS

ROOT = Path(trainer_plugins.__file__).parent


def test_the_page_and_the_code_agree() -> None:
    # The causes of `explain` have a page of their own: docs/explain.md. How a run ended is a finding.
    explain = ROOT / "explain"
    paths = [path for path in ROOT.rglob("*.py") if explain not in path.parents]
    paths.append(explain / "run" / "ending.py")
    code = "\n".join(path.read_text() for path in paths)
    said = set(re.findall(r'code="([a-z-]+)"', code)) | {
        f"leak-{kind.replace('_', '-')}" for kind in KINDS
    }
    page = (ROOT.parent / "docs" / "findings.md").read_text()

    assert len(said) >= 10
    assert set(re.findall(r"^### `([a-z-]+)`", page, re.MULTILINE)) == said
