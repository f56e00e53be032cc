"""Apply all rules to a launch file, the worst finding first."""

from collections.abc import Mapping

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.accelerate import accelerate_findings
from trainer_plugins.launch.lint.agreement import agreement_findings
from trainer_plugins.launch.lint.deepspeed import zero_findings
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.host_memory import memory_findings
from trainer_plugins.launch.lint.schema import name_findings, schema_findings
from trainer_plugins.launch.main_memory import HostLimits

_UNKNOWN = HostLimits()


def judge_document(
    document: Document,
    *,
    training: Mapping[str, object] | None = None,
    num_params: float | None = None,
    num_ranks: int | None = None,
    host: HostLimits = _UNKNOWN,
) -> tuple[Finding, ...]:
    """Judge a launch file, the worst finding first; main memory only if `num_params` is known."""
    found = [
        *schema_findings(document),
        *accelerate_findings(document),
        *zero_findings(document),
        *name_findings(document),
        *agreement_findings(document, training, num_ranks),
        *memory_findings(document, num_params, num_ranks, host),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: -finding.severity))
