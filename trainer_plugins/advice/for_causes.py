"""For each cause of an OOM its remedies in order, and where a room begins with another one."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from trainer_plugins.advice import of_machine as machine
from trainer_plugins.advice import of_moments as moments
from trainer_plugins.advice import of_training as training
from trainer_plugins.advice.entry import Advice

Room = Literal["text", "record", "snapshot", "watch", "check", "plan", "rehearsal"]
"""Who gives advice: `explain` of a text, a record or a snapshot; a watched run, a check, ..."""

_LESS_OF_THE_BATCH = (
    training.SMALLER_MICRO_BATCH,
    training.SURVIVE,
    training.CHECKPOINTING,
    machine.PLAN_THE_RUN,
)
_LESS_MAIN_MEMORY = (
    machine.FEWER_WORKERS,
    machine.CHECK_LAUNCH_FILE,
    training.OFFLOAD_TO_DISK,
    moments.LOAD_ONCE,
    machine.MORE_MAIN_MEMORY,
)
_SMALLER_STATES = (
    training.FUSED_ADAMW,
    training.OFFLOAD_OPTIMIZER,
    training.EIGHT_BIT_ADAMW,
    training.ADAFACTOR,
)

ONE_ROW = (
    training.CHECKPOINTING,
    training.SURVIVE,
    training.SHORTER_ROWS,
    machine.PRINT_THE_OOM,
    machine.PLAN_THE_RUN,
)
"""What helps where a micro-batch has one row, which cannot be divided."""

FOR_CAUSE: Mapping[str, tuple[Advice, ...]] = {
    "adapter-delta": (
        training.MERGE_IN_MAIN_MEMORY,
        training.NO_DORA,
        training.NEWER_PEFT,
        training.NO_EXPERTS,
    ),
    "api-misuse": (machine.PRINT_SHAPES,),
    "capacity": _LESS_OF_THE_BATCH,
    "contradictory": (
        machine.ROCM_MEMORY,
        machine.ROCM_LOG,
        machine.WATCH_THE_CARD,
        machine.MAPPING_LIMITS,
        machine.WSL_MEMORY,
    ),
    "data-parallel": (training.ONE_PROCESS_A_CARD, machine.ONE_CARD),
    "ddp-gpu0": (moments.LOAD_INTO_MAIN_MEMORY, training.OWN_CARD_FIRST),
    "engine-share": (
        machine.SHORTER_REQUESTS,
        machine.SMALLER_ENGINE_SHARE,
        machine.LARGER_ENGINE_SHARE,
        machine.FEWER_SEQUENCES,
        machine.TENSOR_PARALLEL,
        machine.EXPORT_SETTINGS_FOR_VLLM,
        machine.LIST_PROCESSES,
        machine.END_PROCESS,
    ),
    "eval-batch": (
        moments.NO_GRAD,
        moments.SMALLER_EVAL_BATCH,
        moments.OUTPUTS_TO_MAIN_MEMORY,
        training.SURVIVE,
    ),
    "eval-logits": (moments.ARGMAX_LOGITS, moments.OUTPUTS_TO_MAIN_MEMORY, moments.LOSS_ONLY),
    "eval-metrics": (moments.METRICS_ON_CPU,),
    "foreign": (machine.LIST_PROCESSES, machine.OTHER_CARD, machine.END_PROCESS),
    "fragmentation": (
        machine.EXPANDABLE_SEGMENTS,
        training.PAD_TO_FEW_LENGTHS,
        *_LESS_OF_THE_BATCH,
    ),
    "generate-cache": (
        moments.SMALLER_EVAL_BATCH,
        moments.SHORTER_ANSWERS,
        moments.OFFLOADED_CACHE,
    ),
    "host-alloc": (
        training.SDPA_ATTENTION,
        training.SMALLER_MICRO_BATCH,
        machine.PRINT_BATCH,
        machine.LOOK_AT,
        machine.SHOW_MAIN_MEMORY,
        *_LESS_MAIN_MEMORY,
    ),
    "host-commit": (machine.FEWER_WORKERS, machine.LARGER_PAGING_FILE),
    "host-kill": (machine.FIND_THE_KILL, *_LESS_MAIN_MEMORY),
    "host-limit": (machine.MORE_SLURM_MEMORY, machine.MORE_MAIN_MEMORY, *_LESS_MAIN_MEMORY),
    "image-size": (training.FEWER_PATCHES, training.FLASH_ATTENTION),
    "impossible-size": (machine.PRINT_SHAPES,),
    "leak": (moments.EMPTY_CACHE_AFTER_EXCEPT, training.KEEP_NUMBERS),
    "leftover": (
        moments.RELEASE_EARLIER_RUNS,
        moments.RELEASED,
        moments.RESTART_KERNEL,
        training.SMALLER_MICRO_BATCH,
    ),
    "load-too-large": (
        training.UNPREPARED,
        moments.LOAD_ON_ONE_RANK,
        training.HALF_PRECISION_WEIGHTS,
        training.FOUR_BITS,
        moments.CONVERT_IN_MAIN_MEMORY,
        machine.PLAN_THE_RUN,
    ),
    "logits-loss": (
        training.LIGER,
        training.SMALLER_MICRO_BATCH,
        training.SURVIVE,
        machine.PLAN_THE_RUN,
    ),
    "long-sample": (
        training.SURVIVE,
        training.SMALLER_MICRO_BATCH,
        training.SHORTER_ROWS,
        training.GROUP_BY_LENGTH,
        machine.OBSERVE,
    ),
    "mps-other": (training.EMPTY_CACHE_EACH_STEP, machine.CLOSE_OTHER_PROGRAMS),
    "nccl": (machine.HEADROOM, machine.MEMORY_FRACTION, machine.SMALLER_NCCL_BUFFERS),
    "optimizer-state": (*_SMALLER_STATES, machine.PLAN_THE_RUN),
    "pinned": (
        training.NO_PINNED_OFFLOAD,
        training.NO_PINNED_ACTIVATIONS,
        machine.NO_PINNED_BATCHES,
    ),
    "quadratic-attention": (
        training.SDPA_ATTENTION,
        training.FLASH_ATTENTION,
        training.SHORTER_ROWS,
        *_LESS_OF_THE_BATCH,
    ),
    "resume-load": (
        moments.LOAD_INTO_MAIN_MEMORY,
        moments.DROP_THE_COPY,
        moments.RESUME_WITHOUT_STATES,
    ),
    "save-gather": (
        moments.COPY_IN_MAIN_MEMORY,
        moments.SHARDED_SAVE,
        moments.SAVE_WITHOUT_GATHER,
        moments.SAVE_ONLY_MODEL,
        moments.EMPTY_CACHE_BEFORE_SAVE,
        *_SMALLER_STATES,
    ),
    "shm": (machine.FEWER_WORKERS, machine.LARGER_SHM),
    "zero3-gather": (training.FEWER_LIVE_PARAMETERS, training.WRAP_LAYERS, *_LESS_OF_THE_BATCH),
}
"""The first that applies leads. An entry without `when` always applies."""

CACHE_FLUSHES = (training.EMPTY_CACHE_EACH_STEP, training.SMALLER_MICRO_BATCH)
"""What helps where torch releases its cache again and again, and no OOM ends the run."""

OTHER_FRAMEWORKS: Mapping[str, tuple[Advice, ...]] = {
    "JAX": (
        machine.JAX_SHARE,
        moments.FEWER_INPUTS,
        machine.JAX_CHECKPOINT,
        machine.JAX_GROWS,
    ),
    "TensorFlow": (moments.FEWER_INPUTS, machine.TENSORFLOW_GROWS),
}
"""What helps where another framework than torch finds no room on the card."""

ONLY_RUN = (moments.FEWER_INPUTS, training.HALF_PRECISION_WEIGHTS)
"""What helps where a model is used and not trained."""


class Otherwise(NamedTuple):
    """Says why one room begins with another remedy than the table."""

    room: Room
    cause: str
    first: Advice
    why: str


OTHERWISE = (
    Otherwise(
        "record",
        "foreign",
        machine.END_PROCESS,
        "the driver has listed the process, and that it belongs to the user",
    ),
    Otherwise(
        "record",
        "eval-logits",
        moments.OUTPUTS_TO_MAIN_MEMORY,
        "it shows how large the outputs are, and one flag is done sooner than a function",
    ),
    Otherwise(
        "record",
        "logits-loss",
        training.SMALLER_MICRO_BATCH,
        "it knows the rows, and counts how many of them fit; no package has to be installed",
    ),
    Otherwise(
        "record",
        "host-kill",
        machine.FEWER_WORKERS,
        "a dead worker or the kernel's counter has shown the kill already",
    ),
    Otherwise(
        "check",
        "shm",
        machine.LARGER_SHM,
        "it counts how large /dev/shm has to be, before the container is started for the run",
    ),
    Otherwise(
        "text",
        "leftover",
        moments.RESTART_KERNEL,
        "it does not show which object holds the memory",
    ),
    Otherwise(
        "snapshot",
        "logits-loss",
        training.SMALLER_MICRO_BATCH,
        "it names only what fits when its trace is repeated",
    ),
    Otherwise(
        "snapshot",
        "long-sample",
        training.SMALLER_MICRO_BATCH,
        "it names only what fits when its trace is repeated",
    ),
)


def in_order(cause: str, room: Room) -> tuple[Advice, ...]:
    """Return the remedies of a cause, with what a room begins with at the front."""
    order = FOR_CAUSE[cause]
    first = [each.first for each in OTHERWISE if (each.room, each.cause) == (room, cause)]
    return (*first, *(each for each in order if each not in first))
