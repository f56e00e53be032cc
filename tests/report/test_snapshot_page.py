"""The page of a snapshot: its figures are the explanation's, to the byte."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.explain.recorded import FORWARD, RecordedCard
from tests.explain.test_snapshot import in_pieces, train
from tests.report.drawn import Read, loads_nothing
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.cli import app
from trainer_plugins.report.html.snapshot_page import snapshot_data
from trainer_plugins.snapshot.oom import SnapshotCase, case_of, sum_reserved
from trainer_plugins.snapshot.trace import ranges_after
from trainer_plugins.units import GIB, MIB


def drawn(path: Path) -> Read:
    """What the command writes, which says in the terminal what it always says."""
    page = path.with_suffix(".html")
    usual = CliRunner().invoke(app, ["explain", str(path)])
    done = CliRunner().invoke(app, ["explain", str(path), "--html", str(page)])
    assert (done.exit_code, done.stdout) == (usual.exit_code, usual.stdout)
    text = page.read_text(encoding="utf-8")
    assert loads_nothing(text)
    return Read(text)


def test_fragmentation_is_seen_and_the_setting_that_helps_comes_first(tmp_path: Path) -> None:
    card = RecordedCard(1 * GIB)
    with pytest.raises(AllocatorFull):
        in_pieces(card)
    path = card.dump(tmp_path / "snapshot.pickle")
    page = drawn(path)
    assert page.titles[0].startswith("Out of memory: 320.0 MiB were reserved but unused, in")
    assert "expandable_segments:True" in page.words.partition("Try this first")[2][:100]
    assert {480 * MIB, 200 * MIB} <= page.figures, "categories"
    assert "project/model.py:20 forward" in page.words


def categories_of(data: dict, moment: int) -> dict[str, int]:
    """What the page's script adds up for a moment."""
    found: dict[str, int] = {}
    birth = -1
    for at, step in enumerate(data["birth"]):
        birth += step
        lasted = data["lasted"][at]
        if birth <= moment and (lasted < 0 or birth + lasted > moment):
            name = data["categories"][data["category"][at]]
            found[name] = found.get(name, 0) + data["bytes"][at]
    return found


def ranges_of(data: dict, moment: int) -> int:
    taken = sum(change for at, _, change in data["segments"] if at <= moment)
    return sum(high - low for low, high in data["ranges"]) + taken


def same(case: SnapshotCase) -> None:
    """The data has what the explanation has, at each tenth event, to the byte."""
    data = snapshot_data(case, "")
    reserved = sum_reserved(case.card)
    for moment in {-1, case.held.position, *range(0, len(case.card.events), 10)}:
        assert categories_of(data, moment) == dict(case.sorter.find_held(moment).categories)
        assert ranges_of(data, moment) == reserved[moment + 1]


def test_the_data_is_what_was_in_use_and_reserved_at_each_moment(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 20)
    card.note("free_requested", next(iter(card.live)), 0)  # another stream still reads it
    card.release(*[card.alloc(MIB, FORWARD) for _ in range(20)])
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    same(case)
    assert case.in_use_bytes == card.peak_allocated_bytes
    assert "waiting" in case.at_end.categories


def test_expandable_segments_are_ranges_that_grow(tmp_path: Path) -> None:
    card = RecordedCard(1 * GIB, expandable_segments=True)
    train(card, 3)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    same(case)
    assert snapshot_data(case, "")["joins"]
    assert len(ranges_after(case.card, case.held.position)) <= 2


def test_what_was_reserved_is_that_of_the_moment_and_not_of_the_end(tmp_path: Path) -> None:
    """The cache is given back behind the peak, where the snapshot ends."""
    card = RecordedCard(1 * GIB)
    blocks = [card.alloc(40 * MIB, FORWARD) for _ in range(10)]
    card.release(*blocks[1:])
    card.empty_cache()
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.card.reserved_bytes == 40 * MIB
    same(case)


def test_a_snapshot_without_events_has_no_curve(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card)
    card.events.clear()
    page = drawn(card.dump(tmp_path / "snapshot.pickle"))
    assert 80 * MIB in page.figures
    assert page.data["snapshots"][0]["events"] == 0


def test_hostile_names_of_files_and_functions_are_text(tmp_path: Path) -> None:
    card = RecordedCard()
    card.alloc(GIB, [("/x/<script>alert(1)</script>.py", 3, '"><svg onload=alert(1)>\x1b[2J')])
    page = drawn(card.dump(tmp_path / "snapshot.pickle"))
    assert "<svg onload=alert(1)>" in page.words
    assert {tag for tag, _ in page.tags}.isdisjoint({"svg"})
    assert "\x1b" not in page.words
    (shown,) = page.data["snapshots"]
    assert '"><svg onload=alert(1)>\\x1b[2J' in shown["names"]
    assert "<" not in page.scripts[0]


def test_two_snapshots_are_one_page_with_what_grew(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 2)
    before = card.dump(tmp_path / "before.pickle")
    train(card, 2)
    after, html = card.dump(tmp_path / "after.pickle"), tmp_path / "page.html"
    usual = CliRunner().invoke(app, ["explain", str(before), str(after)])
    done = CliRunner().invoke(app, ["explain", str(before), str(after), "--html", str(html)])
    assert (done.exit_code, done.stdout) == (usual.exit_code, usual.stdout)
    text = html.read_text(encoding="utf-8")
    assert loads_nothing(text)
    page = Read(text)
    assert len(page.data["snapshots"]) == 2
    assert page.titles[0] == "The second snapshot has 240.0 MiB more allocated than the first"
    for name in ("before.pickle", "after.pickle"):
        assert f"{name}: " in page.words


def test_what_is_no_snapshot_is_not_drawn(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("CUDA out of memory. Tried to allocate 20.00 MiB")
    for given in ([str(log)], [str(tmp_path)], [str(log), str(log)], [str(log)] * 3):
        done = CliRunner().invoke(app, ["explain", *given, "--html", str(tmp_path / "page.html")])
        assert done.exit_code == 2
        assert "--html draws one memory snapshot" in " ".join(done.stderr.split())
    assert not (tmp_path / "page.html").exists()
