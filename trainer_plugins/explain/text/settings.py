"""Settings: the setup of a run as a text shows it, in its command line or anywhere else."""

import re
from collections.abc import Mapping, Sequence

from trainer_plugins import checkpointing
from trainer_plugins.explain.text.command import find_command
from trainer_plugins.planner.public_models import find_model

# The names used by transformers' examples, TRL, LLaMA-Factory, axolotl, DeepSpeed and QLoRA.
_MODEL = (
    "model_name_or_path|pretrained_model_name_or_path|pretrain|base_model|model_name|model_id|model"
)
TOKENS = "ppo_max_token_len_per_gpu"  # of a micro-batch without padding
LENGTH = (
    "max_seq_length|max_length|cutoff_len|sequence_len|model_max_length|max_seq_len|block_size"
    f"|{TOKENS}"
)
_ON_THE_HUB = r"(?<![\w./-])[a-zA-Z][\w-]{1,40}/[a-zA-Z][\w.-]{2,80}\w(?![\w/])"
# The rows of a micro-batch, also as verl, Megatron, NeMo and other frameworks call them.
ROWS = (
    "per_device_train_batch_size|micro_batch_size|train_micro_batch_size_per_gpu"
    "|ppo_micro_batch_size_per_gpu|ppo_micro_batch_size|micro_train_batch_size|local_batch_size"
    "|per_device_batch_size|micro_bsz|mbs|train_bs"
)
STEPS = "gradient_accumulation_steps|gradient_accumulation|grad_accum"
# Elsewhere a batch may be that of all cards, but one row is one row.
_ONE_ROW = re.compile(
    r"(?i)(?<![\w.])(?<!eval )(?<!eval_)(?:train_)?(?:batch(?:[ _-]?size)?|bs)(?: per \w+)?[\"']?"
    r"(?: ?[=:] ?| is (?:already )?| of | to | )[\"']?(?:1|one)\b(?!['\w%]|[.,]\d|[/:|]| ?(?:of|/))"
)
DTYPES = "bfloat16|float16|float32"


class Settings:
    """Looks for settings in a text's command line, then anywhere in the text."""

    def __init__(self, text: str, rows_in_banner: int | None = None) -> None:
        self.text, self._rows_in_banner = checkpointing.spell(text), rows_in_banner
        self.given = _arguments(find_command(self.text))

    def value(self, names: str, values: str) -> str:
        """Return the value of one of several names; empty if none has this form."""
        for name in names.split("|"):
            if re.fullmatch(values, self.given.get(name, "")):
                return self.given[name]
        found = self._find(names, values)
        return found["value"] if found else ""

    def _find(self, names: str, values: str) -> re.Match[str] | None:
        return re.search(
            rf"(?P<is_set>(?:--(?:{names})(?: +|=)|(?<!\w)(?:\w+\.)*(?:{names})[\"']? {{0,2}}"
            rf"[=:] {{0,2}})[\"']?)(?:torch\.)?(?P<value>{values})(?![\w.])",
            self.text,
        )

    def respell(self, names: str, value: int) -> str:
        """Write a setting with another number as the text writes it; empty if it does not."""
        found = self._find(names, r"\d{1,7}")
        return f"{found['is_set']}{value}".replace('"', "") if found else ""

    def is_on(self, names: str) -> bool:
        return bool(self.value(names, "[Tt]rue|1"))

    @property
    def names_model(self) -> bool:
        """Return whether the command line names the model, as a training's does."""
        return any(name in self.given for name in _MODEL.split("|"))

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
        for names in ROWS.split("|"):
            if found := self.value(names, r"\d{1,6}"):
                return int(found)
        return self._rows_in_banner or (1 if _ONE_ROW.search(self.text) else None)

    @property
    def length(self) -> int | None:
        """Return the tokens of the longest row; None if the text does not show them."""
        return int(self.value(LENGTH, r"\d{1,7}") or 0) or None

    @property
    def dtype(self) -> str:
        """Return the weights' dtype; empty if the text does not show it."""
        loaded = r"(?:from_pretrained\(|model_init_kwargs)[^)}]{0,300}?\bdtype"
        return self.value(f"torch_dtype|{loaded}", DTYPES) or self.given.get("dtype", "")


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
