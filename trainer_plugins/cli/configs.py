"""`trainer-plugins configs`: list, show, copy and check launch files."""

import json
import math
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import click

from trainer_plugins.cli.as_json import plain
from trainer_plugins.cli.typed_options import refuse_bad_input, take_as_json
from trainer_plugins.finding import Severity
from trainer_plugins.launch import configs as files
from trainer_plugins.planner.options import PINNED_MEMORY_HELP
from trainer_plugins.plug_in.flags import EXIT_USAGE, PATH, Group, argument
from trainer_plugins.printable import printable

_refusing = partial(refuse_bad_input, ValueError)

# Findings about files that mean something other than they appear to.
_MALFORMED = {"config-duplicate-key", "config-wrong-type"}

_take_name = argument(
    "name",
    help="A name that `configs list` shows.",
    shell_complete=lambda _, __, typed: [each for each in files.names() if each.startswith(typed)],
)


@click.group(cls=Group)
def configs() -> None:
    """Launch files for accelerate: list, show, copy, check."""


@configs.command("list")
@take_as_json
def list_configs(as_json: bool) -> None:
    """List the shipped launch files, with a line on each.

    Example: trainer-plugins configs list
    """
    if as_json:
        print(json.dumps({name: files.headline(name) for name in files.names()}, indent=2))
        return
    width = max(map(len, files.names()))
    for name in files.names():
        print(f"{name:{width}}  {files.headline(name)}")


@configs.command()
@_take_name
def show(name: str) -> None:
    """Print a shipped launch file.

    Example: trainer-plugins configs show zero3
    """
    with _refusing():
        print(files.read(name), end="")


@configs.command("path")
@_take_name
def path_of(name: str) -> None:
    """Print the path of a launch file.

    Example: accelerate launch --config_file $(trainer-plugins configs path zero3) train.py
    """
    with _refusing():
        print(files.path(name))


@configs.command("copy")
@_take_name
@argument(
    "folder",
    type=PATH,
    default=".",
    metavar="[DIR]",
    help="The target folder (default: the current one).",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a value, checked. Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def copy_to(name: str, folder: Path, overrides: tuple[str, ...], force: bool) -> None:
    """Copy a launch file, and change values in your copy.

    Example: trainer-plugins configs copy zero3 --set num_processes=4
    """
    with _refusing():
        print(files.copy(name, folder, overrides, force=force))


@configs.command()
@argument("file", type=PATH, help="An accelerate YAML or a DeepSpeed JSON.")
@click.option(
    "--training-args", help="The script's arguments in quotes: '--bf16 --max_grad_norm 0.3'."
)
@click.option(
    "--params",
    type=click.FloatRange(min=1),
    metavar="N",
    help="Number of model parameters, as in 7e9; also checks main memory.",
)
@click.option(
    "--num-gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks on all machines (default: from the file, else 1).",
)
@click.option("--host-memory", help="Main memory, as in 128GiB (default: from this machine).")
@click.option("--pinned-memory", help=PINNED_MEMORY_HELP)
@take_as_json
def check(
    file: Path,
    training_args: str | None,
    params: float | None,
    num_gpus: int | None,
    host_memory: str | None,
    pinned_memory: str | None,
    as_json: bool,
) -> None:
    """Check a launch file before you launch it, and find extension builds that would block it.

    Example: trainer-plugins configs check zero3.yaml --params 7e9 --num-gpus 4

    Exit codes: 0 fine; 1 an ERROR; 2 bad input, including duplicate keys and values of the wrong
    type.
    """
    from trainer_plugins.devices.host import HostDevice
    from trainer_plugins.launch.extensions import find_needed_by, lock_findings, read_locks
    from trainer_plugins.launch.lint.document import read_document
    from trainer_plugins.launch.lint.judge import judge_document
    from trainer_plugins.launch.lint.training import training_arguments
    from trainer_plugins.launch.main_memory import HostLimits

    with _refusing():
        if params is not None and not math.isfinite(params):
            raise ValueError(f"--params is the number of the model's parameters, got {params}")
        host = HostLimits.read(host_memory, pinned_memory, HostDevice().read().total_bytes)
        training = None if training_args is None else training_arguments(shlex.split(training_args))
        document = read_document(file)
        findings = judge_document(
            document, training=training, num_params=params, num_ranks=num_gpus, host=host
        )
    findings += tuple(lock_findings(read_locks(os.environ), find_needed_by(document)))
    if as_json:
        print(json.dumps(plain(findings), indent=2))
    else:
        lines = [f"{each.severity.name} {each}" for each in findings]
        print("\n".join(lines) or f"{file}: no findings")
    if not _MALFORMED.isdisjoint(finding.code for finding in findings):
        raise SystemExit(EXIT_USAGE)
    raise SystemExit(int(any(finding.severity >= Severity.ERROR for finding in findings)))


@configs.command()
@argument(
    "needed_by",
    nargs=-1,
    required=True,
    metavar="FILE...",
    help="Launch files, or extensions such as cpu_adam.",
)
def build(needed_by: tuple[str, ...]) -> None:
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
            raise SystemExit(1) from None
