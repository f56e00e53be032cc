"""Reads YAML or JSON in bounded time, and refuses text that cannot be a launch file."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

# No launch file comes near these limits: the largest one of accelerate, DeepSpeed, TRL and axolotl
# has 5 KB and 5 levels.
_MOST_BYTES = 1 << 20
_MOST_LEVELS = 50
_MOST_VALUES = 5_000


class ConfigError(ValueError):
    """A launch file, its name or a change to it is wrong.

    The text is for the user, on one line.
    """


def read_text(path: Path, source: str) -> str:
    """Read a file of text.

    Raises:
        ConfigError: it cannot be read, is too large for a launch file, or is not UTF-8.
    """
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
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ConfigError(
            f"{source} is not UTF-8: byte 0x{byte:02x} in line {line}. Save it as UTF-8"
        ) from None


def parse_json(text: str, source: str) -> tuple[object, tuple[str, ...]]:
    """Parse JSON; the second value names the keys that occur twice in one mapping.

    Raises:
        ConfigError: it is not JSON, is nested too deep, or holds a number that is not finite.
    """
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        duplicates.extend(_more_than_once([key for key, _ in items]))
        return dict(items)

    def integer(digits: str) -> int | float:
        # Python refuses thousands of digits, and does not name the key.
        return int(digits) if len(digits) < 100 else math.inf

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(_too_deep(source)) from None
    _refuse_impossible_numbers(value, source)
    return value, tuple(duplicates)


def parse_yaml(text: str, source: str) -> tuple[object, tuple[str, ...]]:
    """Parse YAML without tags that run code; the second value names keys that occur twice.

    Raises:
        ConfigError: it is not YAML, is nested too deep, refers to itself, or holds a value that
            cannot be.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, ()
        duplicates = _written_twice(root, loader, source)
        value: object = loader.construct_document(root)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{source} is not YAML: {said}") from None
    except RecursionError:
        raise ConfigError(_too_deep(source)) from None
    _refuse_impossible_numbers(value, source)
    return value, duplicates


def _written_twice(root: yaml.Node, loader: yaml.SafeLoader, source: str) -> tuple[str, ...]:
    found: list[str] = []
    for node, name in _walk(root, _within_node, source):
        if isinstance(node, yaml.MappingNode):
            found += _more_than_once([key for key, _ in _within_node(node)])
        elif isinstance(node, yaml.ScalarNode):
            try:
                loader.construct_object(node)
            # A date in month 13, a number of 5,000 digits: PyYAML does not say where.
            except ValueError as error:
                place = f"{source}, line {node.start_mark.line + 1}"
                raise ConfigError(f"{place}: {name} is {str(node.value)[:40]!r}: {error}") from None
    return tuple(dict.fromkeys(found))


def _refuse_impossible_numbers(loaded: object, source: str) -> None:
    for value, name in _walk(loaded, _within_value, source):
        # Written so that NaN, which compares with nothing, is refused too.
        if isinstance(value, (int, float)) and not -(2.0**64) < value < 2.0**64:
            shown = str(value) if len(str(value)) < 25 else f"{str(value)[:20]}..."
            raise ConfigError(
                f"{source}: {name} is {shown}, which is implausible: write another number"
            )


def _within_node(node: object) -> list[tuple[str, object]]:
    if isinstance(node, yaml.MappingNode):
        return [(str(key.value), value) for key, value in node.value]
    return [("", value) for value in node.value] if isinstance(node, yaml.SequenceNode) else []


def _within_value(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(str(key), one) for key, one in value.items()]
    return [("", one) for one in value] if isinstance(value, list) else []


def _walk(
    root: object, within: Callable[[object], list[tuple[str, object]]], source: str
) -> Iterator[tuple[object, str]]:
    """Yield each value with its dotted name, as often as anchors refer to it.

    If this ends, other readers end too.
    """
    waiting = [(root, "", 1)]
    num_seen = 0
    while waiting:
        value, name, level = waiting.pop()
        num_seen += 1
        if level > _MOST_LEVELS:
            raise ConfigError(f"{_too_deep(source)}, in {name.partition('.')[0]}")
        if num_seen > _MOST_VALUES:
            raise ConfigError(
                f"{source} has more than {_MOST_VALUES:,} values once its anchors are followed"
            )
        yield value, name
        waiting += [
            (one, ".".join(filter(None, (name, key))), level + 1)
            for key, one in reversed(within(value))
        ]


def _more_than_once(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _too_deep(source: str) -> str:
    return f"{source} has more than {_MOST_LEVELS} nested levels, or an anchor that holds itself"
