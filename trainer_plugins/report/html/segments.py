"""Draws the blocks in a card's memory at one moment, and the gaps between them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from trainer_plugins.explain.snapshot.held import WORDS
from trainer_plugins.explain.snapshot.oom import SnapshotCase
from trainer_plugins.explain.snapshot.trace import ranges_after
from trainer_plugins.report.html.chart import Band, colour_of
from trainer_plugins.units import MIB, size

_CELLS, _MOST_ROWS, _ROW_PIXELS = 250, 24, 14
_FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMap:
    """Holds all that was reserved, cut into rows of equal size."""

    row_bytes: int
    num_rows: int
    num_segments: int
    pixels: int
    bands: tuple[Band, ...]
    cuts: Markup  # the ends of segments: no block can cross one
    largest_free_bytes: int
    free_bytes: int
    num_gaps: int
    asked_bytes: int | None  # the size of the failed request; None if there was none

    @property
    def title(self) -> str:
        gaps = f"{self.num_gaps:,} {'gap' if self.num_gaps == 1 else 'gaps'}"
        largest = f"the largest {size(self.largest_free_bytes)}"
        asked = "" if self.asked_bytes is None else f"; {size(self.asked_bytes)} were requested"
        return f"{size(self.free_bytes)} free in {gaps}, {largest}{asked}"


def segment_map(case: SnapshotCase) -> SegmentMap | None:
    """Draw the card at the moment of a case; None if nothing was reserved."""
    segments = ranges_after(case.card, case.held.position)
    reserved = sum(high - low for low, high in segments)
    if not reserved:
        return None
    pieces = [*_pieces(case, segments)]
    free = [num_bytes for name, num_bytes in pieces if name == _FREE]
    rows = max(1, min(_MOST_ROWS, reserved // (2 * MIB)))
    row_bytes = -(-reserved // rows)
    cells = [*_cells(pieces, row_bytes / _CELLS)]
    return SegmentMap(
        row_bytes=row_bytes,
        num_rows=rows,
        num_segments=len(segments),
        pixels=rows * _ROW_PIXELS,
        bands=tuple(_bands(cells, pieces)),
        cuts=_cuts(segments, row_bytes),
        largest_free_bytes=max(free, default=0),
        free_bytes=sum(free),
        num_gaps=len(free),
        asked_bytes=case.oom.num_bytes if case.oom is not None else None,
    )


def _pieces(case: SnapshotCase, segments: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    alive = sorted(case.sorter.alive_at(case.held.position), key=lambda life: life.address)
    at = 0
    for low, high in segments:
        position = low
        while at < len(alive) and alive[at].address < high:
            life = alive[at]
            at += 1
            if life.address < position:
                continue  # an edited file may hold a block twice
            if life.address > position:
                yield _FREE, life.address - position
            end = min(life.address + life.num_bytes, high)
            yield case.sorter.category(life), end - life.address
            position = end
        if position < high:
            yield _FREE, high - position


def _cells(pieces: Sequence[tuple[str, int]], cell_bytes: float) -> Iterator[str]:
    inside: dict[str, float] = {}
    left = cell_bytes
    for name, num_bytes in pieces:
        rest = float(num_bytes)
        while rest > 0:
            taken = min(rest, left)
            inside[name] = inside.get(name, 0.0) + taken
            rest -= taken
            left -= taken
            if left < 1:
                yield max(inside, key=inside.__getitem__)
                inside, left = {}, left + cell_bytes
    if inside:
        yield max(inside, key=inside.__getitem__)


def _bands(cells: Sequence[str], pieces: Sequence[tuple[str, int]]) -> Iterator[Band]:
    sizes = Counter[str]()
    for name, num_bytes in pieces:
        sizes[name] += num_bytes
    drawn = dict.fromkeys(sizes, "")
    width, begin = 1000 // _CELLS, 0
    for at, name in enumerate(cells, start=1):
        if at == len(cells) or at % _CELLS == 0 or cells[at] != name:
            row, column = divmod(begin, _CELLS)
            across = (at - begin) * width
            drawn[name] += (
                f"M{column * width} {row * _ROW_PIXELS + 1}h{across}v{_ROW_PIXELS - 2}h-{across}z"
            )
            begin = at
    for name, num_bytes in sorted(sizes.items(), key=lambda pair: (pair[0] == _FREE, -pair[1])):
        yield Band(
            name=WORDS.get(name, name),  # type: ignore[call-overload]
            colour="c-free" if name == _FREE else colour_of(name),
            path=Markup(drawn[name]),
            note=size(num_bytes),
        )


def _cuts(segments: Sequence[tuple[int, int]], row_bytes: int) -> Markup:
    drawn = []
    for position in accumulate(high - low for low, high in segments[:-1]):
        row, within = divmod(position, row_bytes)
        place = round(within / row_bytes * _CELLS) * (1000 // _CELLS)
        drawn.append(f"M{place} {row * _ROW_PIXELS}v{_ROW_PIXELS}")
    return Markup("".join(dict.fromkeys(drawn)))
