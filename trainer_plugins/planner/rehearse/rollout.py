"""Rehearse a Trainer that generates its own training data: TRL's GRPO and RLOO."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import RUN_IT, NotPredicted, PlanError

COLUMNS = ("prompt", "image", "images")  # columns of a row that it reads


def generates(trainer: object) -> bool:
    """Return whether a Trainer generates its own training data, as TRL's GRPO and RLOO do."""
    return hasattr(trainer, "_generate_and_score_completions")


def rows_of_a_batch(args: Any) -> int:
    """Return how many rows a card generates at once: those of several micro-steps."""
    return int(args.per_device_train_batch_size * args.steps_per_generation)


def refuse(trainer: Any) -> None:
    """Refuse a Trainer that generates through code whose memory we do not know."""
    for name, what in (
        ("use_transformers_continuous_batching", "continuous batching of transformers"),
        ("rollout_func", "completions of a rollout_func"),
        ("environment_factories", "environments (environment_factory)"),
        ("tools", "completions that call tools"),
    ):
        if getattr(trainer, name, None):
            raise NotPredicted(f"a {type(trainer).__name__} with {what}: {RUN_IT}")


def prepare(trainer: Any, card: Card | None) -> None:
    """Give a Trainer placeholder rewards, and completions from a stand-in for vLLM.

    The user's functions do not run.
    """
    trainer._calculate_rewards = lambda _, prompts, __, completions: _rewards(
        trainer, prompts, completions
    )
    if not trainer.use_vllm:
        return
    if card is None and trainer.args.vllm_mode == "colocate":
        raise PlanError("vLLM shares the card with the training: name the card (--gpu)")
    held_bytes = 0 if card is None else card.capacity_bytes
    trainer.vllm_generation, trainer._last_loaded_step = Vllm(trainer, held_bytes), -1


def _rewards(trainer: Any, prompts: Sequence[Any], completions: list[list[int]]) -> torch.Tensor:
    """Return one reward per function and row; reward models read the policy's tokens."""
    device, names = trainer.accelerator.device, trainer.reward_func_names
    rewards = torch.zeros(len(prompts), len(names), device=device)
    prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
    length = max(map(len, prompt_ids)) + max(map(len, completions))
    for index, judge in enumerate(models_of(trainer)):
        ids = torch.ones((len(prompts), length), dtype=torch.long)
        read = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
        with torch.inference_mode():
            rewards[:, index] = judge(**read).logits[:, 0]
    gathered: torch.Tensor = trainer.accelerator.gather(rewards)
    return gathered


def models_of(trainer: object) -> list[torch.nn.Module]:
    """Return the reward models."""
    judges = getattr(trainer, "reward_funcs", [])
    return [each for each in judges if isinstance(each, torch.nn.Module)]


class Vllm:
    """Stands in for TRL's VLLMGeneration: takes vLLM's memory, and returns completions.

    vLLM takes `gpu_memory_utilization` of the card's total memory (vllm 0.26.0, v1/worker/utils.py,
    request_memory); in server mode it takes none. In sleep mode TRL gives it that memory only while
    it generates, and empties torch's cache before (trl/generation/vllm_generation.py).
    """

    def __init__(self, trainer: Any, card_bytes: int) -> None:
        self._trainer, self._args, self._card_bytes = trainer, trainer.args, card_bytes
        self._sleeps = self._args.vllm_enable_sleep_mode
        self.held = None if self._sleeps else self._share()

    def _share(self) -> torch.Tensor | None:
        if self._args.vllm_mode != "colocate":
            return None
        share = int(self._card_bytes * self._args.vllm_gpu_memory_utilization)
        return torch.empty(share, dtype=torch.uint8, device=self._args.device)

    def sync_weights(self) -> None:
        """Copy the weights to vLLM, with an adapter merged into its base."""
        model = self._trainer.model
        if self._sleeps:
            torch.cuda.empty_cache()
        if hasattr(model, "merge_adapter"):
            model.merge_adapter()
            model.unmerge_adapter()

    def generate(self, prompts: list[list[int]], **_: object) -> tuple[Any, ...]:
        """Return a completion of maximum length for each prompt, and its log-probabilities."""
        if self._sleeps:
            self.held = self._share()
            self.held = None
            torch.cuda.empty_cache()  # vLLM returns its memory to the card
        length = self._args.max_completion_length
        return prompts, [[1] * length] * len(prompts), [[[0.0]] * length] * len(prompts), None
