"""Build a TRL Trainer with its own constructor, from a config and rows of a given length."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.rehearse import rollout
from trainer_plugins.planner.rehearse.from_config import PADDED
from trainer_plugins.planner.rehearse.gather import longest_batch
from trainer_plugins.planner.rehearse.loops import WORDS, Loop, loop_of
from trainer_plugins.planner.rehearse.model_of_config import adapter_of, load_model
from trainer_plugins.planner.rehearse.refusals import GIVE_A_TRAINER
from trainer_plugins.planner.rehearse.rehearsal import Build, Rehearsed
from trainer_plugins.planner.request import ConfigSource

# A mask separates the texts of a row, and a kernel has a block for each; one text has no mask.
TEXTS_OF_A_PACKED_ROW = 2


def rehearse(source: ConfigSource, build: Build) -> Rehearsed:
    """Build a TRL Trainer from a config. It trains, evaluates and saves."""
    loop = loop_of(source)
    if build.args.do_eval and rollout.generates(loop.trainer):
        raise NotPredicted(f"an evaluation with --trainer {source.trainer}: {GIVE_A_TRAINER}")
    is_streamed = build.streaming is not None
    model, assumptions = load_model(source, is_streamed=is_streamed)
    models = iter([model])  # The trained model is built only once.
    trainer, said = _make(
        *(loop, source, build.args),
        lambda: next(models, None) or load_model(source, is_streamed=is_streamed)[0],
    )
    if build.has_padding is None:
        said.append(PADDED)
    sizes = [build.args.per_device_train_batch_size]
    if build.args.do_eval:
        sizes.append(build.args.per_device_eval_batch_size)
    with _disable_current_modes():
        batch, *for_evaluation = [longest_batch(trainer, rows)[0] for rows in sizes]
    return Rehearsed(
        trainer=trainer,
        batch=batch,
        evaluation_batch=for_evaluation[0] if for_evaluation else None,
        has_padding=build.has_padding is not False,
        assumptions=[*assumptions, *said],
    )


def _make(
    loop: Loop, source: ConfigSource, args: Any, model_of: Callable[[], torch.nn.Module]
) -> tuple[Any, list[str]]:
    """Build the Trainer of a loop and list assumptions; `model_of` also builds a reference."""
    from datasets import Dataset

    if loop.name == "SFT" and getattr(args, "padding_free", False):
        raise NotPredicted(f"padding_free with --trainer {source.trainer}: {GIVE_A_TRAINER}")
    length, said = _length(loop, source, args)
    rows, rewards = args.per_device_train_batch_size, dict[str, list[Any]]()
    if getattr(args, "packing", False) and args.max_length:  # TRL refuses packing without it
        length, rows = args.max_length // TEXTS_OF_A_PACKED_ROW, rows * TEXTS_OF_A_PACKED_ROW
        said = [
            f"rows are packed: each has {args.max_length:,} tokens (--max_length), of "
            f"{TEXTS_OF_A_PACKED_ROW} texts"
        ]
    if rollout.generates(loop.trainer):
        length -= args.max_completion_length
        rows = -(-rollout.rows_of_a_batch(args) // args.num_generations)
        rewards = {"reward_funcs": [lambda **_: []]}  # not called
        if length < 1:
            raise PlanError(
                f"rows of {source.sequence_length:,} tokens (--seq-length) leave no room for a"
                f" prompt beside --max_completion_length {args.max_completion_length:,}"
            )
        said.append(f"prompts have {length:,} tokens: the row without its completion")
    elif loop.halves_rows:
        said.append("half of each row is the prompt, which gets no loss")
    data = Dataset.from_list([loop.row(length, index) for index in range(max(4, rows))])
    adapter = adapter_of(source.peft) if source.peft is not None else None
    with Patches() as patches:
        _replace_files(patches, loop, model_of)
        made = loop.trainer(
            model=model_of(),
            args=args,
            train_dataset=data,
            processing_class=_tokenizer(),
            peft_config=adapter,
            **rewards,
        )
    return made, said


def _length(loop: Loop, source: ConfigSource, args: Any) -> tuple[int, list[str]]:
    """Return the tokens of a row, after the run's own cut if that is shorter."""
    most = getattr(args, "max_length", None) or loop.longest
    if most is None or most >= source.sequence_length:
        return source.sequence_length, []
    return most, [f"rows are cut at {most:,} tokens (--max_length of {type(args).__name__})"]


def _replace_files(patches: Patches, loop: Loop, model_of: Callable[[], torch.nn.Module]) -> None:
    """Build a reference model from the config too, and no vLLM."""
    answers: dict[str, Callable[..., object]] = {
        "create_model_from_path": lambda *_, **__: model_of(),
        "VLLMGeneration": lambda **_: None,
    }
    for home in {kind.__module__ for kind in loop.trainer.__mro__}:
        for name, answer in answers.items():
            if home.startswith("trl.") and hasattr(sys.modules[home], name):
                patches.set(sys.modules[home], name, answer)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel(dict(WORDS), unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
