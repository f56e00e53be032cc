"""Judge the surroundings of a launch: allocator settings, the launch file, versions."""

from collections.abc import Callable, Mapping

from trainer_plugins.advice import version_faults as faults
from trainer_plugins.advice.version_faults import Fault
from trainer_plugins.allocator.lint import lint
from trainer_plugins.allocator.variables import pick
from trainer_plugins.check.facts import Check, CheckLine, Facts
from trainer_plugins.checkpointing import options
from trainer_plugins.finding import Finding
from trainer_plugins.launch.extensions import find_needed_by, lock_findings
from trainer_plugins.launch.lint.judge import judge_document

# Debugging variables and their costs: "CUDA Environment Variables" in torch's docs.
_DEBUG = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is a cudaMalloc: training is many times slower",
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel",
}
_HALVES = ("bfloat16", "float16")


def allocator(facts: Facts) -> CheckLine | None:
    """Judge the allocator settings."""
    if not facts.versions:
        return None
    texts = pick(facts.environ)
    seen = ", ".join(f"{name}={text}" for name, text in texts.items())
    return CheckLine("allocator", seen or "default settings", lint(texts, facts.machine))


def launch_file(facts: Facts) -> CheckLine | None:
    """Judge the file for `accelerate launch`."""
    if not facts.document.name:
        return None
    strategy = facts.run.strategy
    num_ranks = strategy.world_size if strategy else facts.run.local_ranks
    found = judge_document(
        facts.document,
        training=dict(facts.run.values) or None,
        num_ranks=num_ranks if num_ranks > 1 else None,  # 1 is also the default
    )
    return CheckLine("launch file", facts.document.name, found)


def builds(facts: Facts) -> CheckLine | None:
    """Judge whether an interrupted build of an extension will make the launch wait forever."""
    if facts.own_pids:  # in a Trainer, StrategyInForce reports it
        return None
    found = tuple(lock_findings(facts.locks, find_needed_by(facts.document)))
    return CheckLine("extensions", "no build was interrupted", found)


def versions(facts: Facts) -> CheckLine | None:
    """Judge whether these versions are known to leak or to waste memory."""
    there = facts.versions
    if not there:
        return None
    names = ("torch", "transformers", "accelerate")
    seen = ", ".join(f"{name} {there[name]}" for name in names if name in there)
    known = [_judge_fault(fault, facts) for fault in _MEETS]
    return CheckLine("versions", seen, tuple(filter(None, (_wrong_torch(facts), *known))))


def switches(facts: Facts) -> CheckLine | None:
    """Judge debugging variables that are still set."""
    debug = pick(facts.environ, _DEBUG)
    on = {name: text for name, text in debug.items() if text not in ("", "0")}
    if not on:
        return None
    finding = Finding.warning(
        code="debug-switch",
        summary="; ".join(_DEBUG[name] for name in on),
        evidence=", ".join(f"{name}={text}" for name, text in on.items()),
        remedy=f"unset {' '.join(on)}",
    )
    return CheckLine("debugging", "", (finding,))


CHECKS: tuple[Check, ...] = (allocator, launch_file, builds, versions, switches)


def _wrong_torch(facts: Facts) -> Finding | None:
    if facts.own_pids or not facts.cards or "+cpu" not in facts.versions.get("torch", ""):
        return None
    return Finding.warning(
        code="torch-without-cuda",
        summary="the installed torch cannot use the cards of this machine: it trains on the CPU",
        evidence=f"torch {facts.versions['torch']}, {len(facts.cards)} card(s)",
        remedy="Install a build of torch for CUDA: pytorch.org/get-started",
    )


def _is_fsdp2(facts: Facts) -> bool:
    strategy = facts.run.strategy
    if strategy is None or strategy.family != "FSDP":
        return facts.document.get_fsdp("version") == 2
    return strategy.wrapped_class != "FullyShardedDataParallel"


def _has_frozen_halves(facts: Facts) -> bool:
    is_mixed = facts.run.flag("bf16") or facts.run.flag("fp16")
    return is_mixed and any(facts.model.frozen_bytes.get(each) for each in _HALVES)


def _has_whole_experts(facts: Facts) -> bool:
    is_quantised = not {"uint8", "int8"}.isdisjoint(facts.model.frozen_bytes)
    return is_quantised and facts.model.expert_bytes > 0


def _reenters(facts: Facts) -> bool:
    return options(facts.run.values).get("use_reentrant") is True


# Which settings of a run meet a fault; older faults cannot be here, setup.cfg has the versions.
_MEETS: Mapping[Fault, Callable[[Facts], object]] = {
    faults.WRAPPED_PARTS: lambda facts: (
        _is_fsdp2(facts) and facts.document.get_fsdp("activation_checkpointing") is True
    ),
    faults.FROZEN_IN_FLOAT32: lambda facts: _is_fsdp2(facts) and _has_frozen_halves(facts),
    faults.WHOLE_EXPERTS: _has_whole_experts,
    faults.LOADED_BY_EACH: lambda facts: (
        facts.model.expert_bytes > 0
        and facts.document.get_fsdp("cpu_ram_efficient_loading") is True
    ),
    faults.REENTRANT_LEAK: lambda facts: _is_fsdp2(facts) and _reenters(facts),
    faults.COMPILE_LEAK: lambda facts: facts.run.flag("torch_compile"),
    faults.GATHERED_KEPT: lambda facts: (
        facts.document.zero_stage == 3 and facts.model.is_checkpointing
    ),
    faults.PINNED_ANYWAY: lambda facts: (
        facts.document.zero_stage in (1, 2)
        and facts.document.get_offload("optimizer", "pin_memory") is False
    ),
    faults.EXPERTS_KEPT: lambda facts: (
        _has_whole_experts(facts) and facts.model.is_checkpointing and not _reenters(facts)
    ),
    faults.COPIES_KEPT: lambda facts: facts.run.flag("activation_offloading"),
    faults.SLEEPS_WITH_WEIGHTS: lambda facts: facts.run.flag("vllm_enable_sleep_mode"),
}


def _judge_fault(fault: Fault, facts: Facts) -> Finding | None:
    text = facts.versions.get(fault.library, "")
    if not fault.is_in(text) or not _MEETS[fault](facts):
        return None
    return Finding.warning(
        code="known-version",
        summary=f"{fault.library} {text}: {fault.symptom}",
        evidence=fault.source,
        remedy=fault.cure,
    )
