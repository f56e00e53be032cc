"""Provide helpers for texts, records and snapshots: sentences, causes, and remedies."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import NamedTuple

from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.vendors import Vendor
from trainer_plugins.explain.answer import Cause, Certainty, Figure, Numbers, Remedy, ShownBy
from trainer_plugins.printable import printable
from trainer_plugins.units import percent, size


def quote(words: str, most: int = 200) -> str:
    """Quote the first line of a text, cut between two words.

    >>> quote("Tried to allocate 3.16 GiB", most=24)
    'Tried to allocate 3.16 ...'
    """
    line = next(iter(words.strip().splitlines()), "").strip()
    return line if len(line) <= most else f"{line[: most + 1].rpartition(' ')[0]} ..."


_ALIKE = 1.5  # the largest over the smallest: ranks of one launch, not strangers
FRAGMENTED_FRACTION = 0.04  # of the card: less unused memory than this would help no request

SUMMARIES: Mapping[str, str] = {
    "adapter-delta": "LoRA builds a delta as large as the weights that it adapts",
    "adapter-merge": "merging the adapter does not fit beside the memory that training keeps",
    "api-misuse": "a single tensor is larger than the card",
    "capacity": "the run needs more memory than the card has",
    "contradictory": "an allocation was refused although memory was free",
    "cut-command": "a comment inside the command ends it: the flags below it are not passed",
    "data-parallel": "one process drives all cards (DataParallel), and the first fills up first",
    "ddp-buckets": "DDP's buckets, as large as all trainable gradients, do not fit",
    "ddp-gpu0": "several ranks hold memory on the same card",
    "engine-share": "the inference engine's share does not fit beside what else is on the card",
    "eval-batch": "an evaluation batch does not fit next to the memory that training keeps",
    "eval-logits": "the evaluation keeps the outputs of all its batches on the card",
    "eval-metrics": "your compute_metrics does not fit next to the memory that training keeps",
    "foreign": "another process holds part of the card",
    "fragmentation": "enough memory was free, but only in small pieces",
    "generate-cache": "generation does not fit: its batch, its prompts or its KV cache",
    "host-alloc": "an allocation in main memory (not on the card) was refused",
    "host-commit": "Windows' commit limit was reached: main memory and paging file together",
    "host-kill": "the process was killed because main memory ran out",
    "host-limit": "the job or container exceeded its main memory limit",
    "image-size": "pictures produce too many patches in the vision tower",
    "impossible-size": "no card is this large: a shape or an index is wrong",
    "leftover": "an earlier run in this process may still hold its memory",
    "load-too-large": "the weights alone do not fit on the card",
    "logits-loss": "the logits and their loss do not fit",
    "long-sample": "earlier steps fitted: this batch is larger, or memory has grown",
    "mps-other": "memory outside torch's live tensors fills much of the Mac's limit",
    "nccl": "NCCL could not allocate its buffers: torch left no room for them",
    "optimizer-state": "the optimizer states, or the temporaries of its step, do not fit",
    "pinned": "page-locked (pinned) main memory ran out, not the card's",
    "quadratic-attention": "attention builds a length x length score matrix",
    "regression": "the same run fitted with another version",
    "resume-load": "a checkpoint is loaded onto the card on top of the memory already there",
    "save-gather": "saving copies or gathers the state on the card",
    "second-copy": "a second model is on the card beside the one in training",
    "shm": "shared memory (/dev/shm) is full",
    "zero3-gather": "the parameters gathered from other ranks do not fit",
}


class Said(NamedTuple):
    """Holds a sentence with names in braces, and their values; None is unknown.

    >>> from trainer_plugins.units import GIB
    >>> str(say("{num_rows} rows of {row_bytes} in {where}", num_rows=2, row_bytes=GIB, where="a"))
    '2 rows of 1.00 GiB in a'
    """

    words: str
    values: Mapping[str, int | float | str | None]

    def __str__(self) -> str:
        return self.words.format_map({name: _format(name, v) for name, v in self.values.items()})

    def figures(self, sentence: int) -> Iterator[Figure]:
        """Yield the numbers that the sentence states."""
        for _, name, _, _ in Formatter().parse(self.words):
            value = self.values[name] if name else None
            if name and value is not None and not isinstance(value, str):
                yield Figure(name=name, value=value, shown_by="text", sentence=sentence)


def say(words: str, *sources: object, **values: int | float | str | None) -> Said:
    """Build a sentence from words and from numbers, whose names carry the unit.

    A name that is no keyword is an attribute of the first of the sources that has it.
    """
    for name in {name for _, name, _, _ in Formatter().parse(words) if name} - values.keys():
        values[name] = getattr(next((one for one in sources if hasattr(one, name)), None), name)
    return Said(words, values)


def _format(name: str, value: int | float | str | None) -> int | float | str:
    if value is None:
        return "an unknown amount"
    if isinstance(value, str):
        return value
    if "bytes" in name.split("_"):
        return size(value)
    return percent(value) if name.endswith("_fraction") else value


def cause(
    code: str,
    *evidence: str | Said,
    summary: str = "",
    doubt: str = "",
    is_sure: object = False,
    grade: Certainty | None = None,
    **data: int | float | str,
) -> Cause:
    """Build a cause from harmless words; the default grade is likely with a doubt, else certain.

    `data` has the numbers it was judged by besides the figures of the evidence; names carry the
    unit.
    """
    if is_sure:
        doubt = ""
    known = [each for each in evidence if each]
    figures = tuple(
        figure
        for at, each in enumerate(known)
        if isinstance(each, Said)
        for figure in each.figures(at)
    )
    return Cause(
        code=code,
        grade=grade or ("likely" if doubt else "certain"),
        summary=printable(summary or SUMMARIES[code]),
        evidence=tuple(printable(each) for each in known),
        doubt=doubt,
        data={**{each.name: each.value for each in figures}, **data},
        figures=figures,
    )


def insert_sentence(found: Cause, sentence: Said, at: int) -> Cause:
    """Insert a sentence into the evidence of a cause, before the one at a position."""
    figures = [replace(one, sentence=one.sentence + (one.sentence >= at)) for one in found.figures]
    figures = sorted([*figures, *sentence.figures(at)], key=lambda each: each.sentence)
    return replace(
        found,
        evidence=(*found.evidence[:at], printable(sentence), *found.evidence[at:]),
        data={**{each.name: each.value for each in figures}, **found.data},
        figures=tuple(figures),
    )


# The numbers that a cause is judged by, besides those that it names itself.
_ALWAYS = ("requested_bytes", "free_bytes", "allocated_bytes", "capacity_bytes")
_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("foreign", "engine-share", "mps-other"), (*_ALWAYS, "others_bytes")),
    "fragmentation": (*_ALWAYS, "unused_bytes", "largest_gap_bytes"),
    "impossible-size": ("requested_bytes",),
    **dict.fromkeys(("host-alloc", "host-commit", "pinned"), ("requested_bytes",)),
    **dict.fromkeys(("host-kill", "host-limit", "nccl", "shm"), ()),
}


def add_numbers(
    causes: Iterable[Cause], numbers: Numbers, shown_by: Callable[[str], ShownBy]
) -> tuple[Cause, ...]:
    """Give each cause the numbers that it was judged by, as far as known, and their sources."""
    found = []
    for each in causes:
        known = {name: getattr(numbers, name) for name in _EVIDENCE.get(each.code, _ALWAYS)}
        data = {name: value for name, value in known.items() if value is not None}
        figures = tuple(replace(one, shown_by=shown_by(one.name)) for one in each.figures)
        found.append(replace(each, data={**data, **each.data}, figures=figures))
    return tuple(found)


def is_in_pieces(numbers: Numbers) -> bool:
    """Return whether the unused reserved memory was enough, but fragmented."""
    asked, unused, free = (
        each or 0 for each in (numbers.requested_bytes, numbers.unused_bytes, numbers.free_bytes)
    )
    least = max(asked / 2, FRAGMENTED_FRACTION * (numbers.capacity_bytes or 0))
    return 0 < asked <= unused + free and unused >= least


def are_alike(own: int, others: Sequence[int]) -> bool:
    """Return whether processes look like ranks: as large as this one, or alike among themselves."""
    sizes = sorted(others)
    all_alike = bool(sizes) and max(own, sizes[-1]) <= _ALIKE * min(own, sizes[0])
    return all_alike or (len(sizes) > 1 and sizes[-1] <= _ALIKE * sizes[0])


# The words of `survive_oom` when it cannot help.
SURVIVAL_REFUSED = re.compile(
    r"survive_oom (could not help|cannot help|does nothing in this run)"
    r"|\[?(out-of-memory-refused|gradients-in-doubt)\b"
)


def remedy(
    advice: Advice,
    do: str | Door | None = None,
    effect: str = "",
    *,
    by_arithmetic: object = False,
    **values: object,
) -> Remedy:
    """Build a remedy from an advice, as typed or by its door; `values` fill its spelling there.

    By default, use the first door that has a spelling, except arguments in a script.
    """
    if do is None:
        do = next(door for door in advice.spellings if door is not Door.ARGUMENTS)
    if isinstance(do, Door):
        do = ("export " if do is Door.ENVIRONMENT else "") + advice.flag(do, **values)
    return Remedy(
        do=printable(do),
        effect=printable(effect or advice.effect),
        grade="arithmetic" if by_arithmetic else "known",
        price=advice.price,
    )


def remedies_for(
    cause: str, order: Iterable[Advice], made: Callable[[Advice], Remedy | None], vendor: Vendor
) -> Iterator[Remedy]:
    """Yield the remedy that `made` builds from each advice, in the vendor's terms; skip None."""
    for advice in order:
        if advice.only_on and vendor.name not in advice.only_on:
            continue
        one = made(advice)
        if one is not None and (do := vendor.translate(one.do)):
            effect = vendor.translate(one.effect) or one.effect
            yield replace(one, do=do, effect=effect, cause=cause)
