"""Asked: what strategy a launch asked for, from all the places where it may have been said."""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainer_plugins.launch.launcher import Launcher, find_launcher
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import ConfigError, Document, document_of, read_mapping
from trainer_plugins.launch.lint.names import offload_devices, zero_stage
from trainer_plugins.launch.lint.schema import part


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Holds the strategy that was asked for. None, or empty, means that nobody asked."""

    source: str = ""
    """Where it was asked, for the evidence: `zero3.yaml`."""

    distributed_type: str | None = None
    world_size: int | None = None
    num_machines: int | None = None
    zero_stage: int | None = None
    offload: Mapping[str, str] = field(default_factory=dict)
    bf16_master: bool = False
    """Whether DeepSpeed's `bf16_master_weights_and_grads` is set."""

    checkpointing: bool = False
    """Whether DeepSpeed's block `activation_checkpointing` is used."""

    started: int | None = None
    """WORLD_SIZE: the number of ranks that the launcher told this process."""

    one_process_for: str | None = None
    """Why `accelerate launch` starts one process, whatever else was asked for: `--cpu`."""

    use_cpu: bool = False
    """Whether ACCELERATE_USE_CPU is set."""

    multinode_launcher: str | None = None
    """accelerate's `deepspeed_multinode_launcher`."""

    misspelt: Mapping[str, str] = field(default_factory=dict)
    """Unknown keys under `deepspeed_config`, and the known ones that they resemble."""

    flags_beside_json: tuple[str, ...] = ()
    """Flags that `accelerate launch` ignores because a DeepSpeed JSON is named."""

    @property
    def family(self) -> str | None:
        """Return the wrapper that was asked for, as in `Strategy.family`; None if nobody said."""
        if self.one_process_for == "--cpu":
            return "nothing"
        if self.distributed_type in ("DEEPSPEED", "FSDP", "NO"):
            return {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "NO": "nothing"}[
                self.distributed_type
            ]
        return "DDP" if (self.distributed_type or "").startswith("MULTI_") else None


def read_asked(environ: Mapping[str, str], deepspeed: object = None, fsdp: object = None) -> Asked:
    """Find what was asked for by `accelerate launch`, the environment and TrainingArguments.

    Flags and file of `accelerate launch` count, or else the environment. `accelerate launch` passes
    neither to the script, so they are read from the command line of the process that launched this
    one.

    Args:
        environ: the environment of this process.
        deepspeed: `TrainingArguments.deepspeed`, a path or a mapping. In transformers it overrides
            the launch file.
        fsdp: `TrainingArguments.fsdp`.
    """
    launcher = find_launcher()
    said = (launcher and of_launcher(launcher)) or _of_environment(environ)
    said["use_cpu"] = _is_true(environ.get("ACCELERATE_USE_CPU"))
    started = environ.get("WORLD_SIZE", "")
    if started.isdigit():
        said["started"] = int(started)
        said["world_size"] = said.get("world_size") or int(started)
    document = _of_json(deepspeed)
    if document is not None or fsdp:
        # TrainingArguments replace what the launch says about these, but not its ranks.
        for name in (
            "zero_stage",
            "offload",
            "bf16_master",
            "checkpointing",
            "misspelt",
            "flags_beside_json",
        ):
            said.pop(name, None)
    if document is not None:
        said |= _of_document(document) | {
            "source": "TrainingArguments.deepspeed",
            "distributed_type": "DEEPSPEED",
        }
    elif fsdp:
        said |= {"source": "TrainingArguments.fsdp", "distributed_type": "FSDP"}
    return Asked(**said)


def of_launcher(launcher: Launcher) -> dict[str, Any]:
    """Read the flags and the file of `accelerate launch`; flags win, as they do there."""
    flags = launcher.flags()
    if flags is None:
        return {}
    # Flags that were written, by accelerate/commands/utils.py.
    given: set[str] = getattr(flags, "nondefault", set())
    config, source, misspelt = _file(launcher, flags)
    kinds = {
        "DEEPSPEED": "use_deepspeed",
        "FSDP": "use_fsdp",
        "MULTI_GPU": "multi_gpu",
        "MEGATRON_LM": "use_megatron_lm",
    }
    for kind, flag in (kinds | {"XLA": "tpu"}).items():
        if getattr(flags, flag, False):
            config["distributed_type"] = kind
    passed_over = set()
    has_json = (
        "deepspeed_config_file" in given
        or part(config, "deepspeed_config.deepspeed_config_file") is not None
    )
    for section, known in (
        ("deepspeed_config", keys.ACCELERATE_DEEPSPEED),
        ("fsdp_config", keys.ACCELERATE_FSDP),
    ):
        written = {key: _plain(getattr(flags, key)) for key in known if key in given}
        if has_json:
            passed_over |= {key for key in written if key in keys.REFUSED_BESIDE_JSON}
        config[section] = _prefixed(config.get(section), section) | written
    for key in ("num_processes", "num_machines"):
        if key in given:
            config[key] = getattr(flags, key)
    said = _of_document(document_of(source, config, folder=launcher.folder))
    # A flag that accelerate ignores was still asked for.
    if "zero_stage" in passed_over:
        said["zero_stage"] = flags.zero_stage
    for what in ("optimizer", "param"):
        if f"offload_{what}_device" in passed_over:
            said["offload"][what] = getattr(flags, f"offload_{what}_device")
    said["offload"] = {what: where for what, where in said["offload"].items() if where != "none"}
    alone = config.get("distributed_type") in ("NO", "MULTI_CPU")
    return said | {
        "source": source,
        "misspelt": misspelt,
        "flags_beside_json": tuple(sorted(f"--{key}" for key in passed_over)),
        "one_process_for": "--cpu"
        if flags.cpu
        else f"distributed_type {config['distributed_type']}"
        if alone
        else None,
    }


def _file(launcher: Launcher, flags: Namespace) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Read the launch file, if any: its mapping, its name, and misspelt keys with their meaning."""
    file = launcher.file(flags)
    try:
        loaded = read_mapping(file)[0] if file is not None else {}
    except ConfigError:
        loaded = {}
    if file is None or not loaded:
        return {}, "accelerate launch", {}
    section = loaded.get("deepspeed_config")
    if not isinstance(section, dict):
        return loaded, file.name, {}
    near = {
        key: match[0]
        for key in section
        if key not in keys.ACCELERATE_DEEPSPEED
        and (
            match := get_close_matches(
                str(key), set(keys.ACCELERATE_DEEPSPEED) - set(section), 1, 0.8
            )
        )
    }
    mended = {near.get(key, key): value for key, value in section.items()}
    return loaded | {"deepspeed_config": mended}, file.name, near


def _prefixed(section: object, name: str) -> dict[str, Any]:
    """Name the keys of a section as flags do: accelerate adds `fsdp_` to those that lack it."""
    if not isinstance(section, dict):
        return {}
    prefix = "fsdp_" if name == "fsdp_config" else ""
    return {prefix + str(key).removeprefix(prefix): value for key, value in section.items()}


def _plain(value: object) -> object:
    """Convert the value of a flag to what YAML would give."""
    return (
        {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


def _of_document(document: Document) -> dict[str, Any]:
    said: dict[str, Any] = {
        "zero_stage": zero_stage(document),
        "offload": offload_devices(document),
    }
    if document.deepspeed is not None:
        said["bf16_master"] = part(document.deepspeed, "bf16.bf16_master_weights_and_grads") is True
        block = document.deepspeed.get("activation_checkpointing")
        said["checkpointing"] = isinstance(block, dict) and any(block.values())
    if (config := document.accelerate) is not None:
        for name, key in (("world_size", "num_processes"), ("num_machines", "num_machines")):
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                said[name] = value
        if isinstance(config.get("distributed_type"), str):
            said["distributed_type"] = config["distributed_type"]
        said["multinode_launcher"] = part(config, "deepspeed_config.deepspeed_multinode_launcher")
        kind = said.get("distributed_type")
        said["offload"] = {
            what: where
            for what, where in said["offload"].items()
            if (what == "fsdp") == (kind == "FSDP")
        }
    return said


def _of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read what a launcher exported (accelerate/utils/launch.py), if it cannot be found itself."""
    if _is_true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        said: dict[str, Any] = {
            "source": "ACCELERATE_USE_DEEPSPEED",
            "distributed_type": "DEEPSPEED",
        }
        document = _of_json(environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        return said if document is None else _of_document(document) | said
    if _is_true(environ.get("ACCELERATE_USE_FSDP")):
        return {"source": "ACCELERATE_USE_FSDP", "distributed_type": "FSDP"}
    return {"source": "WORLD_SIZE"} if environ.get("WORLD_SIZE") else {}


def _of_json(given: object) -> Document | None:
    """Read a DeepSpeed JSON given as a mapping, a path or text; None for anything else."""
    if isinstance(given, dict) and given:
        return Document(name="deepspeed", deepspeed=given)
    if not isinstance(given, str) or not given or given == "none":
        return None
    try:
        loaded = json.loads(given) if "{" in given else read_mapping(Path(given))[0]
    except ValueError:  # the launch itself reports what is wrong with it
        return None
    return Document(name="deepspeed", deepspeed=loaded) if isinstance(loaded, dict) else None


def _is_true(text: str | None) -> bool:
    return re.fullmatch("1|true|yes|y|on|t", text or "", re.IGNORECASE) is not None
