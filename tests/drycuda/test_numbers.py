"""With numbers a small model really trains on torch's build for CUDA: its weights are those of the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.distributed.launched import environment
from tests.drycuda.scripts import start_python
from trainer_plugins.drycuda.pytest_plugin import Run, dry_cuda

__all__ = ["dry_cuda"]
pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

TRAINS = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trainer_plugins import survive_oom

folder, dropout, survives = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "survives"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    attn_implementation="eager", attention_dropout=dropout,
))
rows = [{"input_ids": (row := torch.randint(0, 2000, (128,))), "labels": row} for _ in range(64)]
args = TrainingArguments(
    folder, per_device_train_batch_size=32, max_steps=2, learning_rate=1.0 if survives else 1e-3,
    optim="sgd" if survives else "adamw_torch", report_to="none", save_strategy="no", disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
if survives and torch.cuda.is_available():
    survive_oom(trainer)
trainer.train()
torch.save([each.detach().cpu() for each in model.parameters()], folder + "/weights.pt")
if torch.cuda.is_available():
    print(json.dumps([torch.cuda.memory_stats()["num_ooms"], torch.cuda.device_memory_used()]))
"""


def weights_of(folder: Path) -> list[torch.Tensor]:
    return torch.load(folder / "weights.pt")


@pytest.fixture
def trained(tmp_path: Path):
    """What the script trains on the CPU."""

    def train(*words: str) -> list[torch.Tensor]:
        folder = tmp_path / "cpu"
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(TRAINS)
        done = processes.run([sys.executable, script, folder, *words], environ=environment())
        assert done.returncode == 0, done.stderr[-2000:]
        return weights_of(folder)

    return train


def test_weights_are_those_of_the_cpu(tmp_path: Path, trained, dry_cuda: Run) -> None:
    done = dry_cuda(TRAINS, tmp_path, 0.1, "whole", gpu="4GiB", numbers=True)
    assert done.returncode == 0, done.stderr[-2000:]
    num_ooms, used = json.loads(done.stdout.splitlines()[-1])
    assert num_ooms == 0
    assert used > 512 << 20, "NVML counts the context too"
    for ours, its in zip(weights_of(tmp_path), trained("0.1", "whole"), strict=True):
        assert torch.equal(ours, its)


def test_a_real_out_of_memory_error_is_survived(tmp_path: Path, trained, dry_cuda: Run) -> None:
    done = dry_cuda(TRAINS, tmp_path, 0, "survives", gpu="680MiB", numbers=True)
    assert done.returncode == 0, done.stderr[-2000:]
    num_ooms, _ = json.loads(done.stdout.splitlines()[-1])
    assert num_ooms > 0
    for ours, its in zip(weights_of(tmp_path), trained("0", "survives"), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-5, atol=1e-6)


def test_what_the_cpu_has_no_code_for_ends_by_name(dry_cuda: Run) -> None:
    code = "import torch; torch.nn.GRU(8, 4, device='cuda')(torch.ones(2, 2, 8, device='cuda'))"
    done = dry_cuda(code, gpu="4GiB", numbers=True)
    assert done.returncode == 1
    assert "the CPU has no code for aten._thnn_fused_gru_cell" in done.stderr


SUMS = """
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
shares = torch.full((4,), dist.get_rank() + 1.0, device="cuda")
print("summed", all_reduce(shares, "sum", dist.group.WORLD).tolist(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("numbers", [True, False])
def test_what_ranks_send_each_other_is_not_computed_again(tmp_path: Path, numbers: bool) -> None:
    """FSDP2 sums norms by a collective that is an operator of torch's."""
    (tmp_path / "sums.py").write_text(SUMS)
    words = ["-m", "trainer_plugins.drycuda", "--gpu", "24GiB", "--num-gpus", "2"]
    command = ["--", "torchrun", "--nproc_per_node", "2", "sums.py"]
    done = start_python(tmp_path, *words, *["--numbers"] * numbers, *command)
    assert done.stdout.count("summed [3.0, 3.0, 3.0, 3.0]") == 2, done.stdout + done.stderr[-2000:]
