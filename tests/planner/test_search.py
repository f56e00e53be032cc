"""`plan --search` and `--explain-change`: many predictions, held against predictions of each run in full."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.planner.several import IS_TOO_OLD
from tests.processes import ENDS_A_HANG
from tests.schemas import read_answer
from trainer_plugins import checkpointing
from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.allocator.variables import names_read
from trainer_plugins.cli import app
from trainer_plugins.launch.configs import path
from trainer_plugins.planner import MemoryPlan, PlanError
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.compare.extrapolate import longer
from trainer_plugins.planner.compare.foresight import Repetition, repetition_of
from trainer_plugins.planner.compare.lines import SearchRequest
from trainer_plugins.planner.compare.saved import ALL, SWITCHES, changes_of
from trainer_plugins.planner.compare.search import search
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.tracing.events import ALLOC, FREE, Event, Storage, Trace
from trainer_plugins.planner.tried import is_safe
from trainer_plugins.report.page import show
from trainer_plugins.report.plans_text import search_report

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 13,
    "vocab_size": 4096,
}
SHORT = {**LLAMA, "num_hidden_layers": 3}
ROWS = 2
ALONE = ("--accelerate-config", str(path("single_device")))
"""Of the ways to launch only that one."""


MICRO_BATCHES = (1, 2)


def plan(model: Path, *arguments: str):
    return CliRunner().invoke(
        app, ["plan", "--model", str(model), *arguments], env={"COLUMNS": "250"}
    )


def in_full(config, way, gpu) -> PlanRequest:
    micro_batch, gradient_checkpointing, length = way
    arguments = (
        *("--output_dir", "runs", "--per_device_train_batch_size", str(micro_batch)),
        *("--gradient_accumulation_steps", str(max(1, ROWS // micro_batch))),
        *("--gradient_checkpointing", str(gradient_checkpointing)),
    )
    source = ConfigSource(
        config=config, arguments=arguments, sequence_length=length, dtype="bfloat16"
    )
    return PlanRequest(source=source, card=card_of(gpu))


NOTHING = MemoryPlan(
    allocated_peak_bytes=1,
    reserved_peak_bytes=1,
    nvidia_smi_peak_bytes=1,
    host_ram_bytes_per_node=0,
    capacity_bytes=2,
    moment="forward",
    breakdown={},
    top_tensors=(),
    moments={},
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def short_llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHORT))
    return tmp_path


@pytest.mark.all
def test_the_largest_micro_batch_is_that_of_a_try_of_all(llama: Path):
    done = plan(
        llama,
        *("--dtype", "bf16", "--gpu", "650MiB,sm_90", "--search", "--seq-length", "256", "--json"),
        *("--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "2", *ALONE),
    )
    assert done.exit_code == 0, done.output
    found = read_answer(done.stdout, "plan")
    assert found["effective_batch"] == ROWS
    assert all(line["micro_batch"] * line["accumulation_steps"] == ROWS for line in found["lines"])
    ways = [*product(MICRO_BATCHES, (False, True), (256,))]
    outcomes = predict_all([in_full(LLAMA, way, "650MiB,sm_90") for way in ways], ENDS_A_HANG)
    plans = {
        way: outcome
        for way, outcome in zip(ways, outcomes, strict=True)
        if isinstance(outcome, MemoryPlan)
    }
    for line in found["lines"]:
        fitting = [
            size
            for size in MICRO_BATCHES
            if is_safe(plans[size, line["gradient_checkpointing"], 256])
        ]
        assert line["micro_batch"] == max(fitting)
        exact = asdict(plans[max(fitting), line["gradient_checkpointing"], 256])
        assert predicted(line) == pytest.approx(predicted(exact), rel=0.01)
        if line["gradient_checkpointing"]:
            assert predicted(line) == predicted(exact), "the best one is no probe"
            assert not line["in_full"], "from few layers, and exact all the same"
    best = found["best"]
    assert best == {
        **found["lines"][1],
        "flags": best["flags"],
        "hydra_overrides": best["hydra_overrides"],
    }
    assert best["micro_batch"] > found["lines"][0]["micro_batch"]
    assert found["best_plan"]["reserved_peak_bytes"] == best["reserved_peak_bytes"]
    assert f"--per_device_train_batch_size {best['micro_batch']}" in best["flags"]
    assert (
        f"++trainer.args.gradient_accumulation_steps={best['accumulation_steps']}"
        in best["hydra_overrides"]
    )


def predicted(line) -> list:
    """What a line of a search has of its plan."""
    return [
        line[name]
        for name in (
            "allocated_peak_bytes",
            "reserved_peak_bytes",
            "host_ram_bytes_per_node",
            "fits",
        )
    ]


@pytest.mark.all
def test_on_several_cards_each_shipped_way_to_launch_has_a_line(short_llama: Path):
    flags = (
        "--num-gpus",
        "16",
        "--gpu",
        "24GiB",
        "--search",
        "--seq-length",
        "64",
        "--per_device_train_batch_size",
        "1",
    )
    done = plan(short_llama, *flags, "--json")
    if IS_TOO_OLD:
        assert "its collectives take no fake tensors" in done.output
        return
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    wide = {"ddp_multinode", "fsdp2_multinode", "fsdp2_offload", "zero2", "zero3_multinode"}
    wide |= {"zero3_offload_optimizer", "zero3_offload_all_multinode"}
    assert not found["refused"]
    plain = {line["strategy"] for line in found["lines"]}
    assert plain == {name for name in wide if "offload" not in name}
    why = dict(found["not_tried"])
    assert {name for name in why if "checkpointing" not in name} == wide - plain
    assert why["zero2 with checkpointing"] == "all rows at once fit without it"
    assert (found["effective_batch"], found["num_gpus"]) == (16, 16)
    allocated = {line["strategy"]: line["allocated_peak_bytes"] for line in found["lines"]}
    assert allocated["fsdp2_multinode"] < allocated["ddp_multinode"]


@pytest.mark.all
def test_a_way_that_fails_is_a_line_with_its_reason_and_not_the_end(short_llama: Path):
    """Real ranks fail of it, and do not with what is named: `tests/planner/test_ranks.py`."""
    flags = ("--dtype", "bf16", "--lora-r", "4", "--load-in-4bit", "--num-gpus", "2")
    more = ("--seq-length", "16", "--gpu", "24GiB", "--search", "--per_device_train_batch_size")
    done = plan(short_llama, *flags, *more, "1", "--bf16", "True")
    if IS_TOO_OLD:
        assert "its collectives take no fake tensors" in done.output
        return
    assert done.exit_code == 0, done.output
    assert re.search(r"ddp +on +1 ", done.output), "with checkpointing it runs"
    assert re.search(r"ddp +off +not", done.output)
    assert "ddp: the rehearsal of the run failed, and so will the run: DDP looks for" in done.output
    assert "--ddp_find_unused_parameters False" in done.output


def test_cards_that_share_rows_have_one_batch_between_them() -> None:
    exported = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
    run = in_full(LLAMA, (4, False, 64), "t4")
    run = replace(run, num_gpus=4, launch_file="fsdp2.yaml", environment=exported)
    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=6)
    fits = replace(NOTHING, fits=True)
    asked = SearchRequest(run=run, lengths=(64,))
    found = search(asked, args, lambda _: fits, lambda _: (fits, True))
    assert (found.num_gpus, found.effective_batch) == (4, 4 * 6 * 2)


@pytest.mark.parametrize("fitting_tokens", [0, 1, 64, 300, 700, 5000, 24 * 256])
def test_the_effective_batch_is_kept_and_the_micro_batch_the_largest_divisor(
    fitting_tokens, capsys
):
    """The search itself, on a card on which so many tokens fit, and one less when the run is predicted in full."""
    asked = SearchRequest(run=in_full(LLAMA, (4, False, 64), "t4"), lengths=(256, 64))
    tried: list[PlanRequest] = []

    def fits(request, tokens):
        tried.append(request)
        given = request.source.arguments
        args = dict(zip(given[::2], given[1::2], strict=True))
        rows = int(args["--per_device_train_batch_size"])
        assert rows * int(args["--gradient_accumulation_steps"]) == 24
        return replace(NOTHING, fits=rows * request.source.sequence_length <= tokens)

    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=6)
    found = search(
        asked,
        args,
        lambda request: fits(request, fitting_tokens),
        lambda request: (fits(request, fitting_tokens - 1), True),
    )

    def largest(length, tokens):
        return max(
            (size for size in (1, 2, 3, 4, 6, 8, 12, 24) if size * length <= tokens), default=1
        )

    assert {line.strategy for line in found.lines} | {name for name, _ in found.not_tried} >= {
        "single_device",
        "one_gpu_7b_offload",
    }
    for line in found.lines:
        length = line.sequence_length
        assert line.micro_batch in (
            largest(length, fitting_tokens),
            largest(length, fitting_tokens - 1),
        )
        assert line.fits is (line.micro_batch_tokens <= fitting_tokens - line.in_full)
    sizes = (largest(length, fitting_tokens - 1) * length for length in (64, 256))
    best = max((tokens for tokens in sizes if tokens < fitting_tokens), default=0)
    assert (found.best.micro_batch_tokens if found.best is not None else 0) == best
    assert found.best is None or (found.best.in_full and not found.best.gradient_checkpointing)
    assert len(tried) <= 8 * 4 + 8 * 5, "it bisects"
    show(search_report(found))
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("Nothing fits on t4" if found.best is None else "Best on t4")
    assert sum(line.startswith("Not tried, see --json: ") for line in others) == bool(
        found.not_tried
    )


@pytest.mark.all
def test_an_interrupted_search_tells_what_it_found_and_ends_its_subprocess(llama: Path):
    command = [*(sys.executable, "-m", "trainer_plugins", "plan", "--model", str(llama))]
    command += ["--gpu", "650MiB,sm_90", "--search", "--seq-length", "256", "--dtype", "bf16"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=llama
    )
    assert process.stderr is not None
    assert "single_device, 256 tokens" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    shown, _ = process.communicate(timeout=ENDS_A_HANG)
    assert process.returncode == 130
    assert "Found so far" in shown
    assert "single_device" in shown
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.all
def test_nothing_fits_is_exit_code_3(short_llama: Path):
    flags = ("--dtype", "bf16", "--bf16", "True", "--lora-r", "8", "--search-lengths", "128,64")
    more = ("--per_device_train_batch_size", "1", *ALONE)
    done = plan(short_llama, "--gpu", "516MiB,sm_90", "--search", *flags, *more)
    assert done.exit_code == 3, done.output
    assert "Nothing fits" in done.output
    lengths, checkpointing = 2, 1 if IS_TOO_OLD else 2  # where an adapter has no gradients with it
    assert done.output.count("none fits") == lengths * checkpointing


def test_the_order_in_which_autocast_drops_its_copies_does_not_matter():
    """It is that of a hash map of addresses: another one in each run."""
    order = Random(0)

    def trace_of(num_layers: int) -> Trace:
        copy = Storage(
            512, 0, "forward", "aten::_to_copy", "", "autocast copies of weights", (), ""
        )
        freed = order.sample(range(3 * num_layers), 3 * num_layers)
        events = [Event(ALLOC, number, "forward") for number in range(3 * num_layers)]
        events += [Event(FREE, number, "forward") for number in freed]
        return Trace((copy,) * (3 * num_layers), tuple(events), {})

    extrapolated = longer([trace_of(3), trace_of(4), trace_of(5)], 7)
    assert extrapolated is not None
    assert len(extrapolated.events) == len(trace_of(10).events)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (LLAMA, Repetition(13, 1)),
        (SHORT, None),
        (
            {**LLAMA, "model_type": "gemma3_text", "head_dim": 32, "num_hidden_layers": 58},
            Repetition(58, 6),
        ),
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 9},
            None,
        ),
        ({**LLAMA, "model_type": "no-such-model"}, None),
    ],
)
def test_layers_that_differ_are_not_taken_for_others(config, found):
    assert repetition_of(ConfigSource(config=config, arguments=())) == found


@pytest.mark.all
def test_what_a_switch_saves_is_predicted_anew(short_llama: Path):
    done = plan(
        short_llama,
        *(
            "--dtype",
            "bf16",
            "--gpu",
            "t4",
            "--seq-length",
            "16",
            "--per_device_train_batch_size",
            "1",
            "--json",
        ),
        *(
            "--optim",
            "adamw_torch",
            "--explain-change",
            "fused-optimizer",
            "--explain-change",
            "lora+length/2",
        ),
    )
    assert done.exit_code == 0, done.output
    found = read_answer(done.stdout, "plan")
    fused, lora = found["changes"]
    assert found["plan"]["moment"] == "optimizer step", "so few tokens"
    # torch/optim/adamw.py, _multi_tensor_adamw: the square roots of all second moments at once.
    assert fused["allocated_saved_bytes"] == pytest.approx(
        2 * found["plan"]["num_parameters"], rel=0.02
    )
    assert lora["change"] == "lora+length/2"
    assert lora["how"] == "--lora-r 16 --lora-target all-linear, half of --seq-length"
    assert (
        lora["nvidia_smi_peak_bytes"] + lora["reserved_saved_bytes"]
        == found["plan"]["nvidia_smi_peak_bytes"]
    )
    assert lora["allocated_saved_bytes"] > fused["allocated_saved_bytes"]
    assert lora["fits"] is True


def test_what_cannot_be_predicted_is_a_line_with_its_reason(short_llama: Path):
    config = ("--dtype", "bf16", "--seq-length", "16", "--lora-r", "4")
    done = plan(
        short_llama, *config, "--explain-change", "lora", "--explain-change", "expandable-segments"
    )
    assert done.exit_code == 0, done.output
    assert "this run already trains an adapter" in done.output
    variable = names_read(gather_machine(os.environ))[-1]  # torch 2.9 reads the old name only
    assert f"{variable}=expandable_segments:True" in done.output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--search"], "--search needs a card"),
        (["--search-lengths", "64"], "--search-lengths belongs to --search"),
        (
            ["--search", "--gpu", "t4", "--search-lengths", "1k"],
            "--search-lengths needs numbers of tokens",
        ),
        (
            ["--explain-change", "chekpointing"],
            "no switch is called 'chekpointing': is it checkpointing?",
        ),
        (["--explain-change", "adamw_torch_fused"], "is it fused-optimizer?"),
        (["--explain-change", "all", "--search", "--gpu", "t4"], "different tables"),
        (
            ["--search", "--gpu", "t4", "--gradient_checkpoint", "True"],
            f"is it --{checkpointing.NAME}?",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(llama: Path, arguments: list[str], line: str):
    done = plan(llama, *arguments)
    assert done.exit_code == 2, done.output
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_all_is_each_switch_alone():
    assert changes_of([ALL, "lora+checkpointing"]) == (
        *SWITCHES,
        "lora+checkpointing",
    )
    with pytest.raises(PlanError, match=r"no switch is called 'nothing'"):
        changes_of(["nothing"])
