"""Read the setup of a run from a text: its settings, and its command line, ready to type again."""

import re
import shlex
from collections.abc import Mapping, Sequence

from trainer_plugins import checkpointing
from trainer_plugins.explain.text.frames import TracebackFrame
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
# As the Trainer and Unsloth print them before the first step, and as people write them.
_SHOWN_ROWS = "per_device_train_batch_size|[Bb]atch size per device"
SHOWN_STEPS = "gradient_accumulation_steps|Gradient [Aa]ccumulation steps"
# Elsewhere a batch may be that of all cards, but one row is one row.
_ONE_ROW = re.compile(
    r"(?i)(?<![\w.])(?<!eval )(?<!eval_)(?:train_)?(?:batch(?:[ _-]?size)?|bs)(?: per \w+)?[\"']?"
    r"(?: ?[=:] ?| is (?:already )?| of | to | )[\"']?(?:1|one)\b(?!['\w%]|[.,]\d|[/:|]| ?(?:of|/))"
)
DTYPES = "bfloat16|float16|float32"

_UNKNOWN = "YOUR LAUNCH COMMAND"
_MOST_CHARACTERS = 2000
# A typed line, or one that names the running program; we drop text before the launcher.
_PROMPT = r"[^\n]{0,80}?[$#%>!] ?|\+ |(?i:[^\n:]{0,30}(?:running|command|cmd)[^\n:]{0,20}: ?)"
_WRAPPER = (
    r"\w+=\S*|nohup|time|srun(?: -\S+)*|(?:uv|poetry|pixi) run"
    r"|trainer-plugins exec [^\n]{0,200}? --"
)
_SHOWN = re.compile(
    rf"(?m)^(?:{_PROMPT})?(?:(?:{_WRAPPER}) +)*((?:\S*/)?(?:python[\d.]*|torchrun|deepspeed"
    r"|accelerate[ -]launch|axolotl train|llamafactory-cli train|trl \w+|swift \w+) +[^\n]*)$"
)
_CONTINUED = re.compile(r" *\\\n(?:> )?\s*")
_END = re.compile(r"\s\d?(?:[|<]|>[>&]?|&)|;")
# Shows the command of each rank in a launcher's own traceback, or in its last line.
_LISTED = re.compile(
    r"(?:Command '|cmd = |sigkill_handler\] )\[((?:'[^'\n]{0,500}'(?:, )?){2,200})\]"
)
_GIVEN_BY_LAUNCHER = re.compile(r"-u|--local[_-]rank=\d+")
_LAUNCHERS = (
    ("accelerate launch", r"accelerate[/\\]commands|bin/accelerate\b|accelerate\.commands"),
    ("deepspeed", r"deepspeed[/\\]launcher|bin/deepspeed\b|\[launch\.py:"),
    (
        "torchrun --nproc-per-node gpu",
        r"torch[/\\]distributed[/\\](?:run|launcher|elastic)|bin/torchrun\b"
        r"|torch\.distributed\.run",
    ),
)


class Settings:
    """Looks for settings in a text's command line, then anywhere in the text."""

    def __init__(self, text: str) -> None:
        self.text = checkpointing.spell(text)
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

    def count(self, names: str) -> int | None:
        """Return the number behind one of several names, in a banner or a sentence too."""
        found = re.search(rf"(?:{names})[\"']?[ =:]{{1,4}}(\d{{1,6}})\b", self.text)
        return int(found[1]) if found else None

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
        return self.count(_SHOWN_ROWS) or (1 if _ONE_ROW.search(self.text) else None)

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


def find_launch(text: str, frames: Sequence[TracebackFrame], writer: str) -> str:
    """Return the command line of a run, with its launcher, quoted so that nothing is executed."""
    if words := find_command(text):
        return shlex.join(words)
    several = writer.isdigit() or "local_rank" in text
    launcher = next(
        (name for name, pattern in _LAUNCHERS if re.search(pattern, text)),
        "accelerate launch" if several else "python",
    )
    if listed := _LISTED.search(text):
        _, *words = re.findall(r"'([^'\n]*)'", listed[1])
        words = [word for word in words if not _GIVEN_BY_LAUNCHER.fullmatch(word)]
        if words[:1] and not words[0].startswith("-"):
            return f"{launcher} {shlex.join(words)}"
    return _find_by_frames(launcher, text, frames)


def find_command(text: str) -> list[str]:
    """Return the words of the first command line in a text; empty if there is none."""
    for match in _SHOWN.finditer(_CONTINUED.sub(" ", text)):
        line = _END.split(match[1][:_MOST_CHARACTERS])[0]
        try:
            words = shlex.split(line)
        except ValueError:  # an unmatched quote
            words = line.split()
        if _names_a_program(words):
            return words
    return []


def _names_a_program(words: Sequence[str]) -> bool:
    """Distinguish a command line from a sentence that begins with the same word."""
    launcher, *others = words
    if launcher.rpartition("/")[2].startswith("python"):
        others = [word for word in others if word == "-m" or not word.startswith("-")][:1]
    elif not launcher.endswith(("torchrun", "deepspeed", "accelerate", "accelerate-launch")):
        return True
    return any(word == "-m" or word.endswith(".py") for word in others)


def _find_by_frames(launcher: str, text: str, frames: Sequence[TracebackFrame]) -> str:
    main = next((one for one in frames if one.function == "<module>"), None)
    is_ours = re.search(r"trainer_plugins[/\\]run\.py", text)
    if any("runpy" in one.file for one in frames) and not is_ours:
        return _UNKNOWN
    if not main or not main.is_users or not re.fullmatch(r"[\w./-]+\.py", main.file):
        return f"{launcher} train.py"
    path = main.file.rsplit("/", 1)[-1] if main.file.startswith("/") else main.file
    return f"{launcher} {path}"
