"""Stand in for the quantised layers of bitsandbytes 0.50.1, without the package and its kernels.

The tensors are those of nn/modules.py, functional.py, autograd/_functions.py and
backends/cuda/ops.py. transformers and PEFT decide which layers are quantised.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from trainer_plugins.wrapped import base_model

_VERSION = "0.50.1"
_BLOCK = 64  # weights that share a scale in 4 bits
_NESTED_BLOCK = 256  # scales that share a scale, with double quantisation


class QuantState:
    """Holds the scales of a weight in 4 bits, in the attributes of bitsandbytes' class."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, shape: Any, dtype: Any) -> None:
        self.absmax, self.code, self.shape, self.dtype = absmax, code, shape, dtype
        self.offset: torch.Tensor | None = None
        self.state2: QuantState | None = None  # the scales of the scales, with double quantisation

    def scales(self) -> torch.Tensor:
        """Return one scale for each block, which double quantisation has to compute first."""
        if self.offset is None:
            return self.absmax
        scales = torch.empty_like(self.absmax, dtype=torch.float32)
        scales += self.offset
        return scales

    def tensors(self) -> list[torch.Tensor]:
        """List all that is kept in addition to the packed weight."""
        found = [self.absmax, self.code]
        if self.state2 is not None and self.offset is not None:
            found += [*self.state2.tensors(), self.offset]
        return found

    def to(self, device: torch.device) -> None:
        """Move all tensors."""
        self.absmax, self.code = self.absmax.to(device), self.code.to(device)
        if self.state2 is not None and self.offset is not None:
            self.offset = self.offset.to(device)
            self.state2.to(device)

    def dequantised(self) -> torch.Tensor:
        """Return the full weight, in the dtype that it was quantised from."""
        scales = self.scales()  # they live while the weight is made
        return torch.empty(self.shape, dtype=self.dtype, device=scales.device)


class MatmulLtState:
    """Holds the scales of a weight in int8, in the attributes of bitsandbytes' class."""

    CB: torch.Tensor | None = None
    SCB: torch.Tensor | None = None
    has_fp16_weights = False
    threshold = 0.0


class _Product4Bit(torch.autograd.Function):
    """Keeps only the packed weight, and makes the full weight once in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, state: Any) -> Any:
        ctx.packed, ctx.state, ctx.bias_dtype = packed, state, None if bias is None else bias.dtype
        return _linear_4bit(x, bias, state)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_bias = grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = torch.matmul(grad, ctx.state.dequantised().to(grad.dtype))
        return of_input, None, of_bias, None


def _linear_4bit(x: torch.Tensor, bias: torch.Tensor | None, state: QuantState) -> torch.Tensor:
    """Compute on the full weight, as for more than 1536 tokens (_dequant_linear_fallback).

    What scales are decoded to, and their sum with the offset, live while the product is computed;
    autocast changes nothing inside.
    """
    scales = state.absmax
    if state.offset is not None:
        decoded = torch.empty_like(scales, dtype=torch.float32)
        scales = decoded + state.offset
    whole = torch.empty(state.shape, dtype=x.dtype, device=scales.device)
    with torch.autocast("cuda", enabled=False):
        return functional.linear(x, whole, bias)


class _Product8Bit(torch.autograd.Function):
    """Keeps its input, although its backward needs only the weight, as MatMul8bitLt does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, state: Any) -> Any:
        ctx.shape, ctx.weight, ctx.state = x.shape, weight, state
        x = x.reshape(-1, x.shape[-1])
        # the rows in int8 and their scales live until the end, the outliers' mask does not
        rows, scales = _rows_in_int8(x.to(torch.float16), state.threshold)
        ctx.input = x if any(ctx.needs_input_grad[:2]) else None
        made = _scaled(rows, scales, weight, bias, x.dtype)
        return made.reshape(*ctx.shape[:-1], weight.shape[0]) if len(ctx.shape) == 3 else made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        whole = ctx.weight.to(ctx.input.dtype, copy=True)
        whole.mul_(ctx.state.SCB.unsqueeze(1).mul(1 / 127))
        return torch.matmul(grad.to(ctx.input.dtype), whole).view(ctx.shape), None, None, None


def _rows_in_int8(half: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row; look for outliers, of which none are assumed."""
    scales = torch.empty(half.shape[0], dtype=torch.float32, device=half.device)
    rows = torch.empty_like(half, dtype=torch.int8)
    if threshold > 0:
        half.abs() >= threshold  # noqa: B015 - its memory counts
    return rows, scales


def _scaled(
    rows: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply in int32 and scale to float16, then to the dtype of the input."""
    sums = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.int32, device=rows.device)
    made = torch.empty_like(sums, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        made.add_(bias)
    return made.to(dtype)


class _Quantised(torch.nn.Linear):
    """Is a linear layer whose weight arrives on the card and is quantised there."""

    def load(self, device: torch.device, dtype: torch.dtype, is_packed: bool) -> None:
        """Put the weight on the card: packed as in its checkpoint, or in full and then packed."""
        shape = self.weight.shape
        whole = None if is_packed else torch.empty(shape, dtype=dtype, device=device)
        self._pack(device, dtype, whole is not None)
        self.weight.quantised_numel = shape.numel()  # type: ignore[attr-defined]

    def _pack(self, device: torch.device, dtype: torch.dtype, quantises: bool) -> None:
        raise NotImplementedError


class Linear4bit(_Quantised):
    """Has the constructor and the tensors of bitsandbytes' class of this name."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        super().__init__(input_features, output_features, bias, device)
        self.weight.requires_grad_(False)
        self.compute_dtype, self.quant_storage = compute_dtype, quant_storage
        self.compress_statistics, self.quant_type = compress_statistics, quant_type
        self.quant_state: QuantState | None = None

    def _pack(self, device: torch.device, dtype: torch.dtype, quantises: bool) -> None:
        """Make what `quantize_4bit` makes, in its order."""
        shape = self.weight.shape
        blocks = -(-shape.numel() // _BLOCK)
        absmax = torch.empty(blocks, dtype=torch.float32, device=device)
        length = (shape.numel() + 1) // (2 * self.quant_storage.itemsize)
        packed = torch.empty((length, 1), dtype=self.quant_storage, device=device)
        state = QuantState(absmax, torch.empty(16, device=device), shape, dtype)
        if self.compress_statistics:
            state.offset = absmax.mean()
            centred = absmax - state.offset if quantises else absmax
            nested = torch.empty(-(-blocks // _NESTED_BLOCK), device=device)
            state.absmax = torch.empty_like(centred, dtype=torch.uint8)
            state.state2 = QuantState(nested, torch.empty(256, device=device), None, absmax.dtype)
        self.quant_state = state
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        vars(self.weight).update(  # PEFT asks the weight
            compress_statistics=self.compress_statistics, quant_type=self.quant_type
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute in the compute dtype, and return the dtype of the input."""
        assert self.quant_state is not None, "the weight was not loaded"
        if self.compute_dtype is None and input.dtype != torch.float16:
            self.compute_dtype = input.dtype
        dtype = self.compute_dtype or input.dtype
        x, bias = input.to(dtype), self.bias
        if bias is not None and bias.dtype != dtype:
            bias.data = bias.data.to(dtype)
        needs_gradient = x.requires_grad or (bias is not None and bias.requires_grad)
        product: Any = partial(_linear_4bit, x, bias)
        if torch.is_grad_enabled() and needs_gradient:
            product = partial(_Product4Bit.apply, x, self.weight, bias)
        return torch.Tensor.to(product(self.quant_state), input.dtype)  # the product goes before x


class Linear8bitLt(_Quantised):
    """Has the constructor and the tensors of bitsandbytes' class of this name."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__(input_features, output_features, bias, device)
        self.weight.requires_grad_(False)
        self.index = index
        self.state = MatmulLtState()
        self.state.has_fp16_weights, self.state.threshold = has_fp16_weights, threshold

    def _pack(self, device: torch.device, dtype: torch.dtype, quantises: bool) -> None:
        """Make what `int8_vectorwise_quant` makes of a weight that the host made float16."""
        shape = self.weight.shape
        half = torch.empty(shape, dtype=torch.float16, device=device) if quantises else None
        self.state.SCB = torch.empty(shape[0], dtype=torch.float32, device=device)
        packed = torch.empty(shape, dtype=torch.int8, device=device)
        del half
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.state.CB = packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute in int8, and return the dtype of the input."""
        if self.bias is not None and self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        made: torch.Tensor = _Product8Bit.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.state
        )
        return made


def stand_in_for_bitsandbytes() -> None:
    """Let this process import these layers as bitsandbytes, permanently."""
    if getattr(sys.modules.get("bitsandbytes"), "Linear4bit", None) is Linear4bit:
        return
    layers = {each.__name__: each for each in (Linear4bit, Linear8bitLt)}
    others = {"Params4bit": torch.nn.Parameter, "Int8Params": torch.nn.Parameter}
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": _VERSION, "__file__": __file__, "Linear4bit": Linear4bit},
        ".nn": {**layers, **others},
        ".nn.modules": {**layers, **others},
        ".functional": {"QuantState": QuantState},
        ".autograd": {},
        ".autograd._functions": {"MatmulLtState": MatmulLtState},
    }
    for path, content in contents.items():
        module = ModuleType(f"bitsandbytes{path}")
        module.__spec__ = ModuleSpec(module.__name__, loader=None, origin=__file__)
        vars(module).update(__path__=[], **content)
        sys.modules[module.__name__] = module
        above, _, leaf = module.__name__.rpartition(".")
        if above:
            setattr(sys.modules[above], leaf, module)
    package = sys.modules["bitsandbytes"]
    for name in ("transformers.utils.import_utils", "peft.import_utils"):
        for asked in ("is_bitsandbytes_available", "is_bnb_available", "is_bnb_4bit_available"):
            answer = getattr(importlib.import_module(name), asked, None)
            if answer is not None and hasattr(answer, "cache_clear"):
                answer.cache_clear()
    user: Any = importlib.import_module("transformers.integrations.bitsandbytes")
    user.bnb = package


def quantise(
    model: Any,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    is_packed: bool,
    made: Mapping[str, Callable[[], None]],
    in_turn: Sequence[str],
) -> Any:
    """Load a model quantised as transformers would: weights in turn, some by what `made` has."""
    from transformers import modeling_utils
    from transformers.quantizers.auto import AutoHfQuantizer

    stand_in_for_bitsandbytes()
    card = {"": device}
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=is_packed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # versions differ in which of these they ask for
        quantizer.preprocess_model(model=model, config=model.config, dtype=dtype, device_map=card)
    finally:
        torch.set_default_dtype(before)
    places = dict.fromkeys(model.state_dict(), device)
    modeling_utils.caching_allocator_warmup(model, places, quantizer)
    if getattr(config, "bnb_4bit_use_double_quant", False):  # one map of the scales for all layers
        vars(model)["map_of_scales"] = torch.empty(256, device=device)
    for name in in_turn:
        if name in made:
            made[name]()
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, _Quantised) and leaf == "weight":
            module.load(device, dtype, is_packed)
        else:
            _make(module, leaf, device)
    for part in model.modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:  # no file has it
                _make(part, leaf, device)
    model.tie_weights()
    model.hf_quantizer = quantizer
    if device.type != "cpu":  # accelerate would keep it there
        model.hf_device_map = card
    return quantizer.postprocess_model(model, config=model.config)


def _make(module: torch.nn.Module, name: str, device: torch.device) -> None:
    before = getattr(module, name)
    value = torch.empty_like(before, device=device)
    if isinstance(before, torch.nn.Parameter):
        value = torch.nn.Parameter(value, before.requires_grad)
    setattr(module, name, value)


def prepared(model: Any, checkpoints: bool) -> Any:
    """Let PEFT prepare a quantised model for training.

    PEFT recognises packed weights by their dtype or the name of their class, which no fake tensor
    has. So they are bytes meanwhile.
    """
    import peft

    packed = [part for part in model.modules() if isinstance(part, Linear4bit)]
    for layer in packed:
        layer.weight.data = layer.weight.data.view(torch.uint8)
    model = peft.prepare_model_for_kbit_training(model, checkpoints)
    for layer in packed:
        layer.weight.data = layer.weight.data.view(layer.quant_storage)
    return model


def place(model: Any, device: torch.device) -> None:
    """Move the user's quantised model to the card, which transformers refuses to do."""
    move(model, device)
    base_model(model).hf_device_map = {"": device}


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a part of a model, quantised or not, with what is neither parameter nor buffer."""
    torch.nn.Module.to(module, device)
    for part in module.modules():
        if isinstance(part, Linear4bit) and part.quant_state is not None:
            part.quant_state.to(device)
            vars(part.weight)["quantised_numel"] = part.quant_state.shape.numel()
        elif isinstance(part, Linear8bitLt):
            part.state.CB = part.weight.data
            part.state.SCB = torch.empty(part.weight.shape[0], device=device)


def attach_states(model: torch.nn.Module) -> None:
    """Let each weight of 4 bits have its state, as in bitsandbytes' own class of weights."""
    for part in model.modules():
        if isinstance(part, Linear4bit):
            vars(part.weight)["quant_state"] = part.quant_state


def bits_of(model: torch.nn.Module) -> int:
    """Return the bits of a quantised weight of a model; 0 if none is quantised."""
    kinds = {type(part) for part in model.modules()}
    if Linear4bit in kinds:
        return 4
    return 8 if Linear8bitLt in kinds else 0


def scales_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """List the scales and maps of quantised weights, which are neither parameters nor buffers."""
    kept = []
    for part in model.modules():
        if isinstance(part, Linear4bit) and part.quant_state is not None:
            kept += part.quant_state.tensors()
        elif isinstance(part, Linear8bitLt) and part.state.SCB is not None:
            kept.append(part.state.SCB)
    return kept
