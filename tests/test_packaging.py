"""What is installed is what the repository shows."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import trainer_plugins

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize(
    "name",
    [
        "trainer_plugins/py.typed",
        "trainer_plugins/_site/sitecustomize.py",
        "trainer_plugins/configs/accelerate/single_device.yaml",
        "trainer_plugins/configs/accelerate/zero3_offload_all.yaml",
        "trainer_plugins/configs/hydra/trainer_plugins/memory_safe.yaml",
        "hydra_plugins/trainer_plugins_searchpath/__init__.py",
        "trainer_plugins/testing/nvml/nvml.c",
        "trainer_plugins/testing/simgpu/backend.cpp",
        "trainer_plugins/drycuda/card/host.cpp",
        "trainer_plugins/report/html/parts.html.jinja",
        "trainer_plugins/report/html/style.css",
        "trainer_plugins/cli/schemas/explain.json",
        "trainer_plugins/report/html/page.js",
        "trainer_plugins/report/html/snapshot.js",
    ],
)
def test_the_wheel_carries_more_than_python(built: dict[str, set[str]], name: str) -> None:
    assert name in built["wheel"]


def test_the_sdist_can_be_built_again(built: dict[str, set[str]]) -> None:
    assert {
        "setup.cfg",
        "pyproject.toml",
        "LICENSE",
        "configs/accelerate/single_device.yaml",
    } <= built["sdist"]
    missing = {name for name in built["wheel"] if name.startswith("trainer_plugins/")} - built[
        "sdist"
    ]
    # The sdist carries the configs once, at the top or behind the link.
    assert not {name for name in missing if "/configs/" not in name}


def test_the_sdist_holds_what_the_readme_names(built: dict[str, set[str]]) -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\]\(([^)#:]+)\)", readme))
    named |= set(re.findall(r"^(scripts/\w+)", readme, re.MULTILINE))
    assert len(named) > 14
    assert named - built["sdist"] == set()


def test_a_package_index_would_take_both(dist: tuple[Path, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *dist],
        check=False,
        capture_output=True,
        text=True,
    )
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
