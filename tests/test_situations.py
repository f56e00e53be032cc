"""Users' situations: the command that answers each prints the cause and the change."""

import re
import shlex

import pytest
from click.testing import CliRunner

from tests.situations import CONFIGS, CORPUS, ROOT, Situation, situations
from trainer_plugins.cli import app

ALL = situations()


@pytest.mark.all(unless=lambda case: case.is_quick)
@pytest.mark.parametrize(
    "case", [each for each in ALL if each.command], ids=lambda case: case.issue
)
def test_the_command_prints_what_decides(case: Situation, tmp_path, monkeypatch) -> None:
    log = (CORPUS / f"{case.corpus}.txt").read_text() if case.corpus else case.log
    for name, text in {**case.files, "train.log": log}.items():
        (tmp_path / name).write_text(text.replace("CONFIGS", str(CONFIGS)))
    monkeypatch.chdir(tmp_path)
    command = case.command.replace("CONFIGS", str(CONFIGS)).replace("MODEL", "model.json")
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "400"})
    said = " ".join(result.output.split())
    assert [words for words in case.prints if words not in said] == [], said
    assert result.exit_code in (0, 1, 3), said


def test_what_a_test_shows_is_a_test() -> None:
    for case in ALL:
        name, _, function = case.test.partition("::")
        assert not name or f"def {function}" in (ROOT / name).read_text()


def test_every_situation_is_there_once() -> None:
    assert len({each.issue for each in ALL}) == len(ALL) == 83
    for case in ALL:
        assert bool(case.prints) is bool(case.command or case.test)
        assert bool(case.why) is (case.verdict != "solved")
        assert re.fullmatch(r"[\w.-]+#\d+", case.issue)
