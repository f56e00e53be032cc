"""Read a launch file in bounded time: its accelerate and DeepSpeed parts, and duplicate keys."""

import base64
import binascii
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

Mapping = dict[str, Any]
# The largest launch file of accelerate, DeepSpeed, TRL and axolotl has 5 KB and 5 levels.
_MOST_BYTES = 1 << 20
_MOST_LEVELS = 50
_MOST_VALUES = 5_000


class ConfigError(ValueError):
    """A launch file, its name or a change to it is wrong; the user gets the text on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Holds one file that `accelerate launch --config_file` or DeepSpeed reads."""

    name: str  # the file's name without its suffix
    accelerate: Mapping | None = None
    deepspeed: Mapping | None = None
    duplicates: tuple[str, ...] = ()  # keys that occur twice in a mapping; readers keep the last
    json_path: str | None = None  # `deepspeed_config_file`, if it names a file
    json_problem: str | None = None  # why a named DeepSpeed part could not be read

    def get_accelerate(self, name: str) -> object:
        return part(self.accelerate or {}, name)

    def get_deepspeed(self, name: str) -> object:
        return part(self.deepspeed or {}, name)

    def count(self, name: str) -> int | None:
        """Return a count in the accelerate part, if it is 1 or more: `num_processes`."""
        value = self.get_accelerate(name)
        return value if isinstance(value, int) and value > 0 else None

    def get_fsdp(self, key: str) -> object:
        """Return a value of `fsdp_config`, whose keys may lack the prefix `fsdp_`."""
        found = self.get_accelerate(f"fsdp_config.fsdp_{key}")
        return self.get_accelerate(f"fsdp_config.{key}") if found is None else found

    def get_offload(self, what: str, key: str) -> object:
        """Return DeepSpeed's value for an offload: `("param", "nvme_path")`."""
        if self.deepspeed is None:
            return self.get_accelerate(f"deepspeed_config.offload_{what}_{key}")
        return self.get_deepspeed(f"zero_optimization.offload_{what}.{key}")

    @property
    def zero_stage(self) -> int | None:
        """Return the ZeRO stage that will run; None if DeepSpeed will not run."""
        if self.deepspeed is not None:
            stage = self.get_deepspeed("zero_optimization.stage")
            if isinstance(stage, (int, float)) and not isinstance(stage, bool):
                return int(stage)
            return 2 if stage == "auto" else 0
        runs_deepspeed = self.get_accelerate("distributed_type") == "DEEPSPEED"
        if not runs_deepspeed or self.json_problem is not None:
            return None
        stage = self.get_accelerate("deepspeed_config.zero_stage")
        return stage if isinstance(stage, int) else 2

    @property
    def offload_devices(self) -> dict[str, str]:
        """Return the offloaded parts and their places: `{"optimizer": "cpu"}`."""
        found = {}
        for what, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
            device = self.get_offload(what, "device")
            if self.get_deepspeed(f"zero_optimization.{old}") is True:
                device = "cpu"
            if device in ("cpu", "nvme"):
                found[what] = str(device)
        if str(self.get_fsdp("offload_params")).lower() == "true":  # text, if it is a flag
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


def get_block(config: Mapping, name: str) -> Mapping:
    """Return the mapping at a dotted name; an empty one if there is none."""
    found = part(config, name)
    return found if isinstance(found, dict) else {}


def read_document(path: Path) -> Document:
    """Read an accelerate YAML (or its JSON form) or a DeepSpeed JSON, or raise ConfigError."""
    source = str(path)
    loaded, duplicates = parse(_read_text(path, source), source, is_json=path.suffix == ".json")
    of_accelerate = {"distributed_type", "compute_environment", "deepspeed_config"}
    if path.suffix == ".json" and of_accelerate.isdisjoint(loaded):
        return Document(name=path.stem, deepspeed=loaded, duplicates=duplicates)
    return document_of(path.stem, loaded, duplicates)


def document_of(
    name: str, accelerate: Mapping, duplicates: tuple[str, ...] = (), folder: Path | None = None
) -> Document:
    """Join an accelerate mapping with the DeepSpeed JSON that it names, relative to `folder`."""
    document = Document(name=name, accelerate=accelerate, duplicates=duplicates)
    named = document.get_accelerate("deepspeed_config.deepspeed_config_file")
    return document if named is None else _add_json(document, named, folder or Path())


def read_deepspeed(given: object) -> Document:
    """Read a DeepSpeed JSON given as a mapping, a path, text or base64 text."""
    document = Document(name="deepspeed")
    if isinstance(given, dict):
        return replace(document, deepspeed=given)
    return _add_json(document, given, Path())


def _add_json(document: Document, named: object, folder: Path) -> Document:
    """Read `deepspeed_config_file` as accelerate does: path, else JSON, else base64 of JSON."""
    if not isinstance(named, str):
        problem = f"it is a {type(named).__name__}, but accelerate reads text"
        return replace(document, json_problem=problem)
    json_path, source = None, "deepspeed_config_file"
    try:  # accelerate/utils/deepspeed.py, HfDeepSpeedConfig.__init__ (1.10 to 1.15)
        if "{" in named:
            text = named
        elif (path := folder / Path(named).expanduser()).is_file():
            json_path, source = named, f"deepspeed_config_file {named}"
            text = _read_text(path, source)
        else:
            text = base64.urlsafe_b64decode(named).decode("utf-8")
        loaded, duplicates = parse(text, source, is_json=True)
    except ConfigError as error:
        # A path may happen to be valid base64: treat it as a path.
        path_or_none = None if "{" in named else named
        return replace(document, json_path=path_or_none, json_problem=str(error))
    except (binascii.Error, OSError, ValueError):
        problem = "there is no such file, and it is neither JSON nor base64"
        return replace(document, json_path=named, json_problem=problem)
    duplicates = document.duplicates + duplicates
    return replace(document, deepspeed=loaded, duplicates=duplicates, json_path=json_path)


def _read_text(path: Path, source: str) -> str:
    """Read a UTF-8 file, up to the size limit of a launch file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        wanted = "Give an accelerate YAML or a DeepSpeed JSON"
        raise ConfigError(f"{source} cannot be read: {error.strerror or error}. {wanted}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{source} has more than 1 MiB, so it cannot be a launch file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8: {error}. Save it as UTF-8") from None


def parse(text: str, source: str, *, is_json: bool = False) -> tuple[Mapping, tuple[str, ...]]:
    """Parse JSON, or YAML without tags that run code; the second value names keys written twice."""
    duplicates: list[str] = []
    try:
        if is_json:
            value = json.loads(text, object_pairs_hook=partial(_make_dict, duplicates))
        else:
            value = _Loader(text, source, duplicates).get_single_data()
    except ConfigError:
        raise
    # PyYAML has no own error for a date in month 13, or for a number of 5,000 digits.
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{source} is not {'JSON' if is_json else 'YAML'}: {said}") from None
    except RecursionError:
        raise ConfigError(_too_deep(source)) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        wanted = "a mapping: write `key: value` lines, or a JSON object"
        raise ConfigError(f"{source} holds {kind}, not {wanted}")
    _refuse_implausible(value, source)
    return value, tuple(dict.fromkeys(duplicates))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads YAML, and adds the keys that occur twice in a mapping to `duplicates`."""

    def __init__(self, text: str, source: str, duplicates: list[str]) -> None:
        super().__init__(text)
        self.source, self.duplicates = source, duplicates

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        _make_dict(self.duplicates, [(str(key.value), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_VALUES:  # nested merges multiply
            raise ConfigError(_too_many(self.source))


def _make_dict(duplicates: list[str], items: list[tuple[str, Any]]) -> Mapping:
    counts = Counter(name for name, _ in items)
    duplicates += sorted(name for name, count in counts.items() if count > 1)
    return dict(items)


def _refuse_implausible(root: Mapping, source: str) -> None:
    """Refuse implausible numbers, and files on which other readers would hang."""
    waiting: list[tuple[object, str, int]] = [(root, "", 1)]
    num_seen = 0
    while waiting:
        value, name, level = waiting.pop()
        num_seen += 1  # an anchor counts at each reference
        if level > _MOST_LEVELS:
            raise ConfigError(f"{_too_deep(source)}, in {name.partition('.')[0]}")
        if num_seen > _MOST_VALUES:
            raise ConfigError(_too_many(source))
        # Written so that NaN, for which no comparison holds, is refused too.
        if isinstance(value, (int, float)) and not -(2.0**64) < value < 2.0**64:
            shown = str(value) if len(str(value)) < 25 else f"{str(value)[:20]}..."
            why = f"{name} is {shown}, which is implausible: write another number"
            raise ConfigError(f"{source}: {why}")
        if isinstance(value, dict):
            inner = [(one, f"{name}.{key}".lstrip("."), level + 1) for key, one in value.items()]
            waiting += reversed(inner)
        elif isinstance(value, list):
            waiting += [(one, name, level + 1) for one in reversed(value)]


def _too_deep(source: str) -> str:
    return f"{source} has more than {_MOST_LEVELS} nested levels, or an anchor that holds itself"


def _too_many(source: str) -> str:
    return f"{source} has more than {_MOST_VALUES:,} values once its anchors are followed"
