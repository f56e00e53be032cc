"""Find a CUDA build of torch: the installed one, or one of the same version in the cache."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer_plugins.compiled import cache_folder, lock, package_site, plain_compiler
from trainer_plugins.planner.plan import PlanError

_TRITON = re.compile(r"^Requires-Dist: (triton[=<>!~ ]*[\d.]+)", re.MULTILINE)


# The name describes a state, like torch.cuda.is_available.
class DryCudaUnavailable(PlanError):  # noqa: N818
    """The dry card is not available here; the text says in one line what is missing."""


def site_with_cuda() -> Path:
    """Return the folder that holds a CUDA build of `torch`, which is not imported.

    Raises:
        DryCudaUnavailable: there is none; the text says how to get it.
    """
    site, version = _locate()
    if not _is_for_cuda(site):
        raise DryCudaUnavailable(
            f"the installed torch {version} was built without CUDA: `plan --dry-env` downloads"
            " the CUDA build (some 700 MB) and leaves the installed one alone"
        )
    return site


def fetch(tell: Callable[[str], None]) -> Path:
    """Download the CUDA build of the installed version into the cache, unless it is there.

    pip fetches torch and triton from its usual index, without CUDA's libraries. If no C++ compiler
    is installed, it also fetches the package `ziglang`, which is one.

    Raises:
        DryCudaUnavailable: pip failed; its last line is in the text.
    """
    site, version = _locate()
    if not _is_for_cuda(site):
        site.parent.mkdir(parents=True, exist_ok=True)
        with lock(site.parent):  # two plans that start together fetch it once
            if not _is_for_cuda(site):
                _fetch_torch(version, site, tell)
    if not plain_compiler("c++"):
        fetch_package(_COMPILER, tell)
    return site


PACKAGES = ("bitsandbytes", "liger_kernel")
"""Packages whose own code runs in the plan of a request."""

_COMPILER = "ziglang"
_SIZES = {"bitsandbytes": "some 60 MB", "liger_kernel": "1 MB", _COMPILER: "some 90 MB"}


def fetch_package(name: str, tell: Callable[[str], None]) -> bool:
    """Fetch a package without its dependencies; False if it is installed or may not be fetched.

    Raises:
        DryCudaUnavailable: pip failed; its last line is in the text.
    """
    site = package_site()
    if os.environ.get("TRAINER_PLUGINS_FETCH") == "never" or find_spec(name):
        return False
    site.mkdir(parents=True, exist_ok=True)
    with lock(site):
        if (site / name).is_dir():
            return False
        tell(f"dry card: downloading {name} ({_SIZES[name]}, once for all projects) into {site}")
        with TemporaryDirectory(dir=site.parent, prefix="fetching-") as folder:
            _pip(Path(folder), name.replace("_", "-"))
            for each in Path(folder).iterdir():
                if not (site / each.name).exists():
                    each.replace(site / each.name)
    return True


def _fetch_torch(version: str, site: Path, tell: Callable[[str], None]) -> None:
    """Install into a temporary folder beside the target, and rename it once it is complete."""
    tell(
        f"dry card: downloading the CUDA build of torch {version} (some 700 MB, once for all"
        f" projects) into {site}"
    )
    with TemporaryDirectory(dir=site.parent, prefix="fetching-") as folder:
        draft = Path(folder) / "site"
        _pip(draft, f"torch==={version}")
        (about,) = draft.glob("torch-*.dist-info/METADATA")
        if triton := _TRITON.search(about.read_text(errors="replace")):
            _pip(draft, triton[1].replace(" ", ""))
        if not _is_for_cuda(draft):
            raise DryCudaUnavailable(
                f"pip found no CUDA build of torch {version}: set PIP_INDEX_URL to an index"
                " that has one"
            )
        shutil.rmtree(site, ignore_errors=True)  # left by an interrupted pip
        draft.replace(site)


def _find_installed() -> Path:
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        raise DryCudaUnavailable(
            "the dry card needs Linux on x86-64 or aarch64; this is"
            f" {sys.platform} on {os.uname().machine}"
        )
    for folder in map(Path, sys.path):
        if (folder / "torch" / "version.py").is_file():
            return folder
    raise DryCudaUnavailable("the dry card needs torch: pip install torch")


def _locate() -> tuple[Path, str]:
    """Return the place of torch's CUDA build, existing or not, and the installed version."""
    installed = _find_installed()
    text = (installed / "torch" / "version.py").read_text()
    found = re.search(r"__version__ = '([^'+]+)", text)
    version = found[1] if found else "VERSION"
    if _is_for_cuda(installed):
        return installed, version
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder().absolute() / "torch-for-cuda" / f"{version}-python{python}", version


def _is_for_cuda(site: Path) -> bool:
    return (site / "torch" / "lib" / "libtorch_cuda.so").is_file()


def _pip(site: Path, what: str) -> None:
    """Run pip to install into a folder; on a terminal it shows its progress."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site), what]
    is_seen = sys.stderr.isatty()
    done = subprocess.run(
        command if is_seen else [*command, "--quiet"],
        stdout=sys.stderr if is_seen else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:]
        raise DryCudaUnavailable(
            f"pip could not download {what}: {''.join(why)}; on a machine with a network `plan"
            " --dry-env` downloads it, and TRAINER_PLUGINS_CACHE names a folder that both"
            " machines see"
        )
