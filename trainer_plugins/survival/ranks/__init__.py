"""How the ranks of a run share a micro-batch, and what a failure on one of them asks of the others.

One file a kind.
"""

from trainer_plugins.survival.ranks.alone import Alone as Alone
from trainer_plugins.survival.ranks.kinds import kind_of as kind_of
