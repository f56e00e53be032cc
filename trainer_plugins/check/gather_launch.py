"""Gather the facts of a run from its command line. Without a model, imports no torch."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer_plugins.check.facts import (
    DataFacts,
    Facts,
    ModelFacts,
    ModelShape,
    RunSettings,
    folder_of,
    predicts_tokens,
)
from trainer_plugins.check.gather_here import folder_trouble, gather_here
from trainer_plugins.check.machine import fullest_card
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.drycuda.predict import predict_one
from trainer_plugins.launch.lint.document import read_document
from trainer_plugins.launch.lint.training import training_arguments, unknown_argument
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.compare.switches import stream_base
from trainer_plugins.planner.inputs import read_config, request_of
from trainer_plugins.planner.options import RunOptions
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import default_length
from trainer_plugins.units import MIB


def gather_launch(environ: Mapping[str, str], asked: RunOptions) -> Facts:
    """Read this machine, and the command line's facts; without a model, only its flags."""
    assert isinstance(asked.training_args, Sequence)
    model, values = asked.model, training_arguments(asked.training_args)
    # With a model, the plan reads them, and knows TRL's too.
    if model is None and asked.trainer is None and (why := unknown_argument(values)):
        raise PlanError(why)
    file = asked.accelerate_config or values.get("deepspeed")
    facts = _add_card(gather_here(environ), asked.gpu)
    if isinstance(file, (str, Path)):
        facts = replace(facts, document=read_document(Path(file)))
    if not values and model is None:
        return facts
    folder = folder_of(values)
    run = RunSettings(
        values=values,
        has_metrics=asked.metrics,
        local_ranks=asked.num_gpus or 1,
        folder_trouble=folder_trouble(folder) if "output_dir" in values else "",
    )
    if model is None:
        return replace(facts, run=run)
    length = asked.seq_length or default_length(asked.trainer)
    target = asked.target_length or length
    data = DataFacts(
        lengths=(length,),
        longest_target=target,
        longest_evaluation=target,
        num_evaluation_rows=asked.eval_batches * run.number("per_device_eval_batch_size", 8),
    )
    config = read_config(model, asked.from_hub)
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    usual = config.get("_attn_implementation") or "sdpa"  # transformers' default
    seen = ModelFacts(
        shape=ModelShape.read(config),
        predicts_tokens=predicts_tokens(name) or not name,
        makes_no_logits=run.flag("use_liger_kernel"),
        attention=str(usual if asked.attn_implementation is None else asked.attn_implementation),
    )
    facts = replace(facts, run=run, model=seen, data=data)
    return _add_plan(facts, asked)


def gather_command(environ: Mapping[str, str], ran: Variations, gpu: str | None) -> Facts:
    """Read this machine, and the facts from a command's dry run."""
    plan, values = ran.plan, ran.arguments
    facts = _add_card(gather_here(environ), gpu)
    run = RunSettings(values=values, folder_trouble=folder_trouble(folder_of(values)))
    return replace(facts, run=run, plan=plan, accumulation=plan.accumulation)


def _add_card(facts: Facts, gpu: str | None) -> Facts:
    if gpu is not None:
        card = card_of(gpu)
        return replace(
            facts,
            device_bytes=card.capacity_bytes,
            device_free_bytes=card.capacity_bytes,
            # A size alone does not identify the kind of card.
            capability=None if "kernels" in card.guess else card.capability,
        )
    if (found := fullest_card(facts)) is None:
        return facts
    here, reading = found
    return replace(
        facts,
        device_bytes=reading.total_bytes,
        device_free_bytes=reading.free_bytes,
        capability=here.capability,
    )


def _add_plan(facts: Facts, asked: RunOptions) -> Facts:
    """Add a plan; if it does not fit, also one with the frozen base streamed."""
    if asked.gpu is None and facts.device_bytes is not None:
        asked = replace(asked, gpu=f"{facts.device_bytes // MIB}MiB")
    try:
        request = request_of(asked.model, asked)
        plan = predict_one(request, asked.timeout)
    except NotPredicted as error:
        return replace(facts, no_plan=str(error))
    streamed = None
    if plan.fits_card is False:
        with suppress(PlanError):
            streamed = predict_one(stream_base(request), asked.timeout)
    return replace(facts, plan=plan, streamed_plan=streamed, accumulation=plan.accumulation)
