"""Changes the place of a callback in its Trainer's list, which events do not get."""

from collections.abc import Callable

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from trainer_plugins.upkeep.frames import frames_above


def move_before_trackers(callback: TrainerCallback) -> bool:
    """Move a callback before the trackers of `report_to`, so that they see what it adds to logs.

    Call it from an event: the list is taken from the call in progress. False if there is no list.
    """
    callbacks = _callbacks_being_called()
    if not any(one is callback for one in callbacks):
        return False
    place = callbacks.index(callback)
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    first = next((index for index, one in enumerate(callbacks) if isinstance(one, trackers)), place)
    # The list is being iterated, and is at this callback: moving it forward neither skips nor
    # repeats any.
    if first < place:
        callbacks.insert(first, callbacks.pop(place))
    return True


def keep_first_place(is_it: Callable[[TrainerCallback], bool]) -> bool:
    """Keep only the first of a callback's places in its Trainer's list.

    Call it from an event. The other places get a callback that does nothing: the list is being
    iterated, and removing one would skip the next.

    Returns:
        Whether there was more than one place.
    """
    callbacks = _callbacks_being_called()
    places = [place for place, one in enumerate(callbacks) if is_it(one)]
    for place in places[1:]:
        callbacks[place] = TrainerCallback()
    return len(places) > 1


def _callbacks_being_called() -> list[TrainerCallback]:
    for frame in frames_above():
        # Check the name first: reading the variables of other frames, such as the training loop's,
        # would keep them alive.
        if frame.f_code.co_name == "call_event":
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                found: list[TrainerCallback] = handler.callbacks
                return found
    return []
