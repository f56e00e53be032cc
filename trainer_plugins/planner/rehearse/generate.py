"""Rehearse `generate`: few tokens are computed, and the KV cache grows instead of others."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_plugins.patched import Patches
from trainer_plugins.planner.tracing.trace import Tracker

_FIRST_COMPUTED = 3  # tokens: that of the prompt, and two from the KV cache
_LAST_COMPUTED = 2  # tokens at the end, where the KV cache is largest
_MOST_GROWTHS = 64  # steps of the KV cache instead of tokens


class Generation:
    """Lets `generate` take all its tokens, though no value can tell it to go on or to end."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._num_computed = 0
        self._num_left = 1
        self._num_skipped = 0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run one `generate` inside the block, in its own moment."""
        from transformers import GenerationMixin
        from transformers.generation.stopping_criteria import StoppingCriteriaList

        def noting(
            criteria: Callable[..., object],
            stops: Any,
            input_ids: torch.Tensor,
            *args: Any,
            **more: Any,
        ) -> object:
            self._num_left = stops.max_length - input_ids.shape[1] - self._num_skipped
            return criteria(stops, input_ids, *args, **more)

        def updating(
            update: Callable[..., Any],
            model: Any,
            outputs: Any,
            inputs: Any,
            *args: Any,
            **more: Any,
        ) -> object:
            lengths = {name: each.shape for name, each in inputs.items() if _is_tensor(each)}
            inputs = update(model, outputs, inputs, *args, **more)
            self._num_computed += 1
            if self._num_computed == _FIRST_COMPUTED:
                self._skip(inputs, lengths)
            return inputs

        with self._tracker.during("generation"), Patches() as patches:
            patches.wrap(StoppingCriteriaList, "__call__", noting)
            patches.set(
                GenerationMixin, "_has_unfinished_sequences", lambda *_, **__: self._num_left > 0
            )
            patches.wrap(GenerationMixin, "_update_model_kwargs_for_generation", updating)
            yield

    def completed(self, generated: Any) -> Any:
        """Return what `generate` has returned, with the tokens that were not computed."""
        if not _is_tensor(generated) or not self._num_skipped:
            return generated
        return _longer(generated, self._num_skipped)

    def _skip(self, inputs: dict[str, Any], lengths: dict[str, torch.Size]) -> None:
        """Let the KV cache, and all inputs that grow with each token, be those of a later token."""
        layers = _layers_that_grow(inputs.get("past_key_values"))
        num_between = self._num_left - 1 - _LAST_COMPUTED
        if not layers or num_between <= 0:
            return
        stride = -(-num_between // _MOST_GROWTHS)
        for done in range(0, num_between, stride):
            for layer in layers:
                num_tokens = min(stride, num_between - done)
                layer.update(_columns(layer.keys, num_tokens), _columns(layer.values, num_tokens))
                self._tracker.tag((layer.keys, layer.values), "KV cache")
        for name, shape in lengths.items():
            if inputs[name].shape == (*shape[:-1], shape[-1] + 1):
                inputs[name] = _longer(inputs[name], num_between)
        self._num_skipped = num_between


def _layers_that_grow(cache: Any) -> list[Any]:
    """Return the layers of a KV cache, if each grows with each token; else none."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    return layers if all(isinstance(each, DynamicLayer) for each in layers) else []


def _columns(kept: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return kept.new_empty((*kept.shape[:-2], num_tokens, kept.shape[-1]))


def _longer(tokens: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([tokens, tokens.new_ones((*tokens.shape[:-1], by))], dim=-1)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0
