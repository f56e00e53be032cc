"""Refuse runs that have no dry run, and turn errors into one line. Imports torch."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.launch.lint.deepspeed import zero_findings
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.schema import schema_findings
from trainer_plugins.oldest import too_old
from trainer_plugins.planner.launched import refuse_malformed
from trainer_plugins.planner.plan import RUN_IT, NotPredicted, PlanError
from trainer_plugins.planner.rehearse import rollout
from trainer_plugins.planner.rehearse.loops import LOOPS

GIVE_A_TRAINER = "pass your Trainer to plan_run, whose collator builds the batches"

_NON_REENTRANT = advice.NON_REENTRANT.flag(Door.TRAINER)
_WHY = {
    "does not require grad and does not have a grad_fn": (
        "the loss depends on no trainable parameter. Reentrant checkpointing does that if a layer's"
        f" input needs no gradient, as after frozen embeddings (LoRA): pass {_NON_REENTRANT}, or"
        f" call {advice.INPUTS_REQUIRE_GRADS.flag(Door.CODE)} before you build the Trainer. Without"
        " checkpointing, no tensor behind the loss has requires_grad"
    ),
    "Expected to mark a variable ready only once": (
        "DDP looks for unused parameters, as the Trainer requests for a PEFT adapter, and"
        " with reentrant checkpointing, which prepare_model_for_kbit_training switches on, it"
        ' finds parameters twice ("Expected to mark a variable ready only once"): pass'
        f" --ddp_find_unused_parameters False, or {advice.CHECKPOINTING.flag(Door.TRAINER)}"
        f" {_NON_REENTRANT}"
    ),
    'unscale_cuda" not implemented for': (
        "--fp16 scales gradients, which CUDA does not do for those of bfloat16 weights (not"
        " implemented for 'BFloat16'): pass --bf16 instead, or load the weights as float32"
    ),
}  # parts of errors that also fail on a card, each with the fix


def make_plan_error(error: Exception) -> PlanError:
    """Turn an error of the dry run, perhaps from the user's own code, into a PlanError."""
    if isinstance(error, PlanError):
        return error
    why = next((why for words, why in _WHY.items() if words in str(error)), None)
    if why is not None:
        return PlanError(f"the dry run failed, and the run will fail too: {why}")
    return PlanError(
        f"the dry run failed: {type(error).__name__}: {first_line(error)}{_name_place(error)}"
    )


def first_line(error: BaseException) -> str:
    """Return an error in one line; add its second line if the first only announces it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def _name_place(error: BaseException) -> str:
    """Name the innermost line outside torch and this package."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/trainer_plugins/" not in file:
            place = f" (in {Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def refuse_trainer(trainer: HfTrainer) -> None:
    """Refuse TRL Trainers that cannot be rebuilt in another process."""
    of_trl = [each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    if of_trl and (why := too_old("trl")):
        raise PlanError(why)
    # Most others generate in their own way.
    if of_trl and of_trl[0] not in {f"{loop.name}Trainer" for loop in LOOPS.values()}:
        raise NotPredicted(f"a {of_trl[0]} of TRL passed to plan_run: {RUN_IT}")
    if rollout.generates(trainer):
        rollout.refuse(trainer)


def refuse_divided(model: torch.nn.Module) -> None:
    """Refuse a Trainer's model with sharded tensors: only a config can be planned that way."""
    if (num_cards := getattr(model, "_tp_size", None)) not in (None, 1):
        raise NotPredicted(
            f"tensor parallelism of a Trainer's model (tp_size {num_cards}): plan its config,"
            f" with tp_size in --accelerate-config, or {RUN_IT}"
        )


def refuse_deepspeed(config: Mapping[str, Any]) -> None:
    """Check the user's DeepSpeed config before DeepSpeed gives a less clear reason."""
    # accelerate sets steps_per_print to infinity
    written = {key: value for key, value in config.items() if value != float("inf")}
    document = Document(name="deepspeed", deepspeed=written)
    findings = chain(schema_findings(document), zero_findings(document))
    refuse_malformed(document, findings, "the DeepSpeed config")
