"""List the names of TrainingArguments, and read them from a command line."""

import ast
import functools
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import yaml

from trainer_plugins.checkpointing import spell
from trainer_plugins.launch.lint.document import ConfigError

# Common names for per_device_train_batch_size; some programs use them for the total batch.
_CALLED_ELSEWHERE = ("batch_size", "train_batch_size")
_SURE = 0.85  # of 1: `gradient_checkpoint` is close enough, but `lora_r` is not `local_rank`


@functools.cache
def argument_names() -> frozenset[str]:
    """Return the fields of the installed TrainingArguments; none if it is not found."""
    return _fields_in("transformers", ("training_args.py", "training_args_seq2seq.py"))


def sft_argument_names() -> frozenset[str]:
    """Return the fields that TRL's SFTConfig adds; none if TRL is not found."""
    return _fields_in("trl", ("trainer/base_config.py", "trainer/sft_config.py"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the intended name: a synonym, or the likely correction of a typo.

    >>> nearest("bf61", ["bf16", "fp16"]), nearest("lora_r", ["local_rank"])
    ('bf16', '')
    """
    spelt = name.replace("-", "_")
    if spelt in _CALLED_ELSEWHERE:
        return "per-device-train-batch-size"
    by_spelling = {each.replace("-", "_"): each for each in reversed([*known])}
    swapped = [each for each in by_spelling if sorted(each) == sorted(spelt)]
    near = swapped or get_close_matches(spelt, by_spelling, n=1, cutoff=_SURE)
    return spell(by_spelling[near[0]]) if near else ""


def _fields_in(package: str, files: Iterable[str]) -> frozenset[str]:
    """Return the fields of the classes in files of an installed package, without importing it."""
    found = find_spec(package)
    folder = Path(found.origin if found is not None and found.origin else "").parent
    paths = (folder / file for file in files)
    return frozenset(
        line.target.id
        for path in paths
        if path.is_file()
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def unknown_argument(names: Iterable[str]) -> str:
    """Report the first name that is no TrainingArgument, with a suggestion; else nothing."""
    known = argument_names()
    for name in names if known else ():
        if name not in known:
            near = nearest(name, known)
            hint = f": is it --{near}?" if near else ""
            return f"neither plan nor TrainingArguments knows --{name}{hint}"
    return ""


def training_arguments(words: Sequence[str]) -> dict[str, object]:
    """Read TrainingArguments from a command line, or from `key=value` words.

    >>> training_arguments(["--bf16", "--max-grad-norm", "0.3", "learning_rate=2e-5"])
    {'bf16': True, 'max_grad_norm': 0.3, 'learning_rate': 2e-05}
    >>> training_arguments(["--optim_target_modules", '["mlp"]'])
    {'optim_target_modules': ['mlp']}
    """
    found: dict[str, object] = {}
    waiting: str | None = None  # a flag whose value may follow
    for word in words:
        if word.startswith("--") or (waiting is None and "=" in word):
            name, equals, value = word.removeprefix("--").partition("=")
            name = spell(name.replace("-", "_"))
            found[name] = _value(value) if equals else True
            waiting = None if equals else name
        elif waiting is not None:
            found[waiting] = _value(word)
            waiting = None
        else:
            raise ConfigError(
                f"training arguments are --name value or name=value, got {word!r} without a name"
            )
    return found


def _value(text: str) -> object:
    try:
        is_power = "e" in text.lower() and not text.startswith("{")
        return float(text) if is_power else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return yaml.safe_load(text) if text.lower() in ("true", "false") else text
