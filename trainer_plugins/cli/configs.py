"""`trainer-plugins configs`: launch files that do what their names say, and a check of anybody's."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer_plugins.printable import printable

configs = typer.Typer(
    no_args_is_help=True, help="Launch files for accelerate: list, show, copy, check."
)

# What a reader would read as something else than was written.
_MALFORMED = {"config-duplicate-key", "config-wrong-type"}

Name = Annotated[str, typer.Argument(help="A name that `configs list` shows.")]


@configs.command("list")
def list_configs() -> None:
    """List the shipped launch files, each with what it is."""
    from trainer_plugins.launch.configs import headline, names

    width = max(map(len, names()))
    for name in names():
        print(f"{name:{width}}  {headline(name)}")


@configs.command()
def show(name: Name) -> None:
    """Print a shipped launch file."""
    from trainer_plugins.launch.configs import read
    from trainer_plugins.launch.lint import ConfigError

    try:
        print(read(name), end="")
    except ConfigError as error:
        raise _refused(error) from None


@configs.command("path")
def path_of(name: Name) -> None:
    """Print where a launch file is: accelerate launch --config_file $(trainer-plugins configs path zero3) train.py."""
    from trainer_plugins.launch.configs import path
    from trainer_plugins.launch.lint import ConfigError

    try:
        print(path(name))
    except ConfigError as error:
        raise _refused(error) from None


@configs.command("copy")
def copy_to(
    name: Name,
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to; here, if not given.")
    ] = Path(),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value, checked. Repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Copy a launch file, with other values where asked."""
    from trainer_plugins.launch.configs import copy
    from trainer_plugins.launch.lint import ConfigError

    try:
        print(copy(name, folder, overrides or (), force=force))
    except ConfigError as error:
        raise _refused(error) from None


@configs.command()
def check(
    file: Annotated[Path, typer.Argument(help="An accelerate YAML or a DeepSpeed JSON.")],
    training_args: Annotated[
        str | None,
        typer.Option(
            "--training-args",
            help="What the script will get: '--bf16 --max_grad_norm 0.3', in quotes.",
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            "--params", min=1, help="Parameters of the model, as in 7e9: judges main memory."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory", help="Main memory to judge by, as in 128GiB; this machine's, else."
        ),
    ] = None,
) -> None:
    """Say what is wrong with a launch file, before the launch, and which build of an extension it would wait for.

    Exit codes: 0 fine; 1 an ERROR; 2 bad input, which a key written twice and a value of the wrong
    type are too.
    """
    import os
    import shlex

    from trainer_plugins.finding import Severity
    from trainer_plugins.launch.extensions import lock_findings, read_locks
    from trainer_plugins.launch.lint import ConfigError, check, training_arguments
    from trainer_plugins.units import parse_size

    try:
        if params is not None and not math.isfinite(params):
            raise ValueError(
                f"--params counts the parameters of the model, as in 7e9, got {params}"
            )
        host_bytes = parse_size(host_memory) if host_memory else (_host_bytes() if params else None)
        training = None if training_args is None else training_arguments(shlex.split(training_args))
        findings = check(file, training=training, num_params=params, host_bytes=host_bytes)
    except (ConfigError, ValueError) as error:
        raise _refused(error) from None
    findings += tuple(lock_findings(read_locks(os.environ)))
    for finding in findings:
        print(f"{finding.severity.name} {finding}")
    if not findings:
        print(f"{file}: nothing to say")
    if not _MALFORMED.isdisjoint(finding.code for finding in findings):
        raise typer.Exit(2)
    raise typer.Exit(int(any(finding.severity >= Severity.ERROR for finding in findings)))


def _refused(error: ValueError) -> typer.Exit:
    """Say what is wrong with the input, on one line that can be copied and searched for."""
    print(f"trainer-plugins configs: {printable(error)}", file=sys.stderr)
    return typer.Exit(2)


def _host_bytes() -> int:
    # The only thing here that needs the floor of devices, which imports torch: two seconds, when
    # --params asks for it.
    from trainer_plugins.devices.host import HostDevice

    return HostDevice().read().total_bytes
