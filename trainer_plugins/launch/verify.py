"""Compare the requested strategy with the running one; we found the causes by running them."""

from collections.abc import Iterator

from trainer_plugins import advice
from trainer_plugins.accumulation import Accumulation
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding
from trainer_plugins.launch.asked import Asked
from trainer_plugins.strategy import Strategy

_OWN_ACCELERATOR = (
    "Look for an Accelerator or PartialState that the script created before its TrainingArguments"
)
# A parameter below the persistence threshold stays whole on every rank. The threshold is meant for
# biases; if such parameters hold half of all elements, sharding saves little.
_LEAST_PARTITIONED_FRACTION = 0.5


def verify(asked: Asked, runs: Strategy) -> tuple[Finding, ...]:
    """Compare the running strategy with the request, as far as the request is specific."""
    return (*_world(asked, runs), *_wrapper(asked, runs), *_zero(asked, runs))


def judge_summed_gradient(
    accumulation: Accumulation, num_steps: int, num_ranks: int
) -> Finding | None:
    """Warn of a gradient that is a multiple of the intended one; None if it is not."""
    factor = accumulation.factor(num_steps, num_ranks)
    if factor == 1:
        return None
    reasons = []
    if num_steps > 1:
        reasons.append(f"does not divide by the {num_steps} micro-batches of a step")
    if factor > num_steps:
        reasons.append(f"multiplies by the {num_ranks} ranks (average_tokens_across_devices)")
    remedy = f"After you build the Trainer, {accumulation.cure}"
    if factor == num_steps:
        remedy += f"; or do not accumulate: {advice.SURVIVE.flag(Door.CODE)} splits exactly"
    return Finding.warning(
        code="gradient-summed",
        summary=f"the gradient and the logged loss of each step are {factor} times too large",
        evidence=f"{accumulation.why}; the Trainer trusts it to use that number, so it"
        f" {' and '.join(reasons)}",
        remedy=remedy,
        amount=float(factor),
        data={"factor": factor, "num_micro_batches": num_steps, "num_ranks": num_ranks},
    )


def _world(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    machines = asked.num_machines or 1
    lacks_machines = runs.num_machines is not None and machines > runs.num_machines
    if lacks_machines:
        summary = f"{asked.num_machines} machines were requested, but each trains alone"
        remedy = "Give --num_machines, --machine_rank and --main_process_ip on every machine"
        if asked.family == "DeepSpeed" and asked.multinode_launcher != "standard":
            remedy = (
                "Write `deepspeed_multinode_launcher: standard` under deepspeed_config: without it"
                " and without a hostfile DeepSpeed finds this machine only"
            )
    elif runs.world_size < (asked.world_size or 1):
        summary, remedy = _missing_ranks(asked, runs)
    else:
        return
    yield Finding.error(
        code="world-size-not-in-force",
        summary=summary,
        evidence=_evidence(asked, runs),
        remedy=remedy,
    )


def _evidence(asked: Asked, runs: Strategy) -> str:
    return f"requested by {asked.source}; runs {runs}"


def _missing_ranks(asked: Asked, runs: Strategy) -> tuple[str, str]:
    summary = f"{asked.world_size} ranks were requested, but {runs.world_size} train together"
    if asked.one_process_for:
        return (
            f"{summary}: `accelerate launch` starts one process because of {asked.one_process_for}",
            f"Launch with `{advice.ONE_PROCESS_A_CARD.flag(Door.ACCELERATE)}` or --multi_gpu; on"
            " the CPU give --use_cpu to the script",
        )
    if runs.world_size > 1:
        return summary, "Compare num_processes with what each machine started"
    if (asked.started or 1) == 1:
        return (
            f"{summary}: one process was started",
            "Start it with `accelerate launch --multi_gpu` or"
            f" `{advice.ONE_PROCESS_A_CARD.flag(Door.SHELL)}`, which start a process for each card",
        )
    summary += ": each process trains alone, all on the same rows"
    if runs.device != "cpu":
        return summary, _OWN_ACCELERATOR
    why = "accelerate found no accelerator, so it did not connect the processes"
    return summary, f"{why}: give --use_cpu to the script"


def _wrapper(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    meant = asked.family
    lacks_ranks = runs.world_size < (asked.world_size or 1)  # they have their own finding
    if lacks_ranks or meant in (None, runs.family) or runs.family == "unknown":
        return
    if meant == "DDP" and (runs.world_size == 1 or runs.num_partitioned):
        # One rank needs no wrapper, and transformers does not use one with tensor parallelism.
        return
    if (meant == "FSDP" and runs.world_size == 1) or (meant == "nothing" and runs.family == "DDP"):
        return
    remedy = _OWN_ACCELERATOR
    if runs.family == "DataParallel":
        remedy = (
            f"One process sees several cards: set {advice.ONE_CARD.flag(Door.ENVIRONMENT)}, or"
            f" launch a process for each card: {advice.ONE_PROCESS_A_CARD.flag(Door.SHELL)}"
        )
    elif asked.use_cpu:
        remedy = "Unset ACCELERATE_USE_CPU: if it is set, accelerate takes its CPU branch"
    elif meant == "FSDP" and runs.device == "cpu":
        remedy = "accelerate uses FSDP only on accelerators: run it on one, or request DDP"
    what = "one process on one device" if meant == "nothing" else meant
    yield Finding.error(
        code="strategy-not-in-force",
        summary=f"{what} was requested, but the model runs as {runs.wrapped_class}",
        evidence=_evidence(asked, runs),
        remedy=remedy,
    )


def _zero(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    """Judge sharding and offload; another finding reports that DeepSpeed or FSDP does not run."""
    if runs.family != asked.family or runs.family not in ("DeepSpeed", "FSDP"):
        return
    if asked.zero_stage is not None and asked.zero_stage != runs.zero_stage:
        why, remedy = _explain_loss(asked)
        yield Finding.error(
            code="zero-stage-not-in-force",
            summary=f"ZeRO-{asked.zero_stage} was requested, but ZeRO-{runs.zero_stage} runs{why}",
            evidence=_evidence(asked, runs),
            remedy=remedy,
        )
    yield from _offload(asked, runs)
    divides = runs.world_size > 1 or "param" in asked.offload
    if runs.zero_stage == 3 and divides and runs.partitioned_fraction < _LEAST_PARTITIONED_FRACTION:
        yield Finding.warning(
            code="parameters-not-partitioned",
            summary="ZeRO-3 shards little: most parameters stay whole on every rank",
            evidence=f"{runs.num_partitioned:,} of {runs.num_params:,} elements are sharded",
            remedy="Lower stage3_param_persistence_threshold, or use no ZeRO-3",
            data={"num_partitioned": runs.num_partitioned, "num_params": runs.num_params},
        )
    if asked.bf16_master and runs.master_dtype == "float32":
        yield Finding.warning(
            code="master-weights-not-in-force",
            summary="bf16 master weights were requested, but float32 ones take twice the memory",
            evidence=_evidence(asked, runs),
            remedy="bf16_master_weights_and_grads needs bf16 in TrainingArguments",
        )
    if asked.checkpointing and not runs.is_checkpointing:
        yield Finding.warning(
            code="checkpointing-not-in-force",
            summary="the DeepSpeed JSON's activation_checkpointing has no effect on this model",
            evidence=f"{asked.source}; transformers calls torch's checkpointing, not DeepSpeed's",
            remedy=f"Give the script {advice.CHECKPOINTING.flag(Door.TRAINER)}; remove the block",
        )


def _explain_loss(asked: Asked) -> tuple[str, str]:
    """Explain where a launch setting got lost: the end of a summary, and the remedy."""
    if asked.misspelt:
        wrong, right = next(iter(asked.misspelt.items()))
        remedy = f"Write `{right}` under deepspeed_config; accelerate ignores unknown keys"
        return f": `{wrong}` is not a known key", remedy
    if asked.flags_beside_json:
        why = f": accelerate ignores {', '.join(asked.flags_beside_json)} next to a DeepSpeed JSON"
        return why, "Change the DeepSpeed JSON instead"
    remedy = "Check which file was read: a default_config.yaml, or `deepspeed` in TrainingArguments"
    return "", remedy


def _offload(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    for what, where in asked.offload.items():
        in_force = runs.offload.get(what)
        if in_force != where:
            why, remedy = _explain_loss(asked)
            summary = f"{what} offload to {where} was requested, but {in_force or 'none'} is in"
            summary += f" force{why}"
        elif what == "param" and where == "nvme" and not runs.homes.get("nvme"):
            summary = "the weights should be offloaded to a drive, but none are there"
            remedy = (
                "DeepSpeed keeps partitions below 1 MiB (or aio.block_size) in main memory:"
                " for weights this small you get `device: cpu`, so write that"
            )
        else:
            continue
        yield Finding.error(
            code="offload-not-in-force",
            summary=summary,
            evidence=f"{_evidence(asked, runs)}; parameters on {dict(runs.homes)}",
            remedy=remedy,
        )
