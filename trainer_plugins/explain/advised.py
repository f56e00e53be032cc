"""Turns advice into the remedies of an answer, with the numbers that a case has."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.vendors import Vendor
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.printable import printable

# What `survive_oom` writes where it cannot help.
SURVIVAL_REFUSED = re.compile(
    r"survive_oom (could not help|cannot help|does nothing in this run)"
    r"|\[?(out-of-memory-refused|gradients-in-doubt)\b"
)


def remedy(
    advice: Advice,
    do: str | Door,
    effect: str = "",
    *,
    by_arithmetic: object = False,
    **values: object,
) -> Remedy:
    """Make a remedy of an advice, as typed or by its door; `values` fill its spelling there."""
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
    """Yield what `made` makes of each advice, in the vendor's words; None does not apply."""
    for advice in order:
        if advice.only_on and vendor.name not in advice.only_on:
            continue
        one = made(advice)
        if one is not None and (do := vendor.translated(one.do)):
            effect = vendor.translated(one.effect) or one.effect
            yield replace(one, do=do, effect=effect, cause=cause)
