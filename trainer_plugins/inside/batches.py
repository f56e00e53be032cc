"""Examines a Trainer's batches: the length of their rows, and whether survival divides them."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from trainer_plugins.accumulation import Effect
from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.survival.evaluation import explain_whole
from trainer_plugins.survival.exact.layouts import find_layout
from trainer_plugins.survival.exact.losses import Family, NoFamily, family_of
from trainer_plugins.survival.exact.shares import IndivisibleError
from trainer_plugins.survival.refusals import refusals

VOUCHES = "TRAINER_PLUGINS_DRY_VOUCHES"  # set if the user vouches for a loss


class Batches:
    """Facts about the batches of a Trainer. Create it before the Trainer's methods are replaced."""

    def __init__(self, trainer: Any) -> None:
        self.tokens = 0
        family, vouched = family_of(trainer, is_vouched=VOUCHES in os.environ), ""
        if isinstance(family, NoFamily) and family.can_vouch:
            judged = judge_accumulation(trainer)
            if judged.effect in (Effect.SAME, Effect.SCALED):  # by its code
                family, vouched = family_of(trainer, is_vouched=True), judged.why
        in_evaluation = explain_whole(trainer, family)
        self.why_whole = {
            "training": refusals(trainer, family),
            "evaluation": [in_evaluation] if in_evaluation else [],
            "unless vouched": [vouched] if vouched else [],
        }
        self._family = family

    def look(self, arguments: tuple[Any, ...]) -> None:
        """Examine a batch, the second argument of `compute_loss`."""
        batch = arguments[1] if len(arguments) > 1 else None
        if not isinstance(batch, Mapping):
            return
        ids = batch.get("input_ids")
        self.tokens = max(self.tokens, ids.shape[-1] if isinstance(ids, torch.Tensor) else 0)
        if isinstance(self._family, Family) and not self.why_whole["training"]:
            try:
                find_layout(self._family.layouts, batch)
            except IndivisibleError as error:
                self.why_whole["training"].append(str(error))
