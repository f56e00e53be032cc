"""`trainer-plugins exec`: runs any command, with callbacks on every Trainer built under it."""

import os
from typing import Annotated

import typer

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_VLLM = "vLLM will run inside the training process."


def exec_(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--preset P] [--memory-... VALUE] -- COMMAND [ARGUMENT ...]"),
    ] = None,
) -> None:
    """Run a command in the environment of a launch, with callbacks on every Trainer under it.

    The environment is what `trainer-plugins env` prints, except for variables that you have set.
    With --vllm, or TRL's --use_vllm in the command, it leaves out expandable segments.

    Example: trainer-plugins exec --preset survive -- accelerate launch train.py

    The command replaces this process, so its exit code is passed on: 127 if it is not found, 126 if
    it cannot be run.
    """
    import json
    import sys

    from trainer_plugins.launch.environment import ASKS_FOR_VLLM, gather, launch_environment
    from trainer_plugins.launch.extensions import lock_findings
    from trainer_plugins.plug_in import _site
    from trainer_plugins.plug_in.flags import Flags

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
    if environment.allocator.endswith(ASKS_FOR_VLLM):
        print(f"trainer-plugins exec: {environment.allocator}", file=sys.stderr)
    environ = os.environ | {export.name: export.value for export in environment.exports}
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


def _asks_for_vllm(words: list[str]) -> bool:
    """Return whether a command has TRL's `--use_vllm`, and not a vLLM that is a server elsewhere.

    trl/trainer/grpo_config.py: `vllm_mode` is "colocate" unless it is given.
    """
    text = " ".join(words).lower().replace("-", "_").replace("=", " ")
    refused = ("use_vllm false", "vllm_mode server")
    return "use_vllm" in text and not any(each in text for each in refused)


def _print_help(file: object = None) -> None:
    """Print the help as the other commands do: of a command that has these options, and no more."""
    from dataclasses import fields
    from inspect import Parameter, Signature

    from trainer_plugins.plug_in.flags import flag_of
    from trainer_plugins.plug_in.options import MemoryArguments, kind_of
    from trainer_plugins.presets import PRESETS

    def described() -> None:
        """Stand for `exec`."""

    command = Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run.")]
    parameters = [Parameter("command", Parameter.KEYWORD_ONLY, annotation=command)]
    for option in fields(MemoryArguments):
        # The help of an option ends with the callback that it is for.
        words, _, callback = option.metadata["help"].removesuffix(")").partition(" (")
        shown = typer.Option(
            flag_of(option),
            help=words,
            metavar="N" if kind_of(option) in (int, float) else None,
            rich_help_panel=callback or None,
        )
        parameters.append(
            Parameter(
                option.name,
                Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=Annotated[kind_of(option), shown],
            )
        )
    described.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    parameters.append(
        Parameter(
            "vllm",
            Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option("--vllm", help=_VLLM)],
        )
    )
    presets = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)
    app = typer.Typer(
        add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command(help=exec_.__doc__, epilog=presets)(described)
    app(["--help"], prog_name="trainer-plugins exec")
