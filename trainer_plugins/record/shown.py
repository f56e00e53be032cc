"""A line of a traceback and a process on the card, as a record or a log shows them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a traceback."""

    file: str  # path from the package's folder: `transformers/trainer.py`
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on the card, as the driver lists it."""

    pid: int
    used_bytes: int | None
    name: str | None
    is_own: bool
    is_of_user: bool = False  # it belongs to the user of the run, who can end it
