"""`trainer-plugins exec --fit`: find arguments with which a command fits, before it runs."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.plug_in.fitted import VARIABLE
from trainer_plugins.printable import printable
from trainer_plugins.units import size

if TYPE_CHECKING:
    from trainer_plugins.drycuda.wall import Allowed
    from trainer_plugins.planner.cards import Card
    from trainer_plugins.planner.plan import Proposal

_VOUCHES = "TRAINER_PLUGINS_DRY_VOUCHES"  # of inside/batches.py, which imports torch
# What a user may allow to be changed besides how the same result is computed.
MAY = ("precision", "optim", "peft", "length")


class DoesNotFit(Exception):  # noqa: N818 - what it says
    """Says what was tried, where nothing fits that keeps the result."""


def choose_to_fit(
    command: Sequence[str],
    given: Mapping[str, Any],
    settings: Mapping[str, str],
    gpu: str | None,
    num_gpus: int | None,
    may: Sequence[str],
    allowed: "Allowed",
    answer: TextIO,
    anyway: bool,
) -> tuple[dict[str, object], dict[str, str]]:
    """Plan a command on dry cards; return options and variables with which it fits, or none.

    Args:
        command: what will be run, launcher included.
        given: the options of the callbacks with which it will be run.
        settings: the variables of the allocator that it will get.
        gpu: the card, by name or size; None takes the fullest that is visible here.
        num_gpus: how many of them; None takes all that are visible.
        may: what may be changed, of `MAY`.
        allowed: what the command may do for real while it is planned.
        answer: where the choice is printed; what is being done goes to standard error.
        anyway: train under the preset where nothing fits.

    Raises:
        PlanError: there is no plan of this command.
        DoesNotFit: nothing that was tried fits.
    """
    from trainer_plugins.drycuda.dry_run import DryRun
    from trainer_plugins.drycuda.dry_search import Variations
    from trainer_plugins.planner.plan import PlanError
    from trainer_plugins.plug_in.options import memory_arguments

    try:
        memory_arguments(**{**given, "rows_at_once": 1})
    except ValueError as error:  # the preset has no SurviveOOM
        raise PlanError(str(error)) from error
    if unknown := {*may} - {*MAY}:
        raise PlanError(
            f"--may is {', '.join(MAY[:-1])} or {MAY[-1]}, got {', '.join(sorted(unknown))}"
        )
    tell = partial(print, file=sys.stderr, flush=True)
    say = partial(print, "trainer-plugins exec --fit:", file=answer, flush=True)
    card, number = _cards(gpu, num_gpus)
    with by_any_signal():
        vouches = {_VOUCHES: "1"} if given.get("vouch_for_loss") else {}
        asked = DryRun(
            command=command,
            card=card,
            num_cards=number,
            environment={**settings, **vouches},
            foretells=True,
            allowed=allowed,
        )
        variations = Variations(asked, tell)
        if variations.fits:
            spare = size(variations.plan.margin_bytes or 0)
            say(f"it fits as it is, {spare} to spare")
            return {}, {}
        found, failed = variations.first_that_fits(may)
    if found is None:
        why = f"nothing fits that keeps the result: {'; '.join(failed)}"
        if not anyway:
            raise DoesNotFit(why)
        say(printable(f"{why}; it trains under the preset {given['preset']}"))
        return {}, {}
    options: dict[str, object] = {}
    if found.rows_at_once:
        options["rows_at_once"] = found.rows_at_once
    if found.vouches:
        options["vouch_for_loss"] = True
    for line in _lines_of(found.proposal, {"preset": given["preset"]} | options):
        say(printable(line))
    changes = json.dumps({"planned": found.planned, "changed": found.changed})
    return options, {VARIABLE: changes} if found.changed else {}


def _lines_of(proposal: "Proposal", options: Mapping[str, Any]) -> Iterator[str]:
    """Say what is changed, what it costs, and what to type to have it without a plan."""
    words = f"{', '.join(proposal.changes)}: {size(proposal.margin_bytes)} to spare"
    yield f"{words}. Price: {proposal.price}"
    typed = f"exec --preset {options['preset']}"
    if "rows_at_once" in options:
        typed += f" --memory-rows-at-once {options['rows_at_once']}"
    if "vouch_for_loss" in options:
        typed += " --memory-vouch-for-loss"
    typed = f"{typed} -- COMMAND {proposal.flags}".rstrip()
    yield f"without a plan, type: trainer-plugins {typed}"


def _cards(gpu: str | None, num_gpus: int | None) -> "tuple[Card, int]":
    """Return the card that is named, or the visible one with the least memory free; and how many.

    Raises:
        PlanError: no card is named, and none is visible.
    """
    from trainer_plugins.check.gather_here import gather_here
    from trainer_plugins.check.machine import cards_in_use
    from trainer_plugins.planner.calibrate import with_measured_context
    from trainer_plugins.planner.cards import card_of, of_size
    from trainer_plugins.planner.plan import PlanError

    facts = gather_here(os.environ)
    found = [
        replace(
            of_size(each.name, each.reading.total_bytes),
            capacity_bytes=each.reading.free_bytes,
            capability=each.capability or (9, 0),
            guess="",
        )
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
