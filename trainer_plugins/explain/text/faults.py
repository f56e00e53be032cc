"""Faults of versions that cost memory, each with the version that cures it and its source.

To add a fault, add its line to `_FAULTS`: the words are those that a report of it has, all of them.
"""

import re
from typing import NamedTuple

from packaging.version import Version


class Fault(NamedTuple):
    """Describes a fault of one library."""

    library: str
    since: str  # the first version with it
    fixed: str  # the first version without it
    words: tuple[str, ...]  # in lower case
    source: str
    symptom: str

    @property
    def cure(self) -> str:
        return f"pip install -U '{self.library}>={self.fixed}'"


_FAULTS = (
    Fault("deepspeed", "0.16.0", "0.16.8", ("checkpointing",), "DeepSpeed#7116",
          "gradient checkpointing with ZeRO-3 keeps the gathered parameters"),
    Fault("deepspeed", "0.14.1", "0.18.3", ("offload", "pin_memory"), "DeepSpeed#7689",
          "ZeRO-1 and ZeRO-2 pin the main memory of an offloaded optimizer against the setting"),
    Fault("bitsandbytes", "0.48.0", "0.50.0", ("expert", "checkpointing"), "bitsandbytes#1999",
          "every dequantized expert stays in memory with non-reentrant checkpointing"),
    Fault("accelerate", "1.6.0", "1.7.0", ("fsdp2", "cpu_ram_efficient_loading"), "accelerate#3482",
          "FSDP2 with loading by one rank needs about twice the memory"),
    Fault("accelerate", "1.6.0", "1.13.0", ("fsdp2", "lora"), "accelerate#3844",
          "FSDP2 casts all weights to float32, the frozen ones too"),
    Fault("transformers", "4.50.0", "4.56.0", ("fsdp", "lora"), "transformers#40075",
          "FSDP keeps the key/value cache whole during training"),
    Fault("trl", "0.18.0", "1.5.0", ("activation_offloading",), "trl#5700 and #5730",
          "activation offloading keeps its copies after a step"),
    Fault("trl", "0.22.0", "0.25.0", ("gkd", "liger"), "trl#4140",
          "GKD with the Liger loss keeps all hidden states of student and teacher"),
    Fault("vllm", "0.14.0", "0.17.0", ("sleep",), "vllm#32714",
          "sleep mode does not free the weights"),
)  # fmt: skip


def find_fault(text: str) -> tuple[Fault, str] | None:
    """Return the first fault whose version and words a text shows, and that version."""
    folded = text.casefold()
    for fault in _FAULTS:
        if not all(word in folded for word in fault.words):
            continue
        named = re.search(
            rf"(?<![\w.-]){fault.library}[`\"']?(?: version)?[ :=v|\"']{{1,6}}(\d+\.\d+(?:\.\d+)?)",
            folded,
        )
        if named and Version(fault.since) <= Version(named[1]) < Version(fault.fixed):
            return fault, named[1]
    return None
