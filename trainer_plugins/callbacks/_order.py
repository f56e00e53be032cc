"""Where a callback stands among those of its Trainer."""

import sys
from collections.abc import Callable
from types import FrameType

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler


def move_before_trackers(callback: TrainerCallback) -> bool:
    """Move a callback in front of the trackers that `report_to` names, so that they see what it adds to the logs.

    Trackers stand before the callbacks of the user, in a list that no event is given; so it is
    taken from the call that is being made, and this has to be called from an event. False where
    there is no such list.
    """
    callbacks = _callbacks_being_called(sys._getframe())
    if not any(one is callback for one in callbacks):
        return False
    place = callbacks.index(callback)
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    first = next((index for index, one in enumerate(callbacks) if isinstance(one, trackers)), place)
    # The list is being walked through, and stands at this callback: a move to the front neither
    # skips nor repeats any.
    if first < place:
        callbacks.insert(first, callbacks.pop(place))
    return True


def keep_first_place(is_it: Callable[[TrainerCallback], bool]) -> bool:
    """Empty all places but the first that one callback has in its Trainer's list.

    True where there were more.

    This has to be called from an event. What is put there does nothing: the list is being walked
    through, and a place taken out would skip the one behind it.
    """
    callbacks = _callbacks_being_called(sys._getframe())
    places = [place for place, one in enumerate(callbacks) if is_it(one)]
    for place in places[1:]:
        callbacks[place] = TrainerCallback()
    return len(places) > 1


def _callbacks_being_called(frame: FrameType | None) -> list[TrainerCallback]:
    while frame is not None:
        # By name first: to read the variables of other frames, such as the training loop's, would
        # keep them alive.
        if frame.f_code.co_name == "call_event":
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                found: list[TrainerCallback] = handler.callbacks
                return found
        frame = frame.f_back
    return []
