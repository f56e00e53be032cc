"""`trainer-plugins exec --fit`: find arguments with which a command fits, before it runs."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.plug_in.fitted import VARIABLE
from trainer_plugins.printable import printable
from trainer_plugins.units import size

if TYPE_CHECKING:
    from trainer_plugins.planner.cards import Card
    from trainer_plugins.testing.drycuda.wall import Allowed

# What a user may allow to be changed besides how the same result is computed.
MAY = ("precision", "optim", "peft", "length")


class DoesNotFit(Exception):  # noqa: N818 - what it says
    """Says what was tried, where nothing fits that keeps the result."""


def variables_to_fit(
    command: Sequence[str],
    gpu: str | None,
    num_gpus: int | None,
    may: Sequence[str],
    allowed: "Allowed",
    answer: TextIO,
) -> dict[str, str]:
    """Plan a command on dry cards; return the variables with which it fits, none if it does.

    Args:
        command: what will be run, launcher included.
        gpu: the card, by name or size; None takes the fullest that is visible here.
        num_gpus: how many of them; None takes all that are visible.
        may: what may be changed, of `MAY`.
        allowed: what the command may do for real while it is planned.
        answer: where the choice is printed; what is being done goes to standard error.

    Raises:
        PlanError: there is no plan of this command.
        DoesNotFit: nothing that was tried fits.
    """
    from trainer_plugins.planner.plan import PlanError
    from trainer_plugins.testing.drycuda.dry_run import DryRun
    from trainer_plugins.testing.drycuda.dry_search import Variations

    if unknown := {*may} - {*MAY}:
        raise PlanError(
            f"--may is {', '.join(MAY[:-1])} or {MAY[-1]}, got {', '.join(sorted(unknown))}"
        )
    tell = partial(print, file=sys.stderr, flush=True)
    say = partial(print, "trainer-plugins exec --fit:", file=answer, flush=True)
    card, number = _cards(gpu, num_gpus)
    with by_any_signal():
        variations = Variations(
            DryRun(command=command, card=card, num_cards=number, foretells=True, allowed=allowed),
            tell,
        )
        if variations.fits:
            spare = size(variations.spare_bytes(variations.plan))
            say(f"it fits as it is, {spare} to spare")
            return {}
        found, failed = variations.first_that_fits(may)
    if found is None:
        raise DoesNotFit(f"nothing fits that keeps the result: {'; '.join(failed)}")
    proposal = found.proposal
    words = f"{', '.join(proposal.changes)}: {size(proposal.margin_bytes)} to spare"
    say(printable(f"{words}. Price: {proposal.price}"))
    say(printable(proposal.flags))
    return {VARIABLE: json.dumps({"planned": found.planned, "changed": found.changed})}


def _cards(gpu: str | None, num_gpus: int | None) -> "tuple[Card, int]":
    """Return the card that is named, or the visible one with the least memory free; and how many.

    Raises:
        PlanError: no card is named, and none is visible.
    """
    from trainer_plugins.check.gather_here import gather_here
    from trainer_plugins.check.machine import cards_in_use
    from trainer_plugins.planner.cards import Card, card_of, with_measured_context
    from trainer_plugins.planner.plan import PlanError

    facts = gather_here(os.environ)
    found = [
        Card(each.name, each.reading.free_bytes, each.capability or (9, 0))
        for each in cards_in_use(facts)
        if each.reading is not None
    ]
    number = num_gpus or max(1, len(found))
    if gpu is not None:
        return with_measured_context(card_of(gpu)), number
    if not found:
        why = facts.driver_trouble or facts.no_cards or "no card is visible"
        raise PlanError(f"name the card with --gpu: {why}")
    return with_measured_context(min(found, key=lambda card: card.capacity_bytes)), number
