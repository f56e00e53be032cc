# ruff: noqa: F405 (the names of the table come in whole)
"""List the remedies of each cause in order (FOR_CAUSE), and where a room starts (FIRST_IN)."""

from collections.abc import Mapping
from typing import Literal

from trainer_plugins.advice import *  # noqa: F403
from trainer_plugins.advice.entry import Advice

# The sources of advice: `explain` of a text, a record or a snapshot; a watched run, a check, ...
Room = Literal["text", "record", "snapshot", "watch", "check", "plan"]

LESS_OF_THE_BATCH = (SMALLER_MICRO_BATCH, SURVIVE, CHECKPOINTING, PLAN_THE_RUN)
_LESS_MAIN_MEMORY = (
    STREAM_THE_DATA, FEWER_WORKERS, LIGHTER_SAMPLES, CHECK_LAUNCH_FILE, OFFLOAD_TO_DISK,
    READ_BY_ONE_RANK, LOAD_ONCE, MORE_MAIN_MEMORY,
)  # fmt: skip
SMALLER_STATES = (FUSED_ADAMW, OFFLOAD_OPTIMIZER, EIGHT_BIT_ADAMW, ADAFACTOR)

# For a micro-batch of one row, which cannot be divided.
ONE_ROW = (
    CHECKPOINTING, FEWER_GENERATIONS, REDUCED_EACH_TIME, SURVIVE, SHORTER_ROWS, PRINT_THE_OOM,
    PLAN_THE_RUN,
)  # fmt: skip

# The first that applies leads.
FOR_CAUSE: Mapping[str, tuple[Advice, ...]] = {
    "adapter-delta": (NO_DORA, NEWER_PEFT, NO_EXPERTS),
    "adapter-merge": (SAVE_THE_ADAPTER, RELEASED, MERGE_IN_MAIN_MEMORY),
    "api-misuse": (PRINT_SHAPES,),
    "capacity": (SMALLER_MICRO_BATCH, SURVIVE, CHECKPOINTING, REDUCED_EACH_TIME, PLAN_THE_RUN),
    "contradictory": (ROCM_MEMORY, ROCM_LOG, WATCH_THE_CARD, MAPPING_LIMITS, WSL_MEMORY),
    "cut-command": (JOIN_COMMAND,),
    "data-parallel": (ONE_PROCESS_A_CARD, ONE_CARD),
    "ddp-buckets": (SHARD_THE_RUN, ADAPTER, HALF_PRECISION_WEIGHTS),
    "ddp-gpu0": (OWN_CARD_FIRST, LOAD_INTO_MAIN_MEMORY, OWN_DEVICE_MAP),
    "engine-share": (
        SHORTER_REQUESTS, SMALLER_ENGINE_SHARE, LARGER_ENGINE_SHARE, FEWER_SEQUENCES,
        TENSOR_PARALLEL, SMALLER_MICRO_BATCH, EXPORT_SETTINGS_FOR_VLLM, LIST_PROCESSES, END_PROCESS,
    ),
    "eval-batch": (NO_GRAD, SMALLER_EVAL_BATCH, OUTPUTS_TO_MAIN_MEMORY, SURVIVE),
    "eval-logits": (ARGMAX_LOGITS, OUTPUTS_TO_MAIN_MEMORY, SMALLER_EVAL_BATCH, LOSS_ONLY),
    "eval-metrics": (METRICS_ON_CPU,),
    "foreign": (SHOW_HOLDERS, LIST_PROCESSES, OTHER_CARD, END_PROCESS),
    "fragmentation": (EXPANDABLE_SEGMENTS, PAD_TO_FEW_LENGTHS, *LESS_OF_THE_BATCH),
    "generate-cache": (SMALLER_EVAL_BATCH, SHORTER_ANSWERS, OFFLOADED_CACHE),
    "host-alloc": (
        SEARCH_BY_FAISS, SDPA_ATTENTION, SMALLER_MICRO_BATCH, PRINT_BATCH, LOOK_AT,
        SHOW_MAIN_MEMORY, *_LESS_MAIN_MEMORY,
    ),
    "host-commit": (FEWER_WORKERS, LARGER_PAGING_FILE),
    "host-kill": (SAVE_WITHOUT_GATHER, ASK_SLURM, FIND_THE_KILL, *_LESS_MAIN_MEMORY),
    "host-limit": (MORE_SLURM_MEMORY, MORE_MAIN_MEMORY, *_LESS_MAIN_MEMORY),
    "image-size": (FEWER_FRAMES, FEWER_PATCHES, FLASH_ATTENTION),
    "impossible-size": (PRINT_SHAPES,),
    "leak": (EMPTY_CACHE_AFTER_EXCEPT, KEEP_NUMBERS),
    "leftover": (RELEASE_EARLIER_RUNS, RESTART_KERNEL, RELEASED, SMALLER_MICRO_BATCH),
    "load-too-large": (
        WHOLE_ON_THE_CARD, BF16_CHECKPOINT, QUANTISED_EXPERTS, UNPREPARED, LOAD_ON_ONE_RANK,
        ROOM_IN_THE_MAP, CONVERT_IN_MAIN_MEMORY, HALF_PRECISION_WEIGHTS, FOUR_BITS, PLAN_THE_RUN,
    ),
    "logits-loss": (LIGER, SMALLER_MICRO_BATCH, SURVIVE, PLAN_THE_RUN),
    "long-sample": (SURVIVE, SMALLER_MICRO_BATCH, SHORTER_ROWS, GROUP_BY_LENGTH, OBSERVE),
    "mps-other": (EMPTY_CACHE_EACH_STEP, CLOSE_OTHER_PROGRAMS),
    "nccl": (
        NO_CUMEM_HOST, NO_NCCL_SHM, LOCK_MORE_MEMORY, NEWER_NCCL, HEADROOM, MEMORY_FRACTION,
        SMALLER_NCCL_BUFFERS,
    ),
    "optimizer-state": (NO_FULL_EMBEDDINGS, *SMALLER_STATES, MORE_CARDS, PLAN_THE_RUN),
    "pinned": (NO_PINNED_OFFLOAD, NO_PINNED_ACTIVATIONS, NO_PINNED_BATCHES),
    "quadratic-attention": (SDPA_ATTENTION, FLASH_ATTENTION, SHORTER_ROWS, *LESS_OF_THE_BATCH),
    "regression": (BACK_TO_WHAT_FITTED, *LESS_OF_THE_BATCH),
    "resume-load": (RESUME_GUARD, LOAD_INTO_MAIN_MEMORY, DROP_THE_COPY, RESUME_WITHOUT_STATES),
    "save-gather": (
        COPY_IN_MAIN_MEMORY, SHARDED_SAVE, SAVE_WITHOUT_GATHER, SAVE_ONLY_MODEL,
        EMPTY_CACHE_BEFORE_SAVE, *SMALLER_STATES,
    ),
    "second-copy": (PRECOMPUTED_REFERENCE, SECOND_MODEL_IN_16_BITS, *LESS_OF_THE_BATCH),
    "shm": (FEWER_WORKERS, LARGER_SHM),
    "zero3-gather": (
        NO_GATHER_TO_GENERATE, GENERATE_ON_ITS_OWN_CARD, GATHER_BY_MODULE, FEWER_LIVE_PARAMETERS,
        WRAP_LAYERS, *LESS_OF_THE_BATCH,
    ),
}  # fmt: skip
# For a text that shows neither the moment nor the run.
UNKNOWN = (OBSERVE, *FOR_CAUSE["capacity"])
# For a run in which torch flushes its cache again and again without an OOM.
CACHE_FLUSHES = (EMPTY_CACHE_EACH_STEP, SMALLER_MICRO_BATCH)
ONLY_RUN = (FEWER_INPUTS, HALF_PRECISION_WEIGHTS)  # for a model that is used but not trained


# Needs a record, which shows whose process it is or which line copied; a text does not.
ONLY_OF_RECORDS: Mapping[str, tuple[Advice, ...]] = {
    "engine-share": (END_PROCESS,),
    "foreign": (END_PROCESS,),
    "save-gather": (COPY_IN_MAIN_MEMORY, *SMALLER_STATES),
}

# A room that knows more, or less, starts with another remedy.
FIRST_IN: Mapping[tuple[Room, str], Advice] = {
    # The driver listed the process, and that it belongs to the user.
    ("record", "foreign"): END_PROCESS,
    # It shows the size of the outputs, and one flag is quicker than a function.
    ("record", "eval-logits"): OUTPUTS_TO_MAIN_MEMORY,
    # It knows the rows, and how many of them fit; no package has to be installed.
    ("record", "logits-loss"): SMALLER_MICRO_BATCH,
    # A dead worker or the kernel's counter has already shown the kill.
    ("record", "host-kill"): FEWER_WORKERS,
    # If the driver lists the processes, so does its finding.
    ("watch", "foreign"): OTHER_CARD,
    # It computes the necessary size of /dev/shm before the run's container is started.
    ("check", "shm"): LARGER_SHM,
    # It knows that attention is already sdpa, and that the card has no other kernel for it.
    ("check", "quadratic-attention"): CHECKPOINTING,
    # It names only remedies that fit when its trace is repeated.
    ("snapshot", "logits-loss"): SMALLER_MICRO_BATCH,
    ("snapshot", "long-sample"): SMALLER_MICRO_BATCH,
}


def order_remedies(cause: str, room: Room) -> tuple[Advice, ...]:
    """Return the remedies of a cause, with the room's own first choice at the front."""
    left_out = ONLY_OF_RECORDS.get(cause, ()) if room == "text" else ()
    order = tuple(each for each in FOR_CAUSE[cause] if each not in left_out)
    first = FIRST_IN.get((room, cause))
    return order if first is None else (first, *(each for each in order if each is not first))
