"""Document: a launch file as written: accelerate part, DeepSpeed part, and duplicate keys."""

import base64
import binascii
from dataclasses import dataclass
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

    name: str
    """The file's name without its suffix."""

    accelerate: Mapping | None = None
    deepspeed: Mapping | None = None
    duplicates: tuple[str, ...] = ()
    """Keys that occur twice in one mapping; readers keep the last and do not warn."""

    json_path: str | None = None
    """`deepspeed_config_file`, if it names a file."""

    json_problem: str | None = None
    """Why the DeepSpeed part could not be read, if one is named."""


def read_document(path: Path) -> Document:
    """Read an accelerate YAML (or its JSON form) or a DeepSpeed JSON.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping.
    """
    loaded, duplicates = read_mapping(path)
    accelerate = (
        "distributed_type" in loaded
        or "compute_environment" in loaded
        or "deepspeed_config" in loaded
    )
    if not accelerate and path.suffix == ".json":
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
    """Join an accelerate mapping with the DeepSpeed JSON that it names.

    Args:
        name: the file's name without its suffix.
        accelerate: the mapping.
        duplicates: keys that occur twice in it.
        folder: where the launch starts; None is the current folder.
    """
    section = accelerate.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if named is None:
        return Document(name=name, accelerate=accelerate, duplicates=duplicates)
    deepspeed, more, json_path, problem = _named_json(named, folder or Path())
    return Document(
        name=name,
        accelerate=accelerate,
        deepspeed=deepspeed,
        duplicates=duplicates + more,
        json_path=json_path,
        json_problem=problem,
    )


def _named_json(
    named: object, folder: Path
) -> tuple[Mapping | None, tuple[str, ...], str | None, str | None]:
    """Read `deepspeed_config_file` as accelerate does: path, else JSON text, else base64 of JSON.

    A path is relative to `folder`.

    Source: accelerate/utils/deepspeed.py, HfDeepSpeedConfig.__init__ (1.10 to 1.15).
    """
    if not isinstance(named, str):
        return None, (), None, f"it is a {type(named).__name__}, but accelerate reads text"
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
        # A path may happen to be valid base64; nobody means that.
        return None, (), None if "{" in named else named, str(error)
    except (binascii.Error, OSError, ValueError):
        return None, (), named, "there is no such file, and it is neither JSON nor base64"
    if not isinstance(loaded, dict):
        return None, (), json_path, f"it holds a {type(loaded).__name__}, not a mapping"
    return loaded, duplicates, json_path, None
