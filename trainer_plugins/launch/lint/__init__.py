"""Judges launch files before the launch: any accelerate YAML or DeepSpeed JSON.

It imports neither accelerate nor DeepSpeed: the tables in `keys.py` list what they read, and each
rule names its source.
"""

from collections.abc import Mapping
from pathlib import Path

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.accelerate import accelerate_findings
from trainer_plugins.launch.lint.deepspeed import zero_findings
from trainer_plugins.launch.lint.document import Document, read_document
from trainer_plugins.launch.lint.memory import memory_findings
from trainer_plugins.launch.lint.names import name_findings
from trainer_plugins.launch.lint.schema import schema_findings
from trainer_plugins.launch.lint.text import ConfigError
from trainer_plugins.launch.lint.training import training_arguments, training_findings
from trainer_plugins.launch.main_memory import HostLimits

_UNKNOWN = HostLimits()

__all__ = ["ConfigError", "Document", "check", "judge", "read_document", "training_arguments"]


def check(
    path: Path,
    *,
    training: Mapping[str, object] | None = None,
    num_params: float | None = None,
    num_ranks: int | None = None,
    host: HostLimits = _UNKNOWN,
) -> tuple[Finding, ...]:
    """Judge one launch file.

    Args:
        path: an accelerate YAML or a DeepSpeed JSON.
        training: TrainingArguments by name, as `training_arguments` reads them from a command line.
        num_params: parameters of the model, all of them trained; without it main memory is not
            judged.
        num_ranks: ranks on all machines; None is what the file says, or 1.
        host: main memory of a machine.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping.
    """
    return judge(
        read_document(path),
        training=training,
        num_params=num_params,
        num_ranks=num_ranks,
        host=host,
    )


def judge(
    document: Document,
    *,
    training: Mapping[str, object] | None = None,
    num_params: float | None = None,
    num_ranks: int | None = None,
    host: HostLimits = _UNKNOWN,
) -> tuple[Finding, ...]:
    """Judge a document that was read; see `check`. The worst findings come first."""
    found = [
        *schema_findings(document),
        *accelerate_findings(document),
        *zero_findings(document),
        *name_findings(document),
        *training_findings(document, training),
        *memory_findings(document, num_params, num_ranks, host),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: -finding.severity))
