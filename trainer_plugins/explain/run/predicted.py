"""Plan a run with each remedy in a subprocess, from the run's own record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer_plugins import advice
from trainer_plugins.advice.entry import flags_in
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.explain.answer import Explanation, Remedy
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.text.predicted import OF_TRAINING, announce_plans, leave_effects_open
from trainer_plugins.explain.text.remedies.plan_command import DECIDING
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare.switches import change_flags, half_as_long, source_of
from trainer_plugins.planner.plan import MemoryPlan, PlanError, Proposal
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.tried import is_safe, margin_bytes
from trainer_plugins.printable import printable
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.units import count_in_words, size

_OF_EVALUATION = {"eval-batch", "eval-logits"}
_OF_THE_MODEL = advice.SDPA_ATTENTION.arguments.partition("{")[0]
_SURVIVE = advice.SURVIVE.shell.partition("COMMAND")[0]
_LONGEST_SECONDS = 300
_KNOWN_ERROR_OF_WEIGHTS = 0.05  # of a plan; a larger difference means another model
_ROWS = {"per_device_train_batch_size", "gradient_accumulation_steps"}
# Arguments for which the planner itself searches the best value.
_SOUGHT = _ROWS | {"per_device_eval_batch_size", "eval_accumulation_steps"}
# Options of `trainer-plugins plan`, each with the text to type for a run (TRL's flags).
_PLANNED_AS_TYPED = {
    **{
        one.plan.removesuffix("LENGTH"): one.trl.removesuffix("LENGTH")
        for one in (advice.SHORTER_ROWS, advice.ADAPTER, advice.FOUR_BITS)
    },
    "--accelerate-config": "accelerate launch --config_file",
}

_DEVICES = ("cuda", "simgpu")


# Prefixes of the variables with which a launch file selects a strategy.
_VARIABLES = {"DeepSpeed": ("ACCELERATE_",), "FSDP": ("FSDP_", "ACCELERATE_USE_FSDP")}
_OF_THIS_MACHINE = "ACCELERATE_TORCH_DEVICE"

Outcomes = Mapping[str, MemoryPlan | PlanError]


def predict_remedies(said: Explanation, case: Case) -> Explanation:
    """Predict the effect of each remedy of the first cause, if a plan can show it."""
    code = said.causes[0].code
    if code not in OF_TRAINING | _OF_EVALUATION:
        return said
    ours = [each for each in said.remedies if each.cause == code]
    try:
        asked = request_of(case)
        changed = {each.do: _change(asked, each.do) for each in ours}
        tried = {do: request for do, request in changed.items() if request is not None}
        announce_plans(code)
        requests = [replace(asked, proposes=True), *tried.values()]
        plan, *others = predict_all(requests, _LONGEST_SECONDS)
        if isinstance(plan, PlanError):
            raise plan
        _refuse_another_run(plan, case)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        return leave_effects_open(said, error)
    outcomes: Outcomes = dict(zip(tried, others, strict=True))
    found = _order(ours, plan, outcomes, case.record.run)
    remedies = [replace(each, cause=code) for each in found]
    remedies += [each for each in said.remedies if each.cause != code]
    needs = f"the plan of the run as it was: {_needs(plan, plan.needed_bytes)}"
    refused = [
        f"the effect of {do}: {printable(outcome)}"
        for do, outcome in outcomes.items()
        if isinstance(outcome, PlanError)
    ]
    return replace(
        said,
        remedies=tuple(remedies),
        facts=(*said.facts, needs),
        unknown=(*said.unknown, *refused),
    )


def _change(asked: PlanRequest, do: str) -> PlanRequest | None:
    """Return the request of a run with a remedy; None if the planner searches, or cannot."""
    flags = flags_in(do)
    if do.startswith(_OF_THE_MODEL):
        source = source_of(asked)
        config = {**source.config, **json.loads(do.removeprefix(_OF_THE_MODEL))}
        return replace(asked, source=replace(source, config=config))
    if not flags or flags.keys() <= _SOUGHT:
        return None
    return half_as_long(asked) if "max_length" in flags else change_flags(asked, **flags)


def _refuse_another_run(plan: MemoryPlan, case: Case) -> None:
    """Refuse a plan of another model, or one that does not run out of memory where the run did."""
    weights = plan.breakdown.get("weights", 0) + plan.breakdown.get("frozen weights", 0)
    parameters = case.category("parameter")
    if parameters and abs(weights - parameters) > _KNOWN_ERROR_OF_WEIGHTS * parameters:
        raise PlanError(
            f"the plan has {size(weights)} of weights, and the run had {size(parameters)}"
        )
    if plan.fits_card is not False:
        raise PlanError(
            f"the plan of its config and arguments fits ({_needs(plan, plan.needed_bytes)}),"
            " so something else took the rest"
        )
    if (case.record.moment == "eval") != (plan.moment == "evaluation"):
        raise PlanError(
            f"the plan fails in the {plan.moment}, and the run failed in {case.record.where}"
        )


def _order(
    ours: Sequence[Remedy], plan: MemoryPlan, outcomes: Outcomes, run: RunFacts
) -> list[Remedy]:
    """Return remedies that make the run fit, then those without a plan, then insufficient ones."""
    found = {_spell(each, run): _make_remedy(each, plan, run) for each in plan.proposals}
    fewer = next((each for each in plan.proposals if flags_in(each.flags).keys() == _ROWS), None)
    enough: dict[str, Remedy] = {}
    unknown, short = [], []
    for remedy in ours:
        outcome, names = outcomes.get(remedy.do), remedy.flags.keys()
        if isinstance(outcome, MemoryPlan):
            known = _add_peak(remedy, plan, outcome.needed_bytes)
            if is_safe(outcome):
                enough[remedy.do] = known
            else:
                short.append(known)
        elif names and names <= _SOUGHT:
            enough |= {do: each for do, each in found.items() if flags_in(do).keys() == names}
        elif remedy.do.startswith(_SURVIVE) and fewer is not None:
            rows = count_in_words(fewer.micro_batch, "row")
            needed = plan.count_needed(fewer)
            effect = f"{remedy.effect}. A piece of {rows} needs {_needs(plan, needed)}"
            known = _add_peak(remedy, plan, needed)
            enough[remedy.do] = replace(known, effect=effect)
        else:
            unknown.append(remedy)
    others = [each for do, each in found.items() if do not in enough]
    return [*enough.values(), *others, *unknown, *short]


def _make_remedy(each: Proposal, plan: MemoryPlan, run: RunFacts) -> Remedy:
    made = Remedy(do=_spell(each, run), effect="", grade="predicted", price=each.price)
    made = _add_peak(made, plan, plan.count_needed(each))
    if "train_batch_size" not in each.flags:
        return made
    rows = each.micro_batch * each.accumulation_steps * run.world_size
    return replace(made, effect=f"{made.effect}; the effective batch size stays {rows}")


def _spell(each: Proposal, run: RunFacts) -> str:
    if "model_init_kwargs" not in run.arguments:  # all TRL configs have it
        return each.in_the_run or each.flags
    do = each.flags
    for option, typed in _PLANNED_AS_TYPED.items():
        do = do.replace(option, typed)
    flags = flags_in(do)  # each once: a base in 4 bits and an adapter both ask for PEFT
    return " ".join(f"--{name} {value}" for name, value in flags.items()) or do


def _add_peak(remedy: Remedy, plan: MemoryPlan, peak_bytes: int) -> Remedy:
    saved = plan.needed_bytes - peak_bytes
    change = f"{size(saved)} less" if saved >= 0 else f"{size(-saved)} more"
    spare = (plan.capacity_bytes or 0) - peak_bytes
    if spare < 0:
        fits = f"still {size(-spare)} short"
    elif spare < margin_bytes(peak_bytes):
        fits = "it fits, but the margin is below the planner's known error"
    else:
        fits = f"it fits, with {size(spare)} to spare"
    effect = f"peaks at {_needs(plan, peak_bytes)}, {change}: {fits}"
    known = replace(remedy, effect=effect, grade="predicted", spare_bytes=spare)
    return replace(known, predicted_peak_bytes=peak_bytes)


def _needs(plan: MemoryPlan, peak_bytes: int) -> str:
    return f"{size(peak_bytes)} of {size(plan.capacity_bytes or 0)}"


def request_of(case: Case) -> PlanRequest:
    """Build the request for a plan of the run as it was, on the card as it was."""
    record, run = case.record, case.record.run
    device = run.device.split(":")[0]
    if record.call != "train":
        raise PlanError(f"it failed in {record.call}(), and plans cover only train()")
    if device not in _DEVICES or not case.total_bytes:
        raise PlanError(f"it ran on {run.device or 'an unknown device'}")
    if case.tokens is None:
        raise PlanError("the batch is unknown, or has no input_ids")
    _refuse(run)
    rows, length = case.tokens
    labels = record.batch.get("labels")
    is_quantised = "quantization_config" in run.model_config
    allocator = run.allocator.get("PYTORCH_CUDA_ALLOC_CONF", "")
    card = Card(
        name=run.card or device,
        capacity_bytes=case.total_bytes,
        context_bytes=case.outside_bytes,
        context_source="the memory outside torch at the OOM",
    )
    return PlanRequest(
        source=ConfigSource(
            config={**run.model_config, "architectures": [run.built_class.rpartition(".")[2]]},
            arguments=_flags(run.arguments),
            sequence_length=length,
            target_length=labels.shape[1] if labels and len(labels.shape) == 2 else None,
            dtype=None if is_quantised or not run.dtype else run.dtype,
            peft=run.adapter or None,
            num_evaluation_batches=max(1, run.num_evaluation_batches),
            has_metrics=run.has_metrics,
        ),
        card=card if run.capability is None else replace(card, capability=run.capability),
        allocator=run.allocator.get("PYTORCH_ALLOC_CONF", allocator),
        num_gpus=run.world_size,
        environment=_find_exports(run),
        has_padding=None if rows > 1 and "attention_mask" in record.batch else False,
    )


def _refuse(run: RunFacts) -> None:
    if not run.built_class.startswith("transformers."):
        raise PlanError(
            f"transformers has no class {run.built_class or run.model or 'of its model'}"
        )
    if run.model.startswith("Peft") and not run.adapter:
        raise PlanError("its adapter is not recorded")
    if run.family not in (*_VARIABLES, "DDP", "nothing"):
        raise PlanError(f"it ran as {run.family}")
    if run.family in _VARIABLES and not _is_in_arguments(run) and not _find_exports(run):
        raise PlanError(f"its launch file is not recorded, and it ran as {run.family}")


def _is_in_arguments(run: RunFacts) -> bool:
    return bool(run.arguments.get(run.family.lower()))


def _find_exports(run: RunFacts) -> dict[str, str]:
    """Return the variables that a launch file set; none if arguments select the strategy."""
    if run.launch is None or run.family not in _VARIABLES or _is_in_arguments(run):
        return {}
    variables, prefixes = run.launch.environment, _VARIABLES[run.family]
    if str(variables.get(f"ACCELERATE_USE_{run.family.upper()}")).lower() != "true":
        return {}
    found = {
        name: text
        for name, text in variables.items()
        if name.startswith(prefixes) and name != _OF_THIS_MACHINE
    }
    if run.launch.deepspeed:
        found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = json.dumps(run.launch.deepspeed)
    return found


def _flags(arguments: Mapping[str, object]) -> tuple[str, ...]:
    flags = ["--output_dir", "runs"]
    for name in DECIDING:
        value = arguments.get(name)
        if value in (None, "", [], {}):
            continue
        if isinstance(value, list):
            value = " ".join(map(str, value))
        flags += [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return tuple(flags)
