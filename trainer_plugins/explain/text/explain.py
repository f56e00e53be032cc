"""explain_text: from a text to causes, remedies, and what the text cannot tell."""

import io
import re
from collections.abc import Iterable
from typing import BinaryIO

from trainer_plugins.explain.answer import Cause, Explanation
from trainer_plugins.explain.text.causes import causes_of
from trainer_plugins.explain.text.causes.numbers import is_fragmented
from trainer_plugins.explain.text.excerpt import Excerpt, find_first
from trainer_plugins.explain.text.facts import Facts, gather
from trainer_plugins.explain.text.remedies import remedies_of
from trainer_plugins.units import size

# Errors that people take for an OOM of the card, and what they are.
_LOOKALIKES = (
    (r"No space left on device", "a disk is full, not the card"),
    (
        r"out of resource: shared memory",
        "a Triton kernel asks for more shared memory than a multiprocessor has",
    ),
    (r"an illegal memory access was encountered", "a kernel read or wrote outside its tensors"),
    (r"device-side assert triggered", "an index is out of range in a kernel"),
    (r"No executable batch size found", "auto_find_batch_size gave up; the OOM stands further up"),
)


def explain_text(text: str | Iterable[str], subject: str) -> Explanation:
    """Explain the first OOM of a text, or say that it has none (no causes).

    Raises:
        ValueError: the text is empty.
    """
    whole = text if isinstance(text, str) else "\n".join(text)
    return explain_stream(io.BytesIO(whole.encode(errors="replace")), subject)


def explain_stream(stream: BinaryIO, subject: str) -> Explanation:
    """Explain the first OOM of a log of any size.

    Raises:
        ValueError: it is empty, or is not text.
    """
    return explain_excerpt(find_first(stream), subject)


def explain_excerpt(excerpt: Excerpt, subject: str) -> Explanation:
    """Explain what was found in a log."""
    if excerpt.oom is None:
        return Explanation(subject=subject, causes=_lookalike(excerpt), remedies=())
    facts = gather(excerpt, excerpt.oom)
    causes = causes_of(facts)
    return Explanation(
        subject=subject,
        causes=causes,
        remedies=remedies_of(causes, facts),
        facts=_known(facts),
        unknown=_unknown(facts),
    )


def _lookalike(excerpt: Excerpt) -> tuple[Cause, ...]:
    for line in excerpt.lines:
        for pattern, meaning in _LOOKALIKES:
            if re.search(pattern, line.text):
                return (
                    Cause(
                        code="not-an-oom",
                        grade="certain",
                        summary=f"this is no OOM: {meaning}",
                        evidence=(f"The words are: {line.text.strip()[:200]}",),
                    ),
                )
    return ()


def _known(facts: Facts) -> tuple[str, ...]:
    names = {
        "asked for": facts.asked,
        "card": facts.total,
        "free": facts.free,
        "live tensors": facts.live,
        "cached": facts.unused,
        "others": facts.others,
    }
    told = [f"{name} {size(value)}" for name, value in names.items() if value is not None]
    lines = [", ".join(told)] if told else []
    if frame := facts.users_frame:
        lines.append(f"innermost line outside packages: {frame}")
    if facts.writer:
        lines.append(f"the first to fail was {'rank ' * facts.writer.isdigit()}{facts.writer}")
    if facts.progress:
        lines.append(facts.progress)
    if facts.unused is not None and facts.asked is not None and not is_fragmented(facts):
        lines.append(
            f"not fragmentation: {size(facts.unused)} cached, {size(facts.asked)} asked for"
        )
    return tuple(lines)


def _unknown(facts: Facts) -> tuple[str, ...]:
    lines = []
    if not facts.frames and facts.oom.source in ("allocator", "driver", "library", "masked"):
        lines.append("where it failed: the text has no traceback")
    if facts.oom.source == "allocator" and facts.total is None:
        lines.append("the card's numbers: the message is cut, or its library prints none")
    return tuple(lines)
