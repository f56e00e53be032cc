"""Read the strategy that a launch requests, from all places that can specify one."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from trainer_plugins.launch.launcher import Launcher, find_launcher
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import (
    ConfigError,
    Document,
    document_of,
    get_block,
    read_deepspeed,
    read_document,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Holds the requested strategy. None, or empty, means that it is not specified."""

    source: str = ""  # the source of the request, for the evidence: `zero3.yaml`
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

    The script sees neither flags nor file of `accelerate launch`; without a launcher, the
    environment counts. transformers lets `deepspeed` and `fsdp` override the launch file.
    """
    launcher = find_launcher()
    asked = read_launcher(launcher) if launcher is not None else None
    asked = asked or _read_environment(environ)
    started = environ.get("WORLD_SIZE", "")
    num_started = int(started) if started.isdigit() else None
    asked = replace(
        asked,
        use_cpu=_is_true(environ.get("ACCELERATE_USE_CPU")),
        started=num_started,
        world_size=asked.world_size or num_started,
    )
    own = _read_json(deepspeed)
    if own is None and not fsdp:
        return asked
    name = "fsdp" if own is None else "deepspeed"
    own = own or Asked()
    # TrainingArguments replace the strategy of the launch, but not its ranks.
    return replace(
        asked,
        source=f"TrainingArguments.{name}",
        distributed_type=name.upper(),
        zero_stage=own.zero_stage,
        offload=own.offload,
        bf16_master=own.bf16_master,
        checkpointing=own.checkpointing,
        misspelt={},
        flags_beside_json=(),
    )


def read_launcher(launcher: Launcher) -> Asked | None:
    """Read flags and file of `accelerate launch`; None if accelerate does not know the flags."""
    flags = launcher.flags()
    if flags is None:
        return None
    # The command line's flags, which win, as in accelerate/commands/utils.py.
    given: set[str] = getattr(flags, "nondefault", set())
    path = launcher.file(flags)
    source, config = "accelerate launch", dict[str, Any]()
    if path is not None:
        with suppress(ConfigError):
            config, source = read_document(path).accelerate or {}, path.name
    misspelt = _correct(config)
    for kind, flag in _KIND_FLAGS.items():
        if getattr(flags, flag, False):
            config["distributed_type"] = kind
    for section, known in keys.ACCELERATE_SECTIONS.items():
        written = {key: getattr(flags, key) for key in known if key in given}
        config[section] = get_block(config, section) | written
    has_json = config["deepspeed_config"].get("deepspeed_config_file") is not None
    ignored = given & set(keys.REFUSED_BESIDE_JSON) if has_json else set()
    for key in ("num_processes", "num_machines"):
        if key in given:
            config[key] = getattr(flags, key)
    asked = _read_document(document_of(source, config, folder=launcher.folder))
    # A flag that accelerate ignores was still requested.
    offload = dict(asked.offload)
    for what in ("optimizer", "param"):
        if f"offload_{what}_device" in ignored:
            offload[what] = getattr(flags, f"offload_{what}_device")
    one_process_for = "--cpu" if flags.cpu else None
    if one_process_for is None and config.get("distributed_type") in ("NO", "MULTI_CPU"):
        one_process_for = f"the type {config['distributed_type']}"
    return replace(
        asked,
        source=source,
        misspelt=misspelt,
        zero_stage=flags.zero_stage if "zero_stage" in ignored else asked.zero_stage,
        offload={what: where for what, where in offload.items() if where != "none"},
        flags_beside_json=tuple(sorted(f"--{key}" for key in ignored)),
        one_process_for=one_process_for,
    )


def _correct(config: dict[str, Any]) -> dict[str, str]:
    """Correct likely typos in the keys of `deepspeed_config`; return them with the right keys."""
    section = get_block(config, "deepspeed_config")
    found, free = {}, set(keys.ACCELERATE_DEEPSPEED) - set(section)
    for key in section:
        match = get_close_matches(str(key), free, 1, 0.8)
        if key not in keys.ACCELERATE_DEEPSPEED and match:
            found[key] = match[0]
    config["deepspeed_config"] = {found.get(key, key): value for key, value in section.items()}
    return found


def _read_document(document: Document) -> Asked:
    kind = document.get_accelerate("distributed_type")
    launcher = document.get_accelerate("deepspeed_config.deepspeed_multinode_launcher")
    block = document.get_deepspeed("activation_checkpointing")
    return Asked(
        distributed_type=kind if isinstance(kind, str) else None,
        world_size=document.count("num_processes"),
        num_machines=document.count("num_machines"),
        zero_stage=document.zero_stage,
        offload={
            what: where
            for what, where in document.offload_devices.items()
            if (what == "fsdp") == (kind == "FSDP")
        },
        bf16_master=document.get_deepspeed("bf16.bf16_master_weights_and_grads") is True,
        checkpointing=isinstance(block, dict) and any(block.values()),
        multinode_launcher=launcher if isinstance(launcher, str) else None,
    )


def _read_environment(environ: Mapping[str, str]) -> Asked:
    """Read a launcher's exports (accelerate/utils/launch.py), if the launcher is not found."""
    if _is_true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        asked = _read_json(environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")) or Asked()
        return replace(asked, source="ACCELERATE_USE_DEEPSPEED", distributed_type="DEEPSPEED")
    if _is_true(environ.get("ACCELERATE_USE_FSDP")):
        return Asked(source="ACCELERATE_USE_FSDP", distributed_type="FSDP")
    return Asked(source="WORLD_SIZE" if environ.get("WORLD_SIZE") else "")


def _read_json(given: object) -> Asked | None:
    """Read a DeepSpeed JSON given as a mapping, a path or text; None for anything else."""
    document = read_deepspeed(given)  # the launch itself reports its errors
    return _read_document(document) if document.deepspeed else None


def _is_true(text: str | None) -> bool:
    return re.fullmatch("1|true|yes|y|on|t", text or "", re.IGNORECASE) is not None
