"""Check the form of a file: unknown or duplicate keys, wrong types, misleading file names."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.lint import keys
from trainer_plugins.launch.lint.agreement import read_asked_values
from trainer_plugins.launch.lint.document import Document, Mapping, get_block

_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "boolean": ("true or false", bool),
    "integer": ("an integer", (int, float)),
    "number": ("a number", (int, float)),
    "text": ("text", str),
    "mapping": ("a mapping", dict),
    "sequence": ("a list", list),
    "anything": ("anything", object),
}
# HfTrainerDeepSpeedConfig, or accelerate's DeepSpeedPlugin, replaces "auto" for these.
_AUTO = {
    *read_asked_values({}, num_ranks=None),
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}
# YAML reads a bare NO as false, and accelerate accepts that.
_MAY_BE_FALSE = ("distributed_type", "mixed_precision", "dynamo_backend")


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
        yield from _block(document.deepspeed, "", keys.DEEPSPEED)
        for name, known in keys.BLOCKS.items():
            yield from _block(get_block(document.deepspeed, name), f"{name}.", known)


def name_findings(document: Document) -> Iterator[Finding]:
    """Judge whether the name of the file matches its content."""
    name, stage = document.name.lower(), document.zero_stage
    claimed = re.search(r"(?:zero|stage|_z)_?(?:stage)?_?([0-3])", name)
    if claimed and stage is not None and stage != int(claimed[1]):
        yield _misleading(document, f"it says stage {claimed[1]}", f"the file has stage {stage}")
    offloads = document.offload_devices
    if re.search(r"no_?offload", name):
        if offloads:
            yield _misleading(document, "it says no offload", f"the file has {offloads}")
    elif "offload" in name and not offloads:
        yield _misleading(document, "it says offload", "nothing in the file is offloaded")
    if "nvme" in name and "nvme" not in offloads.values():
        yield _misleading(document, "it says nvme", "nothing in the file is on a drive")


def wrong_value(key: str, value: object, why: str, remedy: str = "") -> Finding:
    """Report a value that none of its readers accepts."""
    return Finding.error(
        code="config-wrong-value",
        summary=f"{key} is {'missing' if value is None else repr(value)}",
        evidence=why,
        remedy=remedy or f"Change {key}",
    )


def report_ignored_key(summary: str, why: str, remedy: str) -> Finding:
    """Report a key without effect."""
    return Finding.warning(code="config-ignored-key", summary=summary, evidence=why, remedy=remedy)


def _misleading(document: Document, claim: str, fact: str) -> Finding:
    return Finding.warning(
        code="config-name",
        summary=f"the name {document.name} is misleading: {claim}",
        evidence=fact,
        remedy="Rename the file, or make the name true",
    )


def _accelerate(config: Mapping) -> Iterator[Finding]:
    for key, value in config.items():
        if key not in keys.ACCELERATE:
            what = "accelerate launch refuses it (had unknown keys)"
            yield _unknown(key, "", keys.ACCELERATE, what)
        elif value is not None and not (key == "num_processes" and value in ("gpu", "auto")):
            yield from _kind(key, value, keys.ACCELERATE[key])
    for section, known in keys.ACCELERATE_SECTIONS.items():
        for key, value in get_block(config, section).items():
            name = str(key)
            if section == "fsdp_config" and not name.startswith("fsdp"):
                name = f"fsdp_{key}"
            if name not in known:
                what = "accelerate ignores it and does not warn"
                yield _unknown(str(key), f"{section}.", known, what)
            elif value == "auto" and name in _AUTO:
                continue  # DeepSpeedPlugin accepts the word, and the Trainer replaces it
            elif value is not None and name != "deepspeed_config_file":
                yield from _kind(f"{section}.{key}", value, known[name])


def _block(block: Mapping, prefix: str, known: keys.Keys) -> Iterator[Finding]:
    ignores_unknown = prefix.removesuffix(".") in keys.PASSED_OVER
    for key, value in block.items():
        name = f"{prefix}{key}"
        if name in keys.REMOVED:
            yield Finding.error(
                code="config-removed-key",
                summary=f"DeepSpeed has removed {name}, and refuses it",
                evidence="_reject_removed_config_keys of 0.19.8; older versions read it",
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
            if ignores_unknown and "comment" in str(key):
                continue  # JSON has no other place for a comment
            what = "ignores it and does not warn" if ignores_unknown else "refuses it"
            yield _unknown(str(key), prefix, known, f"DeepSpeed {what}")
        elif value == "auto" and (known[key] != "text" or name in keys.AUTO_IS_OFF):
            yield from _auto(name)
        elif value is not None:
            yield from _kind(name, value, known[key])
    if prefix in ("optimizer.", "scheduler."):
        for key, value in get_block(block, "params").items():
            if value == "auto":
                yield from _auto(f"{prefix}params.{key}")


def _auto(name: str) -> Iterator[Finding]:
    if name in keys.AUTO_IS_OFF:
        yield Finding.warning(
            code="config-unresolved-auto",
            summary=f'{name} is "auto", and accelerate replaces it by {keys.AUTO_IS_OFF[name]}',
            evidence="DeepSpeedPlugin.__post_init__ fills it from its own defaults",
            remedy=f"Write the value that {name} should have",
        )
    elif name not in _AUTO:
        yield Finding.error(
            code="config-unresolved-auto",
            summary=f'{name} stays "auto": neither transformers nor accelerate replaces it',
            evidence="accelerate's deepspeed_config_process raises; bare DeepSpeed drops it",
            remedy=f"Write a value, or leave {name} out for DeepSpeed's default",
        )


def _unknown(key: str, prefix: str, known: keys.Keys, what: str) -> Finding:
    near = get_close_matches(key, known, 1, 0.7)
    homes = [f"{name}.{key}" for name, block in keys.BLOCKS.items() if key in block]
    if key in keys.DEEPSPEED:
        homes.append(key)
    remedy = "Remove it"
    if near:
        remedy = f"Write {prefix}{near[0]}, or remove it"
    elif homes:
        remedy = f"Move it to {homes[0]}, or remove it"
    is_harmless = not near and not homes and "refuses" not in what
    return Finding(
        code="config-unknown-key",
        severity=Severity.WARNING if is_harmless else Severity.ERROR,
        summary=f"{prefix}{key} is not a known key",
        evidence=what,
        remedy=remedy,
    )


def _kind(name: str, value: object, kind: str) -> Iterator[Finding]:
    if _is_of(kind, value) or (kind == "text" and name in _MAY_BE_FALSE):
        return
    quoted = isinstance(value, str) and re.fullmatch(
        r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", value, re.IGNORECASE
    )
    yaml_note = "; YAML 1.1 reads 5e7 as text, 5.0e+7 or 50000000 as a number" if quoted else ""
    wanted, _ = _KINDS[kind]
    yield Finding.error(
        code="config-wrong-type",
        summary=f"{name} is {value!r}, but should be {wanted}",
        evidence=f"read as {type(value).__name__}{yaml_note}",
        remedy=f"Write it without quotes, as {wanted}" if quoted else f"Write {wanted}",
    )


def _is_of(kind: str, value: object) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False  # bool is an int in Python
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return isinstance(value, _KINDS[kind][1])
