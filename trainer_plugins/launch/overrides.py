"""Change values in the text of a launch file, and keep its comments."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import yaml

from trainer_plugins.finding import Severity
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import ConfigError, document_of, parse
from trainer_plugins.launch.lint.judge import judge_document
from trainer_plugins.printable import printable


def override_values(text: str, overrides: Sequence[str], name: str) -> str:
    """Apply `key=value` overrides to a shipped file's text; raise ConfigError if it would fail."""
    for override in overrides:
        text = _update_comments(_overridden(text, override, name), override)
    changed = printable(f"# Changed in this copy: {', '.join(overrides)}; figures are without it")
    text = text.replace("compute_environment:", f"{changed}\ncompute_environment:", 1)
    findings = judge_document(document_of(name, *parse(text, name)))
    if findings and findings[0].severity is Severity.ERROR:
        raise ConfigError(f"the resulting file would not run: {findings[0]}")
    return text


def _overridden(text: str, override: str, name: str) -> str:
    key, _, written = override.partition("=")
    if not (key and written):
        takes = "key=value, as in zero_optimization.reduce_bucket_size=2e8"
        raise ConfigError(f"--set takes {takes}, got {override!r}")
    value, config = _value(written), yaml.safe_load(text)
    section, _, rest = key.partition(".")
    in_sections = _list_dotted(keys.ACCELERATE_SECTIONS)
    if key in in_sections and rest != "deepspeed_config_file":
        if section not in config:
            raise ConfigError(f"{name} has no {section}, so {key} would have no effect")
        return _set_line(text, rest, value, section)
    if key in keys.ACCELERATE and key not in keys.ACCELERATE_SECTIONS:
        return _set_line(text, key, value, None)
    of_deepspeed = [*keys.DEEPSPEED, *_list_dotted(keys.BLOCKS)]
    is_parameter = key.startswith(("optimizer.params.", "scheduler.params."))
    if key not in of_deepspeed and not is_parameter:
        choices = [*of_deepspeed, *keys.ACCELERATE, *in_sections]
        same_end = [each for each in choices if each.split(".")[-1] == key]
        near = same_end or get_close_matches(key, choices, 1, 0.6)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--set {key}: there is no such key{hint}")
    if "deepspeed_config" not in config:
        raise ConfigError(f"{name} does not run DeepSpeed, so {key} would have no effect")
    return _set_json(text, key, value)


def _update_comments(text: str, override: str) -> str:
    """Update the numbers in comments that say how to launch the file."""
    name, _, value = override.partition("=")
    if not value.isdecimal():
        return text
    text = re.sub(rf" \[--{name} \d+\]", "", text)
    text = re.sub(rf"--{name} \d+", f"--{name} {value}", text)
    several = "es" if value != "1" else ""
    runs = f"# It runs {value} process{several}, unless a launch gives --num_processes.\n"
    return re.sub(rf"# Without --{name} .*\n", runs, text)


def _list_dotted(blocks: Mapping[str, keys.Keys]) -> list[str]:
    return [f"{block}.{key}" for block, known in blocks.items() for key in known]


def _value(written: str) -> object:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) >= 10
    return int(value) if is_whole else value


def _set_line(text: str, key: str, value: object, section: str | None) -> str:
    indent = "  " if section else ""
    line = f"{indent}{key}: {json.dumps(value)}"
    present = re.compile(rf"^{indent}{key}:.*$", re.MULTILINE)
    if present.search(text):
        return present.sub(lambda _: line, text, count=1)
    before = re.compile(rf"^{section or 'distributed_type'}:.*$", re.MULTILINE)
    return before.sub(lambda found: f"{found[0]}\n{line}", text, count=1)


def _set_json(text: str, key: str, value: object) -> str:
    """Set one value of the DeepSpeed JSON, which ends a file that has one."""
    head, marker, body = text.partition("  deepspeed_config_file: |\n")
    config = json.loads(body)
    block = config
    *parents, last = key.split(".")
    for parent in parents:
        block = block.setdefault(parent, {})
        if not isinstance(block, dict):
            raise ConfigError(f"--set {key}: {parent} holds a value, not a block")
    block[last] = value
    lines = json.dumps(config, indent=2).splitlines()
    return head + marker + "".join(f"    {line}\n" for line in lines)
