"""Reads which strategy a launch requests, from all places that can name one."""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from trainer_plugins.launch.launcher import Launcher, find_launcher
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import (
    ConfigError,
    Document,
    document_of,
    part,
    read_mapping,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Holds the requested strategy. None, or empty, means that it is not specified."""

    source: str = ""  # what requests it, for the evidence: `zero3.yaml`
    distributed_type: str | None = None
    world_size: int | None = None
    num_machines: int | None = None
    zero_stage: int | None = None
    offload: Mapping[str, str] = field(default_factory=dict)
    bf16_master: bool = False  # whether DeepSpeed's `bf16_master_weights_and_grads` is set
    checkpointing: bool = False  # whether DeepSpeed's block `activation_checkpointing` is used
    started: int | None = None  # the number of ranks in WORLD_SIZE, which the launcher sets
    one_process_for: str | None = None  # why `accelerate launch` starts only one process: `--cpu`
    use_cpu: bool = False  # whether ACCELERATE_USE_CPU is set
    multinode_launcher: str | None = None  # accelerate's `deepspeed_multinode_launcher`
    misspelt: Mapping[str, str] = field(default_factory=dict)  # unknown DeepSpeed keys, likely ones
    flags_beside_json: tuple[str, ...] = ()  # flags that accelerate ignores next to a JSON

    @property
    def family(self) -> str | None:
        """Return the requested wrapper, as in `Strategy.family`; None if it is not specified."""
        kind = self.distributed_type or ""
        if self.one_process_for == "--cpu":
            return "nothing"
        if kind.startswith("MULTI_"):
            return "DDP"
        return {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "NO": "nothing"}.get(kind)


# The flag of `accelerate launch` for each distributed_type.
_KIND_FLAGS = {
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MULTI_GPU": "multi_gpu",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}


def read_asked(environ: Mapping[str, str], deepspeed: object = None, fsdp: object = None) -> Asked:
    """Read the request from the launcher's command line, the environment and TrainingArguments.

    The script gets neither flags nor file of `accelerate launch`; without a launcher, the
    environment counts. transformers lets `deepspeed` and `fsdp` override the launch file.
    """
    launcher = find_launcher()
    asked = of_launcher(launcher) if launcher is not None else None
    asked = asked or _of_environment(environ)
    started = environ.get("WORLD_SIZE", "")
    num_started = int(started) if started.isdigit() else None
    asked = replace(
        asked,
        use_cpu=_is_true(environ.get("ACCELERATE_USE_CPU")),
        started=num_started,
        world_size=asked.world_size or num_started,
    )
    document = _of_json(deepspeed)
    if document is None and not fsdp:
        return asked
    own = Asked() if document is None else _of_document(document)
    # TrainingArguments replace the strategy of the launch, but not its ranks.
    return replace(
        asked,
        source=f"TrainingArguments.{'fsdp' if document is None else 'deepspeed'}",
        distributed_type="FSDP" if document is None else "DEEPSPEED",
        zero_stage=own.zero_stage,
        offload=own.offload,
        bf16_master=own.bf16_master,
        checkpointing=own.checkpointing,
        misspelt={},
        flags_beside_json=(),
    )


def of_launcher(launcher: Launcher) -> Asked | None:
    """Read flags and file of `accelerate launch`; None if accelerate does not know the flags."""
    flags = launcher.flags()
    if flags is None:
        return None
    # The flags on the command line, by accelerate/commands/utils.py. They win, as they do there.
    given: set[str] = getattr(flags, "nondefault", set())
    file = _read_file(launcher, flags)
    config = file.config
    for kind, flag in _KIND_FLAGS.items():
        if getattr(flags, flag, False):
            config["distributed_type"] = kind
    ignored: set[str] = set()
    named_json = part(config, "deepspeed_config.deepspeed_config_file")
    has_json = "deepspeed_config_file" in given or named_json is not None
    for section, known in keys.ACCELERATE_SECTIONS.items():
        written = {key: _plain(getattr(flags, key)) for key in known if key in given}
        if has_json:
            ignored |= written.keys() & set(keys.REFUSED_BESIDE_JSON)
        config[section] = _prefixed(config.get(section), section) | written
    for key in ("num_processes", "num_machines"):
        if key in given:
            config[key] = getattr(flags, key)
    asked = _of_document(document_of(file.name, config, folder=launcher.folder))
    # A flag that accelerate ignores was requested nevertheless.
    offload = dict(asked.offload)
    for what in ("optimizer", "param"):
        if f"offload_{what}_device" in ignored:
            offload[what] = getattr(flags, f"offload_{what}_device")
    one_process_for = "--cpu" if flags.cpu else None
    if one_process_for is None and config.get("distributed_type") in ("NO", "MULTI_CPU"):
        one_process_for = f"the type {config['distributed_type']}"
    return replace(
        asked,
        source=file.name,
        misspelt=file.misspelt,
        zero_stage=flags.zero_stage if "zero_stage" in ignored else asked.zero_stage,
        offload={what: where for what, where in offload.items() if where != "none"},
        flags_beside_json=tuple(sorted(f"--{key}" for key in ignored)),
        one_process_for=one_process_for,
    )


class _File(NamedTuple):
    name: str
    config: dict[str, Any]
    misspelt: dict[str, str]  # as in `Asked`


def _read_file(launcher: Launcher, flags: Namespace) -> _File:
    path = launcher.file(flags)
    try:
        config = read_mapping(path)[0] if path is not None else {}
    except ConfigError:
        config = {}
    if path is None or not config:
        return _File("accelerate launch", {}, {})
    section, misspelt = config.get("deepspeed_config"), {}
    if not isinstance(section, dict):
        return _File(path.name, config, {})
    free = set(keys.ACCELERATE_DEEPSPEED) - set(section)
    for key in section:
        match = get_close_matches(str(key), free, 1, 0.8)
        if key not in keys.ACCELERATE_DEEPSPEED and match:
            misspelt[key] = match[0]
    corrected = {misspelt.get(key, key): value for key, value in section.items()}
    return _File(path.name, config | {"deepspeed_config": corrected}, misspelt)


def _prefixed(section: object, name: str) -> dict[str, Any]:
    """Name the keys of a section as flags do: accelerate adds `fsdp_` to those that lack it."""
    if not isinstance(section, dict):
        return {}
    prefix = "fsdp_" if name == "fsdp_config" else ""
    return {prefix + str(key).removeprefix(prefix): value for key, value in section.items()}


def _plain(value: object) -> object:
    """Convert the value of a flag to the value that YAML would have."""
    return {"true": True, "false": False}.get(str(value).lower(), value)


def _of_document(document: Document) -> Asked:
    block = document.in_deepspeed("activation_checkpointing")
    asked = Asked(
        zero_stage=document.zero_stage,
        offload=document.offload_devices,
        bf16_master=document.in_deepspeed("bf16.bf16_master_weights_and_grads") is True,
        checkpointing=isinstance(block, dict) and any(block.values()),
    )
    if document.accelerate is None:
        return asked
    kind = document.accelerate.get("distributed_type")
    launcher = document.in_accelerate("deepspeed_config.deepspeed_multinode_launcher")
    return replace(
        asked,
        world_size=_count(document, "num_processes"),
        num_machines=_count(document, "num_machines"),
        distributed_type=kind if isinstance(kind, str) else None,
        multinode_launcher=launcher if isinstance(launcher, str) else None,
        offload={
            what: where
            for what, where in asked.offload.items()
            if (what == "fsdp") == (kind == "FSDP")
        },
    )


def _count(document: Document, key: str) -> int | None:
    value = document.in_accelerate(key)
    return value if isinstance(value, int) and value > 0 else None


def _of_environment(environ: Mapping[str, str]) -> Asked:
    """Read what a launcher exported (accelerate/utils/launch.py), if it cannot be found itself."""
    if _is_true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        document = _of_json(environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        asked = Asked() if document is None else _of_document(document)
        return replace(asked, source="ACCELERATE_USE_DEEPSPEED", distributed_type="DEEPSPEED")
    if _is_true(environ.get("ACCELERATE_USE_FSDP")):
        return Asked(source="ACCELERATE_USE_FSDP", distributed_type="FSDP")
    return Asked(source="WORLD_SIZE" if environ.get("WORLD_SIZE") else "")


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
