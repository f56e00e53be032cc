"""Judges whether a file's name matches its content."""

import re
from collections.abc import Iterator

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.schema import part


def name_findings(document: Document) -> Iterator[Finding]:
    """Judge a file's name against its content."""
    name, stage = document.name.lower(), zero_stage(document)
    said = re.search(r"(?:zero|stage|_z)_?(?:stage)?_?([0-3])", name)
    if said and stage is not None and stage != int(said[1]):
        yield _untrue(document, f"it says stage {said[1]}", f"the file has stage {stage}")
    offloads = offload_devices(document)
    if re.search(r"no_?offload", name):
        if offloads:
            yield _untrue(document, "it says that nothing is offloaded", f"the file has {offloads}")
    elif "offload" in name and not offloads:
        yield _untrue(document, "it says offload", "nothing in the file is offloaded")
    if "nvme" in name and "nvme" not in offloads.values():
        yield _untrue(document, "it says nvme", "nothing in the file is on a drive")


def _untrue(document: Document, said: str, is_so: str) -> Finding:
    return Finding.warning(
        code="config-name",
        summary=f"the name {document.name} is misleading: {said}",
        evidence=is_so,
        remedy="Rename the file, or make the name true",
    )


def zero_stage(document: Document) -> int | None:
    """Return the ZeRO stage that will run; None if DeepSpeed will not run."""
    if document.deepspeed is not None:
        stage = part(document.deepspeed, "zero_optimization.stage")
        return (
            int(stage)
            if isinstance(stage, (int, float)) and not isinstance(stage, bool)
            else 2
            if stage == "auto"
            else 0
        )
    if document.accelerate is None or document.accelerate.get("distributed_type") != "DEEPSPEED":
        return None
    if document.json_problem is not None:
        return None
    stage = part(document.accelerate, "deepspeed_config.zero_stage")
    return stage if isinstance(stage, int) else 2


def offload_devices(document: Document) -> dict[str, str]:
    """Return what is offloaded and where to: `{"optimizer": "cpu"}`."""
    found = {}
    for what in ("optimizer", "param"):
        if document.deepspeed is not None:
            device = part(document.deepspeed, f"zero_optimization.offload_{what}.device")
            old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
            device = (
                "cpu" if part(document.deepspeed, f"zero_optimization.{old}") is True else device
            )
        else:
            device = part(document.accelerate or {}, f"deepspeed_config.offload_{what}_device")
        if isinstance(device, str) and device in ("cpu", "nvme"):
            found[what] = device
    fsdp = part(document.accelerate or {}, "fsdp_config")
    if isinstance(fsdp, dict) and (
        fsdp.get("fsdp_offload_params", fsdp.get("offload_params")) in (True, "true")
    ):
        found["fsdp"] = "cpu"
    return found
