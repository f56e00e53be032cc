"""What `plan -- COMMAND` refuses, and what it says where torch's build for CUDA is not there."""

import functools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests import processes
from trainer_plugins.allocator.model import AllocatorRules
from trainer_plugins.cli import app
from trainer_plugins.compiled import package_site, plain_compiler
from trainer_plugins.drycuda import unavailable_reason
from trainer_plugins.drycuda.cuda_build import fetch, site_with_cuda
from trainer_plugins.drycuda.smallest import smallest_room
from trainer_plugins.inside.start import _compile_later
from trainer_plugins.inside.values import Values, see_into_operators
from trainer_plugins.snapshot.cards import Event, Segment, SnapshotCard
from trainer_plugins.units import MIB

COMMAND = ("--", "python", "train.py", "--lr", "1")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_it_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    """Told not to fetch, and where there is no network: exit code 2, and what to type."""
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", str(tmp_path))
    monkeypatch.setenv("TRAINER_PLUGINS_FETCH", "never")
    done = CliRunner().invoke(app, ["plan", "--gpu", "24GiB", *COMMAND])
    assert done.exit_code == 2
    assert "was built without CUDA: `plan --dry-env` downloads" in done.stderr
    assert [*tmp_path.iterdir()] == []

    monkeypatch.delenv("TRAINER_PLUGINS_FETCH")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    done = CliRunner().invoke(app, ["plan", "--gpu", "24GiB", *COMMAND])
    assert done.exit_code == 2
    assert "dry card: downloading the CUDA build of torch" in done.stderr
    assert "on a machine with a network `plan --dry-env` downloads it" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h1000"), "unknown GPU 'h1000'"),
        (("--gpu", "24GiB", "--lora-r", "8"), "--lora-r: a command after -- sets this itself"),
        (
            ("--gpu", "24GiB", "--model", "m", "--host-memory", "9GiB"),
            "--model, --host-memory: a command",
        ),
        (("--gpu", "24GiB", "--explain-change", "magic"), "unknown change 'magic'"),
        (
            ("--gpu", "24GiB", "--snapshot", "/nowhere/x.pickle"),
            "must be a file in an existing folder",
        ),
    ],
)
def test_what_a_command_says_itself_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", *words, *COMMAND])
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.all
def test_a_stray_word_beside_a_model_is_no_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpu", "24GiB", "8"])
    assert done.exit_code == 2
    assert "unknown option 8: neither plan nor TrainingArguments has it" in done.stderr


def test_a_file_of_another_program_is_left_to_that_program() -> None:
    done = CliRunner().invoke(app, ["plan", "--gpu", "24GiB", "--config", "axolotl.yml"])
    assert done.exit_code == 2
    assert "-- axolotl train axolotl.yml" in done.stderr


def test_what_is_marked_to_be_compiled_is_when_it_is_called_first() -> None:
    """bitsandbytes marks functions that no plan calls, and torch's compiler takes seconds to import."""
    made: list[dict[str, object]] = []

    def compile(function, **options):
        made.append(options)
        return function

    mark = functools.partial(_compile_later, compile)

    def double(number: int) -> int:
        return 2 * number

    several = [mark(double), mark(model=double), mark(dynamic=False)(double)]
    assert made == []
    assert [each(2) for each in (*several, *several)] == [4] * 6
    assert made == [{}, {}, {"dynamic": False}], "once each"
    mark(torch.nn.Identity())
    assert len(made) == 4


@pytest.mark.parametrize("key", [("CompositeExplicitAutograd",), ()], ids=["by place", "by name"])
def test_values_are_computed_inside_an_operator_however_it_is_registered(monkeypatch, key) -> None:
    monkeypatch.setattr(torch.library.Library, "impl", torch.library.Library.impl)
    values, modes = Values(), []
    see_into_operators(values)

    def double(x: torch.Tensor) -> torch.Tensor:
        modes.append(_get_current_dispatch_mode())
        return 2 * x

    library = torch.library.Library(f"seen_inside_{len(key)}", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl(
        "double", double, *key, **{} if key else {"dispatch_key": "CompositeExplicitAutograd"}
    )
    made = getattr(torch.ops, f"seen_inside_{len(key)}").double(torch.ones(1))
    assert (made.item(), modes) == (2, [values])


def test_another_system_is_named(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    said = "the dry card needs Linux on x86-64 or aarch64; this is darwin"
    assert said in (unavailable_reason() or "")


def test_another_kind_of_processor_is_named(monkeypatch) -> None:
    names = ("Linux", "here", "6.1", "1", "riscv64")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(names))
    assert "this is linux on riscv64" in (unavailable_reason() or "")


def test_no_smallest_card_is_found_where_the_first_events_are_lost() -> None:
    size, at = 20 * MIB, 2 << 30
    kept = Segment(at, size, 0, 0, is_small=False, is_expandable=False, is_private=False, blocks=())
    taken, used, freed = (Event(each, at, size, 0) for each in ("segment_alloc", "alloc", "free"))
    for events, room in (((taken, used, freed), size), ((freed, used, freed), None)):
        card = SnapshotCard(0, (kept,), events, (), has_mapped=False, has_taken=False)
        found = smallest_room(card, AllocatorRules(), 80 << 30)
        assert (found and found[0]) == room


VERSION = torch.__version__.partition("+")[0]


def wheel(folder: Path, package: str, version: str, file: str) -> None:
    """A wheel that holds a single file."""
    about = f"{package}-{version}.dist-info"
    files = {
        f"{package}/{file}": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as made:
        for name, text in files.items():
            made.writestr(name, text)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_where_no_compiler_is_installed_one_is_fetched(tmp_path: Path, monkeypatch) -> None:
    torchs = site_with_cuda()
    for name, value in {
        "TRAINER_PLUGINS_CACHE": str(tmp_path),
        "PATH": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "torch-for-cuda").symlink_to(torchs.parent)
    wheel(tmp_path, "ziglang", "0.17.1", "zig")
    said: list[str] = []
    assert plain_compiler("c++") == []
    assert fetch(said.append) == tmp_path / "torch-for-cuda" / torchs.name
    assert ["downloading ziglang" in line for line in said] == [True]
    assert plain_compiler("c++") == [str(package_site() / "ziglang" / "zig"), "c++"]
    fetch(said.append)
    assert len(said) == 1, "once"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_two_that_fetch_at_once_fetch_it_once_and_a_broken_fetch_leaves_nothing(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    environment = {
        **os.environ,
        "TRAINER_PLUGINS_CACHE": str(cache),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    fetches = "from trainer_plugins.drycuda.cuda_build import fetch; print(fetch(print))"

    def fetched() -> list[str]:
        call, pipe = (sys.executable, "-c", fetches), subprocess.PIPE
        both = [
            processes.start(call, environ=environment, stdout=pipe, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        return [each.communicate()[0].decode() for each in both]

    wheel(tmp_path, "torch", VERSION, "lib/libtorch_cpu.so")
    for said in fetched():
        assert "pip found no CUDA build of torch" in said
    assert [each for each in cache.rglob("*") if each.is_file()] == []
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    left = cache / "torch-for-cuda" / f"{VERSION}-python{python}" / "x"
    left.mkdir(parents=True)
    wheel(tmp_path, "torch", VERSION, "lib/libtorch_cuda.so")
    assert sorted("downloading the CUDA build of torch" in said for said in fetched()) == [
        False,
        True,
    ]
    assert [*cache.rglob("libtorch_cuda.so")] == [left.parent / "torch/lib/libtorch_cuda.so"]
    assert not left.exists()
