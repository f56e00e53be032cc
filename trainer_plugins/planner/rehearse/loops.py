"""List the TRL Trainers that we plan from a config, and the rows that each takes."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer_plugins.oldest import too_old
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import ConfigSource

Row = dict[str, object]
# the vocabulary of the tokenizer: a row repeats one word
WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "w": 3}


def _text(num_tokens: int) -> str:
    return " w" * num_tokens


def _prompt(length: int, _: int) -> Row:
    return {"prompt": _text(length)}


def _pair(length: int, _: int) -> Row:
    prompt = length // 2
    answer = _text(length - prompt - 1)  # minus the end token
    return {"prompt": _text(prompt), "chosen": answer, "rejected": answer}


def _make_judged_row(length: int, index: int) -> Row:
    row = _pair(length, index)
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 2 == 0}


def _triple(length: int, index: int) -> Row:
    row = _pair(length, index)
    return {**row, "reference": row["chosen"]}


class Loop(NamedTuple):
    """Describes one of TRL's Trainers."""

    name: str  # prefix of the Trainer's and the config's name
    row: Callable[[int, int], Row]  # builds a row from its length in tokens and its index
    home: str = "trl"  # the module that defines them
    longest: int | None = None  # where it cuts rows if `max_length` is None; None: nowhere

    @property
    def trainer(self) -> Any:
        """Return the Trainer class."""
        return getattr(importlib.import_module(self.home), f"{self.name}Trainer")

    @property
    def config(self) -> Any:
        """Return the config class."""
        return getattr(importlib.import_module(self.home), f"{self.name}Config")

    @property
    def halves_rows(self) -> bool:
        """Return whether half of each row is the prompt."""
        return self.row in (_pair, _make_judged_row, _triple)


LOOPS = {
    "sft": Loop("SFT", lambda length, _: {"input_ids": [WORDS["w"]] * length}),
    "dpo": Loop("DPO", _pair),
    "kto": Loop("KTO", _make_judged_row),
    "reward": Loop(
        "Reward", lambda length, _: dict.fromkeys(("chosen", "rejected"), _text(length - 1))
    ),
    "grpo": Loop("GRPO", _prompt),
    "rloo": Loop("RLOO", _prompt),
    "gmpo": Loop("GMPO", _prompt, "trl.experimental.gmpo"),
    "orpo": Loop("ORPO", _pair, "trl.experimental.orpo", longest=512),
    "cpo": Loop("CPO", _pair, "trl.experimental.cpo", longest=512),
    "tpo": Loop("TPO", _triple, "trl.experimental.tpo"),
}


def loop_of(source: ConfigSource) -> Loop:
    """Return the loop of the run's `--trainer`."""
    loop = LOOPS[source.trainer or ""]
    if why := too_old("trl"):
        raise PlanError(why)
    try:
        _ = loop.trainer, loop.config
    except (ImportError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise PlanError(
            f"--trainer {source.trainer} needs TRL's {loop.name}Trainer: {why}"
        ) from error
    return loop
