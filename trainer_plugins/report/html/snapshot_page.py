"""Renders a memory snapshot of torch as a page: what held the memory, when, and remedies."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.snapshot.held import WORDS
from trainer_plugins.explain.snapshot.lives import BEFORE
from trainer_plugins.explain.snapshot.oom import SnapshotCase, reserved_after
from trainer_plugins.report.html.chart import (
    WIDTH,
    Band,
    Chart,
    Dot,
    Height,
    Lane,
    Sign,
    Table,
    byte_ticks,
    colour_of,
    height_of,
    limited,
    percent_of,
    stacked,
    stairs,
)
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.html.segments import segment_map
from trainer_plugins.report.words import GRADES
from trainer_plugins.units import percent, size

_PIXELS, _COLUMNS, _MOST_LINES = 260, 240, 12
_ORDER = tuple(WORDS)
_PASSES = (("forward", "c-first"), ("backward", "c-second"), ("optimizer", "c-third"))


def snapshot_page(case: SnapshotCase, answer: Explanation) -> Page:
    """Render the memory in a snapshot, and its explanation."""
    total = case.in_use_bytes
    return page(
        "snapshot.html.jinja",
        verdict=_verdict(case, answer.causes[0].summary if answer.causes else ""),
        is_bad=case.oom is not None,
        ending=answer.facts[0],
        answer=answer,
        grades=GRADES,
        chart=history_chart(case),
        moment="when it ran out" if case.oom is not None else "at the peak",
        total=total,
        categories=[(WORDS[name], num, "") for name, num in case.held.categories.items()],
        colours={WORDS[name]: colour_of(name) for name in WORDS},
        lines=[
            (place, num, f"{count:,} block{'' if count == 1 else 's'}")
            for place, num, count in case.held.lines[:_MOST_LINES]
        ],
        segments=segment_map(case),
        facts=answer.facts[1:],
    )


def _verdict(case: SnapshotCase, cause: str) -> str:
    if case.oom is None:
        most, num_bytes = case.largest_category
        share = percent(num_bytes / max(case.in_use_bytes, 1))
        return f"{size(case.in_use_bytes)} in use at the peak, {share} of it {WORDS[most]}"
    return f"Out of memory: {cause}"


def history_chart(case: SnapshotCase) -> Chart | None:
    """Draw the memory in use after each event, by category; None if no event was recorded."""
    num = len(case.card.events)
    if not num:
        return None
    ends, states = _states(case, min(_COLUMNS, num))
    after = reserved_after(case.card)[1:]
    reserved = [max(after[begin:end]) for begin, end in pairwise((0, *ends))]
    edges = [0.0, *(round(WIDTH * end / num, 1) for end in ends)]
    totals = [sum(state) for state in states]
    capacity = case.capacity_bytes if case.oom is not None else None
    height = height_of(max(*reserved, *totals), capacity, _PIXELS)
    unit, ticks = byte_ticks(height)
    levels = [[sum(state[: at + 1]) for state in states] for at in range(len(_ORDER))]
    at_percent = percent_of(WIDTH * (case.held.position + 1) / num)
    lanes = tuple(_passes(case, num))
    words = f"it could hold {size(capacity or 0)}"
    limit, line = limited(height, capacity, words, max(reserved), is_left=at_percent > 50)
    return Chart(
        name="history",
        title=f"{size(case.in_use_bytes)} in use of {size(case.reserved_bytes)} reserved"
        + (", when it ran out" if case.oom is not None else " at the peak"),
        description="What was in use, by category, over the recorded events.",
        pixels=_PIXELS,
        unit=unit,
        ticks=ticks,
        bands=(
            *line,
            *stacked(edges, levels, _named(case), height),
            Band(
                name="reserved",
                colour="c-reserved",
                path=stairs(edges, reserved, height),
                is_line=True,
                note=size(case.reserved_bytes),
            ),
        ),
        times=(("event", tuple((25.0 * at, f"{num * at // 4:,}") for at in range(5))),),
        lines_percent=(at_percent,) if case.oom is not None else (),
        limit=limit,
        dot=_dot(case, at_percent, height) if case.oom is None else None,
        lanes=lanes,
        lane_key=_PASSES if lanes else (),
        edges=edges,
        titles=[
            f"until event {end:,}: {size(total)} in use, {size(most)} reserved"
            for end, total, most in zip(ends, totals, reserved, strict=True)
        ],
        table=_table(ends, states, reserved),
    )


def _named(case: SnapshotCase) -> list[tuple[str, str, str]]:
    held = case.held.categories
    return [
        (WORDS[name], colour_of(name), size(held[name]) if name in held else "") for name in _ORDER
    ]


def _dot(case: SnapshotCase, at_percent: float, height: Height) -> Dot:
    y, above = height.y(case.in_use_bytes), height.y(case.reserved_bytes)
    return Dot(
        at_percent=at_percent,
        y=y,
        text=size(case.in_use_bytes),
        text_y=above - 8 if y - above < 24 else y - 10,  # not on the line of reserved memory
    )


def _states(case: SnapshotCase, columns: int) -> tuple[list[int], list[list[int]]]:
    """Return the last event of each column, and the categories at the column's peak."""
    num = len(case.card.events)
    ends = [num * (at + 1) // columns for at in range(columns)]
    changes: dict[int, list[tuple[int, int]]] = {}
    state = [0] * len(_ORDER)
    for life in case.sorter.lives:
        row = _ORDER.index(case.sorter.category(life))
        if life.birth == BEFORE:
            state[row] += life.num_bytes
        else:
            changes.setdefault(life.birth, []).append((row, life.num_bytes))
        if life.death is not None:
            changes.setdefault(life.death, []).append((row, -life.num_bytes))
    states = []
    for begin, end in pairwise((0, *ends)):
        best, most = state, -1
        for position in range(begin, end):
            for row, num_bytes in changes.get(position, ()):
                state[row] += num_bytes
            if (total := sum(state)) > most:
                best, most = [*state], total
        states.append([*best])
    return ends, states


def _passes(case: SnapshotCase, num: int) -> Iterator[Lane]:
    signs, shown = [], 0.0
    for first, last, which in case.sorter.passes:
        begin, end = percent_of(WIDTH * first / num), percent_of(WIDTH * (last + 1) / num)
        if end - shown < 100 / _COLUMNS:
            continue
        begin, shown = max(begin, shown), end
        signs.append(
            Sign(
                at_percent=begin,
                width_percent=round(end - begin, 2),
                colour=dict(_PASSES)[which],
                title=f"{which}, events {first:,} to {last:,}",
            )
        )
    if len({sign.colour for sign in signs}) > 1:
        yield Lane(name="pass", signs=tuple(signs))


def _table(ends: Sequence[int], states: Sequence[Sequence[int]], reserved: Sequence[int]) -> Table:
    used = [row for row in range(len(_ORDER)) if any(state[row] for state in states)]
    return Table(
        head=("until event", *(_ORDER[row] for row in used), "in use", "reserved"),
        rows=tuple(
            (f"{end:,}", *(size(state[row]) for row in used), size(sum(state)), size(most))
            for end, state, most in zip(ends, states, reserved, strict=True)
        ),
    )
