"""Load a checkpoint that has no bytes, by transformers 5's own loader. Imports torch.

A checkpoint is mapped into main memory, and what is used as it lies in the file is shared by all
ranks of a machine. What is cast, stacked (experts) or decoded (mxfp4) is made again, by each rank
for itself and on the device that the weight goes to (transformers/core_model_loading.py).
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.units import GIB

Shared = Callable[[], AbstractContextManager[None]]  # what is made inside counts once a machine

_LOADER_TAKES = ["model", "state_dict", "load_config", "disk_offload_index"]
_LEFT_FREE = 12 * GIB // 10  # transformers.modeling_utils.caching_allocator_warmup
_MXFP4_BLOCK = 32  # numbers that share a scale; a byte has two (integrations/mxfp4.py)
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # of gpt-oss, by what their names end with


class _InFile:
    """Is a tensor of a safetensors file that is not read yet."""

    def __init__(self, of: torch.Tensor, stored: torch.dtype, shared: Shared) -> None:
        self._shape, self._shared = of.shape, shared
        self._dtype = stored if of.is_floating_point() else of.dtype

    def __getitem__(self, _: object) -> torch.Tensor:
        with self._shared():
            return torch.empty(self._shape, dtype=self._dtype, device="cpu")

    def get_dtype(self) -> str:
        return "F" if self._dtype.is_floating_point else "U8"


def as_quantised() -> AbstractContextManager[None]:
    """Let ZeRO-3 leave a model whole that is built inside, as it does if it has a quantizer."""
    from transformers import modeling_utils

    made: AbstractContextManager[None] = modeling_utils.set_quantized_state()
    return made


def is_divided() -> bool:
    """Return whether ZeRO-3 divides the weights of a model as they are made."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def dequantiser(quantisation: object) -> Any:
    """Return what decodes a checkpoint in mxfp4, which cannot be trained; None for any other."""
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") != "mxfp4":
        return None
    if not has_loader():
        raise NotPredicted("a checkpoint in mxfp4 with this transformers: plan it with 5.23")
    from transformers import Mxfp4Config
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config(Mxfp4Config(dequantize=True), pre_quantized=True)


@contextmanager
def no_values_before_a_file() -> Iterator[None]:
    """Let ZeRO-3 gather weights once, to load them; `_from_config` would, to initialize them."""
    from transformers.integrations import deepspeed

    def initialized(initialize: Callable[[Any], None], model: Any) -> None:
        if not converted(model):  # only these are loaded too
            initialize(model)

    with Patches() as patches:
        if hasattr(deepspeed, "initialize_weights_zero3"):
            patches.wrap(deepspeed, "initialize_weights_zero3", initialized)
        yield


def converted(model: Any) -> frozenset[str]:
    """Return the names of the weights that transformers 5 makes of others in a checkpoint."""
    if not has_loader():
        return frozenset()
    from transformers.core_model_loading import WeightConverter, apply_converters

    reverse = [
        each.reverse_transform() for each in _mapping(model) if isinstance(each, WeightConverter)
    ]
    names = (name for name, _ in model.named_parameters())
    return frozenset(name for name in names if apply_converters(name, reverse)[1] is not None)


def in_file(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as a checkpoint has them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return found


def each_alone(
    model: Any, home: torch.device, stored: torch.dtype
) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Return what loads each weight that is made of others, and all weights by their turn.

    The file decides about the turn: its names are sorted, not those of the model.
    """
    kept = _without_bytes(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    weights = {name: kept[name] for name in names if name in kept}
    files = {name: {name: each} for name, each in weights.items()}
    if has_loader():
        files = {name: in_file(model, each) for name, each in files.items()}
    in_turn = sorted(files, key=lambda name: min(map(_natural, files[name])))
    return {
        name: partial(_convert, model, _unread(files[name], stored, nullcontext), home)
        for name in converted(model)
    }, in_turn


def load(
    model: Any, home: torch.device, stored: torch.dtype, shared: Shared, quantizer: Any = None
) -> None:
    """Load the weights of a model.

    `stored` is the dtype in the file. Under ZeRO-3 weights are divided already, unless a quantizer
    decodes them: the first rank reads all, and the others get their parts.
    """
    from transformers import modeling_utils

    divides = is_divided() and quantizer is None
    if not divides:
        model.to("meta")
        # It leaves 1.2 GiB of the card free; on one that has no more, as in tests, it would fail.
        if home.type != "cpu" and torch.cuda.mem_get_info(home)[1] > _LEFT_FREE:
            places = dict.fromkeys(model.state_dict(), home)
            modeling_utils.caching_allocator_warmup(model, places, quantizer)
    found = in_file(model, _without_bytes(model))
    state = _unread(found if quantizer is None else _packed(found), stored, shared)
    if divides:
        from transformers.integrations.deepspeed import _load_state_dict_into_zero3_model

        with shared():
            read = {name: each[...] for name, each in state.items()}
            _load_state_dict_into_zero3_model(model, read, _config(model, home, quantizer))
    else:
        _convert(model, state, home, quantizer)
        _finish(model, home)


def _without_bytes(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model without bytes; of those that are tied, a file has one."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {
        name: torch.empty(getattr(each, "ds_shape", each.shape), dtype=each.dtype, device="meta")
        for name, each in model.state_dict(keep_vars=True).items()
        if name not in tied
    }


def _unread(
    found: Mapping[str, torch.Tensor], stored: torch.dtype, shared: Shared
) -> dict[str, _InFile]:
    return {name: _InFile(each, stored, shared) for name, each in found.items()}


def _convert(
    model: Any, state: dict[str, _InFile], home: torch.device, quantizer: Any = None
) -> None:
    from transformers import core_model_loading

    with Patches() as patches:
        patches.set(core_model_loading, "tqdm", lambda each, **_: each)
        # threads read ahead, which takes no more in the end: all is there before the last is made
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # restored after each prediction
        config = _config(model, home, quantizer)
        core_model_loading.convert_and_load_state_dict_in_model(model, state, config)


def _config(model: Any, home: torch.device, quantizer: Any) -> Any:
    from transformers import modeling_utils

    return modeling_utils.LoadStateDictConfig(
        device_map={"": home},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        hf_quantizer=quantizer,
        weight_mapping=_mapping(model, quantizer),
    )


def _finish(model: Any, home: torch.device) -> None:
    """Make what no checkpoint has, and tie weights."""
    missing = {name for name, each in model.state_dict().items() if each.is_meta}
    model._move_missing_keys_from_meta_to_device(missing, {"": home}, None, None)
    model.tie_weights(recompute_mapping=False)


def has_loader() -> bool:
    """Return whether transformers has the loader that is run here: 5.23 has it, 4 has none."""
    try:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as loader
    except ImportError:
        return False
    return [*inspect.signature(loader).parameters] == _LOADER_TAKES


def _mapping(model: Any, quantizer: Any = None) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: list[Any] = get_model_conversion_mapping(model, None, quantizer)
    return mapping


def _packed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let experts be in mxfp4, as in the checkpoints of gpt-oss."""
    found: dict[str, torch.Tensor] = {}
    for name, each in weights.items():
        if not name.endswith(_EXPERTS):
            found[name] = each
            continue
        number, inside, outside = each.shape
        scales = each.new_empty((number, outside, inside // _MXFP4_BLOCK), dtype=torch.uint8)
        found[f"{name}_blocks"] = scales.new_empty((*scales.shape, _MXFP4_BLOCK // 2))
        found[f"{name}_scales"] = scales
    return found


def _natural(name: str) -> list[tuple[int, Any]]:
    """Sort names of weights as transformers loads them: numbers by their value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
