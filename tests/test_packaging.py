"""What is installed is what the repository shows."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import trainer_plugins
from tests import processes
from trainer_plugins.launch import configs

ROOT = Path(__file__).parent.parent
APP = """
import hydra, torch, trainer_plugins, transformers

@hydra.main(version_base=None)
def main(config):
    print(*config.trainer_plugins.callbacks)
    print(trainer_plugins.__file__)
    trainer = transformers.Trainer(torch.nn.Linear(1, 1))
    print(*(type(each).__name__ for each in trainer.callback_handler.callbacks))

main()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(dist: tuple[Path, Path]) -> dict[str, set[str]]:
    """The names inside the wheel and the sdist."""
    wheel, sdist = dist
    with zipfile.ZipFile(wheel) as names, tarfile.open(sdist) as more:
        return {
            "wheel": set(names.namelist()),
            "sdist": {name.split("/", 1)[-1] for name in more.getnames()},
        }


def test_the_wheel_carries_every_file_of_the_package(built: dict[str, set[str]]) -> None:
    """The wheel is built from the sdist, so the sdist carries them too."""
    folders = ("trainer_plugins", "trainer_plugins/configs", "hydra_plugins")
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len({path for path in files if not path.endswith(".py")}) > 60
    assert files - built["wheel"] == set()


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_either_way_it_is_found(
    kind: str, dist: tuple[Path, Path], tmp_path: Path
) -> None:
    """By the shell, by Hydra and by the Python of a training that `exec` starts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    bin_ = tmp_path / "venv" / "bin"
    (packages,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    # Everything but this package comes from the environment of the tests: a .pth of a .pth is not read.
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib"))
    what = ["--editable", ROOT] if kind == "editable" else [dist[0]]
    pip = [sys.executable, "-m", "pip", "--python", bin_ / "python", "install", "--no-index"]
    flags = ["--no-deps", "--ignore-installed", "--no-build-isolation"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "app.py").write_text(APP)

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=environ, cwd=tmp_path, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(*pip, *flags, *what)
    file = Path(run(bin_ / "trainer-plugins", "configs", "path", "zero3").strip())
    app = [bin_ / "python", "app.py", "+trainer_plugins=observe"]
    keys, place, *_, names = run(bin_ / "trainer-plugins", "exec", "--", *app).splitlines()

    home = ROOT if kind == "editable" else packages
    assert file.is_relative_to(home)
    assert file.read_text() == configs.path("zero3").read_text()
    assert "memory_watchdog" in keys
    assert place == str(home / "trainer_plugins" / "__init__.py")
    assert "MemoryWatchdog" in names


def test_the_sdist_holds_what_the_readme_names(built: dict[str, set[str]]) -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\]\(([^)#:]+)\)", readme))
    named |= set(re.findall(r"^(scripts/\w+)", readme, re.MULTILINE))
    assert len(named) > 14
    assert named - built["sdist"] == set()


def test_a_package_index_would_take_both(dist: tuple[Path, Path]) -> None:
    command: list[str | Path] = [sys.executable, "-m", "twine", "check", "--strict", *dist]
    done = processes.run(command, fresh="it needs no torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def description_in(metadata: bytes) -> str:
    described = message_from_bytes(metadata)
    assert described["Description-Content-Type"] == "text/markdown"
    return str(described.get_payload(decode=True), "utf-8")  # type: ignore[arg-type]


def test_a_package_index_shows_no_link_that_leads_nowhere(dist: tuple[Path, Path]) -> None:
    wheel, _ = dist
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        shown = description_in(archive.read(name))
    assert "I have an OOM now (`docs/oom_now.md`)" in shown
    assert "docs/pictures" not in shown
    assert re.findall(r"\]\((?!https://)[^)]*\)", shown) == []


def test_once_there_is_an_address_the_links_lead_there(tmp_path: Path) -> None:
    """The build of a copy whose setup.cfg has the lines that now are a comment in it."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "trainer_plugins", tmp_path / "trainer_plugins")
    settings = (ROOT / "setup.cfg").read_text()
    at_home = re.sub(r"^# (project_urls =|    \w+ = )", r"\1", settings, flags=re.MULTILINE)
    (tmp_path / "setup.cfg").write_text(at_home.replace("https://...", "https://code.example/us"))
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    shown = description_in(metadata.read_bytes())
    assert "[Plan](https://code.example/us/blob/main/docs/plan.md)" in shown
    assert re.findall(r"\]\((?!https://)[^)]*\)", shown) == []
    told = metadata.read_text()
    assert "Project-URL: Source, https://code.example/us\n" in told


def test_nothing_but_the_package_is_installed(built: dict[str, set[str]]) -> None:
    tops = {name.split("/")[0].split("-")[0] for name in built["wheel"]}
    assert tops == {"trainer_plugins", "hydra_plugins"}
    # A namespace of all plugins of Hydra: who puts an __init__.py there hides everybody else's.
    assert {name.split("/")[1] for name in built["wheel"] if name.startswith("hydra")} == {
        "trainer_plugins_searchpath"
    }


def test_the_changelog_knows_this_version() -> None:
    newest = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == trainer_plugins.__version__


def test_importing_costs_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import trainer_plugins;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['trainer_plugins']\n"


def test_the_readme_python_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
