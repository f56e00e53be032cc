"""A misspelt moment or category is refused where it enters, and does not vanish from the plan."""

import json

import pytest

from trainer_plugins.planner.plan import MemoryPlan, MomentPeak

PLAN = MemoryPlan(
    allocated_peak_bytes=512,
    reserved_peak_bytes=1024,
    nvidia_smi_peak_bytes=1024,
    host_ram_bytes_per_node=0,
    moment="load",
    breakdown={"weights": 512},
    moments={"load": MomentPeak(allocated_bytes=512, reserved_bytes=1024)},
)


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
