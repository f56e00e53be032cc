"""The shipped launch files train, evaluate, save and resume on two CPU ranks, as one process would."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

from tests import processes, rounding
from tests.distributed.launched import (
    QUIET,
    TRAIN,
    Launched,
    environment,
    launch,
    torchrun,
)
from trainer_plugins.finding import Severity

FOUR_STEPS = (
    "--max_steps",
    "4",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "2",
    "--save_steps",
    "2",
)
FSDP_SCRIPT = Path(__file__).with_name("fsdp_on_cpu.py")
ZERO = ["zero2", "zero3", "zero3_offload_all"]
# What wraps the model, the ZeRO stage, what is offloaded, and which optimizer updates the weights.
RUNS = {
    "ddp": ("DDP", None, {}, "AdamW"),
    "fsdp2": ("FSDP", None, {}, "AdamW"),
    "zero2": ("DeepSpeed", 2, {}, "AdamW"),
    "zero3": ("DeepSpeed", 3, {}, "AdamW"),
    "zero3_offload_all": ("DeepSpeed", 3, {"optimizer": "cpu", "param": "cpu"}, "DeepSpeedCPUAdam"),
}
STARTED = {"zero3_offload_all": "launched as a user does, with a real start of each process"}

TERMS = rounding.terms_of(num_layers=2, width=1024)  # of the model that examples/train.py makes
OF_A_LOSS = rounding.of_a_mean(
    TERMS, num_values=2 * 2 * 31
)  # two rows of 32 tokens, each but the last, on two ranks


def script_for(name: str) -> Path:
    return FSDP_SCRIPT if name.startswith("fsdp") else TRAIN


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The same training in one process: the same rows, in batches of four instead of two times two."""
    folder = tmp_path_factory.mktemp("alone")
    call = [
        sys.executable,
        str(TRAIN),
        *QUIET,
        "--per_device_train_batch_size",
        "4",
        "--use_cpu",
        *FOUR_STEPS,
    ]
    done = processes.run([*call, "--output_dir", str(folder / "run")], environ=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return Launched(folder / "run", done.stdout + done.stderr)


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_file_trains_as_one_process_does_and_resumes(
    name: str, alone: Launched, tmp_path: Path
) -> None:
    script, fresh = script_for(name), STARTED.get(name, "")
    ran = launch(tmp_path / "whole", name, *FOUR_STEPS, script=script, fresh=fresh)

    family, stage, offload, optimizer = RUNS[name]
    assert len(ran.strategies) == 2
    for strategy in ran.strategies:
        assert (strategy.family, strategy.zero_stage, dict(strategy.offload)) == (
            family,
            stage,
            offload,
        )
        assert (strategy.world_size, strategy.device, strategy.optimizer_class) == (
            2,
            "cpu",
            optimizer,
        )
        assert strategy.num_params == alone.strategies[0].num_params
        divided = family == "FSDP" or stage == 3
        assert strategy.partitioned_fraction == pytest.approx(1.0 if divided else 0.0, abs=1e-3)
        whole = 1.0 if not divided else 0.5
        assert sum(strategy.homes.values()) == pytest.approx(whole * strategy.num_params, rel=1e-3)
    assert not [f for f in ran.findings.values() if f.severity >= Severity.WARNING]

    assert ran.losses("checkpoint-4") == pytest.approx(alone.losses("checkpoint-4"), rel=OF_A_LOSS)
    assert ran.losses("checkpoint-4", "eval_loss") == pytest.approx(
        alone.losses("checkpoint-4", "eval_loss"), rel=OF_A_LOSS
    )
    final, expected = weights(ran.output_dir), weights(alone.output_dir)
    learning_rates = ran.losses("checkpoint-4", "learning_rate")
    assert len(learning_rates) == 4
    assert final.keys() == expected.keys()
    for key, tensor in final.items():
        assert rounding.after_adam(tensor, expected[key], learning_rates, TERMS) <= 1, key

    if name not in ZERO and Version(transformers.__version__) < Version("5"):
        # transformers 4 loads the optimizer of a CPU rank to "cpu:0", which torch knows no storage
        # for
        return
    checkpoint = str(ran.output_dir / "checkpoint-2")
    arguments = (*FOUR_STEPS, "--resume_from_checkpoint", checkpoint)
    resumed = launch(tmp_path / "resumed", name, *arguments, script=script, fresh=fresh)
    assert [s.family for s in resumed.strategies] == [family] * 2
    assert resumed.losses("checkpoint-4") == pytest.approx(
        ran.losses("checkpoint-4"), rel=OF_A_LOSS
    )
    for key, tensor in weights(resumed.output_dir).items():
        if Version(transformers.__version__) >= Version("5"):
            assert rounding.after_adam(tensor, final[key], learning_rates[2:], TERMS) <= 1, key
        else:  # it resumes the learning rate of ZeRO a step off, which the last step shows
            torch.testing.assert_close(tensor, final[key], rtol=0, atol=5e-5)

    if name in ZERO:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        restored = get_fp32_state_dict_from_zero_checkpoint(str(ran.output_dir / "checkpoint-4"))
        for key, tensor in final.items():
            torch.testing.assert_close(restored[key].float(), tensor, rtol=0, atol=0)


def test_fsdp_1_is_read_too(tmp_path: Path) -> None:
    """No file for it is shipped, and it is accelerate's default version of FSDP."""
    script = Path(__file__).with_name("fsdp_1.py")
    done = processes.run([*torchrun(2), str(script), str(tmp_path)], environ=environment())
    assert done.returncode == 0, done.stderr[-3000:]

    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        num_params = found.pop("num_params")
        for name, strategy in found.items():
            assert (strategy["family"], strategy["wrapped_class"]) == (
                "FSDP",
                "FullyShardedDataParallel",
            ), name
            assert strategy["num_params"] == strategy["num_partitioned"] == num_params
            assert strategy["homes"] == {"cpu": num_params // 2}
            assert strategy["offload"] == ({"fsdp": "cpu"} if name == "offload" else {})


@pytest.mark.all
@pytest.mark.slow
def test_the_weights_are_gathered_in_16_bits_and_are_those_of_the_optimizer(tmp_path: Path) -> None:
    ran = launch(tmp_path, "zero3_offload_all", "--max_steps", "2", "--save_steps", "2", "--bf16")

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    restored = get_fp32_state_dict_from_zero_checkpoint(str(ran.output_dir / "checkpoint-2"))
    saved = weights(ran.output_dir)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert {s.master_dtype for s in ran.strategies} == {"float32"}
    for key, tensor in saved.items():
        assert torch.equal(restored[key].bfloat16(), tensor), key


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(
    ("name", "family", "homes", "optimizer"),
    [
        ("single_device", "nothing", {"cuda"}, "AdamW"),
        ("zero3_offload_all", "DeepSpeed", {"cpu"}, "DeepSpeedCPUAdam"),
    ],
)
def test_a_shipped_file_on_a_card(
    name: str, family: str, homes: set[str], optimizer: str, tmp_path: Path
) -> None:
    if family == "DeepSpeed":
        pytest.importorskip("deepspeed")
    flags = ("--num_processes", "1")
    ran = launch(
        tmp_path, name, *FOUR_STEPS, "--bf16", flags=flags, use_cpu=False, DS_ACCELERATOR="cuda"
    )

    (strategy,) = ran.strategies
    assert (strategy.family, strategy.device, strategy.optimizer_class) == (
        family,
        "cuda",
        optimizer,
    )
    most = max(strategy.homes, key=lambda home: strategy.homes[home])
    assert {most} == homes
    assert not [f for f in ran.findings.values() if f.severity >= Severity.WARNING]
    assert len(ran.losses("checkpoint-4")) == 4
