"""Files with one defect each, as people write them: the code that must be found, the file's name, its text."""

from pathlib import Path
from typing import Any

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import read_document
from trainer_plugins.launch.lint.judge import judge_document

GOOD_TAIL = '"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"'
Z3 = '"stage": 3, "reduce_bucket_size": 5e7, "stage3_gather_16bit_weights_on_model_save": true'


def judge_text(folder: Path, name: str, text: str, **how: Any) -> tuple[Finding, ...]:
    """Judge a launch file that has this text."""
    (folder / name).write_text(text)
    return tuple(judge_document(read_document(folder / name), **how))


def zero3(more: str = "", top: str = "") -> str:
    return f'{{{top}"zero_optimization": {{{Z3}{more}}}, {GOOD_TAIL}}}'


def zero2(more: str = "", top: str = "") -> str:
    return (
        f'{{{top}"zero_optimization": {{"stage": 2, "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7{more}}}, '
        f"{GOOD_TAIL}}}"
    )


def deepspeed(section: str, top: str = "") -> str:
    lines = "".join(f"  {line}\n" for line in section.splitlines())
    return f"distributed_type: DEEPSPEED\nnum_processes: 2\n{top}deepspeed_config:\n{lines}"


def fsdp(section: str, top: str = "") -> str:
    lines = "".join(f"  {line}\n" for line in section.splitlines())
    return f"distributed_type: FSDP\nnum_processes: 2\n{top}fsdp_config:\n{lines}"


INLINE = f"deepspeed_config_file: '{zero3()}'"

BAD: tuple[tuple[str, str, str], ...] = (
    # Keys nobody reads.
    ("config-unknown-key", "a.yaml", "distributed_type: MULTI_GPU\nnum_proceses: 2\n"),
    ("config-unknown-key", "b.yaml", deepspeed("deepspeed_config_fle: zero3.json")),
    ("config-unknown-key", "c.yaml", deepspeed("zero_stage: 3\nofload_param_device: cpu")),
    ("config-unknown-key", "d.yaml", fsdp("fsdp_version: 2\nfsdp_offload_parms: true")),
    ("config-unknown-key", "e.json", zero3(top='"gradient_cliping": 1.0, ')),
    ("config-unknown-key", "f.json", zero3(', "stage3_prefetch_bucket_sise": 5e7')),
    (
        "config-unknown-key",
        "g.json",
        zero3(', "offload_param": {"device": "cpu", "pin_memmory": true}'),
    ),
    (
        "config-unknown-key",
        "h.json",
        zero3(', "offload_optimizer": {"device": "cpu", "max_in_cpu": 1e9}'),
    ),
    ("config-unknown-key", "i.json", zero3(top='"bf16": {"enable": true}, ')),
    ("config-unknown-key", "j.json", zero3(top='"aio": {"blocksize": 1048576}, ')),
    ("config-unknown-key", "k.json", zero3(top='"zero_optimisation": {"stage": 3}, ')),
    # Names of the past.
    ("config-removed-key", "a.json", zero3(top='"elasticity": {"enabled": false}, ')),
    ("config-removed-key", "b.json", zero3(top='"amp": {"enabled": true}, ')),
    ("config-removed-key", "c.json", zero3(', "mics_shard_size": 8')),
    ("config-deprecated-key", "d.json", zero2(', "cpu_offload": true')),
    (
        "config-deprecated-key",
        "e.json",
        zero3(', "stage3_gather_fp16_weights_on_model_save": true'),
    ),
    ("config-deprecated-key", "f.json", zero3(', "max_live_parameters": 1e9')),
    ("config-deprecated-key", "g.json", zero3(top='"bfloat16": {"enabled": "auto"}, ')),
    # Form.
    ("config-duplicate-key", "a.json", zero3(', "stage": 2')),
    (
        "config-duplicate-key",
        "b.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nnum_processes: 4\n",
    ),
    ("config-wrong-type", "c.json", zero3(', "stage3_prefetch_bucket_size": "5e7"')),
    ("config-wrong-type", "d.json", zero3(', "overlap_comm": "true"')),
    ("config-wrong-type", "e.yaml", "distributed_type: MULTI_GPU\nnum_processes: '2'\n"),
    ("config-wrong-type", "f.yaml", deepspeed("zero_stage: 3\nzero3_init_flag: 'true'")),
    ("config-wrong-type", "g.json", f'{{"zero_optimization": true, {GOOD_TAIL}}}'),
    ("config-wrong-value", "h.json", f'{{"zero_optimization": {{"stage": 4}}, {GOOD_TAIL}}}'),
    ("config-wrong-value", "i.json", zero3(', "offload_param": {"device": "gpu"}')),
    ("config-wrong-value", "j.yaml", "distributed_type: DDP\nnum_processes: 2\n"),
    ("config-wrong-value", "k.yaml", "distributed_type: NO\nnum_processes: 1\n"),
    (
        "config-wrong-value",
        "l.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bfloat16\n",
    ),
    (
        "config-wrong-value",
        "m.json",
        zero3(top='"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, '),
    ),
    # What accelerate refuses, passes over, or runs in place of what was asked.
    ("config-refused-beside-json", "a.yaml", deepspeed(f"zero_stage: 3\n{INLINE}")),
    ("config-refused-beside-json", "b.yaml", deepspeed(INLINE, "mixed_precision: bf16\n")),
    ("config-missing-json", "c.yaml", deepspeed("deepspeed_config_file: /nowhere/zero3.json")),
    (
        "config-missing-json",
        "d.yaml",
        deepspeed("deepspeed_config_file:\n  zero_optimization:\n    stage: 3"),
    ),
    ("config-relative-path", "e.yaml", deepspeed("deepspeed_config_file: configs/zero3.json")),
    (
        "config-multinode-launcher",
        "f.yaml",
        deepspeed(INLINE, "num_machines: 2\nmain_process_ip: 10.0.0.1\n"),
    ),
    (
        "config-process-count",
        "g.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n",
    ),
    (
        "config-process-count",
        "h.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmachine_rank: 1\n",
    ),
    ("config-process-count", "i.yaml", "distributed_type: 'NO'\nnum_processes: 4\n"),
    (
        "config-process-count",
        "j.yaml",
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\n",
    ),
    (
        "config-distributed-type",
        "k.yaml",
        "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
    ),
    ("config-distributed-type", "l.yaml", fsdp("fsdp_version: 2", "use_cpu: true\n")),
    ("config-ignored-key", "m.yaml", deepspeed(INLINE, "fsdp_config:\n  fsdp_version: 2\n")),
    ("config-ignored-key", "n.yaml", fsdp("fsdp_version: 2\nfsdp_sharding_strategy: FULL_SHARD")),
    (
        "config-wrong-value",
        "o.yaml",
        fsdp("fsdp_version: 2\nfsdp_reshard_after_forward: FULL_SHARD"),
    ),
    # What DeepSpeed rejects, passes over, or takes for something else.
    ("config-no-zero", "a.json", f'{{"bf16": {{"enabled": "auto"}}, {GOOD_TAIL}}}'),
    (
        "config-two-precisions",
        "b.json",
        zero3(top='"bf16": {"enabled": true}, "fp16": {"enabled": true}, '),
    ),
    ("config-offload-stage", "c.json", zero2(', "offload_param": {"device": "cpu"}')),
    (
        "config-offload-stage",
        "d.json",
        zero2(', "offload_optimizer": {"device": "cpu", "ratio": 0.5}'),
    ),
    ("config-elastic-checkpoint", "a.json", zero2(', "elastic_checkpoint": true')),
    ("config-offload-stage", "e.json", zero3(', "offload_optimizer": {"pin_memory": true}')),
    ("config-offload-stage", "f.yaml", deepspeed("zero_stage: 2\noffload_param_device: cpu")),
    ("config-nvme-path", "g.json", zero3(', "offload_optimizer": {"device": "nvme"}')),
    (
        "config-nvme-path",
        "h.json",
        zero3(', "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}'),
    ),
    (
        "config-rejected",
        "i.json",
        zero3(top='"bf16": {"enabled": true, "bf16_optimizer_states": true}, '),
    ),
    ("config-rejected", "j.json", zero3(', "compute_grad_norm": false')),
    ("config-ignored-key", "k.json", zero2(', "stage3_max_live_parameters": 1e9')),
    (
        "config-ignored-key",
        "l.json",
        zero3(top='"activation_checkpointing": {"cpu_checkpointing": true}, '),
    ),
    ("config-unresolved-auto", "m.json", zero3(', "stage3_max_live_parameters": "auto"')),
    ("config-unresolved-auto", "n.json", zero3(', "offload_param": {"device": "auto"}')),
    (
        "config-unresolved-auto",
        "v.yaml",
        deepspeed("zero_stage: 2\noffload_optimizer_device: auto"),
    ),
    ("config-pin-memory", "w.json", zero2(', "offload_optimizer": {"device": "cpu"}')),
    ("config-pin-memory", "x.yaml", deepspeed("zero_stage: 2\noffload_optimizer_device: cpu")),
    ("config-bucket-memory", "o.json", f'{{"zero_optimization": {{"stage": 2}}, {GOOD_TAIL}}}'),
    ("config-bucket-memory", "p.yaml", deepspeed("zero_stage: 3")),
    ("config-gather-on-save", "q.json", f'{{"zero_optimization": {{"stage": 3}}, {GOOD_TAIL}}}'),
    (
        "config-scheduler",
        "r.json",
        zero3(top='"scheduler": {"type": "WarmupDecayLR", "params": {}}, '),
    ),
    # What TrainingArguments will not agree with.
    (
        "config-not-auto",
        "s.json",
        f'{{"zero_optimization": {{{Z3}}}, "gradient_clipping": "auto"}}',
    ),
    ("config-not-auto", "t.json", zero3(top='"fp16": {"enabled": true}, ')),
    ("config-not-auto", "u.yaml", deepspeed("zero_stage: 3\ngradient_accumulation_steps: 1")),
    # Names that are not true.
    ("config-name", "zero3_offload.json", zero3()),
    ("config-name", "zero2.json", zero3()),
    ("config-name", "deepspeed_zero3_nvme.json", zero3(', "offload_optimizer": {"device": "cpu"}')),
    ("config-name", "ds_z3_no_offload.json", zero3(', "offload_optimizer": {"device": "cpu"}')),
)
