"""Judge the surroundings of a launch: allocator settings, the launch file, versions."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.allocator.lint import lint
from trainer_plugins.allocator.variables import Variables
from trainer_plugins.check.facts import Check, CheckLine, Environment, Facts
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
    there = facts.environment
    if not there.versions:
        return None
    variables = Variables.pick(there.environ)
    seen = ", ".join(f"{name}={text}" for name, text in variables.texts.items())
    return CheckLine("allocator", seen or "default settings", lint(variables, there.machine))


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
    there = facts.environment
    if not there.versions:
        return None
    names = ("torch", "transformers", "accelerate")
    seen = ", ".join(f"{name} {there.versions[name]}" for name in names if name in there.versions)
    known = [rule.judge(there) for rule in _KNOWN if rule.applies(facts)]
    return CheckLine("versions", seen, tuple(filter(None, (_wrong_torch(facts, there), *known))))


def switches(facts: Facts) -> CheckLine | None:
    """Judge debugging variables that are still set."""
    environ = facts.environment.environ
    on = {name: environ[name] for name in _DEBUG if environ.get(name, "0") not in ("", "0")}
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


def _wrong_torch(facts: Facts, there: Environment) -> Finding | None:
    if facts.own_pids or not facts.cards or "+cpu" not in there.versions.get("torch", ""):
        return None
    return Finding.warning(
        code="torch-without-cuda",
        summary="the installed torch cannot use the cards of this machine: it trains on the CPU",
        evidence=f"torch {there.versions['torch']}, {len(facts.cards)} card(s)",
        remedy="Install a build of torch for CUDA: pytorch.org/get-started",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownVersions:
    package: str
    since: tuple[int, ...] = ()  # the first version with the problem
    fixed: tuple[int, ...] | None  # the first version without the problem; None: there is none yet
    applies: Callable[[Facts], bool]
    what: str
    issue: str
    remedy: str

    def judge(self, there: Environment) -> Finding | None:
        text = there.versions.get(self.package, "")
        number = tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
        if not number or number < self.since or (self.fixed or (sys.maxsize,)) <= number:
            return None
        return Finding.warning(
            code="known-version",
            summary=f"{self.package} {text}: {self.what}",
            evidence=self.issue,
            remedy=self.remedy,
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


def _asks_one_rank_to_load(facts: Facts) -> bool:
    return (
        facts.model.expert_bytes > 0
        and facts.document.get_fsdp("cpu_ram_efficient_loading") is True
    )


# Add a row for a problem that was reported or found in the code, with its source.
_KNOWN = (
    # accelerate/utils/fsdp_utils.py, fsdp2_apply_ac: read in 1.14.0 and 1.15.0
    _KnownVersions(
        package="accelerate",
        fixed=(1, 15),
        applies=lambda facts: (
            _is_fsdp2(facts) and facts.document.get_fsdp("activation_checkpointing") is True
        ),
        what="FSDP2's activation checkpointing wraps the parts of a layer one by one, and keeps"
        " all tensors between them",
        issue="accelerate#3897, #4172: 29 of 40.8 GB at 131,072 tokens",
        remedy="pip install -U 'accelerate>=1.15', or"
        f" {advice.CHECKPOINTING.flag(Door.TRAINER)} instead of fsdp_activation_checkpointing",
    ),
    # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model: read in 1.12.0 and 1.13.0
    _KnownVersions(
        package="accelerate",
        fixed=(1, 13),
        applies=lambda facts: _is_fsdp2(facts) and _has_frozen_halves(facts),
        what="FSDP2 casts all weights to float32, frozen ones too: twice the memory of a 16-bit"
        " base",
        issue="accelerate#3844",
        remedy="pip install -U 'accelerate>=1.13'",
    ),
    _KnownVersions(
        package="transformers",
        since=(5,),
        fixed=None,
        applies=_has_whole_experts,
        what="bitsandbytes leaves experts in 16 bits, because one tensor per layer holds them all",
        issue="bitsandbytes#1849, axolotl#3374: a run that fitted with 4.57 died while loading",
        remedy=f"{advice.QUANTISED_EXPERTS.flag(Door.CODE)}; or"
        f" {advice.QUANTISED_EXPERTS.flag(Door.SHELL)}",
    ),
    # modeling_utils.py, _load_pretrained_model, does not check the rank: read and run with 5.23.0
    _KnownVersions(
        package="transformers",
        since=(5,),
        fixed=None,
        applies=_asks_one_rank_to_load,
        what="loading on one rank has no effect: each rank of a machine stacks all experts in main"
        " memory",
        issue="transformers#43749, open; seen with 5.0.0",
        remedy="Count the weights once for each rank, or set"
        f" {advice.READ_BY_ONE_RANK.flag(Door.DEEPSPEED)}, which"
        f" {advice.READ_BY_ONE_RANK.effect}",
    ),
    _KnownVersions(
        package="torch",
        fixed=None,
        applies=lambda facts: (
            _is_fsdp2(facts) and options(facts.run.values).get("use_reentrant") is True
        ),
        what="reentrant checkpointing under FSDP2 leaks in the backward pass",
        issue="pytorch#169349, open; seen with 2.9.0",
        remedy=advice.NON_REENTRANT.flag(Door.ARGUMENTS),
    ),
    _KnownVersions(
        package="torch",
        fixed=(2, 10),
        applies=lambda facts: facts.run.flag("torch_compile"),
        what="torch.compile leaks memory",
        issue="pytorch#174468: fixed in 2.10, as far as known",
        remedy="pip install -U 'torch>=2.10'",
    ),
)
