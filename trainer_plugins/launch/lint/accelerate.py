"""Rules of `accelerate launch`: what it refuses, what it ignores, what makes it run another way."""

from collections.abc import Iterator
from pathlib import Path

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import Document, Mapping

_TYPES = [
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "TPU",
    "MEGATRON_LM",
]
_SECTIONS = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
# FullyShardedDataParallelPlugin of accelerate 1.15 warns at these under version 2 and drops them.
_FSDP1_ONLY = (
    "sharding_strategy",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
)


def accelerate_findings(document: Document) -> Iterator[Finding]:
    """Judge the accelerate part of a launch file."""
    config = document.accelerate
    if config is None:
        return
    kind = config.get("distributed_type")
    yield from _type(config, kind)
    yield from _processes(config, kind)
    yield from _sections(config, kind)
    section = config.get("deepspeed_config")
    if isinstance(section, dict):
        yield from _deepspeed(document, config, section)
    fsdp = config.get("fsdp_config")
    if isinstance(fsdp, dict) and kind == "FSDP":
        yield from _fsdp(fsdp)


def _type(config: Mapping, kind: object) -> Iterator[Finding]:
    if kind is False:
        yield Finding.error(
            code="config-wrong-value",
            summary="distributed_type is false: YAML reads a bare NO as false",
            evidence="accelerate knows the text 'NO'",
            remedy="Write distributed_type: 'NO'",
        )
    elif kind not in _TYPES:
        yield Finding.error(
            code="config-wrong-value",
            summary=f"distributed_type is {kind!r}"
            if kind is not None
            else "distributed_type is missing",
            evidence=f"accelerate knows {', '.join(_TYPES)}",
            remedy="Write one of them",
        )
    if kind == "MULTI_CPU" and not config.get("mpirun_config"):
        yield Finding.error(
            code="config-distributed-type",
            summary="distributed_type: MULTI_CPU starts one process, whatever num_processes says",
            evidence="accelerate launch uses its simple launcher for it, unless mpirun_config names"
            " a hostfile",
            remedy="Write distributed_type: MULTI_GPU with use_cpu: true, and give --use_cpu to the"
            " script",
        )
    precision = config.get("mixed_precision")
    if precision is not None and precision not in ("no", "fp16", "bf16", "fp8", False):
        yield Finding.error(
            code="config-wrong-value",
            summary=f"mixed_precision is {precision!r}",
            evidence="accelerate knows 'no', fp16, bf16 and fp8",
            remedy="Write one of them, in quotes if it is no",
        )
    if config.get("use_cpu") is True and kind == "FSDP":
        yield Finding.warning(
            code="config-distributed-type",
            summary="FSDP with use_cpu: true runs plain DistributedDataParallel",
            evidence="accelerate uses its FSDP branch on accelerators only (accelerate/state.py)",
            remedy="Remove use_cpu, or write distributed_type: MULTI_GPU, which says what runs",
        )


def _processes(config: Mapping, kind: object) -> Iterator[Finding]:
    processes, machines = config.get("num_processes", -1), config.get("num_machines", 1)
    rank = config.get("machine_rank", 0)
    problem = remedy = None
    if not isinstance(machines, int) or isinstance(machines, bool):
        return
    if machines < 1:
        problem, remedy = f"num_machines is {machines}", "Write num_machines: 1 or more"
    elif isinstance(rank, int) and not 0 <= rank < machines:
        problem = f"machine_rank {rank} is not below num_machines {machines}"
        remedy = "Count machines from 0; give --machine_rank on each"
    elif processes in ("gpu", "auto") and machines > 1:
        problem = f"num_processes: {processes} does not divide among {machines} machines"
        remedy = "Write the number of processes of all machines together"
    elif isinstance(processes, int) and processes > 0:
        if kind in ("NO", False) and processes > 1:
            problem, remedy = (
                f"distributed_type 'NO' with num_processes {processes}",
                "Write num_processes: 1",
            )
        elif processes % machines:
            problem = f"{processes} processes do not divide among {machines} machines"
            remedy = (
                "num_processes counts the processes of all machines together: write a multiple of"
                " num_machines"
            )
    elif isinstance(processes, int) and (processes == 0 or processes < -1):
        problem, remedy = f"num_processes is {processes}", "Write the number of cards"
    if problem and remedy:
        yield Finding.error(
            code="config-process-count",
            summary=problem,
            evidence=f"num_processes={processes}, num_machines={machines}, machine_rank={rank}",
            remedy=remedy,
        )
    if machines > 1 and not config.get("main_process_ip") and kind != "NO":
        yield Finding.warning(
            code="config-process-count",
            summary=f"{machines} machines, but no main_process_ip at which they meet",
            evidence="accelerate would pass the address None to torchrun",
            remedy="Write main_process_ip, or give --main_process_ip on every machine",
        )


def _sections(config: Mapping, kind: object) -> Iterator[Finding]:
    for section, needed in _SECTIONS.items():
        if config.get(section) and kind != needed:
            yield Finding.warning(
                code="config-ignored-key",
                summary=f"{section} has no effect under distributed_type {kind}",
                evidence=f"accelerate launch only reads it for {needed}",
                remedy=f"Write distributed_type: {needed}, or remove {section}",
            )


def _deepspeed(document: Document, config: Mapping, section: Mapping) -> Iterator[Finding]:
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
    refused = sorted(keys.REFUSED_BESIDE_JSON & {*section, *({"mixed_precision"} & set(config))})
    if config.get("mixed_precision", "no") is None:
        refused = [key for key in refused if key != "mixed_precision"]
    for key in refused:
        yield Finding.error(
            code="config-refused-beside-json",
            summary=f"accelerate refuses {key} beside deepspeed_config_file, whatever its value",
            evidence="DeepSpeedPlugin._deepspeed_config_checks: the following variables will be"
            " ignored",
            remedy=f"Remove {key} here; set it in the DeepSpeed JSON",
        )
    if document.json_path is not None and not Path(document.json_path).expanduser().is_absolute():
        yield Finding.warning(
            code="config-relative-path",
            summary="deepspeed_config_file is relative to the folder of the launch, not to this"
            " file",
            evidence=f"{document.json_path}, from {Path.cwd()}",
            remedy="Write an absolute path, or the JSON itself: `deepspeed_config_file: |` and the"
            " text below it",
        )
    if document.json_problem is not None:
        yield Finding.error(
            code="config-missing-json",
            summary="deepspeed_config_file cannot be read",
            evidence=document.json_problem,
            remedy="Name a file that exists in the folder of the launch, or write the JSON as text"
            " after `|`",
        )


def _fsdp(section: Mapping) -> Iterator[Finding]:
    config = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    version = config.get("version", 1)
    if version == 2:
        for key in _FSDP1_ONLY:
            if config.get(key) not in (None, "None"):
                yield Finding.warning(
                    code="config-ignored-key",
                    summary=f"fsdp_{key} belongs to FSDP 1; version 2 ignores it",
                    evidence="FullyShardedDataParallelPlugin.__post_init__",
                    remedy=f"Remove fsdp_{key}"
                    + (", write fsdp_reshard_after_forward" if "strategy" in key else ""),
                )
        if not isinstance(config.get("reshard_after_forward", True), bool):
            yield _value(
                "fsdp_reshard_after_forward",
                config["reshard_after_forward"],
                "version 2 takes true or false",
            )
    else:
        if isinstance(config.get("reshard_after_forward"), bool):
            yield _value(
                "fsdp_reshard_after_forward",
                config["reshard_after_forward"],
                "a bool is for fsdp_version: 2",
            )
        if config.get("activation_checkpointing_offload") is True:
            yield _value("fsdp_activation_checkpointing_offload", True, "it needs fsdp_version: 2")
        if (
            config.get("cpu_ram_efficient_loading") is True
            and config.get("sync_module_states") is False
        ):
            yield _value(
                "fsdp_sync_module_states",
                False,
                "fsdp_cpu_ram_efficient_loading needs it to be true",
            )
    known = {
        "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    }
    for key, values in known.items():
        if key in config and str(config[key]).upper() not in values:
            yield _value(f"fsdp_{key}", config[key], f"accelerate knows {', '.join(values)}")


def _value(key: str, value: object, why: str) -> Finding:
    return Finding.error(
        code="config-wrong-value",
        summary=f"{key} is {value!r}",
        evidence=why,
        remedy=f"Change or remove {key}",
    )
