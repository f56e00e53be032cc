"""A trace of all layers is made from traces of few, also where DDP's first buffers span layers."""

from trainer_plugins.planner.compare.extrapolate import longer, without_passing
from trainer_plugins.planner.plan import Category
from trainer_plugins.planner.tracing.events import ALLOC, BEGIN, FREE, Event, Storage, Trace

_LAYER, _BUFFER = 90, 320


def trace_of(num_layers: int) -> Trace:
    """Send weights in buffers, keep a bucket of gradients; then each layer makes something."""
    storages: list[Storage] = []
    events = [Event(BEGIN, -1, "forward")]

    def make(num_bytes: int, category: Category, is_kept: bool) -> int:
        number = len(storages)
        storages.append(Storage(num_bytes, 0, "forward", "aten::cat", "", category, (), "uint8"))
        events.append(Event(ALLOC, number, "forward"))
        if not is_kept:
            events.append(Event(FREE, number, "forward"))
        return number

    full, rest = divmod(num_layers * _LAYER, _BUFFER)
    sent = [make(each, "sharding buffers", is_kept=True) for each in [_BUFFER] * full + [rest]]
    events += [Event(FREE, number, "forward") for number in sent]
    make(num_layers, "sharding buffers", is_kept=True)
    kept = [make(_LAYER, "activations", is_kept=True) for _ in range(num_layers)]
    gathered = make(7, "sharding buffers", is_kept=True)
    make(1, "activations", is_kept=False)
    events.append(Event(FREE, gathered, "forward"))
    events += [Event(FREE, number, "forward") for number in reversed(kept)]
    return Trace(tuple(storages), tuple(events))


def seen(trace: Trace) -> list[tuple[int, int]]:
    return [
        (event.kind, trace.storages[event.number].num_bytes if event.number >= 0 else 0)
        for event in trace.events
    ]


def test_buffers_that_span_layers_do_not_repeat_and_what_is_behind_them_does() -> None:
    few = [trace_of(3), trace_of(4)]
    assert longer(few, 33) is None
    found = longer([without_passing(each) for each in few], 33)
    assert found is not None
    assert seen(found) == seen(without_passing(trace_of(36)))


def test_a_buffer_beside_which_something_is_made_stays() -> None:
    left = seen(without_passing(trace_of(3)))
    assert (ALLOC, 7) in left
    assert (ALLOC, 3) in left, "the bucket of gradients is kept"
    assert (ALLOC, _BUFFER) not in left
