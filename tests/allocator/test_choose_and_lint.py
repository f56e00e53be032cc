"""What is exported, and what is said: torch version x platform x what the user has set x vLLM."""

from itertools import product
from typing import Any

import pytest

from trainer_plugins.allocator.lint import OURS, choose, lint
from trainer_plugins.allocator.machine import Machine, gather_machine
from trainer_plugins.allocator.variables import CUDA, HIP, UNIFIED

GOOD, OTHER, BAD_PAIR = (
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "expandable_segments:True,max_split_size_mb:128",
)
TORCHES = {
    "2.8.0": (2, 8),
    "2.9.0": (2, 9),
    "2.9.1": (2, 9),
    "2.10.0": (2, 10),
    "2.11.0": (2, 11),
    "2.13.0+cpu": (2, 13),
}
PLATFORMS: dict[str, dict[str, Any]] = {
    "linux": {},
    "wsl": {"is_wsl": True},
    "rocm6": {"rocm": (6, 4)},
    "rocm7": {"rocm": (7, 0)},
    "windows": {"is_windows": True},
    "mig": {"is_mig": True},
}
OWN = {
    "none": {},
    "unified": {UNIFIED: GOOD},
    "cuda": {CUDA: GOOD},
    "both": {UNIFIED: GOOD, CUDA: GOOD},
    "differ": {UNIFIED: OTHER, CUDA: GOOD},
    "bad pair": {UNIFIED: BAD_PAIR},
    "emptied": {CUDA: ""},
}
MATRIX = list(product(TORCHES, PLATFORMS, OWN, (False, True)))


@pytest.mark.parametrize(("version", "platform", "own", "vllm"), MATRIX)
def test_the_matrix(version: str, platform: str, own: str, vllm: bool) -> None:
    torch = TORCHES[version]
    machine = Machine(torch=torch, has_vllm=vllm, **PLATFORMS[platform])
    variables = OWN[own]
    exports, why = choose(variables, machine)
    codes = {finding.code for finding in lint(variables, machine)}
    may_expand = platform in ("linux", "rocm7") and not vllm

    # What is exported.
    if own == "none":
        assert exports == ({CUDA: OURS} if may_expand else {})
    elif own in ("differ", "bad pair"):
        assert exports == {}
    else:
        (text,) = set(OWN[own].values())
        assert exports == {CUDA: text, UNIFIED: text}
    # Never another text than the user's own, and a second run finds nothing to add.
    after = {**OWN[own], **exports}
    assert all(after[name] == text for name, text in OWN[own].items())
    if exports:
        assert set(choose(after, machine)[0].values()) == set(exports.values())
        assert "allocator-name-not-read" not in {finding.code for finding in lint(after, machine)}
    assert why

    # What is said.
    assert ("allocator-name-not-read" in codes) == (
        own in ("unified", "bad pair") and torch < (2, 10)
    )
    assert ("allocator-names-differ" in codes) == (own == "differ")
    assert ("allocator-expandable-and-max-split" in codes) == (own == "bad pair")
    assert ("allocator-expandable-unsupported" in codes) == (own == "bad pair" and not may_expand)
    assert ("allocator-deprecated-name" in codes) == (torch == (2, 9) and CUDA in OWN[own])
    if own == "none":
        assert not codes


def test_the_matrix_is_large() -> None:
    assert len(MATRIX) == 504


@pytest.mark.parametrize(
    ("text", "machine", "codes"),
    [
        ("expandable_segments:True", {}, []),
        ("max_split_size_mb:128,garbage_collection_threshold:0.8", {}, []),  # the classic pair
        ("expandable_segments:False,max_split_size_mb:128", {}, []),
        ("expandable_segments:True,roundup_power2_divisions:4", {}, []),
        ("expandable_segments:True,max_split_size_mb:128", {}, ["expandable-and-max-split"]),
        ("expandable_segments:True,garbage_collection_threshold:0.8", {}, ["expandable-and-gc"]),
        ("backend:cudaMallocAsync", {}, []),
        ("backend:cudaMallocAsync,expandable_segments:True", {}, ["async-ignores"]),
        ("backend:hipMallocAsync,max_split_size_mb:64", {"rocm": (7, 0)}, ["async-ignores"]),
        ("expandeable_segments:True", {}, ["unknown-option"]),
        ("expandable_segments:true", {}, ["bad-value"]),
        ("max_split_size_mb:512MB", {}, ["misread-value"]),
        ("max_split_size_mb:-1", {}, ["misread-value"]),
        ("max_split_size_mb:20", {}, []),
        ("throw_on_cudamalloc_oom:True", {"torch": (2, 12)}, []),
        ("throw_on_cudamalloc_oom:True", {"torch": (2, 11)}, ["option-too-new"]),
        ("foo:1,max_split_size_mb:1", {}, ["unknown-option", "bad-value"]),
    ],
)
def test_what_is_said_of_a_text(text: str, machine: dict[str, Any], codes: list[str]) -> None:
    found = lint({CUDA: text}, Machine(**machine))
    assert [finding.code for finding in found] == [f"allocator-{code}" for code in codes]


def test_an_option_of_a_torch_to_come_is_not_called_wrong() -> None:
    (finding,) = lint({UNIFIED: "expandable_segments_reserve:0.5"}, Machine(torch=(2, 15)))

    assert finding.code == "allocator-unknown-option"
    assert finding.severity.name == "WARNING"


@pytest.mark.parametrize(
    ("version", "torch", "rocm"),
    [("2.13.0+cpu", (2, 13), None), ("2.10.0+rocm7.0.1", (2, 10), (7, 0))],
)
def test_the_installed_torch_is_read(version, torch, rocm, tmp_path, monkeypatch) -> None:
    about = tmp_path / f"torch-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    machine = gather_machine({})
    assert (machine.torch, machine.rocm) == (torch, rocm)


def test_the_name_of_rocm() -> None:
    own = {HIP: GOOD}
    rocm = Machine(rocm=(7, 0))
    assert choose(own, rocm)[0] == {CUDA: GOOD, UNIFIED: GOOD}
    assert not lint(own, rocm)
    assert [finding.code for finding in lint(own, Machine())] == ["allocator-name-not-read"]


def test_a_finding_reads_well() -> None:
    (finding,) = lint({UNIFIED: "expandable_segments:True"}, Machine(torch=(2, 9)))

    assert str(finding) == (
        "[allocator-name-not-read] PYTORCH_ALLOC_CONF is set, but this torch does not read it "
        "(PYTORCH_ALLOC_CONF=expandable_segments:True; on a card torch 2.9 only reads PYTORCH_CUDA_ALLOC_CONF). "
        "Set PYTORCH_CUDA_ALLOC_CONF to the same text: every version reads it."
    )
