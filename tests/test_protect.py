"""protect(): the callbacks of a preset for one Trainer, once, where they belong, never instead of the user's own."""

import gc

import psutil
import pytest
from transformers import DefaultFlowCallback, PrinterCallback, Trainer, TrainerCallback

from tests.events import at
from tests.offers import install
from tests.written import read_steps
from trainer_plugins import (
    CudaCacheCallback,
    EvalGenerateCleanup,
    EvaluationGuard,
    KVCacheGuard,
    MemoryWatchdog,
    OOMReporter,
    Preflight,
    ReleaseEarlierRuns,
    ResumeGuard,
    StrategyInForce,
    protect,
)
from trainer_plugins.presets import PRESETS, Preset, preset

ALL = [
    StrategyInForce,
    Preflight,
    ReleaseEarlierRuns,
    CudaCacheCallback,
    EvalGenerateCleanup,
    EvaluationGuard,
    KVCacheGuard,
    ResumeGuard,
    MemoryWatchdog,
    OOMReporter,
]


def kinds(trainer) -> list[type]:
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def test_a_trainer_in_hand_is_watched_and_guarded(make_trainer, tmp_path, anywhere) -> None:
    trainer = make_trainer(max_steps=3)

    added = protect(trainer)
    assert kinds(trainer) == [DefaultFlowCallback, *ALL, PrinterCallback]
    assert [type(callback) for callback in added] == ALL
    trainer.train()

    assert read_steps(tmp_path / "run") == [1, 2, 3]


def test_again_is_harmless_and_more_is_added(make_trainer) -> None:
    trainer = make_trainer()

    assert len(protect(trainer, preset="observe", every_steps=5)) == 4
    assert protect(trainer, preset="observe") == []
    assert len(protect(trainer)) == 6
    assert kinds(trainer) == [DefaultFlowCallback, *ALL[2:8], *ALL[:2], *ALL[8:], PrinterCallback]
    assert trainer.pop_callback(MemoryWatchdog).every_steps == 5


def test_options_reach_their_callbacks(make_trainer) -> None:
    _, _, _, cache, _, evaluation, _, _, watchdog, _ = protect(
        make_trainer(), every_steps=2, warn_fraction=0.5, act_fraction=0.75, stop=True,
        release_every_steps=7, min_reclaimable_fraction=0.25, logits_to="argmax",
    )  # fmt: skip

    assert (cache.interval, cache.min_reclaimable_fraction) == (7, 0.25)
    assert evaluation.logits_to == "argmax"
    assert (watchdog.every_steps, watchdog.stop) == (2, True)
    assert (watchdog.budget.warn_fraction, watchdog.budget.act_fraction) == (0.5, 0.75)


class MyWatchdog(MemoryWatchdog):
    """A user's own."""


@pytest.mark.parametrize("own", [MemoryWatchdog, MyWatchdog])
def test_the_users_own_is_kept(make_trainer, own) -> None:
    mine = own(every_steps=3)
    trainer = make_trainer(
        mine, TrainerCallback()
    )  # the second is of no kind, and is in nobody's way

    protect(trainer)

    assert [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, MemoryWatchdog)
    ] == [mine]
    behind = [OOMReporter, own, TrainerCallback, PrinterCallback]
    assert kinds(trainer) == [DefaultFlowCallback, *ALL[:8], *behind]


def test_ours_gives_way_to_one_that_is_added_later(make_trainer) -> None:
    trainer, mine = make_trainer(), MemoryWatchdog(every_steps=2)
    protect(trainer, "observe")
    trainer.add_callback(mine)

    callbacks = trainer.callback_handler.callbacks
    assert [each for each in callbacks if isinstance(each, MemoryWatchdog)] == [mine]


def test_ours_stand_before_the_trackers(make_trainer) -> None:
    trainer = make_trainer(report_to="tensorboard")

    protect(trainer, preset="observe")

    names = [kind.__name__ for kind in kinds(trainer)]
    assert names == [
        "DefaultFlowCallback",
        "StrategyInForce",
        "Preflight",
        "MemoryWatchdog",
        "OOMReporter",
        "TensorBoardCallback",
        "PrinterCallback",
    ]


class Refuses(Trainer):
    """Takes no callbacks, and says so."""

    def __init__(self, model, args, train_dataset, eval_dataset, **kwargs) -> None:
        assert kwargs == {"callbacks": []}
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset
        )
        self.add_callback = self._refuse

    def _refuse(self, callback):
        raise NotImplementedError("no callbacks, please")


def test_a_trainer_that_refuses_callbacks_is_protected(make_trainer) -> None:
    trainer = make_trainer(trainer_class=Refuses, max_steps=2)

    protect(trainer)
    trainer.train()

    assert kinds(trainer)[1:11] == ALL


def test_a_trainer_without_its_flow(make_trainer) -> None:
    trainer = make_trainer()
    trainer.remove_callback(DefaultFlowCallback)

    protect(trainer, preset="observe")

    assert kinds(trainer) == [
        StrategyInForce,
        Preflight,
        MemoryWatchdog,
        OOMReporter,
        PrinterCallback,
    ]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"preset": "memory-safe"}, r"no preset 'memory-safe'. Did you mean memory_safe\?"),
        ({"preset": "survive", "on_refusal": "never"}, "memory_on_refusal is warn or error"),
        ({"warn_fracton": 0.8}, r"no option 'warn_fracton'. Did you mean warn_fraction\?"),
        ({"warn_fraction": 0.98}, "0.98 and 0.97"),
        ({"act_fraction": 0.5}, "0.9 and 0.5"),
        ({"every_steps": 0}, "memory_every_steps is a number of optimizer steps"),
        ({"release_every_steps": -1}, "memory_release_every_steps is a number of optimizer steps"),
        ({"every_steps": 2.5}, "memory_every_steps takes a value of type int, got 2.5"),
        ({"warn_fraction": "0.8"}, "of type float, got '0.8'"),
        ({"stop": 1}, "of type bool, got 1"),
        ({"min_reclaimable_fraction": 1.5}, "a fraction of the card, 0 to 1, got 1.5"),
        (
            {"preset": "observe", "release_every_steps": 5},
            "needs CudaCacheCallback, which is not in the preset observe",
        ),
    ],
)
def test_bad_input_adds_nothing(make_trainer, bad, says) -> None:
    trainer = make_trainer()

    with pytest.raises(ValueError, match=says):
        protect(trainer, **bad)

    assert kinds(trainer) == [DefaultFlowCallback, PrinterCallback]


def test_what_is_no_trainer() -> None:
    with pytest.raises(TypeError, match=r"takes a transformers.Trainer, got dict"):
        protect({})


def test_presets_name_what_there_is() -> None:
    assert {ours.name for ours in PRESETS} == {"observe", "memory_safe", "survive"}
    assert all(preset(ours.name) is ours for ours in PRESETS)


TEAM = """
from trainer_plugins.presets import Preset
ours = Preset("team", "the team's own", ("trainer_plugins.callbacks.MemoryWatchdog", "teampack.Counts"))
lost = Preset("lost", "", ("teampack.Gone",))
none = "memory_safe"

from transformers import TrainerCallback
class Counts(TrainerCallback):
    steps = 0
    def on_step_end(self, *args, **kwargs):
        self.steps += 1
"""
ENTRIES = """
[trainer_plugins.presets]
team = teampack:ours
lost = teampack:lost
none = teampack:none
gone = teampack:gone
"""


@pytest.fixture
def teampack(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "teampack", "1.0", TEAM, ENTRIES)
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_an_installed_package_offers_a_preset(make_trainer, teampack) -> None:
    trainer = make_trainer(max_steps=3)

    watchdog, counts = protect(trainer, preset="team", every_steps=2)
    trainer.train()

    assert watchdog.every_steps == 2
    assert counts.steps == 3
    assert isinstance(preset("team"), Preset)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "tem",
            r"Did you mean team\? Known presets: observe, memory_safe, survive, gone, lost, none, team",
        ),
        ("lost", r"names teampack.Gone, which cannot be imported"),
        ("none", r"offered as the preset 'none', but it is not a Preset: 'memory_safe'"),
        ("gone", r"cannot be loaded from teampack:gone"),
    ],
)
def test_a_bad_offer(make_trainer, teampack, name, says) -> None:
    with pytest.raises(ValueError, match=says):
        protect(make_trainer(), preset=name)


def test_many_steps_hold_no_more_than_few_but_for_the_timeline(make_trainer) -> None:
    """Threads and open files stay as they are; of objects a step leaves its entries of the timeline, which are bounded."""

    held: list[tuple[int, int, int]] = []

    def count(_) -> None:
        gc.collect()
        me = psutil.Process()
        held.append((me.num_threads(), me.num_fds(), len(gc.get_objects())))

    counts = at("step_end", count, 100, 300)
    trainer = make_trainer(counts, max_steps=300, per_device_train_batch_size=1, use_cpu=True)
    protect(trainer, "survive")
    trainer.train()
    (*before, few), (*after, many) = held
    assert after == before
    assert many - few <= 200 * 3
