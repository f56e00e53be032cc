"""Apply DeepSpeed's rules: combinations that it refuses, and misleading ones."""

from collections.abc import Iterator
from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import Document, Mapping, get_block
from trainer_plugins.launch.lint.schema import report_ignored_key, wrong_value

_GATHER_ON_SAVE = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)


def zero_findings(document: Document) -> Iterator[Finding]:
    """Judge the configuration that DeepSpeed will run."""
    stage = document.zero_stage
    if stage is None:
        return
    for what in ("optimizer", "param"):
        yield from _offload_target(document, what)
    yield from _offload_stage(document, stage)
    yield from _buckets(document, stage)
    if document.deepspeed is None:
        return
    if not isinstance(document.get_deepspeed("zero_optimization"), dict):
        yield Finding.error(
            code="config-no-zero",
            summary="there is no zero_optimization block",
            evidence="accelerate stops: Please specify the ZeRO optimization config",
            remedy='Write "zero_optimization": {"stage": 2} or another stage',
        )
    yield from _precision(document, stage)
    yield from _stage(document, stage)
    yield from _hand_over(document, document.deepspeed)


def _offload_target(document: Document, what: str) -> Iterator[Finding]:
    block = document.get_deepspeed(f"zero_optimization.offload_{what}")
    device = document.get_offload(what, "device")
    if device == "auto":
        yield Finding.error(
            code="config-unresolved-auto",
            summary=f'the device of offload_{what} is "auto", so nothing is offloaded',
            evidence="accelerate replaces it with none (DeepSpeedPlugin.__post_init__)",
            remedy='Write "cpu" or "nvme", or remove it',
        )
    elif isinstance(device, str) and device not in ("cpu", "nvme", "none"):
        yield wrong_value(f"offload_{what} device", device, "DeepSpeed knows cpu, nvme and none")
    if isinstance(block, dict) and "device" not in block:
        yield Finding.error(
            code="config-offload-stage",
            summary=f"offload_{what} names no device, so nothing is offloaded",
            evidence="its default is none (deepspeed/runtime/zero/offload_config.py)",
            remedy='Write "device": "cpu", or remove the block',
        )
    if device == "cpu" and not (isinstance(block, dict) and "pin_memory" in block):
        in_json = "" if block else " in a DeepSpeed JSON: the YAML alone has no such key"
        yield Finding.warning(
            code="config-pin-memory",
            summary=f"offload_{what} is slow: it copies from and to memory that is not pinned",
            evidence="pin_memory is false unless it is written (DeepSpeed's offload_config.py)",
            remedy=f'Write "pin_memory": true{in_json}, or false where little memory can be locked',
        )
    if device != "nvme":
        return
    path = document.get_offload(what, "nvme_path")
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


def _offload_stage(document: Document, stage: int) -> Iterator[Finding]:
    offloads = document.offload_devices
    if "param" in offloads and stage < 3:
        yield Finding.error(
            code="config-offload-stage",
            summary=f"parameters are not offloaded at stage {stage}",
            evidence="offload_param works with stage 3 (deepspeed/runtime/zero/config.py)",
            remedy="Write stage 3, or remove offload_param",
        )
    if "optimizer" in offloads and stage < 1:
        yield Finding.error(
            code="config-offload-stage",
            summary="the optimizer is not offloaded at stage 0",
            evidence="offload_optimizer works from stage 1 on (deepspeed/runtime/zero/config.py)",
            remedy="Write stage 2 or 3",
        )
    if offloads.get("param") == "nvme" and "optimizer" not in offloads:
        yield Finding.warning(
            code="config-offload-stage",
            summary="parameters go to a drive, but the optimizer, six times as large, does not",
            evidence="12 B a parameter for AdamW and its master weights, 2 B for 16-bit weights",
            remedy="Offload the optimizer first",
        )
    ratio = document.get_offload("optimizer", "ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and stage < 3:
        yield Finding.error(
            code="config-offload-stage",
            summary=f"offload_optimizer.ratio {ratio} at stage {stage}",
            evidence="DeepSpeed stops: Partial offloading only supported for ZeRO Stage 3",
            remedy="Write stage 3, or remove ratio",
        )


def _buckets(document: Document, stage: int) -> Iterator[Finding]:
    """Count the gradient buckets: deepspeed 0.19.8, stage_1_and_2.py, `setup_buckets`."""
    # `allgather_bucket_size` takes no memory: it limits how much is gathered at once, in place.
    zero = get_block(document.deepspeed or {}, "zero_optimization")
    if stage == 0 or (document.accelerate is None and document.deepspeed is not None and not zero):
        return
    key = "reduce_bucket_size"
    num_elements = zero.get(key, 5e8)
    if not isinstance(num_elements, (int, float)) or num_elements < 3e8:
        return
    evidence, num_buffers = f"{num_elements:.0e} elements", 1
    if key not in zero:
        evidence += ", DeepSpeed's default"
    if stage < 3 and zero.get("overlap_comm") is True:
        evidence, num_buffers = f"{evidence}, in two buffers for overlap_comm", 2
    yaml_note = ", in a DeepSpeed JSON: the YAML alone has no such key"
    yield Finding.warning(
        code="config-bucket-memory",
        summary=f"{key} takes {num_buffers * num_elements * 2 / 2**30:.2f} GiB of GPU memory in"
        " bf16, twice that in fp32",
        evidence=evidence,
        remedy=f'Write "{key}": 50000000{yaml_note if document.deepspeed is None else ""}',
    )


def _precision(document: Document, stage: int) -> Iterator[Finding]:
    on = [name for name in ("bf16", "fp16") if document.get_deepspeed(f"{name}.enabled") is True]
    if len(on) == 2:
        yield Finding.error(
            code="config-two-precisions",
            summary="bf16 and fp16 are both enabled",
            evidence="DeepSpeed stops: bfloat16 and fp16 modes cannot be simultaneously enabled",
            remedy='Write "auto" for both, and choose with --bf16 or --fp16',
        )
    master = document.get_deepspeed("bf16.bf16_master_weights_and_grads") is True
    if master and stage == 0:
        yield _report_rejected(
            "bf16_master_weights_and_grads at stage 0", "It needs stage 1, 2 or 3"
        )
    if document.get_deepspeed("bf16.bf16_optimizer_states") is not True:
        return
    if not master:
        what = "bf16_optimizer_states without bf16_master_weights_and_grads"
        yield _report_rejected(what, "It needs the latter")
        return
    device = document.get_offload("optimizer", "device")
    if device == "cpu" and document.get_deepspeed("optimizer") is None:
        yield _report_rejected(
            "bf16_optimizer_states with offload and no optimizer block",
            "The Trainer would create a DeepSpeedCPUAdam with fp32 states, which DeepSpeed refuses:"
            ' write "optimizer": {"type": "AdamW", "params": {"lr": "auto", ...}}',
        )


def _stage(document: Document, stage: int) -> Iterator[Finding]:
    if stage not in (0, 1, 2, 3):
        yield wrong_value("zero_optimization.stage", stage, "DeepSpeed knows 0, 1, 2 and 3")
        return
    zero = get_block(document.deepspeed or {}, "zero_optimization")
    of_stage_3 = sorted(key for key in zero if key.removeprefix("stage3_") in keys.STAGE3)
    if stage == 3:
        yield from _stage_3(zero)
    elif of_stage_3:
        yield report_ignored_key(
            f"{', '.join(of_stage_3)} has no effect at stage {stage}",
            "they belong to stage 3",
            "Remove them, or write stage 3",
        )
    if zero.get("elastic_checkpoint") is True:
        yield Finding.warning(
            code="config-elastic-checkpoint",
            summary="on resume, each rank reads the optimizer states of all ranks",
            evidence="elastic_checkpoint, to main memory (runtime/engine.py; DeepSpeed#1111)",
            remedy="Remove it, and resume with as many ranks as saved",
        )
    if zero.get("compute_grad_norm") is False and stage not in (1, 2):
        yield _report_rejected(f"compute_grad_norm false at stage {stage}", "It needs stage 1 or 2")
    if document.get_deepspeed("gradient_allreduce_op") == "sum" and stage == 3:
        yield _report_rejected("gradient_allreduce_op sum at stage 3", "Remove it")
    if document.get_deepspeed("activation_checkpointing") is not None:
        yield report_ignored_key(
            "activation_checkpointing has no effect for a Hugging Face model",
            "it configures deepspeed.checkpointing, which they do not call",
            f"Give {advice.CHECKPOINTING.flag(Door.TRAINER)} to the script",
        )


def _stage_3(zero: Mapping) -> Iterator[Finding]:
    if zero.get("round_robin_gradients") is True:
        what = "round_robin_gradients has no effect at stage 3"
        yield report_ignored_key(what, "it belongs to stages 1 and 2", "Remove it")
    if not any(zero.get(name) in (True, "auto") for name in _GATHER_ON_SAVE):
        yield Finding.warning(
            code="config-gather-on-save",
            summary="a save writes no model.safetensors",
            evidence="without stage3_gather_16bit_weights_on_model_save only shards are saved",
            remedy="Write it as true, or run zero_to_fp32.py on the checkpoint afterwards",
        )
    bare = sorted(key for key in zero if key in keys.STAGE3)
    if bare:
        yield Finding.warning(
            code="config-deprecated-key",
            summary=f"{', '.join(bare)}: without the prefix stage3_ only DeepSpeed sees it",
            evidence="HfTrainerDeepSpeedConfig and accelerate look up the name with stage3_",
            remedy=f"Write stage3_{bare[0]}",
        )


def _hand_over(document: Document, config: Mapping) -> Iterator[Finding]:
    if "optimizer" in config and document.get_deepspeed("optimizer.type") is None:
        yield wrong_value("optimizer.type", None, "a block without a type is not an optimizer")
    name = "scheduler.params.warmup_num_steps"
    warmup = document.get_deepspeed(name)
    if isinstance(warmup, (int, float)) and warmup <= 0:
        yield wrong_value(name, warmup, "DeepSpeed 0.19.6 and later refuse less than 1")
    if "scheduler" in config and "optimizer" not in config:
        yield Finding.warning(
            code="config-scheduler",
            summary="the DeepSpeed scheduler replaces lr_scheduler_type of TrainingArguments",
            evidence="transformers' deepspeed_optim_sched creates a DummyScheduler",
            remedy="Remove the scheduler block, unless you mean it",
        )


def _report_rejected(what: str, remedy: str) -> Finding:
    return Finding.error(
        code="config-rejected",
        summary=f"DeepSpeed refuses {what}",
        evidence="deepspeed/runtime/config.py and zero/config.py check it at start (0.19.8)",
        remedy=remedy,
    )
