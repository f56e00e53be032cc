"""Rules of form: unknown keys, duplicate keys, values of the wrong kind."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.document import Document, Mapping

_NOWHERE = "Remove it"
_KINDS = {
    "b": "true or false",
    "i": "an integer",
    "f": "a number",
    "s": "text",
    "m": "a mapping",
    "l": "a list",
}


def schema_findings(document: Document) -> Iterator[Finding]:
    """Judge the form of every key of the file."""
    for key in document.duplicates:
        yield Finding.error(
            code="config-duplicate-key",
            summary=f"{key} occurs twice in one mapping",
            evidence="the reader keeps the last one and does not warn",
            remedy="Keep one of them",
        )
    if document.accelerate is not None:
        yield from _accelerate(document.accelerate)
    if document.deepspeed is not None:
        yield from _deepspeed(document.deepspeed)


def _accelerate(config: Mapping) -> Iterator[Finding]:
    for key, value in config.items():
        if key not in keys.ACCELERATE:
            yield _unknown(
                key, "", keys.ACCELERATE, "accelerate launch refuses it (had unknown keys)"
            )
        elif value is not None and not (key == "num_processes" and value in ("gpu", "auto")):
            yield from _kind(key, value, keys.ACCELERATE[key])
    sections = (
        ("deepspeed_config", keys.ACCELERATE_DEEPSPEED),
        ("fsdp_config", keys.ACCELERATE_FSDP),
    )
    for section, known in sections:
        block = config.get(section)
        for key, value in block.items() if isinstance(block, dict) else ():
            full = (
                f"fsdp_{key}"
                if section == "fsdp_config" and not str(key).startswith("fsdp")
                else str(key)
            )
            if full not in known:
                yield _unknown(
                    str(key), f"{section}.", known, "accelerate ignores it and does not warn"
                )
            elif value == "auto" and full in keys.AUTO:
                continue  # DeepSpeedPlugin accepts the word, and the Trainer replaces it
            elif value is not None and full != "deepspeed_config_file":
                yield from _kind(f"{section}.{key}", value, known[full])


def _deepspeed(config: Mapping) -> Iterator[Finding]:
    yield from _block(config, "", keys.DEEPSPEED)
    for name, known in keys.BLOCKS.items():
        block = part(config, name)
        if isinstance(block, dict):
            yield from _block(block, f"{name}.", known)


def _block(block: Mapping, prefix: str, known: keys.Keys) -> Iterator[Finding]:
    for key, value in block.items():
        name = f"{prefix}{key}"
        if name in keys.REMOVED:
            yield Finding.error(
                code="config-removed-key",
                summary=f"DeepSpeed has removed {name}, and refuses it",
                evidence="deepspeed/runtime/config.py, _reject_removed_config_keys (0.19.8); older"
                " versions read it",
                remedy=f"Remove {name}",
            )
        elif name in keys.DEPRECATED:
            yield Finding.warning(
                code="config-deprecated-key",
                summary=f"{name} is deprecated",
                evidence="transformers and accelerate only look for the new name",
                remedy=f"Write {keys.DEPRECATED[name]}",
            )
        elif key not in known:
            passed_over = prefix.removesuffix(".") in keys.PASSED_OVER
            if passed_over and "comment" in str(key):
                continue  # JSON has no other place for a comment
            what = (
                "DeepSpeed ignores it and does not warn" if passed_over else "DeepSpeed refuses it"
            )
            yield _unknown(str(key), prefix, known, what)
        elif value == "auto" and (known[key] != "s" or name in keys.AUTO_IS_OFF):
            yield from _auto(name)
        elif value is not None:
            yield from _kind(name, value, known[key])
    if prefix in ("optimizer.", "scheduler."):
        params = block.get("params")
        for key, value in params.items() if isinstance(params, dict) else ():
            if value == "auto":
                yield from _auto(f"{prefix}params.{key}")


def _auto(name: str) -> Iterator[Finding]:
    if name in keys.AUTO:
        return
    if name in keys.AUTO_IS_OFF:
        yield Finding.warning(
            code="config-unresolved-auto",
            summary=f'{name} is "auto", for which accelerate fills in {keys.AUTO_IS_OFF[name]}',
            evidence="DeepSpeedPlugin.__post_init__ fills it from its own defaults",
            remedy=f"Write the value that {name} should have",
        )
        return
    yield Finding.error(
        code="config-unresolved-auto",
        summary=f'nobody fills in {name}: "auto"',
        evidence="accelerate's deepspeed_config_process raises if it has no value for it; bare"
        " DeepSpeed drops it",
        remedy=f"Write a value, or leave {name} out for DeepSpeed's default",
    )


def _unknown(key: object, prefix: str, known: keys.Keys, what: str) -> Finding:
    near = get_close_matches(str(key), known, 1, 0.7)
    meant = bool(near) or "refuses" in what or _home(str(key)) != _NOWHERE
    return Finding(
        code="config-unknown-key",
        severity=Severity.ERROR if meant else Severity.WARNING,
        summary=f"{prefix}{key} is not a known key",
        evidence=what,
        remedy=f"Write {prefix}{near[0]}, or remove it" if near else _home(str(key)),
    )


def _home(key: str) -> str:
    """Say where a key belongs that is valid elsewhere."""
    homes = [f"{name}.{key}" for name, known in keys.BLOCKS.items() if key in known]
    homes += [key] if key in keys.DEEPSPEED else []
    return f"Move it to {homes[0]}, or remove it" if homes else _NOWHERE


def _kind(name: str, value: object, kind: str) -> Iterator[Finding]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "b": isinstance(value, bool),
        "i": number and float(value).is_integer() if isinstance(value, (int, float)) else False,
        "f": number,
        "s": isinstance(value, str),
        "m": isinstance(value, dict),
        "l": isinstance(value, list),
        "*": True,
    }[kind]
    # YAML reads a bare NO as false, and accelerate accepts these words for a bool.
    if fits or (kind == "s" and name in ("distributed_type", "mixed_precision", "dynamo_backend")):
        return
    if name == "zero_optimization" and isinstance(value, bool):
        kind = "m"
    quoted = isinstance(value, str) and re.fullmatch(
        r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", value, re.IGNORECASE
    )
    yield Finding.error(
        code="config-wrong-type",
        summary=f"{name} is {value!r}, but should be {_KINDS[kind]}",
        evidence=f"read as {type(value).__name__}"
        + ("; YAML 1.1 reads 5e7 as text, 5.0e+7 or 50000000 as a number" if quoted else ""),
        remedy=f"Write it without quotes, as {_KINDS[kind]}" if quoted else f"Write {_KINDS[kind]}",
    )


def part(config: Mapping, name: str) -> object:
    """Return the value at a dotted name; None if there is none.

    >>> part({"bf16": {"enabled": True}}, "bf16.enabled")
    True
    """
    value: object = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
