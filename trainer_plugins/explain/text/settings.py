"""Settings: the setup of a run as a text shows it, in its command line or anywhere else."""

import re
from collections.abc import Mapping, Sequence

from trainer_plugins import checkpointing
from trainer_plugins.explain.text.command import find_command
from trainer_plugins.explain.text.models import find_model
from trainer_plugins.explain.text.text_facts import TextFacts

# The names used by transformers' examples, TRL, LLaMA-Factory, axolotl, DeepSpeed and QLoRA.
_MODEL = "model_name_or_path|pretrained_model_name_or_path|base_model|model_name|model_id|model"
_LENGTH = (
    "max_seq_length|max_length|cutoff_len|sequence_len|model_max_length|max_seq_len|block_size"
)
_ON_THE_HUB = r"(?<![\w./-])[a-zA-Z][\w-]{1,40}/[a-zA-Z][\w.-]{2,80}\w(?![\w/])"
ROWS = "per_device_train_batch_size|micro_batch_size|train_micro_batch_size_per_gpu"
DTYPES = "bfloat16|float16|float32"
_LOADED_AS = re.compile(
    r"(?:from_pretrained\(|model_init_kwargs)[^)}]{0,300}?\bdtype[\"']?\s{0,2}[=:]\s{0,2}[\"']?"
    rf"(?:torch\.)?({DTYPES})\b"
    rf"|[\"']dtype[\"']: [\"'](?:torch\.)?({DTYPES})[\"']"
    r"|(?i:(?:model|weights|param\w*)\b[^\n=]{0,24}?\b(?:dtype|in)\b[: =]{1,3}"
    rf"(?:torch\.)?({DTYPES})\b)"
)


class Settings:
    """Looks for settings in the text's command line, then anywhere in the text."""

    def __init__(self, facts: TextFacts) -> None:
        self._facts = facts
        self.text = checkpointing.spell(facts.whole)
        self.given = _arguments(find_command(self.text))

    def value(self, names: str, values: str) -> str:
        """Return the value of one of several names; empty if none has this form."""
        for name in names.split("|"):
            if re.fullmatch(values, self.given.get(name, "")):
                return self.given[name]
        is_set = rf"(?:--(?:{names})[ =]|(?<![\w.])(?:{names})[\"']? {{0,2}}[=:] {{0,2}})[\"']?"
        found = re.search(rf"{is_set}(?:torch\.)?({values})(?![\w.])", self.text)
        return found[1] if found else ""

    def is_on(self, names: str) -> bool:
        return bool(self.value(names, "[Tt]rue|1"))

    @property
    def model(self) -> str:
        given = [self.given[name] for name in _MODEL.split("|") if name in self.given]
        path = r"[\w.~-]*/[\w./-]*\w"
        loaded = re.search(rf"from_pretrained\(\s*[\"']({path})[\"']", self.text)
        named = given[0] if given else loaded[1] if loaded else self.value(_MODEL, path)
        return named or next(filter(find_model, re.findall(_ON_THE_HUB, self.text)), "")

    @property
    def rows(self) -> int | None:
        """Return the rows of a micro-batch; None if the text does not show them."""
        found = self.value(ROWS, r"\d{1,6}")
        return int(found) if found else self._facts.rows("per_device_train_batch_size")

    @property
    def length(self) -> int | None:
        """Return the tokens of the longest row; None if the text does not show them."""
        return int(self.value(_LENGTH, r"\d{1,7}") or 0) or None

    @property
    def dtype(self) -> str:
        """Return the weights' dtype: a bare dtype may belong to any tensor in a line of code."""
        if found := self.value("torch_dtype", DTYPES) or self.given.get("dtype", ""):
            return found
        loaded = _LOADED_AS.search(self.text)
        return next(filter(None, loaded.groups()), "").lower() if loaded else ""


def _arguments(words: Sequence[str]) -> Mapping[str, str]:
    """Parse the flags of a command line, and overrides as Hydra takes them.

    >>> _arguments(["x.py", "--max-length", "8", "--bf16", "--optim=sgd", "args.lr=1"])
    {'max_length': '8', 'bf16': 'True', 'optim': 'sgd', 'lr': '1'}
    """
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if assigned := re.fullmatch(r"(?:--|\++)?([\w.-]+)=(.*)", word):
            found[_name(assigned[1])] = assigned[2]
        elif word.startswith("--"):
            found[_name(word[2:])] = "True" if after.startswith("--") else after
    return found


def _name(text: str) -> str:
    return text.replace("-", "_").rpartition(".")[2]
