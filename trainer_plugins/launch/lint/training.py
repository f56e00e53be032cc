"""Names TrainingArguments, and reads them from a command line."""

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import yaml

from trainer_plugins.checkpointing import spelled
from trainer_plugins.launch.lint.document import ConfigError

# What people call the same, and programs use for something else too: the batch of all cards.
CALLED_ELSEWHERE = {
    "batch_size": "per-device-train-batch-size",
    "train_batch_size": "per-device-train-batch-size",
}
_FILES = ("training_args.py", "training_args_seq2seq.py")
_OF_TRL = (
    "trainer/base_config.py",
    "trainer/{0}_config.py",
    "trainer/grpo_config.py",
    "experimental/{0}/{0}_config.py",
)
_SURE = 0.85  # of 1: `gradient_checkpoint` is near enough, `lora_r` is not `local_rank`


@functools.cache
def argument_names(trainer: str | None = None) -> frozenset[str]:
    """Return the names that the installed TrainingArguments take; none if it is not found.

    With one of TRL's Trainers, as in "sft", also those of its own config.
    """
    names = _fields_in("transformers", _FILES)
    if trainer is None:
        return names
    grouped = trainer == "gmpo"  # its config is one of GRPO's
    files = [each.format(trainer) for each in _OF_TRL if grouped or "grpo" not in each]
    return names | _fields_in("trl", files)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name that was meant: one that means the same, or of which this is a slip.

    >>> nearest("bf61", ["bf16", "fp16"]), nearest("lora_r", ["local_rank"])
    ('bf16', '')
    """
    spelt = name.replace("-", "_")
    if spelt in CALLED_ELSEWHERE:
        return CALLED_ELSEWHERE[spelt]
    by_spelling = {each.replace("-", "_"): each for each in reversed([*known])}
    swapped = [each for each in by_spelling if sorted(each) == sorted(spelt)]
    near = swapped or get_close_matches(spelt, by_spelling, n=1, cutoff=_SURE)
    return spelled(by_spelling[near[0]]) if near else ""


def _fields_in(package: str, files: Iterable[str]) -> frozenset[str]:
    return frozenset(
        line.target.id
        for each in _classes_in(package, files)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def _classes_in(package: str, files: Iterable[str]) -> Iterator[ast.ClassDef]:
    """Yield the classes in files of an installed package, which is not imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return
    for file in files:
        path = Path(found.origin).parent / file
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            yield from (each for each in body if isinstance(each, ast.ClassDef))


def unknown_argument(names: Iterable[str]) -> str:
    """Say which of these is no TrainingArgument, and which was probably meant; else nothing."""
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
    waiting: str | None = None  # the name of a flag whose value may follow
    for word in words:
        if word.startswith("--") or (waiting is None and "=" in word):
            name, equals, value = word.removeprefix("--").partition("=")
            name = spelled(name.replace("-", "_"))
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
