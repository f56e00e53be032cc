"""GRPO and RLOO: what does not fit when completions are generated, or scored, is divided."""

from typing import Any

import pytest
import torch

from tests.survival import test_trl
from tests.survival.test_attach import remarks
from trainer_plugins import survive_oom

pytest.importorskip("trl")

TOKENS = {"suppress_tokens": [0, 2, *range(8, 259)]}
MAKE = {"GRPO": test_trl.grpo, "RLOO": test_trl.rloo}


class Card:
    """On which so many rows fit in a pass without gradients, of generation, scoring or both."""

    def __init__(self, model: torch.nn.Module, most: int, kind: str) -> None:
        self.most, self.kind, self.num_failed = most, kind, 0
        model.register_forward_pre_hook(self.refuse, with_kwargs=True)

    def refuse(self, model: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids = inputs["input_ids"]
        # transformers 5.24 renamed it
        is_generated = any(inputs.get(name) is not None for name in ("cache", "past_key_values"))
        if torch.is_grad_enabled() or len(ids) <= self.most:
            return
        if self.kind == ("generate" if is_generated else "score"):
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def made(folder, name: str, card: tuple[int, str] | None, **options):
    """A trained trainer, what it has generated and scored, and how often that failed."""
    kind = {"beta": 0.1, "steps": 2, "gradient_accumulation_steps": 1, **options}
    trainer = MAKE[name](folder, **kind)
    scored: list[dict[str, Any]] = []
    score = trainer._generate_and_score_completions

    def kept(*args):
        scored.append(score(*args))
        return dict(scored[-1])

    trainer._generate_and_score_completions = kept
    models = [trainer.model, *([trainer.ref_model] if trainer.ref_model is not None else [])]
    cards = [Card(model, *card) for model in models] if card else []
    if card:
        survive_oom(trainer)
    trainer.train()
    return trainer, scored, sum(one.num_failed for one in cards)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["generate", "score"])
def test_greedy_completions_and_their_scores_are_the_same(tmp_path, name: str, kind: str) -> None:
    greedy = {"generation_kwargs": {**TOKENS, "do_sample": False}}
    _, expected, _ = made(tmp_path / "whole", name, None, **greedy)
    _, found, num_failed = made(tmp_path / "divided", name, (1, kind), **greedy)

    assert num_failed >= 2, "four rows, then two"
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["completion_ids"], theirs["completion_ids"])
        assert len(theirs["completion_ids"]) == 4
        for column in ("ref_per_token_logps", "ref_logps", "old_logps"):
            if column in theirs:
                assert torch.allclose(ours[column], theirs[column], rtol=0, atol=1e-6)
    what = {"generate": "completions to generate", "score": "rows to score"}[kind]
    (remark,) = remarks(tmp_path / "divided", "out-of-memory-survived")
    said = remark.finding.summary
    assert said.startswith(f"{what} did not fit at once, and were computed in 4 parts")


def test_checkpointing_is_on_again_after_a_generation_that_failed(tmp_path) -> None:
    trainer, found, num_failed = made(
        tmp_path, "GRPO", (2, "generate"), gradient_checkpointing=True
    )

    assert num_failed > 0
    assert len(found) == 2, "sampled"
    assert trainer.model.is_gradient_checkpointing


def test_one_row_that_does_not_fit_ends_the_run_with_its_error(tmp_path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="nothing smaller to try than one completion"):
        made(tmp_path, "GRPO", (0, "generate"))
