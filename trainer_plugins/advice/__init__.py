"""advice: what helps against an out-of-memory error, and how it is typed, all in one place."""

from trainer_plugins.advice.entry import Advice as Advice
from trainer_plugins.advice.entry import Door as Door
from trainer_plugins.advice.of_machine import *  # noqa: F403
from trainer_plugins.advice.of_moments import *  # noqa: F403
from trainer_plugins.advice.of_training import *  # noqa: F403

ALL = {name: each for name, each in globals().items() if isinstance(each, Advice)}  # by name
