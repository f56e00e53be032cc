"""`trainer-plugins exec`: run any command, with callbacks on every Trainer built under it."""

import os
from typing import Annotated, Any

import typer

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_VLLM = "vLLM will run inside the training process."


def exec_(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--preset P] [--memory-... VALUE] -- COMMAND [ARGUMENT ...]"),
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
    import json
    import sys

    from trainer_plugins.launch.environment import gather, launch_environment
    from trainer_plugins.launch.extensions import lock_findings
    from trainer_plugins.plug_in import _site
    from trainer_plugins.plug_in.flags import Flags
    from trainer_plugins.printable import printable

    flags = Flags(
        "trainer-plugins exec",
        "-- COMMAND [ARGUMENT ...]",
        exec_.__doc__ or "",
        switches={"vllm": _VLLM},
    )
    flags.parser.print_help = _print_help  # type: ignore[method-assign]
    given, words = flags.split(command or [])
    if not words:
        flags.refuse(
            "name a command after --, as in: trainer-plugins exec -- accelerate launch train.py"
        )
    facts = gather(os.environ, with_vllm="vllm" in flags.switched_on or _asks_for_vllm(words))
    for finding in lock_findings(facts.extension_locks):
        print(f"{finding.severity.name} {finding}", file=sys.stderr)
    environment = launch_environment(os.environ, facts)
    changed = {
        export.name: export.value
        for export in environment.exports
        if export.purpose == environment.allocator and os.environ.get(export.name) != export.value
    }
    if not _has_guards(given):
        changed = {}
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
        flags.refuse(f"cannot run {words[0]}: {error.strerror}", exit_code)


def _has_guards(given: dict[str, object]) -> bool:
    """Return whether the preset does more than observe, which changes nothing."""
    from trainer_plugins.plug_in.options import DEFAULT_PRESET
    from trainer_plugins.presets import preset

    asked = preset(str(given.get("preset") or DEFAULT_PRESET))
    return not {*asked.callbacks} <= {*preset("observe").callbacks}


def _asks_for_vllm(words: list[str]) -> bool:
    """Return whether a command has TRL's `--use_vllm`, and no vLLM server.

    trl/trainer/grpo_config.py: the default of `vllm_mode` is "colocate".
    """
    text = " ".join(words).lower().replace("-", "_").replace("=", " ")
    refused = ("use_vllm false", "vllm_mode server")
    return "use_vllm" in text and not any(each in text for each in refused)


def _print_help(file: object = None) -> None:
    """Print the help as the other commands do: that of a command which has these options."""
    from dataclasses import fields
    from inspect import Parameter, Signature

    from trainer_plugins.cli.typed_options import Command
    from trainer_plugins.plug_in.flags import flag_of
    from trainer_plugins.plug_in.options import MemoryArguments, kind_of
    from trainer_plugins.presets import PRESETS

    def described() -> None:
        """Stand for `exec`."""

    def parameter(name: str, kind: Any, shown: Any, default: Any = Parameter.empty) -> Parameter:
        annotation = Annotated[kind, shown]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    command = typer.Argument(metavar="-- COMMAND", help="The command to run.")
    parameters = [parameter("command", list[str], command)]
    for option in fields(MemoryArguments):
        # The help of an option ends with the name of its callback.
        words, _, callback = option.metadata["help"].removesuffix(")").partition(" (")
        kind = kind_of(option)
        shown = typer.Option(
            flag_of(option),
            help=words,
            metavar="N" if kind in (int, float) else None,
            rich_help_panel=callback or None,
        )
        parameters.append(parameter(option.name, kind, shown, option.default))
    parameters.append(parameter("vllm", bool, typer.Option("--vllm", help=_VLLM), False))
    described.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    presets = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)
    app = typer.Typer(
        add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command(cls=Command, help=exec_.__doc__, epilog=presets)(described)
    app(["--help"], prog_name="trainer-plugins exec")
