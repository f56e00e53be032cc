"""Replaced: attributes of instances that are replaced for a while, and restored."""

import logging

logger = logging.getLogger(__name__)


class Replaced:
    """Replaces attributes on an instance; its class and every other instance stay as they are."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, object, object]] = []

    def put(self, owner: object, name: str, ours: object) -> None:
        """Replace an attribute of the owner."""
        self._replaced.append((owner, name, vars(owner).get(name), ours))
        setattr(owner, name, ours)

    def put_back(self, of: object = None) -> None:
        """Restore what was there before, on one owner or on all."""
        for owner, name, before, ours in reversed(self._replaced):
            if of is not None and owner is not of:
                continue
            if vars(owner).get(name) is not ours:
                logger.warning(
                    "%s was replaced once more since: that stays in place, and ours does nothing",
                    name,
                )
            elif before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced = [one for one in self._replaced if of is not None and one[0] is not of]
