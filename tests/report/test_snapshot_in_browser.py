"""The page of a snapshot as a person uses it: what it shows where one points, clicks and types."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explain.recorded import RecordedCard
from tests.explain.test_snapshot import in_pieces, train
from tests.report.chromium import NEEDS_CHROMIUM, Tab, chromium
from tests.report.drawn import draw_card, draw_oom
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.explain.snapshot import compare_snapshots
from trainer_plugins.report.html.snapshot_page import snapshot_page
from trainer_plugins.snapshot.held import WORDS
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.units import GIB, MIB, size

pytestmark = NEEDS_CHROMIUM
CHART = "section[data-snapshot] canvas"
SAID = "section[data-snapshot] .said"
LEFT, PIXELS = 58, 280  # of the chart: what its axis takes, and its height without the other axis
COLOUR = """(() => {
  const one = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  one.drawImage(document.querySelector(%r), -%d, -%d);
  return [...one.getImageData(0, 0, 1, 1).data].slice(0, 3);
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as one:
        yield one
        assert one.console == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[SnapshotCase, Path]:
    page = tmp_path_factory.mktemp("trained") / "page.html"
    case, text = draw_oom(page.parent)
    page.write_text(text, encoding="utf-8")
    return case, page


def stacked(case: SnapshotCase, moment: int) -> list[tuple[int, int, str]]:
    """The blocks of a moment from the bottom of the picture to its top: both ends, and words."""
    order = [*WORDS]
    alive = sorted(
        case.sorter.alive_at(moment),
        key=lambda life: (order.index(case.sorter.category(life)), life.birth),
    )
    found, level = [], 0
    for life in alive:
        words = f"{size(life.num_bytes)} {case.sorter.category(life)}"
        found.append((level, level + life.num_bytes, words))
        level += life.num_bytes
    return found


def top_of(case: SnapshotCase) -> float:
    return 1.16 * max(case.capacity_bytes, case.peak_reserved_bytes)


def place_of(
    case: SnapshotCase, width: float, moment: int, num_bytes: float
) -> tuple[float, float]:
    """Where a moment and a height are in the chart, in parts of its size."""
    x = LEFT + (moment + 0.5) / len(case.card.events) * (width - LEFT)
    y = PIXELS * (1 - num_bytes / top_of(case))
    return x / width, y / (PIXELS + 20)


def event_at(tab: Tab, across: float) -> int:
    """The event that the page names where the pointer is."""
    tab.point(CHART, across, 0.02)
    match = re.match(r"Event ([\d,]+)", tab.text(SAID))
    assert match is not None
    return int(match[1].replace(",", ""))


def test_each_block_under_the_pointer_has_its_size_and_category(tab: Tab, trained) -> None:
    case, page = trained
    tab.open(page)
    *_, width, _ = tab.box(CHART)
    for moment in range(5, len(case.card.events), 37):
        blocks = stacked(case, moment)
        for low, high, words in blocks[:: max(1, len(blocks) // 3)]:
            tab.point(CHART, *place_of(case, width, moment, (low + high) / 2))
            assert tab.text(SAID).startswith(f"Event {moment}: {words}, ")


def test_a_click_leads_from_a_block_to_its_stack_and_to_its_moment(tab: Tab, trained) -> None:
    case, page = trained
    tab.open(page)
    *_, width, _ = tab.box(CHART)
    moment = len(case.card.events) // 2
    low, high, words = next(
        block for block in stacked(case, moment) if block[2] == "10.0 MiB activations"
    )
    tab.click(CHART, *place_of(case, width, moment, (low + high) / 2))
    block = tab.text(".block").splitlines()
    assert block[0] == f"{words}, me/project/model.py:20 forward"
    assert block[-2:] == ["me/project/model.py:20 forward", "me/project/train.py:40 main"]
    held = case.sorter.find_held(moment)
    assert f"{size(held.allocated_bytes)} in use after event {moment}" in tab.text("main")
    key = tab.text(".key")
    for name, num_bytes in held.categories.items():
        assert f"{name} {size(num_bytes)}" in key
    assert "from event " in tab.text(".block")
    tab.press("Escape")
    assert tab.text(".block") == ""


def test_a_block_has_the_colour_of_its_category(tab: Tab, trained) -> None:
    case, page = trained
    tab.open(page)
    *_, width, _ = tab.box(CHART)
    moment = case.held.position - 1
    for category, colour in (("parameters", (47, 111, 208)), ("activations", (240, 151, 58))):
        low, high, _ = next(b for b in stacked(case, moment) if b[2].endswith(f" {category}"))
        x, y = place_of(case, width, moment - 3, (low + high) / 2)
        seen = tab.run(COLOUR % (CHART, x * width, y * (PIXELS + 20)))
        assert seen == pytest.approx(colour, abs=2)


def test_a_drag_zooms_and_keys_zoom_and_pan(tab: Tab, trained) -> None:
    case, page = trained
    num = len(case.card.events)
    tab.open(page)
    tab.drag(CHART, 0.5, 0.75)
    assert num * 0.4 < event_at(tab, 0.1) < event_at(tab, 0.9) < num * 0.8
    tab.run(f"document.querySelector({CHART!r}).focus()")
    tab.press("0")
    assert event_at(tab, 0.1) < num * 0.1
    tab.press("+")
    begin = event_at(tab, 0.1)
    assert begin > num * 0.2
    tab.press("ArrowLeft")
    assert event_at(tab, 0.1) < begin
    tab.press("-")
    tab.press("-")
    assert event_at(tab, 0.1) < num * 0.1
    tab.press("ArrowUp")
    first = tab.text(".block").splitlines()[0]
    assert first.startswith("20.0 MiB parameters, ")
    for _ in range(6):
        tab.press("ArrowUp")
    assert tab.text(".block").splitlines()[0] != first


def test_a_search_counts_what_it_finds_and_leaves_the_rest_pale(tab: Tab, trained) -> None:
    case, page = trained
    tab.open(page)
    tab.press("/")
    tab.write("model.py:20")
    found = [
        life
        for life in case.sorter.alive_at(case.held.position)
        if "model.py:20" in case.sorter.place(life)
    ]
    num_bytes = size(sum(life.num_bytes for life in found))
    assert f"{len(found)} of " in tab.text("#found")
    assert f"match, {num_bytes}, in use when it ran out" in tab.text("#found")
    tab.press("Escape")
    assert tab.text("#found") == ""


def test_the_stacks_are_as_wide_as_what_they_hold(tab: Tab, trained) -> None:
    case, page = trained
    tab.open(page)
    icicle = "section[data-snapshot] > figure:nth-of-type(2)"
    assert size(case.in_use_bytes) in tab.text(f"{icicle} figcaption")
    _, _, _, height = tab.box(f"{icicle} canvas")
    rows = round(height / 18)
    tab.point(f"{icicle} canvas", 0.02, 0.5 / rows)
    assert tab.text(f"{icicle} .said") == "402.0 MiB, 89%: me/project/train.py:40 main"
    tab.click(f"{icicle} canvas", 0.02, 1.5 / rows)
    within = "of 160.0 MiB within torch/optim/adamw.py:200 step"
    assert tab.text(f"{icicle} figcaption").endswith(within)
    assert case.held.categories["optimizer states"] == 160 * MIB
    tab.click(f"{icicle} canvas", 0.02, 0.5 / rows)
    assert "within" not in tab.text(f"{icicle} figcaption")


def test_the_map_names_each_gap_and_block(tab: Tab, tmp_path: Path) -> None:
    card = RecordedCard(1 * GIB)
    with pytest.raises(AllocatorFull):
        in_pieces(card)
    tab.show(tmp_path, draw_card(card, tmp_path)[1])
    map_ = "section[data-snapshot] > figure:nth-of-type(3)"
    assert tab.text(f"{map_} figcaption") == (
        "Where it lay when it ran out: 320.0 MiB free in 20 gaps, the largest 16.0 MiB;"
        " 38.0 MiB were requested"
    )
    assert "21 segment(s)" in tab.text(f"{map_} .said")
    said = set()
    for down in range(12):
        for across in range(5):
            tab.point(f"{map_} canvas", (across + 0.5) / 5, (down + 0.5) / 12)
            said.add(tab.text(f"{map_} .said").partition(" at 0x")[0].partition(",")[0])
    assert said == {"A gap of 16.0 MiB", "24.0 MiB activations", "200.0 MiB parameters"}


def test_two_snapshots_stand_side_by_side_on_one_scale(tab: Tab, tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 2)
    before = card.dump(tmp_path / "before.pickle")
    train(card, 2)
    after = card.dump(tmp_path / "after.pickle")
    cases, answer = compare_snapshots(before, after)
    tab.show(tmp_path, snapshot_page(answer, *cases))
    left, top = tab.box("section[data-snapshot='0'] canvas")[:2]
    other_left, other_top = tab.box("section[data-snapshot='1'] canvas")[:2]
    assert left + 300 < other_left
    assert top == pytest.approx(other_top, abs=40)
    tab.press("/")
    tab.write("parameters")
    one, two = tab.text("#found").split(" | ")
    assert "80.0 MiB" in one
    assert "160.0 MiB" in two


def test_a_snapshot_without_events_is_drawn_as_it_ended(tab: Tab, tmp_path: Path) -> None:
    card = RecordedCard()
    train(card, 2)
    card.events.clear()
    tab.show(tmp_path, draw_card(card, tmp_path)[1], width=390)
    assert "in use at the peak" in tab.text("section[data-snapshot] > figure:nth-of-type(2)")
    tab.point("section[data-snapshot] canvas", 0.99, 0.5)
    assert "MiB" in tab.text("section[data-snapshot] > figure:nth-of-type(2) .said")


def test_hostile_names_are_shown_as_text(tab: Tab, tmp_path: Path) -> None:
    wild = (
        "<img src=x onerror=\"document.title='run'\"></script><script>document.title='run'</script>"
    )
    card = RecordedCard()
    for _ in range(8):
        card.alloc(GIB, [(f"/x/{wild}.py", 3, wild)])
    tab.show(tmp_path, draw_card(card, tmp_path)[1])
    tab.click(CHART, 0.9, 0.6)
    assert tab.text(".block").count("<img src=x onerror=") >= 2
    tab.point("section[data-snapshot] > figure:nth-of-type(2) canvas", 0.5, 0.1)
    assert "<img src=x" in tab.text("section[data-snapshot] > figure:nth-of-type(2) .said")
    tab.press("/")
    tab.write("<img src=x")
    assert " of 8 blocks that match" in tab.text("#found")
    assert tab.run("[document.images.length, document.scripts.length]") == [0, 2]
    assert tab.run("document.title") != "run"
