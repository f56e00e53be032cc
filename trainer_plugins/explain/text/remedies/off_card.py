"""Remedies for memory that is not the card's."""

from dataclasses import replace

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.text.causes.place import ATTENTION, LEAST_QUADRATIC_BYTES, LOADING
from trainer_plugins.explain.text.remedies.batch import fewer_rows, quadratic_attention
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import size

_PRINT_THE_SHAPES = Remedy(
    do="print(model.device, {name: rows.shape for name, rows in batch.items()})",
    effect="so much at once is a length or a number of rows; it was asked of main memory, so the"
    " model is not on a card",
    grade="known",
)
_NOT_UNSLOTHS_CHECKPOINTING = Remedy(
    do='use_gradient_checkpointing=True   # in get_peft_model, not "unsloth"',
    effect='activations stay on the card; with "unsloth" each is kept in pinned main memory',
    grade="known",
    price="more of the card; or pip install -U unsloth_zoo, which pins less (unsloth-zoo#1257)",
)
_GROWS = "it had run for some time: each worker's copy of the data set grows as it is read"
_TAKERS = r"(?i)dataloader|offload|cpu_?adam"


def shm(facts: TextFacts) -> list[Remedy]:
    """Give /dev/shm more, or do without."""
    del facts
    return [
        Remedy(
            do="docker run --ipc=host ...   # or --shm-size=16g",
            effect="/dev/shm is no longer 64 MiB",
            grade="known",
        ),
        switches.NO_WORKERS,
    ]


def host_limit(facts: TextFacts) -> list[Remedy]:
    """Raise the limit, or need less."""
    if facts.says(r"(?i)slurm|srun|sbatch"):
        first = Remedy(
            do="#SBATCH --mem=0   # all of the node, or a number above MaxRSS of sacct",
            effect="the job's limit is higher",
            grade="known",
        )
    else:
        first = Remedy(
            do="resources.limits.memory in the pod, or docker run --memory=...",
            effect="the container's limit is higher",
            grade="known",
        )
    return [first, *_less(facts)]


def host_kill(facts: TextFacts) -> list[Remedy]:
    """Confirm it first, unless the text shows what took the memory."""
    see = Remedy(
        do="sudo dmesg -T | grep -i 'killed process'",
        effect="says whether it was main memory, and how much the process had",
        grade="known",
    )
    return [*_less(facts), see] if facts.says(_TAKERS) else [see, *_less(facts)]


def host_commit(facts: TextFacts) -> list[Remedy]:
    """Need less of what counts as committed, or raise the limit."""
    del facts
    return [
        switches.NO_WORKERS,
        Remedy(
            do="a larger paging file (System, Advanced, Performance, Virtual memory)",
            effect="raises the limit; little of it is written",
            grade="known",
        ),
    ]


def host_alloc(facts: TextFacts) -> list[Remedy]:
    """Say what makes the tensor smaller where its place tells what it is; then look."""
    asked = f"{size(facts.asked)} were asked for at once" if facts.asked else ""
    frame = facts.users_frame
    look = Remedy(
        do=f"look at {frame.path.rsplit('/', 1)[-1]}:{frame.line}"
        if frame
        else "free -h   # while it runs",
        effect=asked or "shows how much main memory is left",
        grade="arithmetic" if asked else "known",
    )
    if facts.called(ATTENTION, innermost=3) and (facts.asked or 0) >= LEAST_QUADRATIC_BYTES:
        return [*quadratic_attention(facts, kernel="sdpa"), *fewer_rows(facts), look]
    if facts.called(r"\bforward\b|backward|loss", innermost=4):
        return [*fewer_rows(facts), look]
    if not facts.frames and (facts.asked or 0) >= LEAST_QUADRATIC_BYTES:
        look = replace(look, effect="shows how much main memory is left", grade="known")
        return [_PRINT_THE_SHAPES, look]
    return [look, *_less(facts)]


def pinned(facts: TextFacts) -> list[Remedy]:
    """Pin less."""
    found = [switches.NO_PINNED_BATCHES]
    if facts.called(r"(?i)unsloth") or facts.says(r"CPU_BUFFERS"):
        found = [_NOT_UNSLOTHS_CHECKPOINTING]
    if facts.called(r"deepspeed") or facts.says(r"(?i)deepspeed"):
        found.insert(
            0,
            Remedy(
                do='"offload_optimizer": {"device": "cpu", "pin_memory": false}',
                effect="what is offloaded is not page-locked (the same for offload_param)",
                grade="known",
                price="slower copies",
            ),
        )
    return found


def _less(facts: TextFacts) -> list[Remedy]:
    """Say what takes less main memory, as far as the text shows what took it."""
    if facts.says(r"DataLoader worker|dataloader"):
        return [switches.NO_WORKERS]
    if facts.progress and not facts.says(r"(?i)offload"):
        return [replace(switches.NO_WORKERS, effect=_GROWS)]
    if facts.says(r"(?i)offload|cpu_adam|CPUAdam"):
        return [
            Remedy(
                do="trainer-plugins configs check your_launch_file.yaml",
                effect="counts what the offload needs of main memory against what there is",
                grade="known",
            ),
            Remedy(
                do="trainer-plugins configs show zero3_offload_nvme > accelerate.yaml",
                effect="optimizer states (12 bytes a parameter) and parameters go to a disk",
                grade="known",
                price="much slower steps; a fast local disk",
            ),
        ]
    if facts.oom.is_certain and not facts.called(LOADING):
        return []
    return [
        Remedy(
            do="from_pretrained(..., low_cpu_mem_usage=True)",
            effect="a rank does not hold the weights twice while it loads (the default in"
            " transformers 5); each rank still holds them once",
            grade="known",
        )
    ]
