"""Reads a launch file: its accelerate part, its DeepSpeed part, and its duplicate keys."""

import base64
import binascii
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer_plugins.launch.lint.text import ConfigError as ConfigError
from trainer_plugins.launch.lint.text import parse_json, parse_yaml, read_text

Mapping = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Holds one file that `accelerate launch --config_file` or DeepSpeed reads.

    At least one of its two parts is there.
    """

    name: str  # the file's name without its suffix
    accelerate: Mapping | None = None
    deepspeed: Mapping | None = None
    duplicates: tuple[str, ...] = ()
    """Keys that occur twice in one mapping; readers keep the last and do not warn."""

    json_path: str | None = None  # `deepspeed_config_file`, if it names a file
    json_problem: str | None = None  # why the DeepSpeed part could not be read, if one is named

    def in_accelerate(self, name: str) -> object:
        """Return the value at a dotted name of the accelerate part; None if there is none."""
        return part(self.accelerate or {}, name)

    def in_deepspeed(self, name: str) -> object:
        """Return the value at a dotted name of the DeepSpeed part; None if there is none."""
        return part(self.deepspeed or {}, name)

    @property
    def zero_stage(self) -> int | None:
        """Return the ZeRO stage that will run; None if DeepSpeed will not run."""
        if self.deepspeed is not None:
            stage = self.in_deepspeed("zero_optimization.stage")
            if isinstance(stage, (int, float)) and not isinstance(stage, bool):
                return int(stage)
            return 2 if stage == "auto" else 0
        runs_deepspeed = self.in_accelerate("distributed_type") == "DEEPSPEED"
        if not runs_deepspeed or self.json_problem is not None:
            return None
        stage = self.in_accelerate("deepspeed_config.zero_stage")
        return stage if isinstance(stage, int) else 2

    @property
    def offload_devices(self) -> dict[str, str]:
        """Return what is offloaded and where to: `{"optimizer": "cpu"}`."""
        found = {}
        for what, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
            device = self.in_deepspeed(f"zero_optimization.offload_{what}.device")
            if self.deepspeed is None:
                device = self.in_accelerate(f"deepspeed_config.offload_{what}_device")
            elif self.in_deepspeed(f"zero_optimization.{old}") is True:
                device = "cpu"
            if device in ("cpu", "nvme"):
                found[what] = str(device)
        fsdp = self.in_accelerate("fsdp_config")
        if isinstance(fsdp, dict) and (
            fsdp.get("fsdp_offload_params", fsdp.get("offload_params")) in (True, "true")
        ):
            found["fsdp"] = "cpu"
        return found


def part(config: Mapping, name: str) -> object:
    """Return the value at a dotted name; None if there is none.

    >>> part({"bf16": {"enabled": True}}, "bf16.enabled")
    True
    """
    value: object = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_document(path: Path) -> Document:
    """Read an accelerate YAML (or its JSON form) or a DeepSpeed JSON.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping.
    """
    loaded, duplicates = read_mapping(path)
    of_accelerate = {"distributed_type", "compute_environment", "deepspeed_config"}
    if path.suffix == ".json" and of_accelerate.isdisjoint(loaded):
        return Document(name=path.stem, deepspeed=loaded, duplicates=duplicates)
    return document_of(path.stem, loaded, duplicates)


def read_mapping(path: Path) -> tuple[Mapping, tuple[str, ...]]:
    """Read a YAML or JSON file, and the keys that occur twice in it.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping.
    """
    parse = parse_json if path.suffix == ".json" else parse_yaml
    loaded, duplicates = parse(read_text(path, str(path)), str(path))
    if not isinstance(loaded, dict):
        kind = "nothing" if loaded is None else f"a {type(loaded).__name__}"
        raise ConfigError(
            f"{path} holds {kind}, not a mapping: write `key: value` lines, or a JSON object"
        )
    return loaded, duplicates


def document_of(
    name: str, accelerate: Mapping, duplicates: tuple[str, ...] = (), folder: Path | None = None
) -> Document:
    """Join an accelerate mapping with the DeepSpeed JSON that it names, relative to `folder`."""
    document = Document(name=name, accelerate=accelerate, duplicates=duplicates)
    named = document.in_accelerate("deepspeed_config.deepspeed_config_file")
    return document if named is None else _with_json(document, named, folder or Path())


def _with_json(document: Document, named: object, folder: Path) -> Document:
    """Read `deepspeed_config_file` as accelerate does: path, else JSON text, else base64 of JSON.

    Source: accelerate/utils/deepspeed.py, HfDeepSpeedConfig.__init__ (1.10 to 1.15).
    """
    if not isinstance(named, str):
        problem = f"it is a {type(named).__name__}, but accelerate reads text"
        return replace(document, json_problem=problem)
    json_path, source = None, "deepspeed_config_file"
    try:
        if "{" in named:
            text = named
        elif (path := folder / Path(named).expanduser()).is_file():
            json_path, source = named, f"deepspeed_config_file {named}"
            text = read_text(path, source)
        else:
            text = base64.urlsafe_b64decode(named).decode("utf-8")
        loaded, duplicates = parse_json(text, source)
    except ConfigError as error:
        # A path may happen to be valid base64: it is a path then.
        path_or_none = None if "{" in named else named
        return replace(document, json_path=path_or_none, json_problem=str(error))
    except (binascii.Error, OSError, ValueError):
        problem = "there is no such file, and it is neither JSON nor base64"
        return replace(document, json_path=named, json_problem=problem)
    if not isinstance(loaded, dict):
        problem = f"it holds a {type(loaded).__name__}, not a mapping"
        return replace(document, json_path=json_path, json_problem=problem)
    return replace(
        document,
        deepspeed=loaded,
        duplicates=document.duplicates + duplicates,
        json_path=json_path,
    )
