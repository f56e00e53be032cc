"""`trainer-plugins configs`: list, show, copy and check launch files."""

import json
import math
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trainer_plugins.cli.as_json import plain
from trainer_plugins.cli.typed_options import AsJson, refuse_bad_input
from trainer_plugins.finding import Severity
from trainer_plugins.launch import configs
from trainer_plugins.planner.options import PINNED_MEMORY_HELP
from trainer_plugins.plug_in.flags import EXIT_USAGE, Command
from trainer_plugins.printable import printable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Launch files for accelerate: list, show, copy, check.",
)
_command = partial(app.command, cls=Command)
_refusing = partial(refuse_bad_input, "configs", ValueError)

# Findings about files that mean something other than they appear to.
_MALFORMED = {"config-duplicate-key", "config-wrong-type"}


Name = Annotated[
    str, typer.Argument(help="A name that `configs list` shows.", autocompletion=configs.names)
]


@_command("list")
def list_configs(as_json: AsJson = False) -> None:
    """List the shipped launch files, with a line on each.

    Example: trainer-plugins configs list
    """
    if as_json:
        print(json.dumps({name: configs.headline(name) for name in configs.names()}, indent=2))
        return
    width = max(map(len, configs.names()))
    for name in configs.names():
        print(f"{name:{width}}  {configs.headline(name)}")


@_command()
def show(name: Name) -> None:
    """Print a shipped launch file.

    Example: trainer-plugins configs show zero3
    """
    with _refusing():
        print(configs.read(name), end="")


@_command("path")
def path_of(name: Name) -> None:
    """Print the path of a launch file.

    Example: accelerate launch --config_file $(trainer-plugins configs path zero3) train.py
    """
    with _refusing():
        print(configs.path(name))


@_command("copy")
def copy_to(
    name: Name,
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The target folder (default: the current one).")
    ] = Path(),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, checked. Repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a launch file, and change values in your copy.

    Example: trainer-plugins configs copy zero3 --set num_processes=4
    """
    with _refusing():
        print(configs.copy(name, folder, overrides or (), force=force))


@_command()
def check(
    file: Annotated[Path, typer.Argument(help="An accelerate YAML or a DeepSpeed JSON.")],
    training_args: Annotated[
        str | None,
        typer.Option(help="The script's arguments in quotes: '--bf16 --max_grad_norm 0.3'."),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(min=1, help="Number of model parameters, as in 7e9; also checks main memory."),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on all machines (default: from the file, else 1)."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Main memory, as in 128GiB (default: from this machine)."),
    ] = None,
    pinned_memory: Annotated[str | None, typer.Option(help=PINNED_MEMORY_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Check a launch file before you launch it, and find extension builds that would block it.

    Example: trainer-plugins configs check zero3.yaml --params 7e9 --num-gpus 4

    Exit codes: 0 fine; 1 an ERROR; 2 bad input, including duplicate keys and values of the wrong
    type.
    """
    from trainer_plugins.launch.extensions import find_needed_by, lock_findings, read_locks
    from trainer_plugins.launch.lint.document import read_document
    from trainer_plugins.launch.lint.judge import judge_document
    from trainer_plugins.launch.lint.training import training_arguments
    from trainer_plugins.launch.main_memory import HostLimits

    here_bytes = None
    if params and host_memory is None:
        from trainer_plugins.devices.host import HostDevice

        here_bytes = HostDevice().read().total_bytes
    with _refusing():
        if params is not None and not math.isfinite(params):
            raise ValueError(f"--params is the number of the model's parameters, got {params}")
        host = HostLimits.read(host_memory, pinned_memory, here_bytes)
        training = None if training_args is None else training_arguments(shlex.split(training_args))
        document = read_document(file)
        findings = judge_document(
            document,
            training=training,
            num_params=params,
            num_ranks=num_gpus,
            host=host,
        )
    findings += tuple(lock_findings(read_locks(os.environ), find_needed_by(document)))
    if as_json:
        print(json.dumps(plain(findings), indent=2))
    else:
        lines = [f"{each.severity.name} {each}" for each in findings]
        print("\n".join(lines) or f"{file}: no findings")
    if not _MALFORMED.isdisjoint(finding.code for finding in findings):
        raise typer.Exit(EXIT_USAGE)
    raise typer.Exit(int(any(finding.severity >= Severity.ERROR for finding in findings)))


@_command()
def build(
    needed_by: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Launch files, or extensions such as cpu_adam."),
    ],
) -> None:
    """Build the extensions that DeepSpeed would compile at the start, once on each node.

    It also finishes a build that was interrupted, for ranks that already wait for it.

    Example: trainer-plugins configs build zero3_offload_all.yaml
    """
    from trainer_plugins.launch.extensions import build_extension, find_needed_by
    from trainer_plugins.launch.lint.document import read_document

    names: list[str] = []
    with _refusing():
        for each in needed_by:
            is_file = Path(each).suffix in (".yaml", ".yml", ".json")
            found = find_needed_by(read_document(Path(each))) if is_file else (each,)
            names += found
            if not found:
                print(f"{each} needs no DeepSpeed extension")
        try:
            for name in names:
                print(f"{printable(name)} is built, in {build_extension(name):.0f} s")
        except RuntimeError as error:
            print(f"trainer-plugins configs: {printable(error)}", file=sys.stderr)
            raise typer.Exit(1) from None
