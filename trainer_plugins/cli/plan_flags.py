"""Read those options of `trainer-plugins plan` that stand for several flags or for a file."""

import json
from pathlib import Path

from trainer_plugins.planner.plan import PlanError

_LARGEST_RANK = 1 << 20


def of_vllm(trainer: str | None, utilization: float | None) -> tuple[str, ...]:
    """Return the flags of TRL's config for vLLM on the same card.

    Raises:
        PlanError: the Trainer does not generate, or it is no part of a card.
    """
    if utilization is None:
        return ()
    if trainer not in ("grpo", "rloo", "gmpo"):
        raise PlanError(
            "--vllm-utilization is for --trainer grpo, rloo or gmpo, which may generate so"
        )
    if not 0 < utilization < 1:
        raise PlanError(f"--vllm-utilization is a part of the card below 1, got {utilization}")
    share = str(utilization)
    return ("--use_vllm", "True", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", share)


def of_an_adapter(rank: int | None, target: str, file: Path | None) -> dict[str, object] | None:
    """Return the fields of an adapter's config; None if no adapter is trained.

    Args:
        rank: the rank of LoRA, as in `--lora-r`.
        target: the modules that get LoRA.
        file: an adapter_config.json in place of both.

    Raises:
        PlanError: both are given, or one is wrong.
    """
    if file is None and rank is None:
        return None
    if file is None:
        if rank is not None and not 1 <= rank <= _LARGEST_RANK:
            raise PlanError(f"--lora-r is a rank from 1 to {_LARGEST_RANK:,}, got {rank:,}")
        modules = target if target == "all-linear" else [name.strip() for name in target.split(",")]
        return {"peft_type": "LORA", "r": rank, "target_modules": modules}
    if rank is not None:
        raise PlanError("--lora-r and --peft-config both say which adapter to train: give one")
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"--peft-config: {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--peft-config: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"--peft-config: {file} holds no mapping")
    return content
