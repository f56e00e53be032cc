"""`trainer-plugins exec`: run any command, with callbacks on every Trainer built under it."""

import json
import os
import sys
from typing import Annotated

import typer

from trainer_plugins.cli.typed_options import Vllm
from trainer_plugins.plug_in.flags import CommandInFront, with_memory_options
from trainer_plugins.printable import printable

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


class ExecCommand(CommandInFront):
    """Parses `trainer-plugins exec`."""

    prog = "trainer-plugins exec"


@with_memory_options
def exec_(
    context: typer.Context,
    vllm: Vllm = False,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The command to run.")
    ] = None,
) -> None:
    """Run a command with callbacks on every Trainer under it.

    A preset with guards also sets the allocator settings of `trainer-plugins env`, unless you have
    set some, and prints a line about it. With --vllm, or TRL's --use_vllm in the command, these
    leave out expandable segments. Nothing else is set except the hook.

    Example: trainer-plugins exec --preset survive -- accelerate launch train.py

    The command replaces this process, so its exit code is passed on: 127 if it is not found, 126 if
    it cannot be run.
    """
    from trainer_plugins.launch.environment import gather, launch_environment
    from trainer_plugins.launch.extensions import lock_findings
    from trainer_plugins.plug_in import _site

    given, words = ExecCommand.given(context.params), list(command or ())
    if not words:
        ExecCommand.refuse(
            "name a command after --, as in: trainer-plugins exec -- accelerate launch train.py"
        )
    facts = gather(os.environ, with_vllm=vllm or _asks_for_vllm(words))
    for finding in lock_findings(facts.extension_locks):
        print(f"{finding.severity.name} {finding}", file=sys.stderr)
    environment = launch_environment(os.environ, facts)
    exports = environment.exports if _has_guards(given) else ()
    changed = {
        export.name: export.value
        for export in exports
        if export.purpose == environment.allocator and os.environ.get(export.name) != export.value
    }
    if changed:
        assigned = " ".join(f"{name}={value}" for name, value in changed.items())
        line = f"trainer-plugins exec sets {assigned}: {environment.allocator}"
        print(printable(line), file=sys.stderr)
    environ = os.environ | changed | {"TRAINER_PLUGINS_ATTACH": json.dumps(given)}
    path = os.environ.get("PYTHONPATH")
    # An exec under an exec finds the folder there already.
    theirs = [each for each in path.split(os.pathsep) if each not in _site.__path__] if path else []
    environ["PYTHONPATH"] = os.pathsep.join([*_site.__path__, *theirs])
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        # As shells, env and timeout do: a launcher may check for these two.
        exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        ExecCommand.refuse(f"cannot run {words[0]}: {error.strerror}", exit_code)


def _has_guards(given: dict[str, object]) -> bool:
    """Return whether the preset does more than observe, which changes nothing."""
    from trainer_plugins.plug_in.options import DEFAULT_PRESET
    from trainer_plugins.presets import preset

    asked = preset(str(given.get("preset") or DEFAULT_PRESET))
    return not {*asked.callbacks} <= {*preset("observe").callbacks}


def _asks_for_vllm(words: list[str]) -> bool:
    """Return whether a command has TRL's `--use_vllm`, by default colocated, and no vLLM server."""
    text = " ".join(words).lower().replace("-", "_").replace("=", " ")
    refused = ("use_vllm false", "vllm_mode server")
    return "use_vllm" in text and not any(each in text for each in refused)
