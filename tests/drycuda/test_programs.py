"""Programs of users that ask for more than a training: they get a plan too, unedited."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.drycuda.scripts import (
    CONFIG,
    TRAIN,
    TRAINS,
    WORKSPACES,
    place,
    plan_of,
    start_python,
    typed,
)
from trainer_plugins.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_EARLY = TRAINS.replace(
    "Trainer(model",
    """
from torch.utils.data import RandomSampler
from transformers import EarlyStoppingCallback

class Own(Trainer):
    def _get_train_sampler(self, *_):
        return RandomSampler(self.train_dataset)

args.load_best_model_at_end, args.metric_for_best_model = True, "eval_loss"
args.save_strategy, args.eval_on_start = args.eval_strategy, True
trainer = Own(callbacks=[EarlyStoppingCallback()], model""",
).replace(").train()", ")\nprint(trainer.evaluate())\ntrainer.train()")

_METRICS = TRAINS.replace(
    ").train()",
    """, compute_metrics=precision).train()""",
).replace(
    "model = Auto",
    """
def precision(outputs):
    return {"precision": 1 / int((outputs.predictions.argmax(-1) == 1).sum())}

model = Auto""",
).replace(
    "eval_strategy=",
    'save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="precision", eval_strategy=',
)  # fmt: skip

_EXPERTS: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
}

_TWO = TRAINS.replace(
    '.train()\nprint("the last line of the script")',
    """.train()
assert "no-second" not in sys.argv
args.per_device_train_batch_size = 8
Trainer(model=model, args=args, train_dataset=rows, data_collator=padded, eval_dataset=rows).train()
""",
)

_TOUCHES = """
import subprocess, sys
import torch
torch.cuda.set_device(0)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""

_SECOND_RANK = """
print("others on the first card:", [
    process.usedGpuMemory
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    if process.pid == os.getpid() and os.environ["RANK"] == "1"
], flush=True)
"""

_LOOP = """
import torch
x = torch.arange(1, 5, device="cuda")
assert x.prod() == 24, "torch compiles this kernel when it is called"
print("chosen", torch.ones(1 << 20, device="cuda").masked_select(torch.arange(1 << 20, device="cuda") < 7).shape)
"""


def test_a_rank_has_a_context_on_no_card_but_its_own(tmp_path: Path) -> None:
    """NCCL's watchdog of torch goes back to the first card, if there is a context there."""
    script = TRAINS.replace('eval_strategy="epoch", ', "max_steps=2, ").replace(
        ", eval_dataset=rows * 8", ""
    )
    place(tmp_path, f"import os, pynvml\npynvml.nvmlInit()\n{script}{_SECOND_RANK}")
    command = ("torchrun", "--nproc_per_node", "2", "train.py", "model", "out")
    words = ("-m", "trainer_plugins.drycuda", "--gpu", "24GiB", "--num-gpus", "2", "--")
    done = start_python(tmp_path, *words, *command)
    assert done.stdout.count("others on the first card: []") == 2, done.stdout + done.stderr[-2000:]


def test_micro_steps_that_a_plan_skips_would_need_nothing_more(tmp_path: Path) -> None:
    """The plan computes two micro-steps of five; run in full, the script reserves the same bytes."""
    script = TRAINS.replace("16 * (1 + number % 32)", "512").replace(
        'eval_strategy="epoch", ', 'max_steps=3, save_strategy="no", optim="sgd", '
    )
    place(tmp_path, script + "print('reserved', torch.cuda.max_memory_reserved())")
    plan = plan_of(tmp_path, "--gpu", "24GiB", command=(*TRAIN, "5"))
    assert plan.moment == "backward", "with the gradients of the micro-step before"
    words = ("-m", "trainer_plugins.drycuda", "--gpu", "24GiB", *TRAIN[2:], "5")
    done = start_python(tmp_path, *words)
    assert f"reserved {plan.reserved_peak_bytes}" in done.stdout, done.stdout + done.stderr[-2000:]


def test_an_evaluation_comes_first_and_a_callback_may_stop(tmp_path: Path) -> None:
    plan = plan_of(place(tmp_path, _EARLY), "--gpu", "24GiB")
    assert {"evaluation", "save"} <= set(plan.moments)
    cut = [line for line in plan.assumptions if "an evaluation of 32 of 512 rows" in line]
    assert len(cut) == 1
    assert not any("perhaps not the longest" in line for line in plan.assumptions)


def test_metrics_may_fail_on_outputs_that_mean_nothing(tmp_path: Path) -> None:
    plan = plan_of(place(tmp_path, _METRICS), "--gpu", "24GiB")
    assert {"evaluation", "save"} <= set(plan.moments)
    failed = (
        "compute_metrics failed, perhaps on the meaningless outputs: ZeroDivisionError: division"
    )
    assert any(line.startswith(failed) for line in plan.assumptions)


def test_a_check_of_a_loss_that_means_nothing_is_told_so(tmp_path: Path) -> None:
    diverged = """
class Own(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        assert loss > 1e-6, "the loss collapsed"
        return loss
"""
    script = TRAINS.replace("Trainer(model=", f"{diverged}\nOwn(model=")
    done = typed(place(tmp_path, script), "--gpu", "24GiB", *TRAIN)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "exited with code 1 in its training: AssertionError: the loss collapsed -- " in last
    assert last.endswith("skip a check of them where os.environ has TRAINER_PLUGINS_DRYCUDA")


def test_every_expert_gets_its_share(tmp_path: Path) -> None:
    """The code of transformers that takes expert by expert: each that is hit has a gradient."""
    script = TRAINS.replace(
        "dtype=torch.bfloat16)", 'dtype=torch.bfloat16, experts_implementation="eager")'
    )
    place(tmp_path, script.replace("bf16=True", 'bf16=True, optim="sgd", save_strategy="no"'))
    (tmp_path / "model" / "config.json").write_text(json.dumps(_EXPERTS))
    plan = plan_of(tmp_path, "--gpu", "24GiB")
    both = 2 * 2 * plan.num_parameters + WORKSPACES["24GiB"]
    assert plan.moments["optimizer step"].allocated_bytes == pytest.approx(both, rel=0.02)


_SPARSE = TRAINS.replace(
    "Trainer(model=model",
    """
class Unclipped(Trainer):  # no norm of a sparse gradient is computed
    def _get_grad_norm(self, *args, **kwargs):
        return torch.zeros(())

table = model.get_input_embeddings()
model.set_input_embeddings(torch.nn.Embedding(*table.weight.shape, sparse=True).bfloat16())
args.max_grad_norm, args.save_strategy = 0, "no"
optimizer = torch.optim.SGD(model.parameters(), 0.1)
Unclipped(optimizers=(optimizer, None), model=model""",
)


def test_a_run_is_resumed_with_the_optimizer_that_its_trainer_was_given(tmp_path: Path) -> None:
    """Its states are loaded into one with as many groups of parameters."""
    script = TRAINS.replace(
        "Trainer(model=model",
        "optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"
        "Trainer(optimizers=(optimizer, None), model=model",
    ).replace('eval_strategy="epoch", ', "")
    plan = plan_of(place(tmp_path, script), "--gpu", "24GiB")
    again, first = (plan.moments[name].allocated_bytes for name in ("resume", "backward"))
    assert again == pytest.approx(first, rel=0.01)


def test_sparse_gradients_are_counted(tmp_path: Path) -> None:
    plan = plan_of(place(tmp_path, _SPARSE), "--gpu", "24GiB")
    assert plan.breakdown["gradients"] > 0


_COLLATES = TRAINS.replace('eval_strategy="epoch", ', "remove_unused_columns=False, ").replace(
    'rows.append({"input_ids": ids, "labels": ids})',
    'rows.append({"number": number})',
).replace(
    "def padded(batch):",
    """
def padded(raw):
    tokens = [torch.ones(16 * (1 + row["number"] % 32), dtype=torch.long) for row in raw]
    batch = [{"input_ids": each, "labels": each} for each in tokens]""",
)  # fmt: skip


def test_rows_that_the_collator_turns_into_tokens_are_the_longest_too(tmp_path: Path) -> None:
    plan = plan_of(place(tmp_path, _COLLATES), "--gpu", "24GiB")
    assert plan.planned["batch"].startswith("4 rows at once of 512 tokens")


def test_over_several_cards_the_smallest_is_that_of_one_run(tmp_path: Path) -> None:
    script = TRAINS.replace("dtype=torch.bfloat16)", 'dtype=torch.bfloat16, device_map="balanced")')
    plan = plan_of(place(tmp_path, script), "--gpu", "24GiB", "--num-gpus", "2")
    assert len(plan.cards) == 2
    assert any("one process uses several cards" in line for line in plan.assumptions)


def test_a_second_training_counts_and_one_that_does_not_come_is_named(tmp_path: Path) -> None:
    place(tmp_path, _TWO)
    both = plan_of(tmp_path, "--gpu", "80GiB")
    one = plan_of(tmp_path, "--gpu", "80GiB", command=(*TRAIN, "1", "no-second"))
    assert both.planned["model"].endswith("trained by Trainer, then by Trainer")
    assert both.planned["batch"].startswith("8 rows at once")
    assert both.moments["forward"].allocated_bytes > 1.5 * one.moments["forward"].allocated_bytes
    # The first one's optimizer is gone when the second one makes its own.
    step, first = (plan.moments["optimizer step"].allocated_bytes for plan in (both, one))
    assert step == pytest.approx(first, rel=0.01)
    assert any("not come to the training in train.py:" in line for line in one.assumptions)
    assert not any("not come to the training" in line for line in both.assumptions)


def test_a_launcher_that_has_touched_the_card_holds_a_context_there(tmp_path: Path) -> None:
    place(tmp_path)
    (tmp_path / "launch.py").write_text(_TOUCHES)
    plain = plan_of(tmp_path, "--gpu", "80GiB")
    launched = (*TRAIN[:2], "launch.py", *TRAIN[2:])
    touched = plan_of(tmp_path, "--gpu", "80GiB", command=launched)
    assert touched.context_bytes == 2 * plain.context_bytes
    assert touched.smallest_card_bytes
    assert plain.smallest_card_bytes
    assert touched.smallest_card_bytes == plain.smallest_card_bytes + plain.context_bytes
    enough = f"{touched.smallest_card_bytes // MIB}MiB"
    assert plan_of(tmp_path, "--gpu", enough, command=launched).fits is True


def test_a_program_without_a_trainer_is_told_so_and_runs_by_itself(tmp_path: Path) -> None:
    done = typed(place(tmp_path, _LOOP), "--gpu", "24GiB", *TRAIN)
    assert done.returncode == 2
    assert "other programs run on dry cards with `python -m" in done.stderr
    dry = ("-m", "trainer_plugins.drycuda", "--gpu", "24GiB")
    for program in (["train.py"], ["-m", "train"]):
        alone = start_python(tmp_path, *dry, *program)
        assert "chosen torch.Size([7])" in alone.stdout, alone.stderr[-2000:]
