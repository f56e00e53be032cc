"""Read the user's TrainingArguments, and change them for a short run that writes nothing."""

import contextlib
import dataclasses
import io
import pickle
from collections.abc import Sequence
from typing import Any, cast

from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.launch.lint.document import read_deepspeed
from trainer_plugins.launch.lint.training import nearest, sft_argument_names
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.rehearse import ship
from trainer_plugins.planner.rehearse.loops import loop_of
from trainer_plugins.planner.rehearse.refusals import first_line, refuse_deepspeed
from trainer_plugins.planner.request import OPTIMIZER_STEPS, ConfigSource, TrainerSource, fields_of

# The rehearsal sets these, besides those that each dry run sets (inside/safety.py, observe.py).
_REHEARSED = {
    "max_steps": OPTIMIZER_STEPS,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    "resume_from_checkpoint": None,
    "skip_memory_metrics": True,
    "full_determinism": False,
    "lr_scheduler_type": "constant",  # some others need an evaluation
}


def arguments_of(source: ConfigSource | TrainerSource) -> HfArguments:
    """Return the user's TrainingArguments as given."""
    if isinstance(source, TrainerSource):
        of_trainer: Any = ship.loads(source.trainer)["args"]
        of_trainer.use_cpu = False  # Without a card, transformers requires it for bf16.
        return cast(HfArguments, of_trainer)
    try:
        _check_deepspeed(source.deepspeed)
        if isinstance(source.arguments, bytes):
            kind, given = pickle.loads(source.arguments)
            made: HfArguments = kind(**given)
            return made
        return _parse(source)
    except PlanError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise PlanError(first_line(error)) from error


def copy_arguments(args: Any) -> Any:
    """Copy TrainingArguments for a run of three steps that writes nothing."""
    given = fields_of(args)
    changed = {name: value for name, value in _REHEARSED.items() if name in given}
    return type(args)(**{**given, **changed})


def _parse(source: ConfigSource) -> HfArguments:
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    kind = loop_of(source).config if source.trainer is not None else Seq2SeqTrainingArguments
    parser = HfArgumentParser(kind, prog="trainer-plugins plan", allow_abbrev=False)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args, unknown = parser.parse_args_into_dataclasses(
                [*source.arguments, *_row_length(source, kind)], return_remaining_strings=True
            )
    except SystemExit as exit_:
        lines = errors.getvalue().strip().splitlines()
        why = lines[-1].partition("error: ")[2] if lines else "the flags cannot be read"
        raise PlanError(why) from exit_
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [each.lstrip("-") for each in parser._option_string_actions]
        near = nearest(flag.lstrip("-"), known)
        is_of_trl = source.trainer is None and flag.lstrip("-") in sft_argument_names()
        knower = kind.__name__ if source.trainer is not None else "TrainingArguments"
        hint = f". Did you mean --{near}?" if near else ". It belongs to --trainer sft" * is_of_trl
        raise PlanError(f"unknown option {unknown[0]}: neither plan nor {knower} has it{hint}")
    made: HfArguments = args
    return made


def _row_length(source: ConfigSource, kind: Any) -> Sequence[str]:
    """Make TRL cut rows at the user's length, not at its own default."""
    has_own = source.find_flag("max_length") is not None
    if has_own or not source.has_length or source.trainer is None:
        return ()
    takes_it = "max_length" in {field.name for field in dataclasses.fields(kind)}
    return ("--max_length", str(source.sequence_length)) if takes_it else ()


def _check_deepspeed(given: Any) -> None:
    """Check a DeepSpeed config before transformers reads it, which expects a valid one."""
    if not given:
        return
    document = read_deepspeed(given if isinstance(given, dict) else str(given))
    if document.deepspeed is None:
        raise PlanError(f"--deepspeed {given}: {document.json_problem}")
    refuse_deepspeed(document.deepspeed)
