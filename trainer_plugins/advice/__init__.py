"""Collect the remedies against an out-of-memory error, and how to type each, in one place.

To add a remedy, write an entry with its flag at each door, and give it its place in
`trainer_plugins/advice/for_causes.py`. Messages refer to it, as in
`advice.LIGER.flag(Door.TRAINER)`. `python -m tests.advice.page` writes `docs/remedies.md`. The
terms of other vendors' cards are in `trainer_plugins/advice/vendors.py`.
"""

from trainer_plugins.advice.entry import Advice as Advice
from trainer_plugins.advice.entry import Door as Door
from trainer_plugins.advice.of_machine import *  # noqa: F403
from trainer_plugins.advice.of_moments import *  # noqa: F403
from trainer_plugins.advice.of_training import *  # noqa: F403

ALL = {name: each for name, each in globals().items() if isinstance(each, Advice)}  # by name
