"""What `--json` prints: as its schema says, with the numbers of the run, and as older readers know it."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from tests.explain.recorded import FORWARD, MAIN, RecordedCard
from tests.explain.stated import check_figures
from tests.explain.test_snapshot import explained, in_pieces, train
from tests.schemas import ANSWERS, FOLDER, as_text, read_answer, strict
from tests.test_report import run_of, write
from trainer_plugins.cli import app
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Remark
from trainer_plugins.units import GIB, MIB, size
from trainer_plugins.watch.pressure import Budget, pressure

OLD = Path(__file__).parent / "json"
MESSAGE = (
    '[rank1]:   File "/me/train.py", line 7, in <module>\n[rank1]:     trainer.train()\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a"
    " total capacity of 24.00 GiB of which 1.50 GiB is free. Process 41 has 9.00 GiB memory in use."
    " Including non-PyTorch memory, this process has 13.50 GiB memory in use. Of the allocated"
    " memory 12.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but"
    " unallocated.\n"
)


def answered(name: str, *words: object, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [name, *map(str, words), "--json"])
    assert done.exit_code == code, done.output
    return read_answer(done.stdout, name)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_schemas_are_those_of_the_values(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text() == as_text(name), "python -m tests.schemas"


@pytest.mark.parametrize("file", sorted(OLD.glob("*/*.json")), ids=lambda file: file.stem)
def test_what_older_readers_know_is_still_there(file: Path) -> None:
    schema = strict(json.loads((FOLDER / file.name).read_text()))
    jsonschema.validate(json.loads(file.read_text()), schema)


def filters() -> list[tuple[str, str]]:
    """The lines of docs/json.md that pipe an answer into jq."""
    page = Path(__file__).parents[1] / "docs" / "json.md"
    text = page.read_text().replace("\\\n    ", "")
    found = re.findall(r"^trainer-plugins (\w+) .*--json.* \| (jq .*)$", text, re.M)
    assert len(found) > 8
    return found


@pytest.mark.parametrize(("name", "line"), filters())
def test_the_page_reads_answers_with_jq(name: str, line: str) -> None:
    if shutil.which("jq") is None:
        pytest.skip("no jq")
    words = shlex.split(line)
    answer = (OLD / "version_1" / f"{name}.json").read_text()
    done = subprocess.run(words, input=answer, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "null" not in done.stdout


def test_a_text(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MESSAGE)
    found = answered("explain", log)
    numbers, (first, *_) = found["numbers"], found["causes"]
    assert (numbers["rank"], numbers["card"]) == (1, 1)
    assert numbers["requested_bytes"] == 2 * GIB
    assert numbers["others_bytes"] == 9 * GIB
    assert numbers["reserved_bytes"] == 13 * GIB
    assert numbers["frames"][0]["function"] == "<module>"
    assert [(each["pid"], each["used_bytes"]) for each in numbers["processes"]] == [(41, 9 * GIB)]
    assert first["code"] == "foreign"
    assert first["data"] == {
        "requested_bytes": 2 * GIB,
        "free_bytes": GIB * 3 // 2,
        "allocated_bytes": 12 * GIB,
        "capacity_bytes": 24 * GIB,
        "others_bytes": 9 * GIB,
        "own_bytes": GIB * 27 // 2,
    }
    assert first["evidence"][0].startswith("Of the 24.00 GiB card, you hold 13.50 GiB")
    assert first["figures"][:2] == [
        {"name": "capacity_bytes", "value": 24 * GIB, "shown_by": "text", "sentence": 0},
        {"name": "own_bytes", "value": GIB * 27 // 2, "shown_by": "text", "sentence": 0},
    ]


def test_a_snapshot(tmp_path: Path) -> None:
    explained(RecordedCard(1 * GIB), in_pieces, tmp_path / "died.pickle")
    found = answered("explain", tmp_path / "died.pickle")
    check_figures(found["causes"][0])
    assert {each["sentence"] for each in found["causes"][0]["figures"]} == {0, 1}
    numbers, first, remedy = found["numbers"], found["causes"][0], found["remedies"][0]
    assert (numbers["card"], numbers["stream"], numbers["pool"]) == (0, 0, "large")
    assert numbers["requested_bytes"] == numbers["rounded_bytes"] == 38 * MIB
    assert numbers["part"] == "forward"
    assert sum(numbers["categories"].values()) == numbers["allocated_bytes"]
    assert numbers["largest_gap_bytes"] == 16 * MIB
    assert numbers["unused_bytes"] == numbers["reserved_bytes"] - numbers["allocated_bytes"]
    (most, *_) = numbers["allocations"]
    assert (most["num_bytes"], most["count"]) == (20 * 24 * MIB, 20)
    stack = [(each["file"], each["line"], each["function"]) for each in most["frames"]]
    assert stack == [*FORWARD]
    assert numbers["frames"][-1]["function"] == MAIN[2]
    assert (first["code"], first["grade"]) == ("fragmentation", "certain")
    assert first["data"]["setting_that_helps"] == "expandable_segments:True"
    assert first["data"]["largest_gap_bytes"] < first["data"]["requested_bytes"]
    assert remedy["variables"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert (remedy["grade"], remedy["fits"]) == ("replayed", True)
    assert remedy["spare_bytes"] > 0


def test_the_event_of_the_peak_is_named_as_the_file_counts_them(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card)
    found = answered("explain", card.dump(tmp_path / "run.pickle"))
    numbers = found["numbers"]
    assert found["causes"] == []
    assert (
        numbers["peak_allocated_bytes"] == numbers["allocated_bytes"] == card.peak_allocated_bytes
    )
    at = numbers["event_index"]
    assert at == numbers["peak_event_index"]
    events = [each["action"] for each in card.events[: at + 1]]
    sizes = {"alloc": 1, "free_completed": -1}
    held = sum(sizes.get(each["action"], 0) * each["size"] for each in card.events[: at + 1])
    assert events[-1] == "alloc"
    assert held == card.peak_allocated_bytes


def test_two_snapshots(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 2, keeps=True)
    before = card.dump(tmp_path / "before.pickle")
    for _ in range(30):
        card.alloc(10 * MIB, FORWARD)
    found = answered("explain", before, card.dump(tmp_path / "after.pickle"))
    assert found["causes"][0]["data"]["grown_bytes"] == 300 * MIB
    assert found["before"]["event_index"] < found["numbers"]["event_index"]


def test_a_run(tmp_path: Path) -> None:
    full = MemoryReading(
        device="cuda:0",
        total_bytes=80 * GIB,
        free_bytes=GIB,
        reserved_bytes=77 * GIB,
        allocated_bytes=40 * GIB,
        peak_allocated_bytes=76 * GIB,
    )
    finding = pressure(full, Budget(), "train")
    assert finding is not None
    for rank in (0, 1):
        remark = Remark(step=2, time_seconds=102, finding=finding)
        write(tmp_path, rank, [*run_of(range(3), seconds=100), remark])
    (run,) = answered("report", tmp_path)["runs"]
    assert run["ranks"] == [0, 1]
    told = run["findings"][0]["finding"]
    assert told["data"]["peak_allocated_bytes"] == 76 * GIB
    assert all(size(value) in told["evidence"] for value in told["data"].values())
    assert len(answered("top", tmp_path, "--once")["ranks"]) == 2


def test_a_check() -> None:
    assert answered("check", "--auto_find_batch_size", "True", code=1)["worst"] == "WARNING"


def test_an_environment() -> None:
    assert answered("env")["exports"]
