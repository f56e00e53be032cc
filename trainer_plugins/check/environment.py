"""Judges what surrounds a launch: allocator settings, the launch file, versions."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer_plugins.allocator.lint import lint
from trainer_plugins.check.facts import Environment, Facts, Line
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.extensions import lock_findings
from trainer_plugins.launch.lint import judge

_DEBUG = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is a cudaMalloc: training is many times slower",
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
}
"""Variables for debugging, and what each costs: "CUDA Environment Variables" of torch's docs."""

SWITCHES = tuple(_DEBUG)


def allocator(facts: Facts) -> Line | None:
    """Judge the settings of the allocator."""
    there = facts.environment
    if there is None:
        return None
    seen = ", ".join(f"{name}={text}" for name, text in there.variables.texts.items())
    return Line("allocator", seen or "default settings", lint(there.variables, there.machine))


def launch_file(facts: Facts) -> Line | None:
    """Judge the file that `accelerate launch` will get."""
    there = facts.environment
    if there is None or there.document is None:
        return None
    values = None if facts.run is None else dict(facts.run.values) or None
    return Line("launch file", there.document.name, judge(there.document, training=values))


def builds(facts: Facts) -> Line | None:
    """Judge whether a cut-off build of an extension will make the launch wait for ever."""
    if facts.environment is None or facts.own_pids:  # StrategyInForce tells it in a Trainer
        return None
    found = tuple(lock_findings(facts.environment.locks))
    return Line("extensions", "no build is cut off", found)


def versions(facts: Facts) -> Line | None:
    """Judge whether the versions are known to leak or to take more than they need."""
    there = facts.environment
    if there is None:
        return None
    names = ("torch", "transformers", "accelerate")
    seen = ", ".join(f"{name} {there.versions[name]}" for name in names if name in there.versions)
    found = [_known(rule, there) for rule in _KNOWN if rule.applies(facts)]
    return Line("versions", seen, (*_wrong_torch(facts, there), *filter(None, found)))


def switches(facts: Facts) -> Line | None:
    """Judge variables that were set for debugging."""
    on = {} if facts.environment is None else facts.environment.switches
    on = {name: text for name, text in on.items() if text not in ("", "0")}
    if not on:
        return None
    finding = Finding(
        code="debug-switch",
        severity=Severity.WARNING,
        summary="; ".join(_DEBUG[name] for name in on),
        evidence=", ".join(f"{name}={text}" for name, text in on.items()),
        remedy=f"unset {' '.join(on)}",
    )
    return Line("debugging", "", (finding,))


CHECKS: tuple[Callable[[Facts], Line | None], ...] = (
    allocator,
    launch_file,
    builds,
    versions,
    switches,
)


@dataclass(frozen=True, slots=True)
class _Known:
    """Names versions of a package that take more memory than they need."""

    package: str
    fixed: tuple[int, ...] | None
    """The first version without it; None: there is none yet."""

    applies: Callable[[Facts], bool]
    what: str
    issue: str
    remedy: str


def _fsdp_section(facts: Facts) -> dict[str, object]:
    document = None if facts.environment is None else facts.environment.document
    section = ((document.accelerate if document else None) or {}).get("fsdp_config")
    return section if isinstance(section, dict) else {}


def _is_fsdp2(facts: Facts) -> bool:
    strategy = None if facts.run is None else facts.run.strategy
    if strategy is None or strategy.family != "FSDP":
        return _fsdp_section(facts).get("fsdp_version") == 2
    return strategy.wrapped_class != "FullyShardedDataParallel"


def _has_fsdp_checkpointing(facts: Facts) -> bool:
    return _is_fsdp2(facts) and _fsdp_section(facts).get("fsdp_activation_checkpointing") is True


def _is_reentrant(facts: Facts) -> bool:
    values = {} if facts.run is None else facts.run.values
    names = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    options = [values.get(name) for name in names]
    asked = any(isinstance(each, dict) and each.get("use_reentrant") is True for each in options)
    return _is_fsdp2(facts) and asked


def _is_compiled(facts: Facts) -> bool:
    return facts.run is not None and facts.run.flag("torch_compile")


_KNOWN = (
    # accelerate/utils/fsdp_utils.py, fsdp2_apply_ac: 1.14.0 and 1.15.0 were read
    _Known(
        "accelerate",
        (1, 15),
        _has_fsdp_checkpointing,
        "FSDP2's activation checkpointing wraps each part of a layer, and keeps what is between",
        "accelerate#4172: 29 of 40.8 GB at 131,072 tokens",
        "pip install -U 'accelerate>=1.15', or --gradient_checkpointing in place of"
        " fsdp_activation_checkpointing",
    ),
    _Known(
        "torch",
        None,
        _is_reentrant,
        "reentrant checkpointing under FSDP2 leaks in the backward pass",
        "pytorch#169349, open; seen with 2.9.0",
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
    ),
    _Known(
        "torch",
        (2, 10),
        _is_compiled,
        "torch.compile leaks memory",
        "pytorch#174468: 2.10 seems to mend it",
        "pip install -U 'torch>=2.10'",
    ),
)
"""Extended by a row: what was read or reported, with its source."""


def _known(rule: _Known, there: Environment) -> Finding | None:
    text = there.versions.get(rule.package, "")
    number = tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
    if not number or (rule.fixed is not None and number >= rule.fixed):
        return None
    return Finding(
        code="known-version",
        severity=Severity.WARNING,
        summary=f"{rule.package} {text}: {rule.what}",
        evidence=rule.issue,
        remedy=rule.remedy,
    )


def _wrong_torch(facts: Facts, there: Environment) -> Iterator[Finding]:
    if facts.own_pids or not facts.cards or "+cpu" not in there.versions.get("torch", ""):
        return
    yield Finding(
        code="torch-without-cuda",
        severity=Severity.WARNING,
        summary="this machine has cards, and the installed torch cannot use them: it trains on the"
        " CPU",
        evidence=f"torch {there.versions['torch']}, {len(facts.cards)} card(s)",
        remedy="Install a build of torch for CUDA: pytorch.org/get-started",
    )
