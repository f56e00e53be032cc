"""The page of a snapshot: its figures are the explanation's, to the byte."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.explain.recorded import FORWARD, RecordedCard
from tests.explain.test_snapshot import in_pieces, train
from tests.report.drawn import Read, heights, loads_nothing
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.cli import app
from trainer_plugins.explain.snapshot.oom import case_of
from trainer_plugins.report.html.chart import Height
from trainer_plugins.report.html.segments import segment_map
from trainer_plugins.report.html.snapshot_page import history_chart
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
    assert page.titles[0].startswith("Out of memory: 320.0 MiB were reserved and free, but in")
    assert "expandable_segments:True" in page.words.partition("Do this first")[2][:100]
    assert {480 * MIB, 200 * MIB} <= page.figures, "categories"
    assert "project/model.py:20 forward" in page.words

    found = segment_map(case_of(path))
    assert found is not None
    assert (found.free_bytes, found.largest_free_bytes) == (320 * MIB, 16 * MIB)
    assert (found.num_gaps, found.num_segments) == (20, 21)
    assert found.title in page.words


def test_the_picture_is_as_high_as_what_was_in_use_and_reserved(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 20)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    chart = history_chart(case)
    assert chart is not None
    scale = Height(1.16 * case.peak_reserved_bytes, 260)
    highest = {band.colour: min(heights(band.path)) for band in chart.bands}
    assert highest["c-reserved"] == pytest.approx(scale.y(case.peak_reserved_bytes), abs=0.1)
    areas = [top for colour, top in highest.items() if colour != "c-reserved"]
    assert min(areas) == pytest.approx(scale.y(case.in_use_bytes), abs=0.1)
    assert case.in_use_bytes == card.peak_allocated_bytes
    assert [lane.name for lane in chart.lanes] == ["pass"]


def test_segments_are_those_of_the_moment_and_not_of_the_end(tmp_path: Path) -> None:
    """The cache is given back behind the peak, where the snapshot ends."""
    card = RecordedCard(1 * GIB)
    blocks = [card.alloc(40 * MIB, FORWARD) for _ in range(10)]
    card.release(*blocks[1:])
    card.empty_cache()
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    found = segment_map(case)
    assert case.card.reserved_bytes == 40 * MIB
    assert found is not None
    assert (found.num_segments, found.free_bytes) == (10, 0)


def test_a_snapshot_without_events_has_no_curve(tmp_path: Path) -> None:
    card = RecordedCard()
    train(card)
    card.events.clear()
    page = drawn(card.dump(tmp_path / "snapshot.pickle"))
    assert 80 * MIB in page.figures
    assert "The recorded memory" not in page.words


def test_hostile_names_of_files_and_functions_are_text(tmp_path: Path) -> None:
    card = RecordedCard()
    card.alloc(GIB, [("/x/<script>alert(1)</script>.py", 3, '"><svg onload=alert(1)>\x1b[2J')])
    page = drawn(card.dump(tmp_path / "snapshot.pickle"))
    assert "<svg onload=alert(1)>" in page.words
    assert "\x1b" not in page.words


def test_what_is_no_snapshot_is_not_drawn(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("CUDA out of memory. Tried to allocate 20.00 MiB")
    for given in ([str(log)], [str(tmp_path)], [str(log), str(log)]):
        done = CliRunner().invoke(app, ["explain", *given, "--html", str(tmp_path / "page.html")])
        assert done.exit_code == 2
        assert "--html draws one memory snapshot" in " ".join(done.stderr.split())
    assert not (tmp_path / "page.html").exists()
