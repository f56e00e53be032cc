"""One process is rank 0 of several: the store in which ranks meet waits for no other."""

import os
import sys
from typing import Any

import torch.distributed as dist


def let_the_store_be_alone() -> None:
    """Replace the store if the card says that its process is alone (card.txt)."""
    with open(os.path.join(os.environ["TRAINER_PLUGINS_DRYCUDA"], "card.txt")) as card:
        if "alone=1\n" not in card.read():
            return
    # `import torch.distributed.rendezvous` would give the function of that name.
    import torch.distributed.rendezvous  # noqa: F401

    home = sys.modules["torch.distributed.rendezvous"]
    home._create_c10d_store = lambda *_, **__: _Alone()  # type: ignore[attr-defined]


class _Alone(dist.HashStore):  # type: ignore[misc,name-defined]
    """Answers for the ranks that are not there as this rank would."""

    def wait(self, *_: Any) -> None:
        """Wait for nothing."""
