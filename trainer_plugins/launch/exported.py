"""Gathers what a launcher told this process: the launch file, and what was exported for it."""

import os
from collections.abc import Mapping

from trainer_plugins.launch.launcher import find_launcher, launched_by
from trainer_plugins.launch.lint.document import document_of
from trainer_plugins.launch.masked import masked, masked_command, masked_text
from trainer_plugins.record.run_facts import Launch

_EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_OF_DEEPSPEED = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Gather how this process was launched, without secrets.

    The variables are what accelerate makes of its file and flags, and what it reads in each rank:
    they hold even where the launcher itself cannot be found, or the file has changed since. It
    takes a few milliseconds.

    Args:
        environ: the environment of this process.
    """
    launcher = find_launcher()
    flags = launcher.flags() if launcher is not None else None
    file = launcher.file(flags) if launcher is not None and flags is not None else None
    exported = {name: text for name, text in environ.items() if name.startswith(_EXPORTED)}
    named = exported.pop(_OF_DEEPSPEED, None)
    document = document_of("", {"deepspeed_config": {"deepspeed_config_file": named}})
    deepspeed = masked(document.deepspeed) if document.deepspeed is not None else {}
    if document.json_path is not None:
        exported[_OF_DEEPSPEED] = document.json_path
    shown = masked(exported)
    return Launch(
        file="" if file is None else masked_text(os.fspath(file)),
        words=masked_command(launched_by()),
        environment=shown if isinstance(shown, dict) else {},
        deepspeed=deepspeed if isinstance(deepspeed, dict) else {},
    )
