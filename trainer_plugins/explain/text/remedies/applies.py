"""Where advice applies, as far as a text shows it: by frames, words and numbers."""

from collections.abc import Callable, Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.shared import SURVIVAL_REFUSED
from trainer_plugins.explain.text.causes.place import (
    ATTENTION,
    LEAST_QUADRATIC_BYTES,
    LOADING,
    SHARDING,
)
from trainer_plugins.explain.text.remedies import engine
from trainer_plugins.explain.text.remedies.filled import shows_trainer, uses_trainer
from trainer_plugins.explain.text.text_facts import TextFacts

Test = Callable[[TextFacts], object]


def called(pattern: str, innermost: int | None = None) -> Test:
    """Make a test of the frames."""
    return lambda facts: facts.called(pattern, innermost)


def says(pattern: str) -> Test:
    """Make a test of all words."""
    return lambda facts: facts.says(pattern)


def none_of(*tests: Test) -> Test:
    """Make a test that no other test holds."""
    return lambda facts: not any(test(facts) for test in tests)


def all_of(*tests: Test) -> Test:
    """Make a test that all other tests hold."""
    return lambda facts: all(test(facts) for test in tests)


def _never(facts: TextFacts) -> bool:
    del facts
    return False


def _is_windows(facts: TextFacts) -> bool:
    return facts.is_windows or facts.is_wsl


def _is_large(facts: TextFacts) -> bool:
    return (facts.asked or 0) >= LEAST_QUADRATIC_BYTES


def _is_fsdp(facts: TextFacts) -> bool:
    return bool(facts.called("fsdp") or facts.says("(?i)fsdp"))


def _is_unsloth(facts: TextFacts) -> bool:
    return bool(facts.called("(?i)unsloth") or facts.says("CPU_BUFFERS"))


def _has_refused_survival(facts: TextFacts) -> bool:
    return SURVIVAL_REFUSED.search(facts.command + facts.text) is not None


def _has_workers(facts: TextFacts) -> bool:  # which fill main memory, at once or in time
    if facts.says(r"DataLoader worker|dataloader"):
        return True
    return bool(facts.progress) and not facts.says("(?i)offload")


def _loads_twice(facts: TextFacts) -> bool:  # and nothing else has filled main memory
    is_else = _has_workers(facts) or facts.says(_OFFLOADS)
    return not is_else and (not facts.oom.is_certain or facts.called(LOADING) is not None)


_OFFLOADS = r"(?i)offload|cpu_adam|CPUAdam"
_TRIAL = says(r"[Tt]rial ?#?\d")
_TPU = says(r"TPU|\bhbm\b")
_SLURM = says(r"(?i)slurm|srun|sbatch")
_CONTAINER = says(r"(?i)docker|kubectl|kubelet|\bpod\b")
_DEEPSPEED = called("deepspeed|zero3")
_MERGE = called(r"\bmerge")
_DORA = called(r"\bdora\.py|get_weight_norm")
_KBIT = called("prepare_model_for_kbit_training")
_SDPA = called(r"scaled_dot_product|\bsdpa", innermost=3)

APPLIES: Mapping[Advice, Test] = {
    advice.SURVIVE: all_of(uses_trainer, none_of(_has_refused_survival)),
    advice.CHECKPOINTING: none_of(says(r"gradient_checkpointing[\"']?[ =:]{1,4}[Tt]rue")),
    advice.PLAN_THE_RUN: lambda facts: uses_trainer(facts) or facts.called(LOADING),
    advice.PRINT_THE_OOM: lambda facts: facts.has_tried_one_row,
    advice.NO_GRAD: none_of(uses_trainer),
    advice.EXPANDABLE_SEGMENTS: none_of(
        _is_windows, says(r"ALLOC_CONF[\"'\]\s=:,]{1,6}expandable_segments:True(?! to avoid)")
    ),
    advice.PAD_TO_FEW_LENGTHS: uses_trainer,
    advice.LIGER: uses_trainer,
    advice.WSL_MEMORY: _is_windows,
    advice.JAX_SHARE: none_of(_TPU),
    advice.JAX_GROWS: none_of(_TPU),
    advice.MERGE_IN_MAIN_MEMORY: _MERGE,
    advice.NO_DORA: all_of(_DORA, none_of(_MERGE)),
    advice.NEWER_PEFT: none_of(_MERGE, _DORA, called(r"baddbmm\(W")),
    advice.NO_EXPERTS: none_of(_MERGE, _DORA),
    advice.UNPREPARED: _KBIT,
    advice.FOUR_BITS: none_of(_KBIT),
    advice.LOAD_ON_ONE_RANK: called(SHARDING),
    advice.CONVERT_IN_MAIN_MEMORY: called("core_model_loading"),
    advice.RESUME_WITHOUT_STATES: called("_load_optimizer_and"),
    advice.COPY_IN_MAIN_MEMORY: _never,
    advice.SHARDED_SAVE: all_of(_is_fsdp, none_of(_DEEPSPEED)),
    advice.SAVE_WITHOUT_GATHER: _DEEPSPEED,
    advice.SAVE_ONLY_MODEL: called("_save_optimizer"),
    advice.EMPTY_CACHE_BEFORE_SAVE: none_of(_is_fsdp, _DEEPSPEED),
    advice.FUSED_ADAMW: all_of(called("_multi_tensor|_foreach_"), none_of(_DEEPSPEED)),
    advice.OFFLOAD_OPTIMIZER: _DEEPSPEED,
    advice.EIGHT_BIT_ADAMW: none_of(_DEEPSPEED),
    advice.ADAFACTOR: none_of(_DEEPSPEED),
    advice.FEWER_LIVE_PARAMETERS: _DEEPSPEED,
    advice.WRAP_LAYERS: none_of(_DEEPSPEED),
    advice.PRINT_BATCH: lambda facts: not facts.frames and _is_large(facts),
    advice.SHOW_MAIN_MEMORY: lambda facts: facts.users_frame is None,
    advice.FIND_THE_KILL: none_of(says("(?i)dataloader|offload|cpu_?adam")),
    advice.CHECK_LAUNCH_FILE: all_of(says(_OFFLOADS), none_of(_has_workers)),
    advice.OFFLOAD_TO_DISK: all_of(says(_OFFLOADS), none_of(_has_workers)),
    advice.LOAD_ONCE: _loads_twice,
    advice.MORE_MAIN_MEMORY: _CONTAINER,
    advice.MORE_SLURM_MEMORY: _SLURM,
    advice.NO_PINNED_OFFLOAD: lambda facts: (
        facts.called("deepspeed") or facts.says("(?i)deepspeed")
    ),
    advice.NO_PINNED_ACTIVATIONS: _is_unsloth,
    advice.NO_PINNED_BATCHES: none_of(_is_unsloth),
    advice.HEADROOM: shows_trainer,
    advice.MEMORY_FRACTION: none_of(shows_trainer),
    advice.KEEP_NUMBERS: lambda facts: facts.num_skipped < 2,
    advice.EMPTY_CACHE_AFTER_EXCEPT: lambda facts: facts.num_skipped >= 2,
    advice.RELEASE_EARLIER_RUNS: _TRIAL,
    advice.RELEASED: _never,
    advice.RESTART_KERNEL: none_of(_TRIAL),
}  # what is not here applies everywhere

APPLIES_TO_CAUSE: Mapping[tuple[str, Advice], Test] = {
    ("engine-share", advice.LIST_PROCESSES): engine.is_startup,
    ("engine-share", advice.END_PROCESS): engine.is_startup,
    ("generate-cache", advice.SMALLER_EVAL_BATCH): uses_trainer,
    ("host-alloc", advice.FEWER_WORKERS): _has_workers,
    ("host-alloc", advice.SDPA_ATTENTION): all_of(called(ATTENTION, innermost=3), _is_large),
    ("host-alloc", advice.SMALLER_MICRO_BATCH): called(r"\bforward\b|backward|loss", innermost=4),
    ("host-kill", advice.FEWER_WORKERS): _has_workers,
    ("host-limit", advice.FEWER_WORKERS): _has_workers,
    ("host-limit", advice.MORE_MAIN_MEMORY): none_of(_SLURM),
    ("leftover", advice.SMALLER_MICRO_BATCH): none_of(_TRIAL),
    ("load-too-large", advice.HALF_PRECISION_WEIGHTS): none_of(_KBIT),
    ("quadratic-attention", advice.FLASH_ATTENTION): _SDPA,
    ("quadratic-attention", advice.SDPA_ATTENTION): none_of(_SDPA),
    ("save-gather", advice.ADAFACTOR): _never,
    ("save-gather", advice.EIGHT_BIT_ADAMW): _never,
    ("save-gather", advice.FUSED_ADAMW): _never,
    ("save-gather", advice.OFFLOAD_OPTIMIZER): _never,
}  # where it depends on the cause too; it counts instead of `APPLIES`
