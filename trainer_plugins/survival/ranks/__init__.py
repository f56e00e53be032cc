"""These files know how ranks share a micro-batch, and what a failure on one asks of the others.

`protocol.py` says what a kind of ranks can do, each kind is one file with its refusals, its proof
on this torch and its passes, and `kinds.py` lists them.
"""

from trainer_plugins.survival.ranks.alone import Alone as Alone
from trainer_plugins.survival.ranks.kinds import kind_of as kind_of
from trainer_plugins.survival.ranks.protocol import Ranks as Ranks
