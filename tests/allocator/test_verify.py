"""What was asked, against what the running torch really uses."""

import os
import sys

import pytest
import torch

from tests import processes
from trainer_plugins.allocator.in_force import InForce, verify
from trainer_plugins.allocator.machine import Machine
from trainer_plugins.allocator.variables import CUDA, UNIFIED

ASKED, OTHER = "expandable_segments:True", "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("in_force", "texts", "machine", "reason"),
    [
        (InForce(ASKED), {UNIFIED: ASKED}, Machine(), None),
        (InForce(f"{OTHER},{ASKED}"), {UNIFIED: f"{OTHER},{ASKED}"}, Machine(), None),
        (InForce(""), {}, Machine(), "no variable of this process holds them"),
        (
            InForce(""),
            {UNIFIED: ASKED},
            Machine(torch=(2, 9)),
            "torch 2.9 does not read PYTORCH_ALLOC_CONF",
        ),
        (
            InForce(OTHER),
            {UNIFIED: ASKED, CUDA: OTHER},
            Machine(),
            f"{CUDA}={OTHER} takes precedence over {UNIFIED}",
        ),
        (
            InForce(""),
            {UNIFIED: ASKED},
            Machine(),
            "torch had read PYTORCH_ALLOC_CONF before it was set",
        ),
        (
            InForce(ASKED, {"expandable_segments": False}),
            {UNIFIED: ASKED},
            Machine(is_wsl=True),
            "under WSL",
        ),
        (
            InForce(ASKED, {"expandable_segments": False}),
            {UNIFIED: ASKED},
            Machine(),
            "a build without that option",
        ),
        (
            InForce(refusal="Expected 'True'"),
            {UNIFIED: "x"},
            Machine(),
            "torch refused to read them (Expected 'True')",
        ),
        # A call may have changed the text and left the option: values count more than text.
        (InForce(OTHER, {"expandable_segments": True}), {UNIFIED: ASKED}, Machine(), None),
    ],
)
def test_the_reason_when_they_differ(in_force, texts, machine, reason) -> None:
    finding = verify(ASKED, in_force, texts, machine)

    assert (finding is None) == (reason is None)
    assert finding is None or reason in finding.summary


def test_what_is_the_default_anyway_is_in_force() -> None:
    assert verify("expandable_segments:False,backend:native", InForce(), {}, Machine()) is None


def run(code: str, may_abort: bool = False, **variables: str) -> str:
    """Run a program with these variables, and no others of the allocator."""
    environ = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    start = (
        "import os, torch\nfrom trainer_plugins.allocator.in_force import check, read_in_force\n"
    )
    reason = "torch may read the variables while it is imported"
    call = [sys.executable, "-c", start + code]
    done = processes.run(call, environ=environ | variables, fresh=reason)
    assert done.returncode == 0 or may_abort, done.stderr
    return done.stdout.strip()


can_say = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings") and torch.version.cuda is None,
    reason="a torch before 2.12 without CUDA does not say",
)


@can_say
def test_in_a_real_process_that_is_right() -> None:
    assert (
        run("print(check(), read_in_force().text)", PYTORCH_CUDA_ALLOC_CONF=ASKED)
        == f"None {ASKED}"
    )
    assert run("print(check())") == "None"


@can_say
def test_in_a_real_process_where_the_other_variable_wins() -> None:
    said = run(f"print(check({ASKED!r}))", PYTORCH_ALLOC_CONF=ASKED, PYTORCH_CUDA_ALLOC_CONF=OTHER)

    assert said.startswith("[allocator-settings-not-in-force]")
    # 2.9 does not even look at the other.
    assert (
        "takes precedence over PYTORCH_ALLOC_CONF" in said
        or "does not read PYTORCH_ALLOC_CONF" in said
    )


@can_say
@pytest.mark.all
def test_in_a_real_process_that_sets_it_too_late() -> None:
    said = run(
        f"read_in_force()\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = {ASKED!r}\nprint(check())"
    )

    assert "torch had read PYTORCH_CUDA_ALLOC_CONF before it was set" in said
    assert "expandable_segments is False instead of True" in said


@can_say
@pytest.mark.all
def test_after_the_import_is_still_early_enough() -> None:
    assert run(f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = {ASKED!r}\nprint(check())") == "None"


@can_say
@pytest.mark.all
def test_in_a_real_process_with_a_value_that_torch_refuses() -> None:
    # torch 2.9 reads it once more on its way out, and aborts.
    said = run(
        "print(check(), flush=True)",
        may_abort=True,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:true",
    )
    assert "torch refused to read them" in said


@pytest.mark.skipif(
    torch.version.cuda is None, reason="only a build with CUDA reports values; it needs no card"
)
@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:64,garbage_collection_threshold:0.8,release_lock_on_cudamalloc:True",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[>:4]",
        "roundup_power2_divisions:[131072:2,>:4]",
        "pinned_num_register_threads:8,pinned_use_cuda_host_register:True,expandable_segments:True",
        "graph_capture_record_stream_reuse:True,backend:native",
        "backend:cudaMallocAsync",
    ],
)
def test_the_values_that_a_cuda_build_reports_are_those_of_the_parser(text: str) -> None:
    assert run("print(check())", PYTORCH_CUDA_ALLOC_CONF=text) == "None"


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="torch 2.10 and later"
)
@pytest.mark.skipif(
    torch.version.cuda is None, reason="only a build with CUDA reports values; it needs no card"
)
def test_a_later_call_that_turns_it_off() -> None:
    code = "read_in_force()\ntorch._C._accelerator_setAllocatorSettings('expandable_segments:False')\nprint(check())"
    assert "a call has changed them since" in run(code, PYTORCH_CUDA_ALLOC_CONF=ASKED)

    # A call that does not name it leaves it as it was, though the text is another: what counts is
    # the value.
    code = code.replace("expandable_segments:False", "pinned_use_background_threads:True")
    assert run(code, PYTORCH_CUDA_ALLOC_CONF=ASKED) == "None"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_on_a_card_after_its_first_use() -> None:
    said = run(
        f"torch.zeros(1, device='cuda')\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = {ASKED!r}\nprint(check())"
    )
    assert "torch had read PYTORCH_CUDA_ALLOC_CONF before it was set" in said

    said = run("torch.zeros(1, device='cuda')\nprint(check())", PYTORCH_CUDA_ALLOC_CONF=ASKED)
    assert said == "None"
