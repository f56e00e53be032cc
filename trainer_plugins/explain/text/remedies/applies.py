"""Decide which advice applies to a text, by its frames, words and numbers."""

from collections.abc import Callable, Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.advice.for_causes import LESS_OF_THE_BATCH
from trainer_plugins.explain.shared import SURVIVAL_REFUSED
from trainer_plugins.explain.text.causes import off_card, place
from trainer_plugins.explain.text.causes.arithmetic import FRAMES, SEES_VIDEOS, trains_embeddings
from trainer_plugins.explain.text.followed import is_followed
from trainer_plugins.explain.text.frameworks import spell_for
from trainer_plugins.explain.text.remedies import engine
from trainer_plugins.explain.text.remedies.filled import shows_trainer, uses_trainer
from trainer_plugins.explain.text.states import IN_4_BITS
from trainer_plugins.explain.text.text_facts import TextFacts

Test = Callable[[TextFacts], object]
_STRAW_FRACTION, _FULL_FRACTION = 0.02, 0.85


def is_called(pattern: str, innermost: int | None = None) -> Test:
    """Test whether one of the innermost frames, by default of all, has these words."""
    return lambda facts: facts.find_call(pattern, innermost)


def says(pattern: str) -> Test:
    """Test whether the text has these words."""
    return lambda facts: facts.says(pattern)


def _none_of(*tests: Test) -> Test:
    return lambda facts: not any(test(facts) for test in tests)


def _any_of(*tests: Test) -> Test:
    return lambda facts: any(test(facts) for test in tests)


def _all_of(*tests: Test) -> Test:
    return lambda facts: all(test(facts) for test in tests)


def _is_windows(facts: TextFacts) -> bool:
    return facts.is_windows or facts.is_wsl


def is_last_straw(facts: TextFacts) -> bool:
    """Return whether a full card refused a small request after some steps: it may be a leak."""
    asked, live, total = facts.asked_bytes, facts.live_bytes, facts.total_bytes
    if not facts.progress or not uses_trainer(facts) or asked is None or not live or not total:
        return False
    return asked <= _STRAW_FRACTION * total and live >= _FULL_FRACTION * total


def _is_large(facts: TextFacts) -> bool:
    return (facts.asked_bytes or 0) >= place.LEAST_QUADRATIC_BYTES


def _has_workers(facts: TextFacts) -> bool:
    """Return whether dataloader workers may have filled main memory, at once or over time."""
    if facts.says(r"DataLoader worker|dataloader"):
        return True
    return bool(facts.progress) and not facts.says("(?i)offload")


def _loads_twice(facts: TextFacts) -> bool:
    """Return whether loading may have filled main memory, with no sign of another cause."""
    is_else = _has_workers(facts) or facts.says(_OFFLOADS)
    return not is_else and (not facts.oom.is_certain or facts.find_call(place.LOADING) is not None)


LONG_SAMPLES = r"(?i)\b(?:each|every|one) (?:row|sample)\b|\d ?[MG] (?:characters|tokens)"
_OFFLOADS = r"(?i)offload(?!\w*[\"']?[=: ]{1,3}(?:false|none|null))|cpu_adam"
_TRIAL = says(r"[Tt]rial ?#?\d")
_FSDP = _any_of(is_called("fsdp"), says("(?i)fsdp"))
_UNSLOTH = _any_of(is_called("(?i)unsloth"), says("CPU_BUFFERS"))
_SLURM = says(off_card.SLURM)
_CONTAINER = says(off_card.CONTAINER)
_HOSTED = says(off_card.HOSTED)
_LOAD_BAR = says(off_card.LOAD_BAR)
_MERGES = says(off_card.MERGES)
_SAVE_LINE = says(off_card.SAVE_LINE)
_ZERO3 = says("(?i)zero_?-?3")
SAVES_BESIDE_RANKS = _all_of(_SAVE_LINE, _none_of(_ZERO3))
_ON_THE_HOST = says(off_card.NCCL_ON_THE_HOST)
_REGISTERS_FOR_IB = says("ibv_reg_mr")
_SHARES_THE_HOST = _all_of(_ON_THE_HOST, _none_of(_REGISTERS_FOR_IB))
_GATHERS_ALL = is_called(r"GatheredParameters\(.*parameters\(|unwrap_model_for_generation")
_GENERATES = _any_of(is_called("generat"), says(r"(?i)\bgenerat(?:e|ion)\b"))
_VLLM = _any_of(is_called("vllm"), says("(?i)vllm"))
_NO_PLACE = _none_of(lambda facts: facts.frames)
SAVES_STATES = _all_of(says(r"(?i)\bsav(?:es?|ing)\b[^.\n]{0,40}optimi[sz]er"), _NO_PLACE)
_DEEPSPEED = _any_of(
    is_called(r"deepspeed|zero3|\bstage(?:3|_1_and_2)\.py"),
    says(r"(?i)deepspeed_?zero|(?<!o)zero[-_ ]?(?:stage[-_ ]?)?[123]\b"),
    _all_of(_NO_PLACE, says(r"(?i)\bdeepspeed\b")),
)
_MERGE = is_called(r"\bmerge")
_DORA = is_called(r"\bdora\.py|get_weight_norm")
_KBIT = is_called("prepare_model_for_kbit_training")
_MXFP4 = _any_of(is_called("mxfp4"), says(r"(?i)mxfp4|openai/gpt-oss"))
_CONVERTS = is_called(r"core_model_loading.*\bconvert\b")
_STACKS_EXPERTS = _all_of(
    _CONVERTS,
    _any_of(is_called("MergeModulelist|torch\\.stack|concatenate"), says("(?i)experts")),
)
_EXPERTS_IN_16_BITS = _all_of(
    _STACKS_EXPERTS,
    says(r"load_in_[48]bit|BitsAndBytes|bnb_|(?i:qlora)"),
)
_IN_16_BITS = says(
    r"(?i)\w-bf16\b|dtype[\"']?\W{1,4}(?:torch\.)?b?float16|load_in_[48]bit[\"']?\W{1,4}True"
)
_REFUSED = says("dispatched on the CPU or the disk")  # only with a quantised model
_MAP = says(r"device_map[\"']?\s*[=:]\s*[\"']?(?:auto|balanced|sequential)")
# Under WSL nvidia-smi never lists a process, and there is no device file to query.
_HIDES_HOLDERS = _all_of(says("No running processes found"), _none_of(_is_windows))
_RANKS = says(r"local_rank|nproc_per_node|num_processes|\[rank\d|torchrun|accelerate launch")
_IS_LOADING = _any_of(is_called(place.LOADING), _LOAD_BAR)
_TAKEN_BY_UNKNOWN = _none_of(_has_workers, _IS_LOADING, says(_OFFLOADS))
_SDPA = is_called(r"scaled_dot_product|\bsdpa", innermost=3)

APPLIES: Mapping[Advice, Test] = {
    advice.SURVIVE: lambda facts: (
        uses_trainer(facts)
        and not SURVIVAL_REFUSED.search(facts.whole)
        # One row is not divided, and it turns on what is on.
        and not (facts.settings.rows == 1 and is_followed(advice.CHECKPOINTING, facts))
    ),
    advice.FEWER_FRAMES: lambda facts: facts.says(SEES_VIDEOS) or FRAMES.search(facts.whole),
    advice.CHECKPOINTING: _none_of(
        says(r"(?:gradient|activation)_checkpointing[\"']?[ =:]{1,4}[Tt]rue")
    ),
    advice.REDUCED_EACH_TIME: _all_of(
        _FSDP, says(r"gradient_accumulation_steps[\"']?[ =:]{1,4}(?:[2-9]|\d\d)")
    ),
    advice.NO_FULL_EMBEDDINGS: trains_embeddings,
    advice.PLAN_THE_RUN: lambda facts: uses_trainer(facts) or facts.find_call(place.LOADING),
    advice.NO_GRAD: _none_of(uses_trainer),
    advice.EXPANDABLE_SEGMENTS: _none_of(
        _is_windows, says(r"ALLOC_CONF[\"'\]\s=:,]{1,6}expandable_segments:True(?! to avoid)")
    ),
    advice.PAD_TO_FEW_LENGTHS: uses_trainer,
    advice.ARGMAX_LOGITS: uses_trainer,
    advice.LIGER: lambda facts: uses_trainer(facts) or spell_for(advice.LIGER, facts),
    advice.WSL_MEMORY: _is_windows,
    advice.NO_DORA: _all_of(_DORA, _none_of(_MERGE)),
    advice.NEWER_PEFT: _none_of(_MERGE, _DORA, is_called(r"baddbmm\(W")),
    advice.NO_EXPERTS: _none_of(_MERGE, _DORA),
    advice.UNPREPARED: _KBIT,
    advice.FOUR_BITS: _none_of(_KBIT, _MXFP4, _STACKS_EXPERTS, _REFUSED, says(IN_4_BITS.pattern)),
    advice.BF16_CHECKPOINT: _MXFP4,
    advice.QUANTISED_EXPERTS: _EXPERTS_IN_16_BITS,
    advice.READ_BY_ONE_RANK: _all_of(_IS_LOADING, _RANKS, _none_of(_has_workers, _MXFP4)),
    advice.LOAD_ON_ONE_RANK: _any_of(is_called(place.SHARDING), _all_of(_FSDP, _NO_PLACE)),
    advice.CONVERT_IN_MAIN_MEMORY: _all_of(_CONVERTS, _none_of(_DEEPSPEED, _MAP)),
    advice.WHOLE_ON_THE_CARD: _REFUSED,
    advice.ROOM_IN_THE_MAP: _all_of(_CONVERTS, _MAP),
    advice.SEARCH_BY_FAISS: is_called("mine_hard_negatives"),
    advice.SHOW_HOLDERS: _HIDES_HOLDERS,
    advice.LIST_PROCESSES: _none_of(_HIDES_HOLDERS),
    advice.OWN_CARD_FIRST: _none_of(is_called(r"torch\.load|serialization\.py")),
    advice.RESUME_GUARD: is_called(
        "load_fsdp_optimizer|set_optimizer_state_dict|_load_optim_state_dict"
    ),
    advice.RESUME_WITHOUT_STATES: is_called("_load_optimizer_and"),
    advice.SHARDED_SAVE: _all_of(_any_of(_FSDP, _NO_PLACE), _none_of(_DEEPSPEED)),
    advice.SAVE_WITHOUT_GATHER: _any_of(_DEEPSPEED, _all_of(_NO_PLACE, _none_of(_FSDP))),
    advice.NO_GATHER_TO_GENERATE: _all_of(_GATHERS_ALL, _GENERATES),
    advice.GENERATE_ON_ITS_OWN_CARD: _all_of(_GATHERS_ALL, _GENERATES, _none_of(_VLLM)),
    advice.GATHER_BY_MODULE: _all_of(_GATHERS_ALL, _any_of(_VLLM, _none_of(is_called("generat")))),
    advice.NO_CUMEM_HOST: _SHARES_THE_HOST,
    advice.NO_NCCL_SHM: _SHARES_THE_HOST,
    advice.NEWER_NCCL: _SHARES_THE_HOST,
    advice.LOCK_MORE_MEMORY: _REGISTERS_FOR_IB,
    advice.SMALLER_NCCL_BUFFERS: _none_of(_ON_THE_HOST),
    advice.MORE_CARDS: _DEEPSPEED,
    advice.ASK_SLURM: _SLURM,
    advice.LIGHTER_SAMPLES: _any_of(
        lambda facts: is_followed(advice.FEWER_WORKERS, facts), says(LONG_SAMPLES)
    ),
    advice.SAVE_ONLY_MODEL: _any_of(is_called("_save_optimizer"), SAVES_STATES),
    advice.EMPTY_CACHE_BEFORE_SAVE: _none_of(_FSDP, _DEEPSPEED),
    advice.FUSED_ADAMW: _all_of(is_called("_multi_tensor|_foreach_"), _none_of(_DEEPSPEED)),
    advice.OFFLOAD_OPTIMIZER: _DEEPSPEED,
    advice.EXPORT_SETTINGS_FOR_VLLM: engine.is_in_training,
    advice.EIGHT_BIT_ADAMW: _none_of(_DEEPSPEED),
    advice.ADAFACTOR: _none_of(_DEEPSPEED),
    advice.FEWER_LIVE_PARAMETERS: _all_of(_DEEPSPEED, _none_of(_GATHERS_ALL)),
    advice.WRAP_LAYERS: _none_of(_DEEPSPEED),
    advice.PRINT_THE_OOM: says("auto_find_batch_size|No executable batch size"),
    advice.PRINT_BATCH: lambda facts: not facts.frames and _is_large(facts),
    advice.STREAM_THE_DATA: says(
        r"(?i)tokeniz(?:ing|ation)|preprocess|prepared dataset|keep_in_memory|大数据集"
        r"|(?:large|huge) (?:\w+ ){0,2}dataset"
    ),
    advice.SHOW_MAIN_MEMORY: lambda facts: facts.users_frame is None,
    advice.FIND_THE_KILL: _none_of(
        says(r"(?i)dataloader|offload|cpu_?adam|kubectl|\bpod\b|\bRAM\b|cpu\)? ?memory|内存"),
        _LOAD_BAR,
        _HOSTED,
        _SLURM,
        _MERGES,
        says(rf"{off_card.KILLED.pattern}|{off_card.BY_RAY}"),
    ),
    advice.CHECK_LAUNCH_FILE: _all_of(says(_OFFLOADS), _none_of(_has_workers)),
    advice.OFFLOAD_TO_DISK: _all_of(says(_OFFLOADS), _none_of(_has_workers)),
    advice.LOAD_ONCE: _loads_twice,
    advice.MORE_MAIN_MEMORY: _CONTAINER,
    advice.MORE_SLURM_MEMORY: _SLURM,
    advice.NO_PINNED_OFFLOAD: _any_of(is_called("deepspeed"), says("(?i)deepspeed")),
    advice.NO_PINNED_ACTIVATIONS: _UNSLOTH,
    advice.NO_PINNED_BATCHES: _none_of(_UNSLOTH),
    advice.HEADROOM: _all_of(shows_trainer, _none_of(_ON_THE_HOST)),
    advice.MEMORY_FRACTION: _none_of(shows_trainer, _ON_THE_HOST),
    advice.RELEASE_EARLIER_RUNS: _TRIAL,
    advice.RESTART_KERNEL: _none_of(_TRIAL),
}  # advice not listed here applies everywhere

APPLIES_TO_CAUSE: Mapping[tuple[str, Advice], Test] = {
    ("engine-share", advice.SMALLER_MICRO_BATCH): lambda facts: (
        not facts.frames and not facts.asked_bytes and facts.oom.source == "allocator"
    ),
    ("capacity", advice.FOUR_BITS): _all_of(says("(?i)lora"), _none_of(_MXFP4)),
    ("ddp-gpu0", advice.LOAD_INTO_MAIN_MEMORY): _any_of(
        is_called(r"torch\.load|serialization\.py"), lambda facts: facts.processes
    ),
    ("engine-share", advice.LIST_PROCESSES): engine.is_startup,
    ("generate-cache", advice.SMALLER_EVAL_BATCH): uses_trainer,
    ("host-alloc", advice.FEWER_WORKERS): _has_workers,
    ("host-alloc", advice.SDPA_ATTENTION): _all_of(
        is_called(place.ATTENTION, innermost=3), _is_large
    ),
    ("host-alloc", advice.SMALLER_MICRO_BATCH): is_called(
        r"\bforward\b|backward|loss", innermost=4
    ),
    ("host-kill", advice.FEWER_WORKERS): _all_of(
        _any_of(_has_workers, _TAKEN_BY_UNKNOWN),
        _none_of(_SAVE_LINE, _MERGES, says(off_card.BY_RAY)),
    ),
    ("host-kill", advice.LOAD_ONCE): _all_of(_loads_twice, _IS_LOADING),
    ("host-kill", advice.MORE_MAIN_MEMORY): _none_of(_HOSTED),
    ("host-kill", advice.SAVE_ONLY_MODEL): _SAVE_LINE,
    ("host-kill", advice.SAVE_WITHOUT_GATHER): _all_of(_SAVE_LINE, _ZERO3),
    ("host-limit", advice.FEWER_WORKERS): _has_workers,
    ("host-limit", advice.MORE_MAIN_MEMORY): _none_of(_SLURM),
    ("leftover", advice.SMALLER_MICRO_BATCH): lambda facts: facts.is_notebook,
    # transformers 5, the only one that converts, loads in the checkpoint's dtype
    ("load-too-large", advice.HALF_PRECISION_WEIGHTS): _none_of(
        _KBIT, _MXFP4, _CONVERTS, _REFUSED, _IN_16_BITS
    ),
    **{("zero3-gather", each): _none_of(_GATHERS_ALL) for each in LESS_OF_THE_BATCH},
    ("not-an-oom", advice.STREAM_THE_DATA): lambda _: True,
    ("quadratic-attention", advice.FLASH_ATTENTION): _SDPA,
    ("quadratic-attention", advice.SDPA_ATTENTION): _none_of(_SDPA),
    ("shm", advice.FEWER_WORKERS): _none_of(says("/dev/shm/nccl")),
}  # conditions for a cause, which replace those in `APPLIES`
