"""Names the causes that a snapshot shows. The first is the answer."""

from collections.abc import Iterator
from dataclasses import replace

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.snapshot.held import WORDS
from trainer_plugins.explain.snapshot.lives import BEFORE
from trainer_plugins.explain.snapshot.oom import SnapshotCase, reserved_after
from trainer_plugins.explain.snapshot.remedies import Tries, leaked_lives
from trainer_plugins.units import GIB, percent, size


def causes_of(case: SnapshotCase, tries: Tries) -> tuple[Cause, ...]:
    """Name the causes, the surest first."""
    first, *others = _found(case, tries)
    return (replace(first, evidence=(_asked(case), *first.evidence)), *others)


def _found(case: SnapshotCase, tries: Tries) -> Iterator[Cause]:
    if case.is_impossible:
        yield _impossible()
    elif case.is_contradictory:
        yield _contradictory()
    else:
        leak = list(_leak(case))
        special = [
            *_foreign(case),
            *(leak or _fragmentation(case, tries)),  # what is kept also leaves gaps
            *_long_sample(case),
            *_by_request(case),
        ]
        yield from special
        if not special or case.missing_bytes > 0:
            yield _capacity(case)


def _asked(case: SnapshotCase) -> str:
    assert case.oom is not None
    return (
        f"{size(case.oom.num_bytes)} were asked for at {case.request.place}; the card had "
        f"{size(case.oom.address)} left, and this process held {size(case.reserved_bytes)}"
    )


def _impossible() -> Cause:
    return Cause(
        code="impossible-size",
        grade="certain",
        summary="a tensor was asked for that no card can hold, so an index or a shape is wrong",
        evidence=(),
    )


def _contradictory() -> Cause:
    return Cause(
        code="contradictory",
        grade="likely",
        summary="the request was refused though the card had room for it",
        evidence=(),
        doubt=(
            "A limit that is not the card's refused it: look for "
            "set_per_process_memory_fraction, and for limits of WSL, a container or a MIG slice"
        ),
    )


def _foreign(case: SnapshotCase) -> Iterator[Cause]:
    """Compare what could be held at the first and at the last OOM: the rest is others'."""
    reserved = reserved_after(case.card)
    ends = [
        reserved[at + 1] + event.address
        for at, event in enumerate(case.card.events)
        if event.action == "oom"
    ]
    lost = max(ends) - ends[-1]
    if lost > max(2 * GIB, 0.15 * max(ends)):
        yield Cause(
            code="foreign",
            grade="likely",
            summary=f"something outside of this allocator took {size(lost)} of the card meanwhile",
            evidence=(
                f"At an earlier OOM this process could hold {size(max(ends))}, at the last one "
                f"{size(ends[-1])}",
            ),
            doubt="nvidia-smi shows whether it is another process, NCCL or a library",
        )


def _fragmentation(case: SnapshotCase, tries: Tries) -> Iterator[Cause]:
    assert case.oom is not None
    wanted, unused = case.oom.num_bytes, case.unused_bytes
    if case.missing_bytes > 0:
        return
    helps = tries.setting_that_helps
    if helps or (unused >= wanted / 2 and unused >= 0.04 * case.capacity_bytes):
        yield Cause(
            code="fragmentation",
            grade="certain" if helps else "likely",
            summary=f"{size(unused)} were reserved and free, but in pieces too small to use",
            evidence=(
                f"{size(case.in_use_bytes)} were in use, so the request would have fitted into "
                f"{size(case.capacity_bytes)} without gaps",
                *((f"Repeated with {helps}, the same trace fits",) if helps else ()),
            ),
            doubt="" if helps else f"Not confirmed by a replay: {tries.why_none_helps}",
        )


def _leak(case: SnapshotCase) -> Iterator[Cause]:
    leaked = leaked_lives(case)
    if not leaked:
        return
    bytes_at: dict[str, int] = {}
    for life in leaked:
        place = case.sorter.place(life)
        bytes_at[place] = bytes_at.get(place, 0) + life.num_bytes
    place = max(bytes_at, key=bytes_at.__getitem__)
    steps = {case.sorter.step_at(life.birth) for life in leaked}
    total = size(sum(bytes_at.values()))
    yield Cause(
        code="leak",
        grade="likely",
        summary=f"{total} of earlier steps are still alive: something keeps their tensors",
        evidence=(
            f"They are from {len(steps)} of the {case.sorter.step_at(case.held.position)} earlier "
            f"steps in the trace, and most, {size(bytes_at[place])}, are from {place}",
        ),
        doubt="Look for a list, a metric or a hook that keeps a tensor with its graph (`loss` "
        "instead of `loss.item()`)",
    )


def _long_sample(case: SnapshotCase) -> Iterator[Cause]:
    assert case.oom is not None
    now = case.sorter.step_at(case.held.position)
    before = [
        life.requested_bytes
        for life in case.sorter.lives
        if life.stack
        and life.stack == case.oom_stack
        and life.birth != BEFORE
        and case.sorter.step_at(life.birth) < now
    ]
    if now >= 2 and len(before) >= 2 and case.oom.num_bytes > 1.25 * max(before):
        yield Cause(
            code="long-sample",
            grade="likely",
            summary=(
                f"this batch is longer than those before: the same line asked for "
                f"{case.oom.num_bytes / max(before):.1f} times as much as ever"
            ),
            evidence=(
                f"In {now} earlier steps it asked for {size(max(before))} at most, and now for "
                f"{size(case.oom.num_bytes)}, at {case.request.place}",
            ),
        )


def _by_request(case: SnapshotCase) -> Iterator[Cause]:
    """Name what the failing request itself was for, where that has a cause of its own."""
    logits = case.held.categories.get("logits", 0)
    work = case.request.work
    if work == "loss" or logits >= 0.25 * case.in_use_bytes:
        yield Cause(
            code="logits-loss",
            grade="certain" if work == "loss" else "likely",
            summary="the logits and their loss are too large: one value for each token and word",
            evidence=(f"Logits and loss held {size(logits)} already",),
        )
    elif work == "optimizer":
        yield Cause(
            code="optimizer-state",
            grade="certain",
            summary="the optimizer's step needs memory for its states or for temporaries",
            evidence=(
                f"Optimizer states held {size(case.held.categories.get('optimizer states', 0))}",
            ),
        )
    elif work == "evaluation":
        yield Cause(
            code="eval-logits",
            grade="certain",
            summary="the evaluation gathers the logits of all its batches on the card",
            evidence=(),
        )
    elif work == "generation":
        yield Cause(
            code="generate-cache",
            grade="certain",
            summary="the cache of keys and values grows with each generated token",
            evidence=(),
        )
    elif work == "saving":
        yield Cause(
            code="save-gather",
            grade="likely",
            summary="a state dict is put together on the card",
            evidence=(),
        )


def _uneven(case: SnapshotCase) -> Iterator[str]:
    """Compare the cards of a process that uses several."""
    others = {
        card.index: max(reserved_after(card))
        for card in case.snapshot.cards
        if card is not case.card
    }
    if others and max(others.values()) < case.reserved_bytes / 2:
        held = ", ".join(f"card {index} {size(most)}" for index, most in others.items())
        yield (
            f"The cards are loaded unevenly: this one held {size(case.reserved_bytes)}, the others "
            f"at most: {held}"
        )


def _capacity(case: SnapshotCase) -> Cause:
    assert case.oom is not None
    category, most = next(iter(case.held.categories.items()), ("unknown", 0))
    missing, unused = size(case.missing_bytes), size(case.unused_bytes)
    share = f"{percent(most / max(case.in_use_bytes, 1))} of it is {WORDS[category]}"
    largest = case.held.lines[0] if case.held.lines else None
    fits = case.missing_bytes <= 0
    return Cause(
        code="capacity",
        grade="possible" if fits else "certain",
        summary=f"the card is too small for what was alive: {share}",
        evidence=(
            *((f"The most is from {largest[0]}: {size(largest[1])}",) if largest else ()),
            *_uneven(case),
            *(
                ()
                if fits
                else (
                    f"It is not fragmentation: even without a gap {missing} were missing, and only "
                    f"{unused} were reserved without being in use",
                )
            ),
        ),
        doubt=(
            f"The file does not say how large the card is: if it has much more than "
            f"{size(case.capacity_bytes)}, another process held the rest, which nvidia-smi shows"
        ),
    )
