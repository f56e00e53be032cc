"""What CUDA's other libraries answer: sizes of workspaces, that all went well, and objects of other ranks."""

import importlib.util
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from trainer_plugins.compiled import compile_once, package_site
from trainer_plugins.drycuda.card import libraries
from trainer_plugins.drycuda.cuda_build import fetch_package
from trainer_plugins.drycuda.pytest_plugin import Run, dry_cuda
from trainer_plugins.planner.cards import CARDS

__all__ = ["dry_cuda"]
pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_LINEAR_ALGEBRA = """
import torch
for _ in range(50):  # what these leave in the cache is no answer
    torch.full((256,), 7, device="cuda", dtype=torch.int32)
full = torch.linalg
for shape in ((40, 40), (3, 40, 40), (600, 600), (3, 600, 600)):
    a, b = torch.randn(*shape, device="cuda"), torch.randn(*shape[:-1], 2, device="cuda")
    for driver in (None, "gesvd", "gesvdj", "gesvda"):
        full.svd(a, full_matrices=False, driver=driver)
    full.qr(a), full.eigh(a), full.cholesky(a), full.solve(a, b), full.ldl_factor(a), full.lu(a)
    torch.cholesky_solve(b, a), torch.svd_lowrank(a), torch.ormqr(a, a[..., 0], a)
    torch.fft.irfft(torch.fft.rfft(a)), torch.fft.fft2(a)
weight = torch.randn(600, 600, device="cuda", requires_grad=True)
(full.svd(weight)[1].sum() + torch.fft.fft2(weight).real.sum()).backward()
print("gradient of", tuple(weight.grad.shape))
"""

_LAST = """
import sys, torch
weight = torch.randn(600, 600, device="cuda", requires_grad=True)
loss = torch.fft.fft2(weight).real.sum()
sys.setswitchinterval(1000)  # no thread of autograd's runs Python before this ends
loss.backward()
"""

_LEFT = """
import torch
labels = torch.full((1 << 18,), -100, device="cuda")  # half of their bytes are NaN in float32
where = labels.data_ptr()
del labels
weights = torch.empty(1 << 19, device="cuda")
assert weights.data_ptr() == where
assert not weights[:8].isnan().any()
del weights
counts = torch.full((256,), 7, device="cuda", dtype=torch.int32)
where = counts.data_ptr()
del counts
counts = torch.empty(256, device="cuda", dtype=torch.int32)  # for a kernel of Triton to fill
assert counts.data_ptr() == where
assert not counts.any()
print("nothing")
"""

_OBJECTS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
of = [f"{number}" * (1 << 20) for number in range(2)]
given = [of[0] if rank == 0 else None]
dist.broadcast_object_list(given)
assert given == [of[0]]
all = [None, None]
dist.all_gather_object(all, of[rank])
assert all == of
all = [None, None] if rank == 0 else None
dist.gather_object(of[rank], all)
assert rank == 1 or all == of
given = [None]
dist.scatter_object_list(given, of if rank == 0 else None)
assert given == [of[rank]]
print("moved")
"""


_LARGER = """
import psutil, torch
size = 2 * psutil.virtual_memory().total
logits = torch.empty(size // 4, device="cuda")
for _ in range(3):
    kept = logits.cpu()
    assert float(kept[-1]) == 0
    del kept
memory = psutil.Process().memory_info()
assert memory.rss < size // 8
assert memory.vms < 2 * size, "what was freed is gone"
print("kept")
"""


_SORTED = """
import torch
table = torch.nn.Embedding(100, 64, device="cuda")
table(torch.randint(100, (1 << 14,), device="cuda")).sum().backward()
many = torch.randn(1 << 20, device="cuda")
many.sort(), many.topk(5), many.cumsum(0), many.unique(), many[many > 0]
print("of", torch.cuda.get_device_capability())
"""


def test_what_sorts_and_counts_runs_on_each_generation(dry_cuda: Run) -> None:
    """CUB refuses a kernel of a generation for which it is not built, as there is none of 8.9."""
    of_each = {card.capability: card.name for card in CARDS}
    assert (8, 9) in of_each
    for capability, name in of_each.items():
        if capability >= (7, 5):
            done = dry_cuda(_SORTED, gpu=name)
            assert f"of {capability}" in done.stdout, done.stderr[-2000:]


def test_linear_algebra_and_transforms_run(dry_cuda: Run) -> None:
    done = dry_cuda(_LINEAR_ALGEBRA, gpu="24GiB")
    assert "gradient of (600, 600)" in done.stdout, done.stderr[-2000:]


def test_a_backward_pass_may_come_last(dry_cuda: Run) -> None:
    """Autograd's thread still holds the mode that computes what is small; Python aborted then."""
    codes = [dry_cuda(_LAST, gpu="24GiB").returncode for _ in range(3)]
    assert codes == [0, 0, 0]


def test_a_tensor_of_main_memory_may_be_larger_than_it(dry_cuda: Run) -> None:
    """A plan is of another machine: the outputs of its evaluation, or the states of a shard."""
    done = dry_cuda(_LARGER, gpu="2000GiB")
    assert "kept" in done.stdout, done.stderr[-2000:]


def test_what_another_tensor_has_left_is_no_value(dry_cuda: Run) -> None:
    """DeepSpeed would find an overflow in a large buffer, and Liger a negative number of tiles."""
    done = dry_cuda(_LEFT, gpu="24GiB")
    assert "nothing" in done.stdout, done.stderr[-2000:]


def test_objects_larger_than_what_is_exchanged_of_numbers_move(
    tmp_path: Path, dry_cuda: Run
) -> None:
    """A plan of a sharded checkpoint is such an object."""
    script = tmp_path / "objects.py"
    script.write_text(_OBJECTS)
    words = ["--standalone", "--nproc_per_node", "2", str(script)]
    launch = f"from torch.distributed.run import main; main({words})"
    done = dry_cuda(launch, gpu="24GiB", num_gpus=2)
    assert done.stdout.count("moved") == 2, done.stderr[-2000:]


def test_the_card_compiles_for_aarch64(tmp_path: Path) -> None:
    """By the compiler that is fetched where none is installed: it has the headers of both."""
    fetch_package("ziglang", print)
    folder = importlib.util.find_spec("ziglang")
    home = Path(folder.origin).parent if folder and folder.origin else package_site() / "ziglang"
    card = Path(libraries.__file__).parent
    sources = sorted(card.glob("*.c*"))
    assert len(sources) > 6
    for source in sources:
        language = ["c", "-std=gnu17"] if source.suffix == ".c" else ["c++", "-std=c++17"]
        words = [str(home / "zig"), "c++", "-target", "aarch64-linux-gnu.2.28", "-x", *language]
        words += ["-DCUDA_MAJOR=13", "-DCUDNN_VERSION=92000", "-fPIC", "-w", "-c", str(source)]
        compile_once(tmp_path / f"{source.stem}.o", words, 600)
        with (tmp_path / f"{source.stem}.o").open("rb") as file:
            assert ELFFile(file).get_machine_arch() == "AArch64"
