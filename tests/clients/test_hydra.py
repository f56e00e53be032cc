"""A Hydra app gets the callbacks by a word on its command line, whatever the shape in which it builds its Trainer."""

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests import processes
from tests.written import read_entries
from trainer_plugins import MemoryWatchdog
from trainer_plugins.integrations.hydra import AttachToJob
from trainer_plugins.presets import PRESETS
from trainer_plugins.record.timeline import Sample

ROOT = Path(__file__).parent.parent.parent
APP = Path(__file__).parent / "hydra_app" / "app.py"
TOLD = "++hydra.callbacks.trainer_plugins._target_=trainer_plugins.integrations.hydra.AttachToJob"
"""Hydra makes its callbacks before it takes a sweep apart: one over presets has to be told."""
SHAPES = ("forwards", "own_callbacks", "evaluates_itself", "instantiates")
CALLBACKS = "trainer_plugins.callbacks"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the app, its jobs in this folder."""
    return processes.run(
        [sys.executable, APP, *words, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"],
        cwd=folder,
        environ={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def facts(job: Path) -> dict:
    return json.loads((job / "facts.json").read_text())


def ours(job: Path) -> list[str]:
    """The classes of ours that its Trainer had; each of them once."""
    told = facts(job)
    assert told["step"] == 4
    assert len(told["callbacks"]) == told["num_callbacks"]
    return [name for name in told["callbacks"] if name.startswith("trainer_plugins.")]


def homes(names: tuple[str, ...] | list[str]) -> list[str]:
    """`trainer_plugins.callbacks.X` -> where X is really defined."""
    classes = [pkgutil.resolve_name(name) for name in names]
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]


def moments(job: Path) -> list[tuple[int, str]]:
    return [(each.step, each.moment) for each in read_entries(job, Sample)]


@pytest.mark.all
def test_each_job_of_a_multirun_has_each_callback_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--multirun", "+trainer_plugins=memory_safe", "++trainer.args.seed=1,2,3")

    assert done.returncode == 0, done.stderr[-3000:]
    (memory_safe,) = (preset.callbacks for preset in PRESETS if preset.name == "memory_safe")
    assert [ours(tmp_path / str(job)) for job in range(3)] == [homes(memory_safe)] * 3


@pytest.mark.all
def test_every_preset_reaches_every_shape(tmp_path: Path) -> None:
    presets = {preset.name: preset.callbacks for preset in PRESETS}
    done = run(
        tmp_path,
        "--multirun",
        f"+trainer_plugins={','.join(presets)}",
        f"trainer={','.join(SHAPES)}",
        TOLD,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "attaches nothing" not in done.stderr
    jobs = [tmp_path / str(number) for number in range(len(presets) * len(SHAPES))]
    for job, (preset, shape) in zip(jobs, [(p, s) for p in presets for s in SHAPES], strict=True):
        memo = ["trainer_plugins.survival.memo.SurvivalMemo"] if preset == "survive" else []
        assert ours(job) == homes(presets[preset]) + memo
        assert ("trainers.CudaCacheCallback" in facts(job)["callbacks"]) == (
            shape == "own_callbacks"
        )
        assert ("transformers.trainer_callback.TrainerCallback" in facts(job)["callbacks"]) == (
            shape == "instantiates"
        )
        # Every evaluation was seen, also that of which no callback hears (and which the Trainer
        # then makes twice).
        assert [step for step, moment in moments(job) if moment == "train"] == [1, 2, 3, 4]
        assert {step for step, moment in moments(job) if moment == "eval"} == {2, 4}


@pytest.mark.all
def test_a_sweep_over_presets_that_attaches_nothing_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--multirun", "+trainer_plugins=choice(observe)")

    assert done.returncode == 0, done.stderr[-3000:]
    assert ours(tmp_path / "0") == []
    says = "trainer_plugins: this sweep over presets attaches nothing: "
    (line,) = (line for line in done.stderr.splitlines() if line.startswith(says))
    assert line.endswith(f". Add {TOLD}")
    assert says in run(tmp_path, "--help", "+trainer_plugins=observe,survive").stderr


def test_an_app_that_passes_callbacks_on_is_given_them(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "+trainer_plugins=memory_safe",
        "trainer_plugins/attach=method_args",
        "trainer_plugins.callbacks.cuda_cache.interval=20",
        "++trainer_plugins.callbacks.memory_watchdog.every_steps=2",
        "~trainer_plugins.callbacks.kv_cache_guard",
        "trainer_plugins.callbacks.eval_cleanup=null",
    )

    assert done.returncode == 0, done.stderr[-3000:]
    names = [
        "StrategyInForce",
        "Preflight",
        "ReleaseEarlierRuns",
        "CudaCacheCallback",
        "EvaluationGuard",
        "ResumeGuard",
        "MemoryWatchdog",
        "OOMReporter",
    ]
    given = homes([f"{CALLBACKS}.{name}" for name in names])
    assert ours(tmp_path) == given
    *_, cache, _, _, watchdog, _ = given
    assert (
        json.loads((tmp_path / "_trainer_plugins" / "run.json").read_text())["override"]
        == "++trainer.args."
    )
    assert facts(tmp_path)["callbacks"][cache]["interval"] == 20
    assert facts(tmp_path)["callbacks"][watchdog]["every_steps"] == 2
    assert moments(tmp_path) == [
        (0, "begin"),
        (2, "train"),
        (2, "eval"),
        (4, "train"),
        (4, "eval"),
        (4, "end"),
    ]


@pytest.mark.all
def test_an_app_that_instantiates_callbacks_takes_ours_among_its_own(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "trainer=instantiates",
        "+trainer_plugins/callback@callbacks.watchdog=memory_watchdog",
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert ours(tmp_path) == homes(
        [f"{CALLBACKS}.MemoryWatchdog"]
    )  # and nothing was attached besides


def test_an_installation_below_a_name_with_a_space(tmp_path: Path) -> None:
    """Hydra reads the address of a config folder as it stands."""
    site = tmp_path / "sp ace"
    site.mkdir()
    for name in ("trainer_plugins", "hydra_plugins"):
        (site / name).symlink_to(ROOT / name)
    code = (
        "import trainer_plugins, sys; from hydra import compose, initialize_config_module;"
        "from hydra.core.plugins import Plugins; assert 'sp ace' in trainer_plugins.__file__;"
        "initialize_config_module('hydra.conf', version_base=None).__enter__();"
        "print(compose(overrides=['+trainer_plugins=observe']).trainer_plugins.callbacks.memory_watchdog)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command, why = [sys.executable, "-c", code], "it imports what lies there"
    done = processes.run(command, cwd=tmp_path, environ=environment, fresh=why)
    assert "trainer_plugins.callbacks.MemoryWatchdog" in done.stdout, done.stderr[-2000:]


def test_help_names_the_group(tmp_path: Path) -> None:
    shown = run(tmp_path, "--help").stdout

    assert f"trainer_plugins: {', '.join(sorted(preset.name for preset in PRESETS))}\n" in shown
    assert "trainer_plugins/attach: method_args, process\n" in shown
    callbacks = (
        "cuda_cache, eval_cleanup, evaluation_guard, headroom, kv_cache_guard, memory_watchdog,"
        " oom_reporter, preflight, release_earlier_runs, resume_guard, strategy_in_force,"
        " stream_base, survive_oom"
    )
    assert f"trainer_plugins/callback: {callbacks}\n" in shown


def test_what_cannot_be_made_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    done = run(
        tmp_path, "+trainer_plugins=memory_safe", "trainer_plugins.callbacks.cuda_cache.interval=0"
    )

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "trainer_plugins: trainer_plugins.callbacks.cuda_cache interval is a number of optimizer steps, 1 or more, got 0"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "facts.json").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("+trainer_plugins=surviv", "memory_safe"),  # one of those that there are
        (
            "trainer_plugins.callbacks.cuda_cache.intervall=5",
            "Did you mean trainer_plugins.callbacks.cuda_cache.interval?",
        ),
        (
            "trainer_plugins.callback.memory_watchdog.warn_fracton=0.8",
            "Did you mean trainer_plugins.callbacks.memory_watchdog.warn_fraction?",
        ),
        (
            "~trainer_plugins.callbacks.kv_cash_guard",
            "Did you mean trainer_plugins.callbacks.kv_cache_guard?",
        ),
    ],
)
@pytest.mark.all(but=1)
def test_what_hydra_refuses_by_itself(tmp_path: Path, word: str, says: str) -> None:
    done = run(tmp_path, "+trainer_plugins=memory_safe", word)

    assert done.returncode == 1
    assert says in done.stderr
    assert not (tmp_path / "facts.json").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("warn_fraction=0.8", "warn_fraction is not used. Did you mean trainer_plugins.callbacks.memory_watchdog.warn_fraction?"),
        ("callbaks.cuda_cache.interval=5", "callbaks is not used. Did you mean trainer_plugins.callbacks?"),
        ("callbacks.memory_wachdog.stop=true", "callbacks.memory_wachdog has no _target_, so it makes no callback. Did you mean trainer_plugins.callbacks.memory_watchdog?"),
    ],
)  # fmt: skip
@pytest.mark.all(but=1)
def test_a_plus_makes_any_key_but_none_that_is_passed_over(
    tmp_path: Path, word: str, says: str
) -> None:
    done = run(tmp_path, "+trainer_plugins=memory_safe", f"++trainer_plugins.{word}")

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"trainer_plugins: trainer_plugins.{says}"
    assert not (tmp_path / "facts.json").exists()


@pytest.mark.all
def test_an_argument_that_a_callback_does_not_take_ends_the_job(tmp_path: Path) -> None:
    word = "trainer_plugins.callbacks.memory_watchdog.warn_fracton"
    done = run(tmp_path, "+trainer_plugins=memory_safe", f"++{word}=0.8")

    assert done.returncode == 2
    meant = "Did you mean trainer_plugins.callbacks.memory_watchdog.warn_fraction?"
    assert f"trainer_plugins: our configs have no key {word}. {meant}" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("trainer_plugins: trainer_plugins.callbacks.memory_watchdog ")
    assert "unexpected keyword argument 'warn_fracton'" in last
    assert not (tmp_path / "facts.json").exists()


def test_a_group_of_another_name_is_said_to_do_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "+trainer_plugin=memory_safe")

    assert done.returncode == 0, done.stderr[-3000:]
    assert ours(tmp_path) == []
    said = "trainer_plugins: +trainer_plugin makes a key of your own. Did you mean trainer_plugins?"
    assert said in done.stderr.splitlines()


@pytest.mark.all
def test_a_callback_of_the_users_own_is_no_misspelling(tmp_path: Path) -> None:
    mine = "{_target_: trainer_plugins.callbacks.Headroom, leave_fraction: 0.1}"
    done = run(
        tmp_path,
        "+trainer_plugins=observe",
        f"++trainer_plugins.callbacks.mine={mine}",
        "trainer_plugins.callbacks.memory_watchdog.warn_fraction=0.8",
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Did you mean" not in done.stderr
    assert homes([f"{CALLBACKS}.Headroom"])[0] in ours(tmp_path)


@pytest.fixture
def app():
    """Composes the config of the app, here."""
    with initialize_config_dir(str(APP.parent / "conf"), version_base=None):
        yield lambda *overrides: compose("config", [*overrides])


def test_a_job_attaches_to_each_of_its_trainers_and_leaves_nothing_behind(
    app, make_trainer
) -> None:
    hydra, config = AttachToJob(), app("+trainer_plugins=observe")

    def watchdog():
        return make_trainer().pop_callback(MemoryWatchdog)

    assert watchdog() is None
    hydra.on_job_start(config)
    first, second = watchdog(), watchdog()
    hydra.on_job_end(config, None)

    assert first is not None
    assert second is not None
    assert first is not second
    assert watchdog() is None


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_the_presets_of_hydra_are_those_of_python(app, preset) -> None:
    entries = app(f"+trainer_plugins={preset.name}").trainer_plugins.callbacks.values()

    assert tuple(entry._target_ for entry in entries) == preset.callbacks


@pytest.mark.parametrize(
    "name", ["cuda_cache", "eval_cleanup", "kv_cache_guard", "memory_watchdog", "oom_reporter"]
)
def test_each_callback_has_a_config_with_its_own_defaults(app, name: str) -> None:
    config = app(f"+trainer_plugins/callback@it={name}").it

    made = instantiate(config)
    parameters = inspect.signature(type(made)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in ("device", "timeline")}
    assert OmegaConf.to_container(config) == {
        "_target_": f"{CALLBACKS}.{type(made).__name__}",
        **defaults,
    }


def test_a_resolver_that_hydra_does_not_take_ends_no_app(monkeypatch) -> None:
    plugin = importlib.import_module("hydra_plugins.trainer_plugins_searchpath")

    def taken(*args, **kwargs):
        raise AttributeError("an OmegaConf of another age")

    monkeypatch.delattr(OmegaConf, "register_resolver")  # of which 2.4 made what the other one was
    monkeypatch.setattr(OmegaConf, "register_new_resolver", taken)
    with pytest.raises(
        ImportError, match="another age"
    ):  # of which Hydra warns; any other error would end it
        importlib.reload(plugin)


def test_the_plugin_has_nothing_to_be_warned_of() -> None:
    code = (
        "import sys, warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import hydra_plugins.trainer_plugins_searchpath as plugin\n"
        "from omegaconf import OmegaConf\n"
        "assert OmegaConf.has_resolver('trainer_plugins.callbacks')\n"
        "print([str(one.message) for one in caught if one.filename.startswith(tuple(plugin.__path__))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


def test_the_names_of_omegaconf_2_4(monkeypatch) -> None:
    plugin = importlib.import_module("hydra_plugins.trainer_plugins_searchpath")
    registered = []

    def register_resolver(
        name, resolver, *, replace=False, use_cache=False, annotation_validation="warn"
    ):
        registered.append((name, replace))

    def register_new_resolver(*args, **kwargs):
        raise DeprecationWarning("Use register_resolver() instead")

    monkeypatch.setattr(OmegaConf, "register_resolver", register_resolver)
    monkeypatch.setattr(OmegaConf, "register_new_resolver", register_new_resolver)
    importlib.reload(plugin)

    assert registered == [("trainer_plugins.callbacks", True)]


def test_the_plugin_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hydra_plugins.trainer_plugins_searchpath;"
        "sys.exit(bool({'torch', 'transformers', 'trainer_plugins'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
