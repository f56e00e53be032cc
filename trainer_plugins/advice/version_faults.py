"""Faults of versions that cost memory, each with the version that cures it and its source.

`explain` finds them by the words of a report, `check` by the settings of a run. To add a fault, add
it to `FAULTS`, and its condition to `trainer_plugins/check/environment.py`.
"""

import re
from typing import NamedTuple

from trainer_plugins.advice.entry import Door
from trainer_plugins.advice.of_moments import QUANTISED_EXPERTS, READ_BY_ONE_RANK
from trainer_plugins.advice.of_training import CHECKPOINTING, NON_REENTRANT


class Fault(NamedTuple):
    """Describes a fault of one library."""

    library: str
    since: str  # the first version with it
    fixed: str  # the first version without it; empty if there is none yet
    words: tuple[str, ...]  # patterns of a report of it, in lower case; it has each of them
    source: str
    symptom: str
    remedy: str = ""  # besides a newer version

    @property
    def cure(self) -> str:
        newer = f"pip install -U '{self.library}>={self.fixed}'" if self.fixed else ""
        return ", or ".join(filter(None, (newer, self.remedy)))

    def is_in(self, version: str) -> bool:
        """Return whether a version has the fault; a version that cannot be read has not."""
        from packaging.version import InvalidVersion, Version

        try:
            number = Version(Version(version).base_version)
        except InvalidVersion:
            return False
        is_older = not self.fixed or number < Version(self.fixed)
        return Version(self.since) <= number and is_older


_FSDP2 = r"fsdp2|fsdp_version: 2"
_EXPERTS = r"expert|\bmoe\b|b-a\d+b"  # Qwen3-30B-A3B has 3 of its 30 billion active
# accelerate/utils/fsdp_utils.py, fsdp2_apply_ac: read in 1.14.0 and 1.15.0
WRAPPED_PARTS = Fault(
    "accelerate", "0", "1.15", (_FSDP2, r"fsdp_activation_checkpointing: true"),
    "accelerate#3897, #4172: 29 of 40.8 GB at 131,072 tokens",
    "FSDP2's activation checkpointing wraps the parts of a layer one by one, and keeps"
    " all tensors between them",
    f"{CHECKPOINTING.flag(Door.TRAINER)} instead of fsdp_activation_checkpointing",
)  # fmt: skip
# accelerate/utils/fsdp_utils.py, fsdp2_prepare_model: read in 1.12.0 and 1.13.0
FROZEN_IN_FLOAT32 = Fault(
    "accelerate", "1.6.0", "1.13", (_FSDP2, "lora"), "accelerate#3844",
    "FSDP2 casts all weights to float32, frozen ones too: twice the memory of a 16-bit base",
)  # fmt: skip
LOADED_TWICE = Fault(
    "accelerate", "1.6.0", "1.7.0", (_FSDP2, "cpu_ram_efficient_loading"), "accelerate#3482",
    "FSDP2 with loading by one rank needs about twice the memory",
)  # fmt: skip
WHOLE_EXPERTS = Fault(
    "transformers", "5", "", (r"load_in_[48]bit|qlora|bnb_", _EXPERTS),
    "bitsandbytes#1849, axolotl#3374: a run that fitted with 4.57 died while loading",
    "bitsandbytes leaves experts in 16 bits, because one tensor per layer holds them all",
    f"{QUANTISED_EXPERTS.flag(Door.CODE)}; or {QUANTISED_EXPERTS.flag(Door.SHELL)}",
)  # fmt: skip
# modeling_utils.py, _load_pretrained_model, does not check the rank: read and run with 5.23.0
LOADED_BY_EACH = Fault(
    "transformers", "5", "", ("cpu_ram_efficient_loading: true", _EXPERTS),
    "transformers#43749, open",
    "loading on one rank has no effect: each rank of a machine stacks all experts in main memory",
    f"count the weights once for each rank, or set {READ_BY_ONE_RANK.flag(Door.DEEPSPEED)}, which"
    f" {READ_BY_ONE_RANK.effect}",
)  # fmt: skip
CACHE_UNDER_FSDP = Fault(
    "transformers", "4.50.0", "4.56.0", ("fsdp", "lora"), "transformers#40075",
    "FSDP keeps the key/value cache whole during training",
)  # fmt: skip
REENTRANT_LEAK = Fault(
    "torch", "0", "", (_FSDP2, r"use_reentrant\W{1,4}true"), "pytorch#169349, open",
    "reentrant checkpointing under FSDP2 leaks in the backward pass",
    NON_REENTRANT.flag(Door.ARGUMENTS),
)  # fmt: skip
COMPILE_LEAK = Fault(
    "torch", "0", "2.10", (r"torch_compile\W{1,4}true|torch\.compile", "leak|grow"),
    "pytorch#174468: fixed in 2.10, as far as known", "torch.compile leaks memory",
)  # fmt: skip
GATHERED_KEPT = Fault(
    "deepspeed", "0.16.0", "0.16.8", ("checkpointing", "zero.?3"), "DeepSpeed#7116",
    "gradient checkpointing with ZeRO-3 keeps the gathered parameters",
)  # fmt: skip
PINNED_ANYWAY = Fault(
    "deepspeed", "0.14.1", "0.18.3", ("offload", "pin_memory"), "DeepSpeed#7689",
    "ZeRO-1 and ZeRO-2 pin the main memory of an offloaded optimizer against the setting",
)  # fmt: skip
EXPERTS_KEPT = Fault(
    "bitsandbytes", "0.48.0", "0.50.0", (_EXPERTS, "checkpointing"),
    "bitsandbytes#1999",
    "every dequantized expert stays in memory with non-reentrant checkpointing",
)  # fmt: skip
COPIES_KEPT = Fault(
    "trl", "0.18.0", "1.5.0", ("activation_offloading",), "trl#5700 and #5730",
    "activation offloading keeps its copies after a step",
)  # fmt: skip
HIDDEN_STATES_KEPT = Fault(
    "trl", "0.22.0", "0.25.0", ("gkd", "liger"), "trl#4140",
    "GKD with the Liger loss keeps all hidden states of student and teacher",
)  # fmt: skip
SLEEPS_WITH_WEIGHTS = Fault(
    "vllm", "0.14.0", "0.17.0", ("sleep",), "vllm#32714", "sleep mode does not free the weights",
)  # fmt: skip
FAULTS = (
    GATHERED_KEPT, PINNED_ANYWAY, EXPERTS_KEPT, LOADED_TWICE, FROZEN_IN_FLOAT32, CACHE_UNDER_FSDP,
    COPIES_KEPT, HIDDEN_STATES_KEPT, SLEEPS_WITH_WEIGHTS, WRAPPED_PARTS, WHOLE_EXPERTS,
    LOADED_BY_EACH, REENTRANT_LEAK, COMPILE_LEAK,
)  # fmt: skip


def find_fault(text: str) -> tuple[Fault, str] | None:
    """Return the first fault whose version and words a text shows, and that version."""
    folded = text.casefold()
    for fault in FAULTS:
        if not all(re.search(words, folded) for words in fault.words):
            continue
        named = re.search(
            rf"(?<![\w.-]){fault.library}[`\"']?(?: version)?[ :=v|\"'-]{{1,6}}"
            r"(\d+\.\d+(?:\.\d+)?)",
            folded,
        )
        if named and fault.is_in(named[1]):
            return fault, named[1]
    return None
