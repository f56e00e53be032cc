"""Contexts measured on this machine: one small file for each kind of card and version of torch.

Delete it to forget.
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
    """Where the context of this card, with the torch that is installed, is or would be kept."""
    return (
        cache_folder()
        / "contexts"
        / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', card_name)}-torch{version('torch')}.json"
    )


def remember(card_name: str, context_bytes: int, measured_in: Path) -> Path:
    """Keep a measured context for the plans to come. The file that says so.

    Raises:
        OSError: it cannot be written.
    """
    file = context_file(card_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"context_bytes": context_bytes, "measured_in": str(measured_in)}))
    draft.replace(file)
    return file


def with_measured_context(card: Card) -> Card:
    """The card with the context that was measured for it here, if one was."""
    file = context_file(card.name)
    try:
        kept = json.loads(file.read_text())
        measured = int(kept["context_bytes"])
        source = f"measured in {kept['measured_in']} and kept in {file}; --no-calibration plans without it"
    except (OSError, ValueError, KeyError, TypeError):
        return card
    return replace(card, context_bytes=measured, context_source=source)
