"""A generation runs to its longest: no token of it is chosen by the model."""

import torch

from trainer_plugins.inside.process import has_numbers


def generate_to_the_end() -> None:
    """Let no end token end a generation of transformers, unless the model really chooses them."""
    if has_numbers():
        return
    from transformers.generation import stopping_criteria

    def never(self: object, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    stopping_criteria.EosTokenCriteria.__call__ = never
