"""attach(): every Trainer that is built meanwhile has fresh callbacks of a preset, once; and then all is as it was."""

import copy
import functools
import gc
import inspect
import logging
import warnings
from dataclasses import dataclass

import pytest
from transformers import (
    DefaultFlowCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

from tests.events import at
from tests.offers import install, install_transformers
from tests.test_protect import ALL, MyWatchdog, Refuses, kinds
from tests.written import read_steps
from trainer_plugins import (
    MemoryWatchdog,
    OOMReporter,
    Preflight,
    StrategyInForce,
    attach,
    attached,
    detach,
    protect,
)
from trainer_plugins.oldest import OLDEST

INIT, ADD = Trainer.__init__, Trainer.add_callback

OBSERVE = [StrategyInForce, Preflight, MemoryWatchdog, OOMReporter]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    detach()
    assert Trainer.__init__ is INIT
    assert Trainer.add_callback is ADD


def ours(trainer) -> list[type]:
    return [kind for kind in kinds(trainer) if kind in ALL]


def test_each_trainer_has_its_own(make_trainer) -> None:
    attach()
    attach()
    first = make_trainer()
    second = make_trainer(trainer_class=Seq2SeqTrainer, args_class=Seq2SeqTrainingArguments)
    refuses = make_trainer(trainer_class=Refuses)
    detach()

    assert ours(first) == ours(second) == ours(refuses) == ALL
    assert kinds(first)[0] is DefaultFlowCallback
    assert not set(map(id, first.callback_handler.callbacks)) & set(
        map(id, second.callback_handler.callbacks)
    )
    assert ours(make_trainer()) == []


def test_it_trains_and_trains_on_from_a_checkpoint(make_trainer, tmp_path) -> None:
    saves = {
        "save_strategy": "steps",
        "save_steps": 2,
        "restore_callback_states_from_checkpoint": True,
    }
    with attached("memory_safe", every_steps=2):
        make_trainer(max_steps=4, **saves).train()
        again = make_trainer(max_steps=6, **saves)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))

    assert again.state.global_step == 6
    assert ours(again) == ALL
    assert read_steps(tmp_path / "run") == [2, 4, 6]


def test_nested_repeated_and_one_after_the_other(make_trainer) -> None:
    with attached():
        with attached("observe", every_steps=3):
            inner = make_trainer()
        outer = make_trainer()
    jobs = []
    for _ in range(3):
        with attached("observe"):
            jobs.append(make_trainer())

    assert ours(inner) == OBSERVE
    assert inner.pop_callback(MemoryWatchdog).every_steps == 3
    assert ours(outer) == ALL
    assert [ours(job) for job in jobs] == [OBSERVE] * 3
    assert Trainer.__init__ is INIT


def test_the_signature_stays() -> None:
    before = inspect.signature(Trainer.__init__)
    with attached():
        assert Trainer.__init__ is not INIT
        assert inspect.signature(Trainer.__init__) == before


@pytest.mark.parametrize("own", [MemoryWatchdog, MyWatchdog])
@pytest.mark.parametrize("how", ["argument", "add_callback", "class"])
def test_the_users_own_is_kept(make_trainer, own, how) -> None:
    mine = own(every_steps=3)
    with attached():
        trainer = make_trainer(*[mine] * (how == "argument"))
        if how != "argument":
            trainer.add_callback(mine if how == "add_callback" else own)

    assert ours(trainer)[:4] == ALL[:4]
    watchdogs = [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, MemoryWatchdog)
    ]
    assert [type(watchdog) for watchdog in watchdogs] == [own]
    assert how == "class" or watchdogs == [mine]


def test_in_training_ours_stays_and_ends_what_it_began(make_trainer) -> None:
    late = at("step_end", lambda _: trainer.add_callback(MemoryWatchdog), 1)
    with attached("observe"):
        trainer = make_trainer(late, max_steps=2)
        trainer.train()

    assert ours(trainer) == [*OBSERVE, MemoryWatchdog]


def test_what_is_popped_stays_away(make_trainer) -> None:
    with attached():
        trainer = make_trainer(max_steps=2)
        popped = trainer.pop_callback(MemoryWatchdog)
        trainer.train()

    assert isinstance(popped, MemoryWatchdog)
    assert ours(trainer) == [kind for kind in ALL if kind is not MemoryWatchdog]


@dataclass
class Unhashable(TrainerCallback):
    """As people write them: a dataclass that compares by value has no hash."""

    every: int = 1


def test_a_callback_without_a_hash(make_trainer) -> None:
    with attached("observe"):
        trainer = make_trainer(Unhashable(), max_steps=1)
        trainer.add_callback(Unhashable(2))
    with attached("observe"):  # looks at those that are built
        pass
    trainer.train()

    assert ours(trainer) == OBSERVE


def test_the_state_can_be_copied(make_trainer) -> None:
    copies: list = []
    with attached():
        keeps = at("step_end", lambda now: copies.append(copy.deepcopy(now.state)))
        make_trainer(keeps, max_steps=2).train()

    assert copies[-1].global_step == 2


def test_ours_gives_way_to_one_that_is_added_later(make_trainer, caplog) -> None:
    mine = MemoryWatchdog(every_steps=2)
    with attached("observe"):
        trainer = make_trainer(max_steps=4)
    trainer.add_callback(mine)
    with caplog.at_level(logging.WARNING, "trainer_plugins"):
        trainer.train()

    assert read_steps(trainer.args.output_dir) == [2, 4]
    assert "added twice" not in caplog.text


def test_an_exception_inside_puts_all_back(make_trainer) -> None:
    with pytest.raises(RuntimeError, match="of the user"), attached():
        raise RuntimeError("of the user")

    assert Trainer.__init__ is INIT
    assert ours(make_trainer()) == []


def test_a_wrapper_above_ours(make_trainer, monkeypatch) -> None:
    built = []
    attach("observe")
    below = Trainer.__init__

    @functools.wraps(below)
    def theirs(self, *args, **kwargs):
        below(self, *args, **kwargs)
        built.append(self)

    monkeypatch.setattr(Trainer, "__init__", theirs)
    detach()
    bare = make_trainer()
    attach("observe")
    watched = make_trainer()
    still = Trainer.__init__
    monkeypatch.undo()  # they leave; what is on top now is ours

    assert still is theirs
    assert built == [bare, watched]
    assert [ours(trainer) for trainer in built] == [[], OBSERVE]


def test_a_warning_keeps_the_line_of_the_user(make_trainer) -> None:
    class Warns(Trainer):
        """The Trainer itself calls this while it is built: two levels up is who builds it."""

        def add_callback(self, callback) -> None:
            warnings.warn("of the past", FutureWarning, stacklevel=3)
            super().add_callback(callback)

    def built_at() -> set[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(trainer_class=Warns)
        return {one.filename for one in caught if str(one.message) == "of the past"}

    without = built_at()
    with attached("observe"):
        assert built_at() == without
    assert without


def test_those_built_before_are_named_once(make_trainer, caplog) -> None:
    protected = make_trainer()
    protect(protected)
    bare = [make_trainer(), make_trainer()]
    alive = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Trainer) and hasattr(each, "callback_handler")
    ]
    named = [
        each for each in alive if not ours(each)
    ]  # other tests of this process may have left some
    assert protected not in named
    assert all(each in named for each in bare)

    with caplog.at_level(logging.WARNING, "trainer_plugins"):
        attach()
        attach("observe")

    (said,) = caplog.messages
    assert said.startswith(f"{len(named)} Trainers were built before attach()")
    assert "trainer_plugins.protect(trainer)" in said
    assert [ours(trainer) for trainer in bare] == [[], []]


BROKEN = """
from trainer_plugins.presets import Preset
ours = Preset("broken", "raises", ("brokenpack.Raises",))
class Raises:
    def __init__(self):
        raise KeyError("somebody's bug")
"""


def test_what_fails_in_a_preset_does_not_stop_training(
    make_trainer, tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "site").mkdir()
    install(
        tmp_path / "site",
        "brokenpack",
        "1",
        BROKEN,
        "[trainer_plugins.presets]\nbroken = brokenpack:ours\n",
    )
    monkeypatch.syspath_prepend(tmp_path / "site")

    with attached("broken"), caplog.at_level(logging.ERROR, "trainer_plugins"):
        trainers = [make_trainer(max_steps=2), make_trainer(max_steps=2)]
        for trainer in trainers:
            trainer.train()

    assert [trainer.state.global_step for trainer in trainers] == [2, 2]
    (said,) = [
        record for record in caplog.records if "trains without our callbacks" in record.message
    ]
    assert "somebody's bug" in said.exc_text


@pytest.mark.parametrize(
    "bad",
    [{"preset": "observ"}, {"warn_fracton": 1}, {"warn_fraction": 2.0}, {"on_refusal": "never"}],
)
def test_bad_input_changes_nothing(make_trainer, bad) -> None:
    with pytest.raises(ValueError, match=r"no preset|no option|a budget needs|needs SurviveOOM"):
        attach(**bad)

    assert Trainer.__init__ is INIT
    with attached("observe"):
        with pytest.raises(ValueError, match="no preset"), attached("observ"):
            pass
        assert ours(make_trainer()) == OBSERVE


def test_a_transformers_that_is_too_old(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(install_transformers(tmp_path, "4.45.1"))

    with pytest.raises(ValueError, match=r"works with transformers .* or newer, but this is 4\.45"):
        attach()

    assert Trainer.__init__ is INIT


def test_what_is_supported_is_what_is_installed() -> None:
    from tests.test_packaging import ROOT

    settings = (ROOT / "setup.cfg").read_text()
    assert all(f"{name}>={oldest}\n" in settings for name, oldest in OLDEST.items())
