"""Apply the rules of `accelerate launch`: keys it refuses, ignores, or handles unexpectedly."""

from collections.abc import Iterator
from pathlib import Path

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import Document, Mapping
from trainer_plugins.launch.lint.schema import report_ignored_key, wrong_value

_SECTIONS = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
# accelerate 1.15's FullyShardedDataParallelPlugin warns about these under version 2 and drops them.
_FSDP1_ONLY = (
    "sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states",
    "forward_prefetch",
)  # fmt: skip
_FSDP_WORDS = {
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
}


def accelerate_findings(document: Document) -> Iterator[Finding]:
    """Judge the accelerate part of a launch file."""
    config = document.accelerate
    if config is None:
        return
    kind = config.get("distributed_type")
    yield from _type(config, kind)
    yield from _processes(config, kind)
    for section, needed in _SECTIONS.items():
        if config.get(section) and kind != needed:
            yield report_ignored_key(
                f"{section} has no effect under distributed_type {kind}",
                f"accelerate launch only reads it for {needed}",
                f"Write distributed_type: {needed}, or remove {section}",
            )
    deepspeed = config.get("deepspeed_config")
    if isinstance(deepspeed, dict):
        yield from _judge_deepspeed(document, config, deepspeed)
    fsdp = config.get("fsdp_config")
    if isinstance(fsdp, dict) and kind == "FSDP":
        yield from _fsdp({str(key).removeprefix("fsdp_"): value for key, value in fsdp.items()})


def _type(config: Mapping, kind: object) -> Iterator[Finding]:
    if kind is False:
        why = "YAML reads a bare NO as false"
        yield wrong_value("distributed_type", kind, why, "Write distributed_type: 'NO'")
    elif kind not in keys.DISTRIBUTED_TYPES:
        known = f"accelerate knows {', '.join(keys.DISTRIBUTED_TYPES)}"
        yield wrong_value("distributed_type", kind, known, "Write one of them")
    if kind == "MULTI_CPU" and not config.get("mpirun_config"):
        yield Finding.error(
            code="config-distributed-type",
            summary="MULTI_CPU starts one process, whatever num_processes says",
            evidence="accelerate uses its simple launcher, unless mpirun_config names a hostfile",
            remedy="Write distributed_type: MULTI_GPU, use_cpu: true; give the script --use_cpu",
        )
    precision = config.get("mixed_precision")
    if precision is not None and precision not in ("no", "fp16", "bf16", "fp8", False):
        known = "accelerate knows 'no', fp16, bf16 and fp8"
        yield wrong_value("mixed_precision", precision, known, "Write one of them, no in quotes")
    if config.get("use_cpu") is True and kind == "FSDP":
        yield Finding.error(
            code="config-distributed-type",
            summary="FSDP with use_cpu: true runs plain DistributedDataParallel",
            evidence="accelerate uses its FSDP branch on accelerators only (accelerate/state.py)",
            remedy="Remove use_cpu, or write distributed_type: MULTI_GPU, which is what runs",
        )


def _processes(config: Mapping, kind: object) -> Iterator[Finding]:
    processes, machines = config.get("num_processes", -1), config.get("num_machines", 1)
    if not isinstance(machines, int) or isinstance(machines, bool):
        return
    rank = config.get("machine_rank", 0)
    if problem := _count_problem(kind, processes, machines, rank):
        summary, remedy = problem
        yield Finding.error(
            code="config-process-count",
            summary=summary,
            evidence=f"num_processes={processes}, num_machines={machines}, machine_rank={rank}",
            remedy=remedy,
        )
    if machines > 1 and not config.get("main_process_ip") and kind != "NO":
        yield Finding.warning(
            code="config-process-count",
            summary=f"{machines} machines have no main_process_ip to connect to",
            evidence="accelerate would pass the address None to torchrun",
            remedy="Write main_process_ip, or give --main_process_ip on every machine",
        )


def _count_problem(
    kind: object, processes: object, machines: int, rank: object
) -> tuple[str, str] | None:
    if machines < 1:
        return f"num_machines is {machines}", "Write num_machines: 1 or more"
    if isinstance(rank, int) and not 0 <= rank < machines:
        problem = f"machine_rank {rank} is not below num_machines {machines}"
        return problem, "Count machines from 0; give --machine_rank on each"
    if processes in ("gpu", "auto") and machines > 1:
        problem = f"num_processes: {processes} does not divide among {machines} machines"
        return problem, "Write the number of processes of all machines together"
    if not isinstance(processes, int):
        return None
    if processes == 0 or processes < -1:
        return f"num_processes is {processes}", "Write the number of cards"
    if kind in ("NO", False) and processes > 1:
        return f"distributed_type 'NO' with num_processes {processes}", "Write num_processes: 1"
    if processes > 0 and processes % machines:
        remedy = "num_processes counts the processes of all machines together: write a multiple of"
        problem = f"{processes} processes do not divide among {machines} machines"
        return problem, f"{remedy} num_machines"
    return None


def _judge_deepspeed(document: Document, config: Mapping, section: Mapping) -> Iterator[Finding]:
    machines = config.get("num_machines", 1)
    launcher = section.get("deepspeed_multinode_launcher")
    hosts = section.get("deepspeed_hostfile")
    if isinstance(machines, int) and machines > 1 and launcher != "standard" and not hosts:
        yield Finding.error(
            code="config-multinode-launcher",
            summary=f"each of the {machines} machines will train alone",
            evidence=f"deepspeed_multinode_launcher is {launcher or 'pdsh, by default'}, and no"
            " deepspeed_hostfile is named; DeepSpeed then finds one machine, and only warns",
            remedy="Write deepspeed_multinode_launcher: standard under deepspeed_config",
        )
    if "deepspeed_config_file" not in section:
        return
    refused = {key for key in keys.REFUSED_BESIDE_JSON if key in section}
    if config.get("mixed_precision") is not None:
        refused.add("mixed_precision")
    for key in sorted(refused):
        yield Finding.error(
            code="config-refused-beside-json",
            summary=f"accelerate refuses {key} next to deepspeed_config_file, at any value",
            evidence="accelerate stops: the following variables will be ignored",
            remedy=f"Remove {key} here; set it in the DeepSpeed JSON",
        )
    if document.json_path is not None and not Path(document.json_path).expanduser().is_absolute():
        yield Finding.warning(
            code="config-relative-path",
            summary="deepspeed_config_file is a path relative to the folder in which you launch",
            evidence=f"{document.json_path}, from {Path.cwd()}",
            remedy="Write an absolute path, or the JSON itself after `deepspeed_config_file: |`",
        )
    if document.json_problem is not None:
        yield Finding.error(
            code="config-missing-json",
            summary="deepspeed_config_file cannot be read",
            evidence=document.json_problem,
            remedy="Name a file in the folder of the launch, or write the JSON after `|`",
        )


def _fsdp(config: Mapping) -> Iterator[Finding]:
    """Judge the FSDP section, whose keys have lost their prefix."""
    reshards = config.get("reshard_after_forward")
    if config.get("version", 1) == 2:
        for key in _FSDP1_ONLY:
            if config.get(key) not in (None, "None"):
                instead = ", write fsdp_reshard_after_forward" if "strategy" in key else ""
                yield report_ignored_key(
                    f"fsdp_{key} belongs to FSDP 1; version 2 ignores it",
                    "FullyShardedDataParallelPlugin.__post_init__",
                    f"Remove fsdp_{key}{instead}",
                )
        if "reshard_after_forward" in config and not isinstance(reshards, bool):
            why = "version 2 takes true or false"
            yield wrong_value("fsdp_reshard_after_forward", reshards, why)
    else:
        if isinstance(reshards, bool):
            why = "a bool is for fsdp_version: 2"
            yield wrong_value("fsdp_reshard_after_forward", reshards, why)
        if config.get("activation_checkpointing_offload") is True:
            why = "it needs fsdp_version: 2"
            yield wrong_value("fsdp_activation_checkpointing_offload", True, why)
        loads_once = config.get("cpu_ram_efficient_loading") is True
        if loads_once and config.get("sync_module_states") is False:
            why = "fsdp_cpu_ram_efficient_loading needs it to be true"
            yield wrong_value("fsdp_sync_module_states", False, why)
    for key, words in _FSDP_WORDS.items():
        if key in config and str(config[key]).upper() not in words:
            yield wrong_value(f"fsdp_{key}", config[key], f"accelerate knows {', '.join(words)}")
