"""Rehearse a Trainer that generates what it trains on: TRL's GRPO and RLOO, by its own code."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.tracing.trace import Tracker

COLUMNS = ("prompt", "image", "images")  # what such a Trainer reads of a row

ASSUMPTION = (
    "each completion has max_completion_length tokens, and the longest prompts are in one batch: "
    "the worst case"
)


def generates(trainer: object) -> bool:
    """Return whether a Trainer generates what it trains on, as TRL's GRPO and RLOO do."""
    return hasattr(trainer, "_generate_and_score_completions")


def rows_of_a_batch(args: Any) -> int:
    """Return the rows that a card generates at once: those of several micro-steps."""
    return int(args.per_device_train_batch_size * args.steps_per_generation)


def refuse(trainer: Any) -> None:
    """Refuse a Trainer that generates by code whose memory is not known here."""
    for name, what in (
        ("use_transformers_continuous_batching", "continuous batching of transformers"),
        ("rollout_func", "completions of a rollout_func"),
        ("environment_factories", "environments (environment_factory)"),
        ("tools", "completions that call tools"),
    ):
        if getattr(trainer, name, None):
            raise NotPredicted(f"{type(trainer).__name__} with {what}")


def check_card(args: Any, card: Card | None) -> None:
    """Refuse a vLLM that shares a card whose size is unknown."""
    if card is None and getattr(args, "use_vllm", False) and args.vllm_mode == "colocate":
        raise PlanError("vLLM shares the card with the training: name the card (--gpu)")


def revive(trainer: Any) -> None:
    """Make again what belongs to such a Trainer's process."""
    trainer.log_completions = False
    distributed: Any = sys.modules.get("trl.distributed")
    if distributed is not None:  # an older TRL is refused later
        trainer._dist = distributed.DistributedBackend(trainer.accelerator)


def prepare(trainer: Any, tracker: Tracker) -> None:
    """Give a Trainer made-up rewards, and completions of a vLLM that is not there."""
    give_rewards(trainer)
    _completions_are_scored(trainer, tracker)
    if trainer.use_vllm:
        trainer.vllm_generation, trainer._last_loaded_step = Vllm(trainer, tracker), -1


def _completions_are_scored(trainer: Any, tracker: Tracker) -> None:
    """Say how many tokens of a row the mask of labels picks: those of its completion."""
    score = trainer._get_per_token_logps_and_entropies  # of TRL's GRPO and RLOO

    def scored(model: Any, ids: Any, mask: Any, logits_to_keep: int, *args: Any, **kw: Any) -> Any:
        tracker.values.ones_of_a_row = logits_to_keep
        try:
            return score(model, ids, mask, logits_to_keep, *args, **kw)
        finally:
            tracker.values.ones_of_a_row = None

    trainer._get_per_token_logps_and_entropies = scored


def give_rewards(trainer: Any) -> None:
    """Give a Trainer made-up rewards: the user's functions do not run."""
    trainer._calculate_rewards = lambda _, prompts, __, completions: _rewards(
        trainer, prompts, completions
    )


def skip(trainer: Any) -> bool:
    """Skip a micro-step, unless it begins by generating; return whether it was skipped."""
    if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0:
        return False
    trainer._step += 1
    return True


def generate_again(trainer: Any) -> None:
    """Let the next micro-step generate, as a later one will, when there are optimizer states."""
    trainer._buffered_inputs = None


def _rewards(trainer: Any, prompts: Sequence[Any], completions: list[list[int]]) -> torch.Tensor:
    """Return a reward of each function for each row; reward models read the policy's tokens."""
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
    """Stands in for TRL's VLLMGeneration: takes the memory of vLLM, and returns completions.

    vLLM takes `gpu_memory_utilization` of the card's whole memory (vllm 0.26.0, v1/worker/utils.py,
    request_memory); on a server none. With its sleep mode TRL gives it that memory while it
    generates, and empties torch's cache before (trl/generation/vllm_generation.py).
    """

    def __init__(self, trainer: Any, tracker: Tracker) -> None:
        self._trainer, self._tracker, self._args = trainer, tracker, trainer.args
        self._sleeps = self._args.vllm_enable_sleep_mode
        self._held = None if self._sleeps else self._share()

    def _share(self) -> torch.Tensor | None:
        if self._args.vllm_mode != "colocate":
            return None
        _, total_bytes = torch.cuda.mem_get_info()
        share = int(total_bytes * self._args.vllm_gpu_memory_utilization)
        with self._tracker.as_category("vLLM"):
            return torch.empty(share, dtype=torch.uint8, device=self._args.device)

    def sync_weights(self) -> None:
        """Copy the weights to vLLM, those of an adapter merged into its base."""
        model = self._trainer.model
        if self._sleeps:
            torch.cuda.empty_cache()
        if hasattr(model, "merge_adapter"):
            model.merge_adapter()
            model.unmerge_adapter()

    def generate(self, prompts: list[list[int]], **_: object) -> tuple[Any, ...]:
        """Return for each prompt a completion of the greatest length, and its log-probabilities."""
        with self._tracker.during("generation"):
            asleep = self._share() if self._sleeps else None
            del asleep
        if self._sleeps:
            self._tracker.emptied()  # vLLM returns its memory to the card
        length = self._args.max_completion_length
        return prompts, [[1] * length] * len(prompts), [[[0.0]] * length] * len(prompts), None
