"""A plan with Liger's kernels is that of Liger's own code, and as its authors measured."""

import os
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

from tests import processes
from tests.models import tiny_llama, token_rows
from trainer_plugins import plan_run
from trainer_plugins.planner import NotPredicted
from trainer_plugins.units import MIB

pytest.importorskip("liger_kernel")

ROOT = Path(__file__).parent.parent.parent
WIDE = tiny_llama(
    vocab_size=32000, hidden_size=256, intermediate_size=512, max_position_embeddings=512
).config
ROWS, LENGTH = 8, 512
LOGITS = ROWS * LENGTH * 32000 * 4

AS_MEASURED = """
import os
from benchmarks import liger
from trainer_plugins.planner.tracing import kernels

kernels._MULTIPLIES_OUTER = False  # as with the torch that was measured
liger.begin()
for version in ("0.2.1", "0.3.0"):
    for row in liger.rows(version):
        if row.provider == "liger":
            print(row.kernel, row.peak_mib, liger.planned_mib(row), flush=True)
os._exit(0)  # as the worker does
"""


def planned(**arguments: object):
    args = TrainingArguments(
        per_device_train_batch_size=ROWS, report_to="none", max_steps=2, **arguments
    )
    return plan_run(WIDE, args, seq_length=LENGTH, gpu="24GiB", has_padding=False)


@pytest.fixture(scope="module")
def plans():
    return {wanted: planned(use_liger_kernel=wanted) for wanted in (False, True)}


def test_the_logits_are_never_whole(plans) -> None:
    plain, fused = plans[False], plans[True]

    assert plain.breakdown["logits and loss"] >= 2 * LOGITS
    assert fused.breakdown.get("logits and loss", 0) < LOGITS / 10
    # a chunk has as many logits as the hidden states have numbers: 4096 tokens in 125, as powers of 2
    chunk = 64 * 32000 * 4
    assert fused.allocated_peak_bytes < plain.allocated_peak_bytes - 2 * LOGITS + 3 * chunk
    assert fused.num_parameters == plain.num_parameters


def test_a_trainer_is_planned_as_it_will_train(plans) -> None:
    """The Trainer replaces its model's functions in `train`, and not before."""
    model = LlamaForCausalLM(WIDE)
    forward = model.forward.__func__
    args = TrainingArguments(
        per_device_train_batch_size=ROWS, report_to="none", max_steps=2, use_liger_kernel=True
    )
    rows = token_rows(16, LENGTH)
    plan = plan_run(Trainer(model=model, args=args, train_dataset=rows), gpu="24GiB")

    assert plan.allocated_peak_bytes == pytest.approx(plans[True].allocated_peak_bytes, rel=0.01)
    assert model.forward.__func__ is forward
    assert "triton" not in sys.modules


REPLACED = """
import sys
from trainer_plugins.planner.pretend import triton

triton.kernels_do_nothing()  # so that Liger can be imported without Triton and a card
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from tests.models import token_rows
from tests.planner.test_liger import LENGTH, ROWS, WIDE
from trainer_plugins import plan_run

if __name__ == "__main__":
    if sys.argv[1] == "before":
        apply_liger_kernel_to_llama()
    model = LlamaForCausalLM(WIDE)
    if sys.argv[1] == "after":
        apply_liger_kernel_to_llama(model=model)
    args = TrainingArguments(per_device_train_batch_size=ROWS, report_to="none", max_steps=2)
    plan = plan_run(Trainer(model, args, train_dataset=token_rows(16, LENGTH)), gpu="24GiB")
    print(model.model.norm.forward.__qualname__, plan.allocated_peak_bytes)
"""


@pytest.mark.all
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_liger_replaced_before_the_trainer_is_planned(plans, when, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REPLACED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), when]
    done = processes.run(command, environ=environ, cwd=tmp_path, check=True)
    norm, peak = done.stdout.splitlines()[-1].split()

    assert norm == "LigerRMSNorm.forward"
    assert int(peak) == pytest.approx(plans[True].allocated_peak_bytes, rel=0.01)


def test_an_evaluation_of_the_loss_makes_no_logits() -> None:
    """transformers then passes skip_logits, which only Liger knows."""
    both = {"eval_strategy": "steps", "eval_steps": 1, "prediction_loss_only": True}
    plan = planned(use_liger_kernel=True, per_device_eval_batch_size=ROWS, **both)

    assert plan.moments["evaluation"].allocated_bytes < LOGITS


@pytest.mark.all
def test_a_kernel_that_is_tuned_takes_a_buffer_at_first(monkeypatch) -> None:
    """Triton overwrites 256 MiB before it times a kernel, to empty the card's L2 cache."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes, **heads)
    args = TrainingArguments(report_to="none", max_steps=2, use_liger_kernel=True)
    reserved = []
    for tunes in ("1", "0"):
        monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", tunes)
        plan = plan_run(config, args, seq_length=64, gpu="24GiB", has_padding=False)
        reserved.append(plan.reserved_peak_bytes)

    assert reserved[0] > 256 * MIB > reserved[1], "later blocks lie in it"


def test_without_its_code_it_is_refused_with_what_to_install() -> None:
    script = (
        "import sys; sys.modules['liger_kernel'] = None\n"
        "from trainer_plugins.planner.rehearse.liger import refuse_liger\n"
        "refuse_liger('cuda')"
    )
    done = processes.run([sys.executable, "-c", script])

    assert "NotPredicted: not predicted: Liger kernels" in done.stderr
    assert "pip install --no-deps liger-kernel" in done.stderr


def test_what_liger_published_of_its_kernels_is_what_is_planned() -> None:
    """27 peaks of an A100, of code that did not change since (see benchmarks/liger.py)."""
    done = processes.run([sys.executable, "-c", AS_MEASURED], check=True)
    rows = [line.split() for line in done.stdout.splitlines()]

    assert len(rows) == 27
    assert {name for name, *_ in rows} == {"cross_entropy", "geglu", "layer_norm", "rope", "swiglu"}
    for name, measured, found in rows:
        assert float(found) * MIB == pytest.approx(float(measured) * MIB, rel=1e-4), name


def test_a_card_of_the_machine_other_than_cuda_is_refused(make_trainer, simgpu) -> None:
    with pytest.raises(NotPredicted, match="on simgpu: they need CUDA"):
        plan_run(make_trainer(use_liger_kernel=True))
