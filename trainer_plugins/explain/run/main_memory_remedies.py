"""Says what helps where the card has nothing to do with it: main memory, /dev/shm."""

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Remedy


def without_shm() -> list[Remedy]:
    """Return what helps where /dev/shm is too small."""
    larger = Remedy(
        do="docker run --shm-size=16g", effect="docker's default is 64 MiB", grade="known"
    )
    return [switches.NO_WORKERS, larger]


def less_main_memory(num_workers: int) -> list[Remedy]:
    """Return what helps where main memory, or the limit of a container or job, is too small."""
    limit = Remedy(
        do="docker run --memory=SIZE (Slurm: --mem=SIZE; Kubernetes: resources.limits.memory)",
        effect="raises what the container or the job may take",
        grade="known",
    )
    if not num_workers:
        return [limit]
    half = num_workers // 2
    gone = f"{num_workers - half} processes less, each with its part of the data"
    return [Remedy(do=f"--dataloader_num_workers {half}", effect=gone, grade="known"), limit]
