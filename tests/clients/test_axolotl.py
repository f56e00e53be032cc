"""The axolotl plugin, called as axolotl documents that it calls plugins. axolotl itself is not installed here."""

import importlib
import sys
import types

import pytest
from transformers import DefaultFlowCallback, PrinterCallback

from tests.test_protect import ALL, kinds
from trainer_plugins import MemoryWatchdog, OOMReporter, Preflight, StrategyInForce

pydantic = pytest.importorskip("pydantic")
NAME = "trainer_plugins.integrations.axolotl.MemoryPlugin"


class BasePlugin:
    """What a plugin of callbacks overrides of `axolotl.integrations.base.BasePlugin` (067b021c8, 2026-07-24)."""

    def register(self, cfg): ...

    def get_input_args(self): ...

    def add_callbacks_pre_trainer(self, cfg, model):
        return []

    def add_callbacks_post_trainer(self, cfg, trainer):
        return []


class AxolotlInputConfigBase(pydantic.BaseModel):  # type: ignore[name-defined]
    """Somebody's YAML, read: keys that no model has are dropped."""

    micro_batch_size: int = 1


@pytest.fixture
def plugin(monkeypatch):
    base = types.ModuleType("axolotl.integrations.base")
    vars(base)["BasePlugin"] = BasePlugin
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    module, _, name = NAME.rpartition(".")
    yield getattr(importlib.import_module(module), name)()
    sys.modules.pop(module)


def train_as_axolotl_does(plugin, yaml: dict, make_trainer):
    plugin.register(yaml)
    module, _, name = plugin.get_input_args().rpartition(".")
    merged = type(
        "AxolotlInputConfig",
        (AxolotlInputConfigBase, getattr(importlib.import_module(module), name)),
        {},
    )
    cfg = merged(**yaml).model_dump(exclude_none=True)
    callbacks = plugin.add_callbacks_pre_trainer(cfg, None)
    trainer = make_trainer(*callbacks, max_steps=2)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def test_the_trainer_of_axolotl_is_protected(plugin, make_trainer) -> None:
    trainer = train_as_axolotl_does(
        plugin, {"micro_batch_size": 2, "memory_warn_fraction": 0.5}, make_trainer
    )

    assert kinds(trainer) == [DefaultFlowCallback, *ALL, PrinterCallback]
    assert trainer.pop_callback(MemoryWatchdog).budget.warn_fraction == 0.5


def test_a_preset_in_the_yaml(plugin, make_trainer) -> None:
    trainer = train_as_axolotl_does(plugin, {"memory_preset": "observe"}, make_trainer)

    ours = [StrategyInForce, Preflight, MemoryWatchdog, OOMReporter]
    assert kinds(trainer) == [DefaultFlowCallback, *ours, PrinterCallback]


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ({"memory_warn_fracton": 0.5}, "Did you mean warn_fraction"),
        ({"memory_preset": "surviv"}, "Did you mean survive"),
        ({"memory_every_steps": 0}, "is a number of optimizer steps"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(plugin, yaml, says) -> None:
    with pytest.raises(ValueError, match=says):
        plugin.register(yaml)
