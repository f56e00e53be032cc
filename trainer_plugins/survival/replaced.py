"""Replaced: attributes of instances that others stand in for meanwhile, put back as they were."""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class Replaced:
    """On the instance: the class, and every other instance, stay as they are."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Let ours stand there."""
        self._replaced.append((owner, name, vars(owner).get(name), ours))
        setattr(owner, name, ours)

    def put_back(self, of: Any = None) -> None:
        """What stood there before; of one owner, or of all."""
        for owner, name, before, ours in reversed(self._replaced):
            if of is not None and owner is not of:
                continue
            if vars(owner).get(name) is not ours:
                logger.warning(
                    "%s was replaced once more since: that is left in place, and ours does nothing",
                    name,
                )
            elif before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced = [one for one in self._replaced if of is not None and one[0] is not of]
