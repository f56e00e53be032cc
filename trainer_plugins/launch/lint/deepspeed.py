"""Rules of DeepSpeed: combinations that it refuses, and those that do not do what they seem to."""

from collections.abc import Iterator
from pathlib import Path

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import Document, Mapping
from trainer_plugins.launch.lint.names import offload_devices, zero_stage
from trainer_plugins.launch.lint.schema import part


def zero_findings(document: Document) -> Iterator[Finding]:
    """Judge what DeepSpeed will run."""
    stage = zero_stage(document)
    if stage is None:
        return
    yield from _offload(document, stage)
    yield from _buckets(document, stage)
    config = document.deepspeed
    if config is None:
        return
    if not isinstance(config.get("zero_optimization"), dict):
        yield Finding.error(
            code="config-no-zero",
            summary="there is no zero_optimization block",
            evidence="accelerate stops: Please specify the ZeRO optimization config in the"
            " DeepSpeed config",
            remedy='Write "zero_optimization": {"stage": 2} or another stage',
        )
    yield from _precision(config, stage)
    yield from _stage(config, stage)
    yield from _hand_over(config)


def _offload(document: Document, stage: int) -> Iterator[Finding]:
    config = document.deepspeed if document.deepspeed is not None else {}
    for what in ("optimizer", "param"):
        yield from _offload_target(document, what)
    yield from _offload_at_stage(offload_devices(document), stage)
    ratio = part(config, "zero_optimization.offload_optimizer.ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and stage < 3:
        yield Finding.error(
            code="config-offload-stage",
            summary=f"offload_optimizer.ratio {ratio} at stage {stage}",
            evidence="DeepSpeed stops: Partial offloading only supported for ZeRO Stage 3",
            remedy="Write stage 3, or remove ratio",
        )


def _offload_target(document: Document, what: str) -> Iterator[Finding]:
    """Judge where `what` (optimizer, param) is offloaded to."""
    config = document.deepspeed if document.deepspeed is not None else {}
    section = part(document.accelerate or {}, "deepspeed_config")
    section = section if isinstance(section, dict) else {}
    device = part(config, f"zero_optimization.offload_{what}.device") or section.get(
        f"offload_{what}_device"
    )
    if isinstance(device, str) and device not in ("cpu", "nvme", "none", "auto"):
        yield _wrong(f"offload_{what} device", device, "DeepSpeed knows cpu, nvme and none")
    block = part(config, f"zero_optimization.offload_{what}")
    if isinstance(block, dict) and "device" not in block:
        yield Finding.warning(
            code="config-offload-stage",
            summary=f"offload_{what} names no device, so nothing is offloaded",
            evidence="its default is none (deepspeed/runtime/zero/offload_config.py)",
            remedy='Write "device": "cpu", or remove the block',
        )
    if offload_devices(document).get(what) != "nvme":
        return
    path = part(config, f"zero_optimization.offload_{what}.nvme_path")
    path = section.get(f"offload_{what}_nvme_path") if document.deepspeed is None else path
    if not isinstance(path, str) or path in ("", "none", "None"):
        problem = f"offload_{what} goes to nvme, but nvme_path is missing"
    elif not Path(path).is_absolute():
        problem = f"nvme_path {path} is relative to the folder where each rank runs"
    else:
        return
    yield Finding.error(
        code="config-nvme-path",
        summary=problem,
        evidence="DeepSpeed accepts the file without it, and fails when it first writes",
        remedy="Write the absolute path of a folder on a local drive",
    )


def _offload_at_stage(offloads: dict[str, str], stage: int) -> Iterator[Finding]:
    """Judge whether this stage offloads what the file says."""
    if "param" in offloads and stage < 3:
        yield Finding.error(
            code="config-offload-stage",
            summary=f"parameters are not offloaded at stage {stage}",
            evidence="offload_param is valid only with stage 3 (deepspeed/runtime/zero/config.py);"
            " below, it is read and has no effect",
            remedy="Write stage 3, or remove offload_param",
        )
    if "optimizer" in offloads and stage < 1:
        yield Finding.error(
            code="config-offload-stage",
            summary="the optimizer is not offloaded at stage 0",
            evidence="offload_optimizer is valid with stages 1, 2 and 3"
            " (deepspeed/runtime/zero/config.py)",
            remedy="Write stage 2 or 3",
        )
    if offloads.get("param") == "nvme" and "optimizer" not in offloads:
        yield Finding.warning(
            code="config-offload-stage",
            summary="parameters are offloaded to a drive, but the optimizer, six times their size,"
            " stays on the card",
            evidence="12 B a parameter for AdamW's master weights and states, 2 B for 16-bit"
            " weights",
            remedy="Offload the optimizer first",
        )


def _buckets(document: Document, stage: int) -> Iterator[Finding]:
    """Count what gradients are collected in: deepspeed 0.19.8, stage_1_and_2.py, `setup_buckets`.

    `allgather_bucket_size` takes nothing: it says how much is gathered at once, in place.
    """
    zero = part(document.deepspeed or {}, "zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if stage == 0 or (document.accelerate is None and document.deepspeed is not None and not zero):
        return
    key = "reduce_bucket_size"
    value = zero.get(key, 5e8)
    if not isinstance(value, (int, float)) or value < 3e8:
        return
    num_buffers = 2 if stage < 3 and zero.get("overlap_comm") is True else 1
    yield Finding.warning(
        code="config-bucket-memory",
        summary=f"{key} takes {num_buffers * value * 2 / 2**30:.2f} GiB of the card in bf16, twice"
        " that in fp32",
        evidence=f"{value:.0e} elements"
        + ("" if key in zero else ", DeepSpeed's default if none is written")
        + (", in two buffers, for overlap_comm" if num_buffers > 1 else ""),
        remedy=f'Write "{key}": 50000000'
        + (
            ", in a DeepSpeed JSON: the YAML alone has no such key"
            if document.deepspeed is None
            else ""
        ),
    )


def _precision(config: Mapping, stage: int) -> Iterator[Finding]:
    on = [name for name in ("bf16", "fp16") if part(config, f"{name}.enabled") is True]
    if len(on) == 2:
        yield Finding.error(
            code="config-two-precisions",
            summary="bf16 and fp16 are both enabled",
            evidence="DeepSpeed stops: bfloat16 and fp16 modes cannot be simultaneously enabled",
            remedy='Write "auto" for both, and choose with --bf16 or --fp16',
        )
    master = part(config, "bf16.bf16_master_weights_and_grads") is True
    if part(config, "bf16.bf16_optimizer_states") is True:
        if not master:
            yield _rejected(
                "bf16_optimizer_states without bf16_master_weights_and_grads",
                "It needs the latter",
            )
        elif (
            "cpu" in str(part(config, "zero_optimization.offload_optimizer.device"))
            and "optimizer" not in config
        ):
            yield _rejected(
                "bf16_optimizer_states with offload and no optimizer block",
                "The Trainer would create a DeepSpeedCPUAdam with fp32 states, which DeepSpeed"
                " refuses: "
                'write "optimizer": {"type": "AdamW", "params": {"lr": "auto", ...}}',
            )
    if master and stage == 0:
        yield _rejected("bf16_master_weights_and_grads at stage 0", "It needs stage 1, 2 or 3")


def _stage(config: Mapping, stage: int) -> Iterator[Finding]:
    if stage not in (0, 1, 2, 3):
        yield _wrong("zero_optimization.stage", stage, "DeepSpeed knows 0, 1, 2 and 3")
        return
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if stage < 3:
        idle = sorted(key for key in zero if key.removeprefix("stage3_") in keys.STAGE3)
        if idle:
            yield _idle(
                ", ".join(idle),
                f"at stage {stage}",
                "they belong to stage 3",
                "Remove them, or write stage 3",
            )
    else:
        if zero.get("round_robin_gradients") is True:
            yield _idle(
                "round_robin_gradients", "at stage 3", "it belongs to stages 1 and 2", "Remove it"
            )
        names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
        if not any(
            zero.get(name) in (True, "auto")
            for name in (*names, "stage3_gather_fp16_weights_on_model_save")
        ):
            yield Finding.warning(
                code="config-gather-on-save",
                summary="a save writes no model.safetensors",
                evidence="stage3_gather_16bit_weights_on_model_save is not true, so only ZeRO's"
                " shards are saved",
                remedy="Write it as true, or run zero_to_fp32.py on the checkpoint afterwards",
            )
        bare = sorted(key for key in zero if key in keys.STAGE3)
        if bare:
            yield Finding.warning(
                code="config-deprecated-key",
                summary=f"{', '.join(bare)}: without the prefix stage3_ only DeepSpeed sees it",
                evidence="transformers and accelerate look up the name with stage3_"
                " (HfTrainerDeepSpeedConfig)",
                remedy=f"Write stage3_{bare[0]}",
            )
    if zero.get("compute_grad_norm") is False and stage not in (1, 2):
        yield _rejected(f"compute_grad_norm false at stage {stage}", "It needs stage 1 or 2")
    if config.get("gradient_allreduce_op") == "sum" and stage == 3:
        yield _rejected("gradient_allreduce_op sum at stage 3", "Remove it")
    if "activation_checkpointing" in config:
        yield _idle(
            "activation_checkpointing",
            "for a Hugging Face model",
            "it configures deepspeed.checkpointing, which they do not call",
            "Give --gradient_checkpointing to the script",
        )


def _hand_over(config: Mapping) -> Iterator[Finding]:
    if "optimizer" in config:
        params = part(config, "optimizer.params")
        if isinstance(params, dict) and "max_grad_norm" in params:
            yield _idle(
                "optimizer.params.max_grad_norm",
                "in DeepSpeed",
                "it only warns",
                'Write "gradient_clipping": "auto"',
            )
        kind = part(config, "optimizer.type")
        if kind is None:
            yield _wrong("optimizer.type", None, "a block without a type is not an optimizer")
        if str(kind).lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
            yield _wrong(
                "optimizer.type", kind, "1-bit optimizers do not work with ZeRO stages 2 and 3"
            )
    warmup = part(config, "scheduler.params.warmup_num_steps")
    if isinstance(warmup, (int, float)) and warmup <= 0:
        yield _wrong(
            "scheduler.params.warmup_num_steps",
            warmup,
            "DeepSpeed 0.19.6 and later refuse less than 1",
        )
    if "scheduler" in config and "optimizer" not in config:
        yield Finding.warning(
            code="config-scheduler",
            summary="the DeepSpeed scheduler replaces lr_scheduler_type of TrainingArguments",
            evidence="deepspeed_optim_sched (transformers/integrations/deepspeed.py) creates a"
            " DummyScheduler",
            remedy="Remove the scheduler block, unless you mean it",
        )


def _wrong(key: str, value: object, why: str) -> Finding:
    return Finding.error(
        code="config-wrong-value",
        summary=f"{key} is {value!r}",
        evidence=why,
        remedy=f"Change {key}",
    )


def _rejected(what: str, remedy: str) -> Finding:
    return Finding.error(
        code="config-rejected",
        summary=f"DeepSpeed refuses {what}",
        evidence="deepspeed/runtime/config.py and zero/config.py check it at start (0.19.8)",
        remedy=remedy,
    )


def _idle(key: str, where: str, why: str, remedy: str) -> Finding:
    return Finding.warning(
        code="config-ignored-key",
        summary=f"{key} has no effect {where}",
        evidence=why,
        remedy=remedy,
    )
