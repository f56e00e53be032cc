"""Optimizers of other packages, by their own Python: predicted, then really run on the card."""

import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import llama, rows, run
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.pretend.optimizers import PACKAGES, let_it_be_imported

MISSING = [each for each, _ in PACKAGES.values() if importlib.util.find_spec(each) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}")
LINEAR = {"optim_target_modules": ["self_attn", "mlp"], "optim_args": "rank=8"}
SETTINGS = {"apollo_adamw": LINEAR}
# Not LOMO and not layer by layer: their hooks hold memory of the card as long as the process lives.
ON_THE_CARD = [name for name in PACKAGES if "lomo" not in name and "layerwise" not in name]


def trains(path, name):
    more = {"optim": name, **SETTINGS.get(name, {})}
    return run(path, llama(hidden_size=256), data=rows(length=32), **more)


LOOP = Loop({name: partial(trains, name=name) for name in ON_THE_CARD})


@pytest.fixture
def bitsandbytes(monkeypatch) -> None:
    """What apollo_torch imports for an optimizer with 8 bits, which these runs do not use."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    for leaf in ("", ".functional", ".optim", ".optim.optimizer"):
        module = ModuleType(f"bitsandbytes{leaf}")
        module.__spec__ = ModuleSpec(module.__name__, loader=None)
        vars(module).update(__path__=[], Optimizer2State=torch.optim.Optimizer)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.all(unless=lambda name: name in ("grokadamw", "schedule_free_adamw"))
@pytest.mark.parametrize("name", ON_THE_CARD)
def test_the_card_holds_what_was_predicted(simgpu, bitsandbytes, tmp_path, name):
    LOOP.goes_round(name, tmp_path)


def test_what_each_keeps_is_told():
    names = ("adamw_torch", "schedule_free_sgd", "grokadamw", "lomo", "adalomo")
    asked = [request(tiny(), "--optim", name) for name in names]
    plans: dict[str, Any] = dict(zip(names, predict_all(asked, ENDS_A_HANG), strict=True))

    for plan in plans.values():
        assert isinstance(plan, MemoryPlan), plan
    states = {name: plans[name].moments["save"].allocated_bytes for name in names}
    adamw, sgd = plans["adamw_torch"], plans["schedule_free_sgd"]
    assert adamw.allocated_peak_bytes > sgd.allocated_peak_bytes
    # LOMO leaves no gradient of which the last step keeps a norm
    assert states["grokadamw"] == states["lomo"] + 512
    assert states["lomo"] < states["adalomo"] < states["schedule_free_sgd"]
    # GrokAdamW keeps its states in main memory
    assert plans["grokadamw"].host_ram_bytes_per_node > plans["lomo"].host_ram_bytes_per_node


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--optim", "galore_adamw"), "not predicted: the optimizer galore_adamw"),
        (("--optim", "stable_adamw"), "not predicted: the optimizer stable_adamw"),
        (
            ("--optim", "apollo_adamw", "--optim_args", "proj=svd"),
            "not predicted: APOLLO by singular values (proj=svd)",
        ),
    ],
)
def test_what_is_not_known_is_one_line(flags, line):
    (refusal,) = predict_all([request(tiny(), *flags)], ENDS_A_HANG)

    assert str(refusal).startswith(line), refusal


def test_a_package_that_is_missing_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lomo_optim" else found(name)
    )

    with pytest.raises(NotPredicted, match="pip install --no-deps lomo-optim"):
        let_it_be_imported("lomo", "")
