"""Knows the names of TrainingArguments without importing transformers, which takes seconds."""

import ast
import functools
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

# What people and other programs call the same: axolotl has micro_batch_size and sequence_len, TRL
# max_length (and had max_seq_length), LLaMA-Factory cutoff_len.
CALLED_ELSEWHERE = {
    "batch-size": "--per-device-train-batch-size",
    "train-batch-size": "--per-device-train-batch-size",
    "micro-batch-size": "--per-device-train-batch-size",
    "epochs": "--num-train-epochs",
    "lr": "--learning-rate",
    "max-length": "--seq-length",
    "max-seq-length": "--seq-length",
    "seq-len": "--seq-length",
    "sequence-len": "--seq-length",
    "cutoff-len": "--seq-length",
}
_FILES = ("training_args.py", "training_args_seq2seq.py")


@functools.cache
def argument_names() -> frozenset[str]:
    """Return the names that the installed TrainingArguments take; none if it is not found."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    texts = (Path(found.origin).with_name(file).read_text(encoding="utf-8") for file in _FILES)
    return frozenset(
        line.target.id
        for text in texts
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def unknown_argument(names: Iterable[str]) -> str:
    """Say which of these is no TrainingArgument, and which was probably meant; else nothing."""
    known = argument_names()
    for name in names if known else ():
        if name not in known:
            meant = CALLED_ELSEWHERE.get(name.replace("_", "-"))
            near = [meant] if meant else [f"--{n}" for n in get_close_matches(name, known, n=1)]
            hint = f": is it {near[0]}?" if near else ""
            return f"neither plan nor TrainingArguments knows --{name}{hint}"
    return ""
