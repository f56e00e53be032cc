"""`trainer-plugins exec --fit`: plan a command, and change it so that it fits."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from trainer_plugins.check.gather_here import gather_here
from trainer_plugins.check.machine import cards_in_use, fullest_card
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.drycuda.wall import Allowed
from trainer_plugins.interrupted import interrupt_by_any_signal
from trainer_plugins.planner.calibrate import add_measured_context
from trainer_plugins.planner.cards import Card, card_of, make_card
from trainer_plugins.planner.plan import PlanError, Proposal
from trainer_plugins.plug_in.fitted import VARIABLE as CHANGES
from trainer_plugins.plug_in.options import memory_arguments
from trainer_plugins.printable import printable
from trainer_plugins.units import size

if TYPE_CHECKING:
    from trainer_plugins.cli.exec import FitOptions

MAY = ("precision", "optim", "peft", "length")
"""Changes that need the user's permission; all others keep the result."""

_VOUCHES = "TRAINER_PLUGINS_DRY_VOUCHES"  # of inside/batches.py, which imports torch


class NothingFits(PlanError):  # noqa: N818
    """Lists the attempts, none of which fits."""


def fit(
    words: Sequence[str],
    given: Mapping[str, Any],
    settings: Mapping[str, str],
    how: "FitOptions",
    answer: TextIO,
    anyway: bool,
) -> tuple[dict[str, object], dict[str, str]]:
    """Plan a command on dry cards; return options of callbacks and variables with which it fits.

    Args:
        words: the command.
        given: the options of the callbacks, as `attach` takes them.
        settings: its allocator settings.
        how: the cards, and the changes allowed.
        answer: where to print the choice; progress goes to standard error.
        anyway: whether it trains, as `given`, even if nothing fits.

    Raises:
        NothingFits: no change that keeps the result makes it fit.
        PlanError: there is no plan of this command, a change of `how` is not in `MAY`, or the
            preset lacks SurviveOOM, which would have to divide batches.
    """
    if unknown := {*how.may} - {*MAY}:
        raise PlanError(
            f"--may is {', '.join(MAY[:-1])} or {MAY[-1]}, got {', '.join(sorted(unknown))}"
        )
    try:
        memory_arguments(**{**given, "rows_at_once": 1})
    except ValueError as error:
        raise PlanError(str(error)) from error
    card, number = _choose_cards(how.gpu, how.num_gpus)
    vouches = {_VOUCHES: "1"} if given.get("vouch_for_loss") else {}
    asked = DryRun(
        command=words,
        card=card,
        num_cards=number,
        environment={**settings, **vouches},
        foretells=True,
        allowed=Allowed(writes=how.allow_writes, network=how.allow_network),
    )
    say = partial(print, "trainer-plugins exec --fit:", file=answer, flush=True)
    with interrupt_by_any_signal():
        variations = Variations(asked, partial(print, file=sys.stderr, flush=True))
        if missed := variations.plan.planned.get("missed"):
            say(f"{missed}: the program has not come to it")
        if variations.fits:
            spare = size(variations.plan.margin_bytes or 0)
            say(f"the run fits as it is, with {spare} to spare")
            return {}, {}
        found, failed = variations.first_that_fits(how.may)
    if found is None:
        why = f"nothing that keeps the result fits: {'; '.join(failed)}"
        if not anyway:
            raise NothingFits(why)
        say(printable(f"{why}; training starts under the preset {given['preset']}"))
        return {}, {}
    options: dict[str, object] = {}
    if found.rows_at_once:
        options["rows_at_once"] = found.rows_at_once
    if found.vouches:
        options["vouch_for_loss"] = True
    for line in _lines_of(found.proposal, {"preset": given["preset"]} | options):
        say(printable(line))
    changes = json.dumps({"planned": found.planned, "changed": found.changed})
    return options, {CHANGES: changes} if found.changed else {}


def _lines_of(proposal: Proposal, options: Mapping[str, Any]) -> Iterator[str]:
    """Describe the changes and their price, and the command that applies them without a plan."""
    words = f"{', '.join(proposal.changes)}: {size(proposal.margin_bytes)} to spare"
    yield f"{words}. Cost: {proposal.price}"
    typed = f"exec --preset {options['preset']}"
    if "rows_at_once" in options:
        typed += f" --memory-rows-at-once {options['rows_at_once']}"
    if "vouch_for_loss" in options:
        typed += " --memory-vouch-for-loss"
    typed = f"{typed} -- COMMAND {proposal.flags}".rstrip()
    yield f"to skip the plan next time: trainer-plugins {typed}"


def _choose_cards(gpu: str | None, num_gpus: int | None) -> tuple[Card, int]:
    """Return the named card, or the visible GPU with the least free memory; and how many.

    Raises:
        PlanError: no card is named, and none is visible.
    """
    facts = gather_here(os.environ)
    number = num_gpus or max(1, len(cards_in_use(facts)))
    if gpu is not None:
        return add_measured_context(card_of(gpu)), number
    if (found := fullest_card(facts)) is None:
        why = facts.driver_trouble or facts.no_cards or "no card is visible"
        raise PlanError(f"name the card with --gpu: {why}")
    here, reading = found
    card = replace(
        make_card(here.name, reading.total_bytes),
        capacity_bytes=reading.free_bytes,
        capability=here.capability or (9, 0),
        guess="",
    )
    return add_measured_context(card), number
