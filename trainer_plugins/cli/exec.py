"""`trainer-plugins exec`: runs any command, with callbacks on every Trainer built under it."""

import os
from typing import Annotated

import typer

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def exec_(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--preset P] [--memory-... VALUE] -- COMMAND [ARGUMENT ...]"),
    ] = None,
) -> None:
    """Run a command in the environment of a launch, with callbacks on every Trainer under it.

    `exec --help` lists all options.

    The command replaces this process, so its exit code is passed on: 127 if it is not found, 126 if
    it cannot be run.
    """
    import json
    import sys

    from trainer_plugins.launch.environment import gather, launch_environment
    from trainer_plugins.launch.extensions import lock_findings
    from trainer_plugins.plug_in import _site
    from trainer_plugins.plug_in.flags import Flags

    flags = Flags(
        "trainer-plugins exec",
        "-- COMMAND [ARGUMENT ...]",
        "Run a command in the environment of a launch (what `trainer-plugins env` prints, except"
        " for variables that you have set), with callbacks on every transformers.Trainer that any"
        " Python under it builds.",
    )
    given, words = flags.split(command or [])
    if not words:
        flags.refuse(
            "name a command after --, as in: trainer-plugins exec -- accelerate launch train.py"
        )
    facts = gather(os.environ)
    for finding in lock_findings(facts.extension_locks):
        print(f"{finding.severity.name} {finding}", file=sys.stderr)
    exports = launch_environment(os.environ, facts).exports
    environ = os.environ | {export.name: export.value for export in exports}
    environ["TRAINER_PLUGINS_ATTACH"] = json.dumps(given)
    environ["PYTHONPATH"] = os.pathsep.join(
        [*_site.__path__, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        # As shells, env and timeout do: a launcher may check for these two.
        exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        flags.refuse(f"cannot run {words[0]}: {error.strerror}", exit_code)
