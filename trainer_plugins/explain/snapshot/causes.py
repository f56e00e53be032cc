"""Name the causes that a snapshot shows. The first is the answer."""

from collections import Counter
from collections.abc import Iterator

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.shared import cause, insert_sentence, is_in_pieces, say
from trainer_plugins.explain.snapshot.remedies import Tries, find_leaked_lives
from trainer_plugins.snapshot.held import WORDS
from trainer_plugins.snapshot.lives import BEFORE
from trainer_plugins.snapshot.oom import Oom, SnapshotCase, sum_reserved
from trainer_plugins.units import GIB, percent, size


def causes_of(case: SnapshotCase, oom: Oom, tries: Tries) -> tuple[Cause, ...]:
    """Name the causes of an OOM, the most certain first."""
    asked = say(
        "{place} asked for {requested_bytes}; the card had {free_bytes} left, and this"
        " process held {reserved_bytes}",
        requested_bytes=oom.num_bytes,
        place=case.request.place,
        free_bytes=oom.left_bytes,
        reserved_bytes=case.reserved_bytes,
    )
    first, *others = _find_causes(case, oom, tries)
    return (insert_sentence(first, asked, at=0), *others)


def _find_causes(case: SnapshotCase, oom: Oom, tries: Tries) -> Iterator[Cause]:
    if oom.is_impossible:
        yield cause("impossible-size")
    elif oom.is_contradictory:
        yield cause(
            "contradictory",
            doubt="A limit below the card's size refused it: look for"
            " set_per_process_memory_fraction, and for limits of WSL, a container or a MIG slice",
        )
    else:
        leak = list(_leak(case))
        special = [
            *_foreign(case),
            *(leak or _fragmentation(case, oom, tries)),  # a leak also leaves gaps
            *_long_sample(case, oom),
            *_judge_request(case),
        ]
        yield from special
        if not special or case.missing_bytes > 0:
            yield _capacity(case)


def _foreign(case: SnapshotCase) -> Iterator[Cause]:
    """Compare the process's limit at the first and at the last OOM: others hold the difference."""
    reserved = sum_reserved(case.card)
    ends = [
        reserved[at + 1] + event.address
        for at, event in enumerate(case.card.events)
        if event.action == "oom"
    ]
    lost = max(ends) - ends[-1]
    if lost > max(2 * GIB, 0.15 * max(ends)):
        yield cause(
            "foreign",
            say(
                "At an earlier OOM this process could hold {earlier_bytes}, at the last one"
                " {last_bytes}",
                earlier_bytes=max(ends),
                last_bytes=ends[-1],
            ),
            summary=f"something outside this allocator took {size(lost)} of the card in between",
            doubt="nvidia-smi shows whether it is another process, NCCL or a library",
            lost_bytes=lost,
        )


def _fragmentation(case: SnapshotCase, oom: Oom, tries: Tries) -> Iterator[Cause]:
    unused, helps = case.unused_bytes, tries.setting_that_helps
    if case.missing_bytes > 0:
        return
    if helps or is_in_pieces(oom.num_bytes, unused, oom.left_bytes, case.capacity_bytes):
        yield cause(
            "fragmentation",
            say(
                "{in_use_bytes} were in use: without gaps, {capacity_bytes} would have held"
                " the request",
                in_use_bytes=case.in_use_bytes,
                capacity_bytes=case.capacity_bytes,
            ),
            f"Replayed with {helps}, the same trace fits" if helps else "",
            summary=f"{size(unused)} were reserved but unused, in pieces too small for the request",
            doubt="" if helps else f"Not confirmed by a replay: {tries.why_none_helps}",
            spare_without_gaps_bytes=-case.missing_bytes,
            setting_that_helps=helps,
        )


def _leak(case: SnapshotCase) -> Iterator[Cause]:
    leaked = find_leaked_lives(case)
    if not leaked:
        return
    bytes_at: Counter[str] = Counter()
    for life in leaked:
        bytes_at[case.sorter.place(life)] += life.num_bytes
    [(place, most)] = bytes_at.most_common(1)
    steps = {case.sorter.step_at(life.birth) for life in leaked}
    yield cause(
        "leak",
        say(
            "They come from {num_steps} of the {num_earlier_steps} earlier steps in the"
            " trace; most, {most_bytes}, from {place}",
            num_steps=len(steps),
            num_earlier_steps=case.sorter.step_at(case.held.position),
            most_bytes=most,
            place=place,
        ),
        summary=f"{size(bytes_at.total())} of earlier steps are still alive: something keeps their"
        " tensors",
        doubt="Look for a list, a metric or a hook that keeps a tensor with its graph (`loss`"
        " instead of `loss.item()`)",
        leaked_bytes=bytes_at.total(),
        place=place,
    )


def _long_sample(case: SnapshotCase, oom: Oom) -> Iterator[Cause]:
    sorter, now = case.sorter, case.sorter.step_at(case.held.position)
    same = [life for life in sorter.lives if life.stack and life.stack == case.oom_stack]
    before = [
        life.requested_bytes
        for life in same
        if life.birth != BEFORE and sorter.step_at(life.birth) < now
    ]
    if now >= 2 and len(before) >= 2 and oom.num_bytes > 1.25 * max(before):
        yield cause(
            "long-sample",
            say(
                "In {num_earlier_steps} earlier steps {place} asked for"
                " {earlier_request_bytes} at most, and now for {requested_bytes}",
                num_earlier_steps=now,
                earlier_request_bytes=max(before),
                requested_bytes=oom.num_bytes,
                place=case.request.place,
            ),
            summary="this batch is longer than those before: the same line asked for"
            f" {oom.num_bytes / max(before):.1f} times as much as ever",
            grade="likely",
        )


def _judge_request(case: SnapshotCase) -> Iterator[Cause]:
    held, work = case.held.categories, case.request.work
    logits = held.get("logits", 0)
    if work == "loss" or logits >= 0.25 * case.in_use_bytes:
        yield cause(
            "logits-loss",
            say("Logits and loss already held {logits_bytes}", logits_bytes=logits),
            grade="certain" if work == "loss" else "likely",
        )
    elif work == "optimizer":
        states = held.get("optimizer states", 0)
        words = say("Optimizer states held {states_bytes}", states_bytes=states)
        yield cause("optimizer-state", words)
    elif work == "evaluation":
        yield cause("eval-logits")
    elif work == "generation":
        yield cause("generate-cache")
    elif work == "gathering":
        gathered = held.get("gathered parameters", 0)
        words = say("Gathered parameters held {gathered_bytes}", gathered_bytes=gathered)
        yield cause("zero3-gather", words, grade="likely")
    elif work == "saving":
        yield cause("save-gather", grade="likely")


def _capacity(case: SnapshotCase) -> Cause:
    category, most = case.largest_category
    share = f"{percent(most / max(case.in_use_bytes, 1))} of it is {WORDS[category]}"
    largest = case.held.lines[0] if case.held.lines else None
    fits = case.missing_bytes <= 0
    return cause(
        "capacity",
        say("The largest part, {most_bytes}, comes from {at}", at=largest[0], most_bytes=largest[1])
        if largest
        else "",
        ""
        if fits
        else say(
            "This is not fragmentation: without gaps {missing_bytes} were missing, and only"
            " {unused_bytes} were reserved but unused",
            missing_bytes=case.missing_bytes,
            unused_bytes=case.unused_bytes,
        ),
        summary=f"the live tensors need more than this card has: {share}",
        grade="possible" if fits else "certain",
        doubt="The file does not record the card's size: if it has much more than"
        f" {size(case.capacity_bytes)}, another process held the rest, which nvidia-smi shows",
        missing_bytes=case.missing_bytes,
        largest_category=category,
        largest_category_bytes=most,
    )
