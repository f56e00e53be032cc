"""Repeats torchtitan's published runs as the first of their ranks, on tensors without bytes.

Its layers, its FSDP and its loop, written anew after its source: `models/llama/model.py`,
`parallelisms/parallelize_llama.py` and `train.py` of 83c879f18763 (2024-03-28), of the commit
before it (FSDP1) and of 9dec370ad26b (2024-12-26). torch's own `fully_shard` and
`FullyShardedDataParallel` shard and gather, as in a plan.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.published import Row
from trainer_plugins.planner.pretend.as_on_card import World, in_world
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.sharded.fsdp1 import Fsdp1
from trainer_plugins.planner.sharded.ranks import Ranks
from trainer_plugins.planner.tracing.events import Trace
from trainer_plugins.planner.tracing.trace import Tracker

MARCH = "torchtitan#165"
"""The source whose model returns logits in fp32, which its loop keeps until the next ones."""

NUM_STEPS = 3
_NUM_POSITIONS = 65536
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class Norm(nn.Module):
    """Normalises in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows in the dtype of `x`."""
        return _normalised(x.float()).type_as(x) * self.weight


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _turned(
    query: torch.Tensor, key: torch.Tensor, turns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rotary embedding in complex numbers of fp32, to both before either is cast back."""
    pairs = [
        torch.view_as_complex(each.float().reshape(*each.shape[:-1], -1, 2))
        for each in (query, key)
    ]
    by = turns.view(1, turns.shape[0], 1, -1)
    real = [torch.view_as_real(pair * by).flatten(3) for pair in pairs]
    return real[0].type_as(query), real[1].type_as(key)


class Block(nn.Module):
    """Is one layer: attention, and a gated MLP."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.size = width // config["num_attention_heads"]
        of_keys = config["num_key_value_heads"] * self.size
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, of_keys, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer; rows and tokens are one dimension."""
        hidden = x + self.attention(self.attention_norm(x), turns)
        return hidden + self.mlp(self.ffn_norm(hidden))

    def attention(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the output of the attention."""
        query, key, value = self.wq(x), self.wk(x), self.wv(x)
        query, key, value = (
            each.view(-1, turns.shape[0], each.shape[-1] // self.size, self.size)
            for each in (query, key, value)
        )
        query, key = _turned(query, key, turns)
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = (_repeated(each, groups) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(x.shape[0], -1))  # type: ignore[no-any-return]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    rows, length, heads, size = x.shape
    wide = x[:, :, :, None, :].expand(rows, length, heads, groups, size)
    return wide.reshape(rows, length, heads * groups, size)


class Llama(nn.Module):
    """Is the whole model. It returns logits, in fp32 if `in_float`."""

    def __init__(self, config: dict[str, Any], in_float: bool, num_positions: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.in_float = in_float
        self.tok_embeddings = nn.Embedding(config["vocab_size"], width)
        turns = torch.empty(num_positions, width // config["num_attention_heads"] // 2)
        self.register_buffer("turns", turns.to(torch.complex64), persistent=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(width)
        self.output = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens."""
        hidden, turns = self.tok_embeddings(tokens), self.get_buffer("turns")[: tokens.shape[1]]
        hidden = hidden.view(-1, hidden.shape[-1])
        for layer in self.layers:
            hidden = layer(hidden, turns)
        logits = self.output(self.norm(hidden).view(*tokens.shape, -1))
        return logits.float() if self.in_float else logits  # type: ignore[no-any-return]


def trace_of(row: Row, is_early: bool) -> Trace:
    """Return what the card of the first rank would see.

    Args:
        row: one of torchtitan's.
        is_early: whether FSDP2 takes the buffer that it reduces from the pool of its own stream, as
            it once did (pytorch 01d66d21f38a, _composable/fsdp/_fsdp_collectives.py). In torch 2.13
            it comes from the pool of the default stream.
    """
    request = PlanRequest(
        source=ConfigSource(config={}, arguments=()),
        num_gpus=row.settings["num_gpus"],
        num_nodes=-(-row.settings["num_gpus"] // 8),
    )
    with (
        in_world(World(device="cuda")) as tracker,
        (Fsdp1 if _is_first(row) else Ranks)(request).around(tracker),
    ):
        train(row, tracker, is_early)
        return tracker.trace()


def train(row: Row, tracker: Tracker, is_early: bool) -> None:
    """Run the row's loop; see `trace_of`. No torch of 2024 asked cuDNN for attention first."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    with _reduced_from_its_stream() if is_early else contextlib.nullcontext():
        _train(row, tracker)


def _train(row: Row, tracker: Tracker) -> None:
    is_old, shape = row.source == MARCH, (row.settings["batch"], row.settings["seq_length"])
    model = _sharded(row, in_float=is_old)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    logits = None
    for _ in range(NUM_STEPS):
        tokens, labels = (torch.ones(shape, dtype=torch.long, device="cuda") for _ in range(2))
        optimizer.zero_grad()
        tracker.moment = "forward"
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        if not is_old:
            del logits
        tracker.moment = "backward"
        torch.autograd.backward(loss)
        tracker.moment = "optimizer step"
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    tracker.moment = "save"  # when all of it dies


def _sharded(row: Row, in_float: bool) -> nn.Module:
    with _disable_current_modes():
        mesh = init_device_mesh("cuda", (row.settings["num_gpus"],), mesh_dim_names=("dp",))
    num_positions = _NUM_POSITIONS if in_float else row.settings["seq_length"]
    with torch.device("meta"):
        model = Llama(row.architecture, in_float, num_positions)
    selects: dict[str, Any] = {"context_fn": _selective}
    given = {} if row.settings.get("checkpointing") is True else selects
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False, **given)
    return (_flattened if _is_first(row) else _fully_sharded)(model, mesh).train()


def _is_first(row: Row) -> bool:
    return bool(row.settings["strategy"] == "FSDP1")


def _fully_sharded(model: Llama, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        fully_shard(layer, **shared, reshard_after_forward=index < last)
    fully_shard(model, **shared)
    return model.to_empty(device="cuda")


def _flattened(model: Llama, mesh: DeviceMesh) -> nn.Module:
    shared: dict[str, Any] = {
        "mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32),
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "use_orig_params": True,
        "device_mesh": mesh,
        "param_init_fn": lambda part: part.to_empty(device="cuda", recurse=False),
    }
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **shared)
    return FullyShardedDataParallel(model, **shared)


def _selective() -> Any:
    """Keep attention and every second matrix product, and compute the rest again."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: object, *_: object, **__: object) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.mm.default
        counts[context.is_recompute] += is_product
        is_second = is_product and counts[context.is_recompute] % 2 == 0
        keeps = operation in _KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _reduced_from_its_stream() -> Iterator[None]:
    module: Any = param_group
    reduce: Callable[..., Any] = module.foreach_reduce

    def as_once(
        parameters: object, gradients: object, group: object, stream: Any, *rest: Any
    ) -> tuple[object, ...]:
        with torch.cuda.stream(stream):
            kept = reduce(parameters, gradients, group, stream, *rest)
        return (None, *kept[1:])  # it was free at the end of this function

    with patch.object(module, "foreach_reduce", as_once):
        yield
