"""start() prepares a Python process that has the dry libraries. Imports torch."""

import os

from trainer_plugins.testing.drycuda.inside import alone, cheap, observe, safety, shapes
from trainer_plugins.testing.drycuda.inside.process import is_dry, say
from trainer_plugins.testing.drycuda.inside.values import Values


def start() -> None:
    """Prepare this process; it says what it is on stderr.

    Raises:
        RuntimeError: torch has found another card than the dry one.
    """
    if not is_dry():
        raise RuntimeError("TRAINER_PLUGINS_DRYCUDA is set, and torch has not loaded the dry card")
    say("a card that computes nothing: losses, metrics and texts of this process mean nothing")
    cheap.skip_initialisation()
    safety.protect()
    shapes.compute_on_the_host()
    values = Values(all_numbers=os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1")
    values.__enter__()  # type: ignore[no-untyped-call] # for the rest of the process
    alone.be_all_ranks()
    observe.record()
