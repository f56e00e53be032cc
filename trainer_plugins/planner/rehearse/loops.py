"""Make one of TRL's Trainers from a config and flags, with rows of a given length.

Its own constructor runs, with a tokenizer of four words and rows of one of them. Imports torch.
"""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse import rollout
from trainer_plugins.planner.rehearse.failures import first_line
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER
from trainer_plugins.planner.request import ConfigSource

_Row = dict[str, object]
_WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "w": 3}


def _text(num_tokens: int) -> str:
    return " w" * num_tokens


def _pair(length: int, _: int) -> _Row:
    prompt = length // 2
    answer = _text(length - prompt - 1)  # and the end
    return {"prompt": _text(prompt), "chosen": answer, "rejected": answer}


def _judged(length: int, index: int) -> _Row:
    row = _pair(length, index)
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 2 == 0}


def _compared(length: int, _: int) -> _Row:
    return {"chosen": _text(length - 1), "rejected": _text(length - 1)}


def _triple(length: int, index: int) -> _Row:
    row = _pair(length, index)
    return {**row, "reference": row["chosen"]}


@dataclass(frozen=True, slots=True)
class Loop:
    """Describes one of TRL's Trainers."""

    name: str
    """What the names of the Trainer and of its config begin with."""

    row: Callable[[int, int], _Row]
    """Makes a row from its length in tokens and its index."""

    home: str = "trl"
    """The module that has them."""

    longest: int | None = None
    """Where it cuts rows if its `max_length` is None; None: nowhere."""

    @property
    def trainer(self) -> Any:
        """Return the class of the Trainer."""
        return getattr(importlib.import_module(self.home), f"{self.name}Trainer")

    @property
    def config(self) -> Any:
        """Return the class of its arguments."""
        return getattr(importlib.import_module(self.home), f"{self.name}Config")


_LOOPS = {
    "sft": Loop("SFT", lambda length, _: {"input_ids": [_WORDS["w"]] * length}),
    "dpo": Loop("DPO", _pair),
    "kto": Loop("KTO", _judged),
    "reward": Loop("Reward", _compared),
    "grpo": Loop("GRPO", lambda length, _: {"prompt": _text(length)}),
    "rloo": Loop("RLOO", lambda length, _: {"prompt": _text(length)}),
    "gmpo": Loop("GMPO", lambda length, _: {"prompt": _text(length)}, "trl.experimental.gmpo"),
    "orpo": Loop("ORPO", _pair, "trl.experimental.orpo", longest=512),
    "cpo": Loop("CPO", _pair, "trl.experimental.cpo", longest=512),
    "tpo": Loop("TPO", _triple, "trl.experimental.tpo"),
}


def loop_of(source: ConfigSource) -> Loop | None:
    """Return the loop that a run names, by `--trainer`; None is transformers' own.

    Raises:
        PlanError: it is not installed.
    """
    if source.trainer is None:
        return None
    loop = _LOOPS[source.trainer]
    try:
        _ = loop.trainer, loop.config
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"--trainer {source.trainer} needs TRL's {loop.name}Trainer: {first_line(error)}"
        ) from error
    return loop


def make(
    loop: Loop,
    source: ConfigSource,
    args: Any,
    model_of: Callable[[], torch.nn.Module],
    adapter: object,
) -> tuple[Any, list[str]]:
    """Make the Trainer of a loop, and say what was chosen because the input leaves it open.

    Args:
        loop: one of TRL's Trainers.
        source: the run as it was described.
        args: its arguments, of the loop's own class.
        model_of: builds the model, and once more for a reference.
        adapter: the config of an adapter of peft; None trains the weights.

    Raises:
        PlanError: TRL refuses the arguments, or a row has no room for its prompt.
        NotPredicted: what it does with its rows depends on their lengths, or needs values.
    """
    from datasets import Dataset

    for name in (
        ("packing", "padding_free") if loop.name == "SFT" else ("precompute_ref_log_probs",)
    ):
        if getattr(args, name, False):
            raise NotPredicted(f"{name} with --trainer {source.trainer}: {GIVE_A_TRAINER}")
    length, said = _length(loop, source, args)
    rows = args.per_device_train_batch_size
    if rollout.generates(loop.trainer):
        length -= args.max_completion_length
        rows = -(-rollout.rows_of_a_batch(args) // args.num_generations)
        if length < 1:
            raise PlanError(
                f"a row has {source.sequence_length:,} tokens (--seq-length), and its completion "
                f"takes {args.max_completion_length:,} of them (--max_completion_length): nothing "
                "is left for the prompt"
            )
        said.append(f"prompts have {length:,} tokens: the row without its completion")
    elif loop.row in (_pair, _judged, _triple):
        said.append("half of each row is the prompt, which gets no loss")
    rewards = {"reward_funcs": [_no_reward]} if rollout.generates(loop.trainer) else {}
    data = Dataset.from_list([loop.row(length, index) for index in range(max(2, rows))])
    try:
        with _without_files(loop, model_of):
            made = loop.trainer(
                model=model_of(),
                args=args,
                train_dataset=data,
                processing_class=_tokenizer(),
                peft_config=adapter,
                **rewards,
            )
    except (ValueError, NotImplementedError) as error:
        raise PlanError(f"TRL refuses this run: {first_line(error)}") from error
    return made, said


def _length(loop: Loop, source: ConfigSource, args: Any) -> tuple[int, list[str]]:
    """Return the tokens of a row: what the run cuts longer ones at, if that is less."""
    most = getattr(args, "max_length", None) or loop.longest
    if most is None or most >= source.sequence_length:
        return source.sequence_length, []
    return most, [f"rows are cut at {most:,} tokens (--max_length of {type(args).__name__})"]


@contextlib.contextmanager
def _without_files(loop: Loop, model_of: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Build a reference from the config too, and no vLLM."""
    homes = {kind.__module__ for kind in loop.trainer.__mro__ if kind.__module__.startswith("trl.")}
    answers = {
        "create_model_from_path": lambda *_, **__: model_of(),
        "VLLMGeneration": lambda **_: None,
    }
    with contextlib.ExitStack() as stack:
        for home, name in itertools.product(homes, answers):
            if hasattr(sys.modules[home], name):
                stack.enter_context(patch.object(sys.modules[home], name, answers[name]))
        yield


def _no_reward(**_: object) -> list[float]:
    """Stand in for the user's rewards, which are not computed."""
    raise AssertionError("a plan computes no rewards")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel(dict(_WORDS), unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
