"""A misspelt moment or category is refused where it enters, and does not vanish from the plan."""

import json

import pytest

from trainer_plugins.planner import MemoryPlan, MomentPeak, TensorAtPeak
from trainer_plugins.planner.tracing.events import ALLOC, Event, Storage, Trace
from trainer_plugins.planner.tracing.replay import replay
from trainer_plugins.planner.tracing.trace import Tracker

TENSOR = TensorAtPeak(
    num_bytes=512,
    category="weights",
    module="",
    operation="aten::empty",
    moment="load",
    shape=(128,),
    dtype="float32",
)
PLAN = MemoryPlan(
    allocated_peak_bytes=512,
    reserved_peak_bytes=1024,
    nvidia_smi_peak_bytes=1024,
    host_ram_bytes_per_node=0,
    moment="load",
    breakdown={"weights": 512},
    top_tensors=(TENSOR,),
    moments={"load": MomentPeak(allocated_bytes=512, reserved_bytes=1024)},
)


@pytest.mark.parametrize("moment", ["optimiser step", "saving", ""])
def test_an_unknown_moment_never_enters_a_trace(moment):
    tracker = Tracker("cuda", None)
    with pytest.raises(ValueError, match=f"no moment '{moment}'; it has load, forward"):
        tracker.moment = moment
    with pytest.raises(ValueError, match="no moment"), tracker.during(moment):
        pass
    assert tracker.moment == "load"
    assert tracker.trace().events == ()
    storage = Storage(512, 0, "load", "aten::empty", "", "weights", (128,), "float32")
    with pytest.raises(ValueError, match="no moment"):
        replay(Trace((storage,), (Event(ALLOC, 0, moment),)))


@pytest.mark.parametrize("category", ["weight", "activation", ""])
def test_an_unknown_category_never_enters_a_trace(category):
    tracker = Tracker("cuda", None)
    with pytest.raises(ValueError, match=f"no category '{category}'; it has weights"):
        tracker.tag([], category)
    with pytest.raises(ValueError, match="no category"), tracker.as_category(category):
        pass


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("moment", "eval", "'eval' is none of load"),
        ("moments", {"eval": {"allocated_bytes": 1, "reserved_bytes": 1}}, "'eval' is none of"),
        ("breakdown", {"activation": 512}, "'activation' is none of weights"),
    ],
)
def test_a_plan_refuses_them(field, value, line):
    assert MemoryPlan.from_json(PLAN.to_json()) == PLAN
    fields = json.loads(PLAN.to_json())
    with pytest.raises(ValueError, match=line):
        MemoryPlan.from_json(json.dumps({**fields, field: value}))
    with pytest.raises(ValueError, match="'eval' is none of load"):
        MemoryPlan.from_json(
            json.dumps({**fields, "top_tensors": [{**fields["top_tensors"][0], "moment": "eval"}]})
        )
