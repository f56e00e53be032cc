"""Shown: cut padded rows short for a probe, and label them so that no two weights are the same."""

import numpy as np
import torch

PROBE_TOKENS = 16
"""Tokens of each example that a probe keeps: enough to show how a loss adds up."""

IGNORED = -100
"""The label that no loss of transformers counts."""

TEXT = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "completion_mask",
)
"""Endings of the names of what has a column a token."""

_FEW = 3
"""Fewest tokens of a probe's row that is labelled in part."""

_Columns = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_Texts = dict[str, torch.Tensor]
"""Integers of two dimensions, by a name that ends as one of `TEXT`."""


def cut_short(texts: _Texts, num: int) -> _Texts:
    """Keep `PROBE_TOKENS` columns of each row, with their padding.

    In the first of every `num` rows a third of what the mask shows is labelled, and one token that
    the mask hides.
    """
    masks = {
        (_part(name), v.size(1)): _Shown(_tokens(texts, name), v, num, _part(name))
        for name, v in texts.items()
        if name.endswith("attention_mask")
    }
    of_width = {width: shown for (_, width), shown in masks.items()}
    cut: _Texts = {}
    for name, value in texts.items():
        width = value.size(1)
        shown = masks.get((_part(name), width)) or of_width.get(width)
        if shown is None:
            tokens = _tokens(texts, name)
            shown = of_width[width] = _Shown(tokens, torch.ones_like(tokens), num)
        text = shown.columns(value)
        if name.endswith("attention_mask"):
            text = shown.mask
        elif name.endswith("labels"):
            text = torch.where(
                shown.is_labelled, text.clamp(min=0), torch.where(shown.is_first, IGNORED, text)
            )
        elif name.endswith("completion_mask"):
            text.fill_(1)
            text[::num, PROBE_TOKENS // 3 :] = 0
        cut[name] = text
    return cut


class _Shown:
    """Holds the columns of padded rows that a probe keeps, with its mask and its labels.

    In the first row a third of what the mask shows is labelled, and the last token, which the mask
    hides now: a loss that goes by the mask does not count it. Rows of one or two tokens are shown
    whole, with their padding. The end of a prompt stays: with what follows it would be a hole, and
    TRL 0.24 cuts all columns behind one (trl/trainer/utils.py, flush_left).
    """

    def __init__(self, tokens: torch.Tensor, mask: torch.Tensor, num: int, part: str = "") -> None:
        width = min(PROBE_TOKENS, mask.size(1))
        columns = _begins(tokens, mask, width)[:, None] + np.arange(width)
        self._kept = torch.from_numpy(columns).to(mask.device)
        self.mask = self.columns(mask)
        self.mask[(self.mask != 0).sum(1) < _FEW] = 1
        self.is_labelled = self.mask != 0
        self.is_first = torch.zeros_like(self.is_labelled)
        for row in range(0, len(self.mask), num):
            at = self.mask[row].nonzero().flatten()
            self.is_first[row] = True
            self.is_labelled[row, at[max(1, len(at) // 3) : -1]] = False
            if len(at) >= _FEW and part != "prompt_":
                self.mask[row, at[-1]] = 0

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        """Copy the columns that are kept, of each row its own."""
        return value.expand(len(self._kept), -1).gather(1, self._kept)


def _begins(tokens: torch.Tensor, mask: torch.Tensor, width: int) -> _Columns:
    """Find for each row where to begin: at the first token by which it is like no other row.

    What rows have in common would show nothing. Chosen and rejected begin with the same prompt, and
    up to its end the gradient of their difference is 0. It is found in main memory: the card is
    full.
    """
    is_shown = mask.cpu().numpy() != 0
    seen = np.where(is_shown, tokens.cpu().numpy(), -1)
    in_common = np.cumprod(seen[:, None] == seen, axis=2, dtype=np.int8).sum(2, dtype=np.int64)
    np.fill_diagonal(in_common, 0)
    begins, num_columns = in_common.max(1), seen.shape[1]
    first = is_shown.argmax(1)
    last = num_columns - 1 - is_shown[:, ::-1].argmax(1)
    begins = np.minimum(np.where(begins <= last, begins, first), last - _FEW + 1)
    found: _Columns = np.minimum(np.maximum(begins, first), num_columns - width)
    return found


def _tokens(texts: _Texts, name: str) -> torch.Tensor:
    """Return the tokens to which a text belongs: ids or labels of its width, rather its own."""

    def rank(other: str) -> tuple[bool, bool, bool]:
        is_own = _part(other) == _part(name)
        return not other.endswith(("input_ids", "labels")), not is_own, other.endswith("labels")

    return texts[min((n for n, v in texts.items() if v.size(1) == texts[name].size(1)), key=rank)]


def _part(name: str) -> str:
    """Return what a tensor is part of: `prompt_`, `chosen_`; empty for `input_ids`."""
    return next(name.removesuffix(ending) for ending in TEXT if name.endswith(ending))
