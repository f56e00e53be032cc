"""What the kernels of a card keep beside their results: by the card's compute capability, and by torch's source."""

import sys
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

from tests import processes
from tests.models import SMALL_GPT2, tiny_llama
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan, plan_run
from trainer_plugins.allocator.model import MIN_BLOCK_BYTES
from trainer_plugins.planner import PlanError
from trainer_plugins.planner.cards import card_of, prefers_cudnn
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.pretend.attention import cuda_attention
from trainer_plugins.planner.tracing.kernels import KernelRules, run
from trainer_plugins.units import KIB, MIB

LENGTH, HEADS = 640, 4
GROUPS = tiny(num_key_value_heads=2)
GPT2 = {**SMALL_GPT2, "n_layer": 1}
REQUESTS = {
    "heads on t4": request(tiny(), gpu="t4", sequence_length=LENGTH, dtype="float16"),
    "groups on t4": request(GROUPS, gpu="t4", sequence_length=LENGTH, dtype="float16"),
    "bfloat16 on t4": request(tiny(), gpu="t4", sequence_length=LENGTH, dtype="bfloat16"),
    "groups on a10g": request(GROUPS, gpu="a10g", sequence_length=LENGTH, dtype="float16"),
    "biases": request(GPT2, gpu="a10g", sequence_length=32, dtype="float32"),
    "no biases": request(tiny(), gpu="a10g", sequence_length=32, dtype="float32"),
    "bf16": request(tiny(), "--bf16", "True", gpu="a10g", sequence_length=32, dtype="float32"),
    "fp16": request(tiny(), "--fp16", "True", gpu="a10g", sequence_length=32, dtype="float32"),
}
CUBLAS = (
    4096 * 2 + 16 * 8
) * KIB  # aten/src/ATen/cuda/CublasHandlePool.cpp, of a card that is no Hopper


@pytest.fixture(scope="module")
def outcomes() -> dict[str, MemoryPlan | PlanError]:
    return dict(zip(REQUESTS, predict_all([*REQUESTS.values()], ENDS_A_HANG), strict=True))


@pytest.mark.parametrize(
    ("name", "stored"),
    [("heads on t4", 0), ("groups on t4", 1), ("bfloat16 on t4", 1), ("groups on a10g", 0)],
)
def test_scores_are_stored_where_no_kernel_avoids_it(outcomes, name, stored):
    """aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash from 8.0 on; the other fused one knows no groups."""
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    scores = [tensor for tensor in plan.top_tensors if tensor.shape[-2:] == (LENGTH, LENGTH)]
    assert bool(scores) == bool(stored)
    assert all(tensor.shape[:-2] in ((1, HEADS), (HEADS,)) for tensor in scores)


@pytest.mark.parametrize("name", ["biases", "no biases"])
def test_a_product_with_a_bias_has_the_workspace_of_others_since_torch_2_12(outcomes, name):
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    has_its_own = name == "biases" and Version(torch.__version__) < Version("2.12")
    assert (
        plan.breakdown["workspaces"] == 2 * CUBLAS + has_its_own * MIB
    )  # cuBLAS for the backward's thread too


BF16, FP32 = torch.bfloat16, torch.float32
ATTENTION: tuple[tuple[Any, tuple[list[int], list[int]]], ...] = (
    # capability, multiprocessors, dtype, heads, heads of keys, length, size, mask; what is taken besides
    # queries, keys, values, results and their gradients, in the forward and in the backward pass
    (((9, 0), 132, BF16, 8, 8, 300, 64, True), ([256], [1_248_256])),
    (((9, 0), 132, BF16, 8, 2, 300, 128, True), ([256], [2_477_056])),
    (((9, 0), 132, BF16, 8, 8, 512, 256, False), ([256], [8_421_632])),
    (((8, 0), 108, BF16, 8, 8, 300, 64, False), ([38_400, 2_457_600], [24_576, 1_572_864])),
    (((8, 0), 108, BF16, 8, 8, 300, 256, False), ([96_000, 24_576_000], [24_576, 6_291_456])),
    (((8, 0), 108, BF16, 8, 2, 64, 80, False), ([], [8_192, 786_432, 163_840, 163_840])),
    (((8, 0), 108, BF16, 8, 8, 300, 64, True), ([], [19_200, 1_312_000])),
    (((8, 0), 108, BF16, 8, 8, 300, 128, True), ([], [19_200, 3_146_496])),
    (((8, 0), 108, BF16, 8, 8, 100, 256, True), ([], [6_400, 6_292_480])),
    (((8, 0), 108, FP32, 8, 8, 300, 96, True), ([], [19_200, 19_200, 3_147_264])),
    (((7, 5), 40, FP32, 8, 8, 512, 128, False), ([], [32_768, 32_768, 4_198_400])),
)
"""As torch 2.13's own code asked its allocator on the dry card, with two rows; cuDNN's 256 bytes are an H100's."""


@pytest.mark.parametrize(("given", "taken"), ATTENTION)
def test_attention_takes_what_cudas_own_code_took(given, taken):
    capability, multiprocessors, dtype, heads, of_keys, length, size, has_mask = given
    rules = KernelRules(capability, multiprocessors)
    found: list[list[int]] = [[], []]

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if "attention" in func.name():
                found["backward" in func.name()] += rules.transients(func, args)
            return made

    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, length, each, size, dtype=dtype).transpose(1, 2).requires_grad_()
            for each in (heads, of_keys, of_keys)
        )
        mask = torch.ones(2, 1, length, length, dtype=torch.bool) if has_mask else None
        with Asks():
            made = cuda_attention(
                *(query, key, value, mask),
                enable_gqa=heads != of_keys,
                capability=capability,
                prefers_cudnn=prefers_cudnn("2.13.0", capability),
            )
            made.backward(torch.empty_like(made))
    assert tuple(found) == taken


@pytest.mark.parametrize(
    ("columns", "length", "copied"), [(257, 257, [264]), (1000, 1000, []), (257, 256, [264])]
)
def test_a_mask_is_copied_where_its_rows_are_not_aligned(columns, length, copied):
    """transformers/attention.cpp, pad_bias: to multiples of 8, or by 8; on the dry card, torch 2.13."""
    found = []

    class Pads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.constant_pad_nd.default:
                found.append(made.shape[-1])
            return made

    with FakeTensorMode(), Pads():
        query = torch.empty(2, 8, length, 64, dtype=BF16)
        mask = torch.empty(2, 1, length, columns, dtype=BF16)[..., :length]
        cuda_attention(query, query, query, mask, capability=(8, 0), prefers_cudnn=False)
    assert found == copied


@pytest.mark.parametrize(
    ("card", "shape", "dims", "taken"),
    [
        ("h100-80gb", (2, 1000, 1024), (0, 1), [16_777_216]),
        ("h100-80gb", (8192, 4096), (0,), [138_412_032]),
        ("rtx4090", (8192, 4096), (0,), [100_663_296]),
        ("h100-80gb", (4096, 33), (0,), [67_584]),
        ("h100-80gb", (100, 768), (0,), []),
        ("h100-80gb", (2, 1000, 1024), (2,), []),
    ],
)
def test_a_sum_of_many_rows_takes_what_cudas_own_code_took(card, shape, dims, taken):
    """As for the gradients of norms and biases; on the dry card, with torch 2.13."""
    found = card_of(card)
    rules = KernelRules(found.capability, found.num_multiprocessors, found.num_threads)
    for dtype in (BF16, FP32):
        rows = torch.empty(shape, dtype=dtype, device="meta")
        assert rules.transients(torch.ops.aten.sum.dim_IntList, (rows, [*dims])) == taken


def test_what_is_empty_takes_nothing():
    """An expert without tokens, rows without keys."""
    rules = KernelRules((8, 0), 108)
    rows = torch.empty(5000, 0, device="meta")
    assert rules.transients(torch.ops.aten.sum.dim_IntList, (rows, [0])) == []
    query, key = (torch.empty(2, 8, number, 64, device="meta") for number in (0, 300))
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert rules.transients(flash, (query, key, key)) == []
    assert rules.transients(flash, (key[..., :100, :], query, query)) == []


@pytest.mark.parametrize(
    ("torch_version", "capability", "asks"),
    [
        ("2.10.0+cu128", (9, 0), False),
        ("2.11.0+cu130", (9, 0), True),
        ("2.13.0+cpu", (10, 0), True),
        ("2.13.0+cu128", (9, 0), False),
        ("2.14.0", (8, 0), False),
        ("2.14.0", (12, 0), False),
    ],
)
def test_cudnn_is_asked_first_where_it_is_new(torch_version, capability, asks):
    assert prefers_cudnn(torch_version, capability) is asks


def test_a_program_that_turns_cudnn_off_takes_flash():
    """As those that repeat runs of 2024 do: no torch of then asked cuDNN first."""
    names: list[str] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with FakeTensorMode():
            query = torch.empty(2, 8, 64, 64, dtype=BF16)
            with Asks():
                cuda_attention(query, query, query, capability=(9, 0), prefers_cudnn=True)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert "aten::_scaled_dot_product_flash_attention" in names


def test_outer_products_take_a_workspace_of_cublas_but_with_torch_2_13():
    rules = KernelRules((8, 9), 142)
    columns, row = torch.empty(4, 64, 1, device="meta"), torch.empty(4, 1, 9, device="meta")
    is_one = torch.__version__.startswith("2.13.")
    for args, without in (((columns, row), is_one), ((row, row.mT), False)):
        taken = [*rules.workspaces(torch.ops.aten.bmm.default, args)]
        assert taken == ([] if without else [("cuBLAS", (4096 * 2 + 16 * 8) << 10)])


def test_fp16_needs_three_numbers_more_than_bf16(outcomes):
    """torch/amp/grad_scaler.py: the scale, the steps that it has held, and the loss once more, multiplied by it."""
    bf16, fp16 = outcomes["bf16"], outcomes["fp16"]
    assert isinstance(bf16, MemoryPlan), bf16
    assert isinstance(fp16, MemoryPlan), fp16
    assert fp16.moment == bf16.moment == "backward"
    assert fp16.allocated_peak_bytes == bf16.allocated_peak_bytes + 3 * MIN_BLOCK_BYTES


class SumsTheLogits(Trainer):
    """A loss whose gradient is one number, expanded: its strides are 0, and cuBLAS reads no such matrix."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return model(input_ids=inputs["input_ids"]).logits.sum()


def test_what_cublas_cannot_read_is_copied(make_trainer):
    """aten/src/ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas: `tensor.clone(at::MemoryFormat::Contiguous)`."""
    plan = plan_run(
        make_trainer(trainer_class=SumsTheLogits, model=tiny_llama(vocab_size=4096)), gpu="a10g"
    )
    logits = 2 * 32 * 4096 * 4
    assert plan.moment == "backward"
    assert plan.breakdown["workspaces"] == 2 * CUBLAS + logits


BACKWARD_OF_SILU = """
import os
import torch
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world

fake_cuda.install()
with in_world(World(device="cuda")) as tracker:
    x = torch.ones(64, device="cuda", requires_grad=True)
    loss = torch.nn.functional.silu(x).sum()
    before = len(tracker.trace().storages)
    loss.backward()
    print(len(tracker.trace().storages) - before, flush=True)
os._exit(0)  # as the worker does
"""


MASK_OF_DROPOUT = """
import os
import torch
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world

fake_cuda.install()
with in_world(World(device="cuda")) as tracker:
    kept = torch.nn.functional.dropout(torch.ones(64, device="cuda", requires_grad=True), 0.5)
    print([each.num_bytes for each in tracker.trace().storages], flush=True)
os._exit(0)  # as the worker does
"""


def test_the_mask_of_dropout_is_made_before_its_result():
    done = processes.run([sys.executable, "-c", MASK_OF_DROPOUT], check=True)
    assert done.stdout.splitlines()[-1] == str([4 * 64, 64, 4 * 64])


@pytest.mark.slow
def test_the_gradient_of_an_embedding_takes_what_an_h100_took() -> None:
    """4096 tokens of 2048 numbers, of which 128,256 can be: docs/on_a_card.md."""
    func, rules = torch.ops.aten.embedding_dense_backward.default, KernelRules((9, 0), 132)
    taken = {}
    for num in (3072, 4096):
        with FakeTensorMode():
            args = (torch.empty(num, 2048), torch.empty(num, dtype=torch.long), 128_256, -1, False)
            taken[num] = rules.transients(func, args)
    assert taken == {3072: [], 4096: [*[32_768] * 5, 8, 8, 36_040, 36_904_960]}


def test_the_norms_of_gradients_take_what_an_h100_took() -> None:
    """146 gradients of a Llama of 1.2 billion parameters, the largest that of its embeddings."""
    with FakeTensorMode():
        few, embeddings = torch.empty(2048, dtype=BF16), torch.empty(128_256, 2048, dtype=BF16)
        func = torch.ops.aten._foreach_norm.Scalar
        assert KernelRules((9, 0), 132).transients(func, ([*[few] * 145, embeddings],)) == [
            2_340_672
        ]


def test_a_row_of_sound_that_was_turned_round_is_copied_for_its_kernel() -> None:
    """What a dry run of wav2vec2 takes: of a picture the order of elements may be another."""
    rules, aten = KernelRules((9, 0), 132), torch.ops.aten
    with FakeTensorMode():
        turned = torch.empty(2, 499, 768, dtype=BF16).transpose(1, 2)
        picture = torch.empty(2, 8, 8, 3, dtype=BF16).permute(0, 3, 1, 2)
        for func in (aten.native_layer_norm.default, aten.convolution.default):
            assert rules.copies(func, (turned,)) == [turned.nbytes]
            assert rules.copies(func, (turned.contiguous(),)) == []
        assert rules.copies(aten.convolution.default, (picture,)) == []
        backward = aten.convolution_backward.default
        assert rules.transients(backward, (turned, turned)) == [turned.nbytes]


def test_a_product_that_is_summed_in_place_makes_nothing() -> None:
    """TRL's chunked head adds to a gradient in float32; torch's rule of it is wrong up to 2.11."""
    with FakeTensorMode():
        total = torch.empty(4, 6, device="cuda")
        rows, columns = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 8), (8, 6))
        )
        func = torch.ops.aten.addmm.dtype_out
        args = (total, rows, columns, torch.float32)
        assert run(func, args, {"out": total}) is total
    rules = KernelRules((9, 0), 132)
    assert [name for name, _ in rules.workspaces(func, args)] == ["cuBLAS"]
    assert rules.transients(func, args) == []


COPIED_FIRST = """
import os
import torch
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world

fake_cuda.install()
with in_world(World(device="cuda")) as tracker:
    turned = torch.ones(1, 100, 8, device="cuda").transpose(1, 2)
    weights = torch.ones(16, 8, 1, device="cuda")
    before = len(tracker.trace().storages)
    torch.nn.functional.conv1d(turned, weights)
    print([each.num_bytes for each in tracker.trace().storages[before:]], flush=True)
os._exit(0)
"""


def test_a_convolution_copies_its_input_before_it_makes_its_result():
    done = processes.run([sys.executable, "-c", COPIED_FIRST], check=True)
    assert done.stdout.splitlines()[-1] == str([4 * 8 * 100, 4 * 16 * 100])


def test_the_backward_of_silu_is_one_kernel():
    """A build without CUDA takes it apart into six operations, whose results no card holds."""
    done = processes.run([sys.executable, "-c", BACKWARD_OF_SILU], check=True)
    assert done.stdout.split()[-1] == "2"  # the gradients of the loss and of x


RMS_NORM = """
import os
import torch
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world

fake_cuda.install()
with in_world(World(device="cuda")) as tracker:
    x = torch.ones(3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(3, 64, device="cuda", dtype=torch.bfloat16)
    before = len(tracker.trace().storages)
    made = torch.nn.functional.rms_norm(x, (64,), weight)
    torch.autograd.backward(made, gradient)
    print([each.num_bytes for each in tracker.trace().storages[before:]], flush=True)
os._exit(0)
"""


def test_rms_norm_keeps_its_input_and_one_number_of_each_row():
    """A build without CUDA takes it apart, and each part of DiffLlama's would keep float32."""
    done = processes.run([sys.executable, "-c", RMS_NORM], check=True)
    of_weight, of_input = 2 * 64, 2 * 3 * 64
    assert done.stdout.splitlines()[-1] == str([of_input, 4 * 3, of_weight, of_input])


IN_AUTOCAST = """
import os
import torch
from torch.nn import functional
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.pretend import fake_cuda
from trainer_plugins.planner.pretend.as_on_card import World, in_world

fake_cuda.install()
with in_world(World(device="cuda", card=card_of("h100-80gb"))) as tracker:
    query, key, value = (torch.ones(1, n, 64, 64, device="cuda") for n in (4, 2, 2))
    for trains in (False, True):
        query.requires_grad_(trains)
        before = len(tracker.trace().storages)
        with torch.autocast("cuda", torch.bfloat16):
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        made = [each.num_bytes for each in tracker.trace().storages[before:]]
        print([each for each in made if each], flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not prefers_cudnn(torch.__version__, (9, 0)), reason="cuDNN is not asked")
def test_attention_takes_what_it_needs_in_the_order_of_cudas_code():
    """Autocast casts the last argument first; cuDNN makes its seed first, and sums if it trains."""
    done = processes.run([sys.executable, "-c", IN_AUTOCAST], check=True)
    head = 2 * 64 * 64
    made = [2 * head, 2 * head, 4 * head, 8, 8, 4 * head]
    assert done.stdout.splitlines()[-2:] == [
        str([*made, 256]),
        str([*made, 4 * 4 * 64, 256]),
    ]


def test_what_fsdp2_and_deepspeed_ask_takes_what_cudas_own_code_took():
    """What a rank of four gathers of a Qwen2-MoE with an adapter; gradients in float16."""
    import torch.distributed.fsdp

    rules, norm, embeddings = KernelRules((9, 0), 132), 512, 151_936 * 512
    attention = [1_048_576, norm, *[32_768] * 2] * 3 + [1_048_576, *[32_768] * 2]
    experts = [30_720, 86_507_520, 43_253_760]
    shared = [2_883_584, 32_768, 90_112] * 2 + [2_883_584, 90_112, 32_768, 2048, 32_768, 64]
    layer = [*attention, *experts, *shared, norm, norm]
    with FakeTensorMode():
        gradients = torch.empty(1000, dtype=torch.float16)
        split = torch.ops.fsdp.split_with_sizes_copy.default
        for numels, taken in (([norm], 48), ([embeddings], 33_808), (layer, 34_072)):
            gathered = torch.empty(4, sum(numels), dtype=torch.float16)
            assert rules.transients(split, (gathered, numels)) == [taken]
        assert rules.transients(torch.ops.aten.isinf.default, (gradients,)) == [2000]
        assert rules.transients(torch.ops.aten.isinf.default, (gradients.long(),)) == []
        cumsum, tokens_of_experts = torch.ops.aten.cumsum.default, torch.empty(8).int()
        assert rules.transients(cumsum, (tokens_of_experts, 0)) == [1023]


def test_the_numbers_of_dropout_are_in_main_memory() -> None:
    """Without them on the card each layer kept 1 KiB more than CUDA's own code."""
    with FakeTensorMode():
        query = torch.empty(1, 8, 64, 64, device="cuda")
        func = torch.ops.aten._scaled_dot_product_efficient_attention.default
        made = run(func, (query, query, query, None, True), {})
        assert isinstance(made, tuple)
        assert [each.device.type for each in made] == ["cuda", "cuda", "cpu", "cpu"]
