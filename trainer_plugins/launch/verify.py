"""Compares the strategy that was asked for with the one that runs, and names the usual cause.

Each of these launches ends with exit code 0 after training in some other way; the causes were found
by running them.
"""

from collections.abc import Iterator

from trainer_plugins.finding import Finding
from trainer_plugins.launch.asked import Asked
from trainer_plugins.strategy import Strategy

# A parameter below the persistence threshold stays whole on every rank. That is meant for a bias
# here and there; if half of all elements are in such parameters, sharding saves little.
_LEAST_PARTITIONED_FRACTION = 0.5


def verify(asked: Asked, runs: Strategy) -> tuple[Finding, ...]:
    """Judge what runs against what was asked for; silent on what nobody asked for."""
    return (*_world(asked, runs), *_wrapper(asked, runs), *_zero(asked, runs), *_model(asked, runs))


def _world(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    machines = asked.num_machines or 1
    lacks_machines = runs.num_machines is not None and machines > runs.num_machines
    if not lacks_machines and runs.world_size >= (asked.world_size or 1):
        return
    summary = f"{asked.world_size} ranks were asked for, but {runs.world_size} train together"
    if lacks_machines:
        summary = f"{machines} machines were asked for, but each trains alone"
        remedy = "Give --num_machines, --machine_rank and --main_process_ip on every machine"
        if asked.family == "DeepSpeed" and asked.multinode_launcher != "standard":
            remedy = (
                "Write `deepspeed_multinode_launcher: standard` under deepspeed_config: without it "
                "and without a hostfile DeepSpeed finds this machine only"
            )
    elif asked.one_process_for:
        summary += f": `accelerate launch` starts one process because of {asked.one_process_for}"
        remedy = (
            "Launch with `distributed_type: MULTI_GPU` or --multi_gpu; on the CPU give --use_cpu to"
            " the script"
        )
    elif runs.world_size == 1 and (asked.started or 1) > 1:
        summary += ": each process trains alone, all on the same rows"
        remedy = (
            "No accelerator was found, so accelerate did not make a group of the processes: give"
            " --use_cpu to the script"
        )
        if runs.device != "cpu":
            remedy = (
                "Look for an Accelerator or PartialState that the script built before its"
                " TrainingArguments"
            )
    elif runs.world_size == 1:
        summary += ": one process was started"
        remedy = (
            "Start it with `accelerate launch --multi_gpu` or `torchrun`, which start a process for"
            " each card"
        )
    else:
        remedy = "Compare num_processes with what each machine started"
    yield Finding.error(
        code="world-size-not-in-force",
        summary=summary,
        evidence=f"asked by {asked.source}; runs {runs}",
        remedy=remedy,
    )


def _wrapper(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    meant = asked.family
    if (
        meant in (None, runs.family)
        or runs.family == "unknown"
        or runs.world_size < (asked.world_size or 1)
    ):
        return  # missing ranks have a finding of their own
    if meant == "DDP" and (runs.world_size == 1 or runs.num_partitioned):
        # One rank needs no wrapper, and transformers does not use one with tensor parallelism.
        return
    if (meant == "FSDP" and runs.world_size == 1) or (meant == "nothing" and runs.family == "DDP"):
        return
    remedy = "Look for an Accelerator or PartialState that the script built itself"
    if runs.family == "DataParallel":
        remedy = (
            "One process sees several cards: set CUDA_VISIBLE_DEVICES=0, or launch a process for"
            " each card"
        )
    elif asked.use_cpu:
        remedy = "Unset ACCELERATE_USE_CPU: if it is set, accelerate takes its CPU branch"
    elif meant == "FSDP" and runs.device == "cpu":
        remedy = "accelerate uses FSDP on accelerators only: run it on one, or ask for DDP"
    yield Finding.error(
        code="strategy-not-in-force",
        summary=f"{_name(meant)} was asked for, but the model runs as {runs.wrapped_class}",
        evidence=f"asked by {asked.source}; runs {runs}",
        remedy=remedy,
    )


def _name(family: str | None) -> str:
    return "one process on one device" if family == "nothing" else str(family)


def _zero(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    """Judge what is sharded and offloaded.

    If DeepSpeed or FSDP does not run at all, another finding says so.
    """
    if runs.family != asked.family or runs.family not in ("DeepSpeed", "FSDP"):
        return
    lost = _lost(asked)
    if asked.zero_stage is not None and asked.zero_stage != runs.zero_stage:
        yield Finding.error(
            code="zero-stage-not-in-force",
            summary=f"ZeRO-{asked.zero_stage} was asked for, but ZeRO-{runs.zero_stage}"
            f" runs{lost[0]}",
            evidence=f"asked by {asked.source}; runs {runs}",
            remedy=lost[1],
        )
    yield from _offload(asked, runs)
    divides = runs.world_size > 1 or "param" in asked.offload
    if runs.zero_stage == 3 and divides and runs.partitioned_fraction < _LEAST_PARTITIONED_FRACTION:
        yield Finding.warning(
            code="parameters-not-partitioned",
            summary="ZeRO-3 shards hardly any of this model: most parameters stay whole on every"
            " rank",
            evidence=f"{runs.num_partitioned:,} of {runs.num_params:,} elements are sharded",
            remedy="Set stage3_param_persistence_threshold below the size of the weights, or do"
            " without ZeRO-3",
        )
    if asked.bf16_master and runs.master_dtype == "float32":
        yield Finding.warning(
            code="master-weights-not-in-force",
            summary="bf16 master weights were asked for, but float32 ones are kept: twice the"
            " memory",
            evidence=f"asked by {asked.source}; runs {runs}",
            remedy="bf16_master_weights_and_grads needs bf16 in TrainingArguments",
        )


def _lost(asked: Asked) -> tuple[str, str]:
    """Say where a setting of the launch got lost: the end of a summary, and the remedy."""
    if asked.misspelt:
        wrong, right = next(iter(asked.misspelt.items()))
        return (
            f": `{wrong}` is not a known key",
            f"Write `{right}` under deepspeed_config; accelerate ignores unknown keys",
        )
    if asked.flags_beside_json:
        flags = ", ".join(asked.flags_beside_json)
        return (
            f": accelerate ignores {flags} beside a DeepSpeed JSON",
            "Change the DeepSpeed JSON instead",
        )
    return (
        "",
        "Check which file was read: a default_config.yaml, or `deepspeed` in TrainingArguments",
    )


def _model(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    if asked.checkpointing and runs.family == "DeepSpeed" and not runs.is_checkpointing:
        yield Finding.warning(
            code="checkpointing-not-in-force",
            summary="activation_checkpointing of the DeepSpeed JSON has no effect here: the model"
            " keeps all activations",
            evidence=f"asked by {asked.source}; models of transformers call torch's checkpointing,"
            " not DeepSpeed's",
            remedy="Give --gradient_checkpointing to the script, and remove the block",
        )


def _offload(asked: Asked, runs: Strategy) -> Iterator[Finding]:
    """Judge whether what was to be offloaded is where it was to be."""
    lost = _lost(asked)
    for what, where in asked.offload.items():
        on_drive = runs.homes.get("nvme", 0) > 0
        in_force = runs.offload.get(what)
        if in_force == where and not (what == "param" and where == "nvme" and not on_drive):
            continue
        if in_force == where:
            remedy = (
                "DeepSpeed keeps partitions below 1 MiB (or aio.block_size) in main memory: for "
                "weights this small `device: cpu` is what runs, so write that"
            )
            summary = "the weights were to be offloaded to a drive, but none of them is there"
        else:
            summary = (
                f"{what} offload to {where} was asked for, but {in_force or 'none'} is in"
                f" force{lost[0]}"
            )
            remedy = lost[1]
        yield Finding.error(
            code="offload-not-in-force",
            summary=summary,
            evidence=f"asked by {asked.source}; runs {runs}; parameters on {dict(runs.homes)}",
            remedy=remedy,
        )
