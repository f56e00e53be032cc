"""Keep contexts that were measured on this machine, one small file per card and torch version.

Delete a file to forget its measurement.
"""

import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from trainer_plugins.compiled import cache_folder
from trainer_plugins.planner.cards import Card


def context_file(card_name: str) -> Path:
    """Return the file for the context of this card with the installed torch; it may not exist."""
    return (
        cache_folder()
        / "contexts"
        / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', card_name)}-torch{version('torch')}.json"
    )


def remember(card_name: str, context_bytes: int, measured_in: Path) -> Path:
    """Keep a measured context for later plans, and return its file.

    Args:
        card_name: the name of the card.
        context_bytes: the measured context, in bytes.
        measured_in: the folder of the run that it was measured in.

    Raises:
        OSError: the file cannot be written.
    """
    file = context_file(card_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"context_bytes": context_bytes, "measured_in": str(measured_in)}))
    draft.replace(file)
    return file


def with_measured_context(card: Card) -> Card:
    """Return the card with the context measured on this machine, or unchanged if there is none."""
    file = context_file(card.name)
    try:
        kept = json.loads(file.read_text())
        measured = int(kept["context_bytes"])
        source = (
            f"measured in {kept['measured_in']} and kept in {file}; "
            "--no-calibration plans without it"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return card
    return replace(card, context_bytes=measured, context_source=source)
