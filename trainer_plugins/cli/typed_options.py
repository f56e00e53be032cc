"""Turns the fields of dataclasses into options of a command."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from functools import update_wrapper
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

MOST_USED = "Most used"  # the first panel of a long help
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Vllm = Annotated[bool, typer.Option("--vllm", help="vLLM will run inside the training process.")]
RunDir = Annotated[Path, typer.Argument(help="The output_dir of a run with MemoryWatchdog.")]


@contextmanager
def bad_parameters(path: Path | str) -> Iterator[None]:
    """Report what cannot be read or written, by default this path, as a bad parameter."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename or path}: {error.strerror or error}"
        raise typer.BadParameter(why) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def option(panel: str, help: str, *, default: object = None, metavar: str | None = None) -> Any:
    """Make a field of a dataclass an option of a command, in a panel of its help."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel})


def with_options(
    shown: Container[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take dataclasses: each field is an option, listed in the help if in `shown`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = Signature.from_callable(command).parameters.values()
        options: list[Parameter] = []
        for each in own:
            if is_dataclass(each.annotation):
                options += _options_of(each.annotation, shown)
            else:
                options.append(each.replace(kind=Parameter.KEYWORD_ONLY))

        def called(**given: Any) -> None:
            command(**{each.name: _value_of(each, given) for each in own})

        update_wrapper(called, command)
        options.sort(key=lambda option: _panel(option) != MOST_USED)
        called.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return called

    return decorate


def _options_of(kind: Any, shown: Container[str] | None) -> Iterator[Parameter]:
    """Make a typer option of each field of a dataclass."""
    for each in fields(kind):
        # A switch that is off by default has no --no- form.
        flags = [f"--{each.name.replace('_', '-')}"] if each.default is False else []
        info = typer.Option(
            *flags,
            help=each.metadata["help"],
            metavar=each.metadata["metavar"],
            rich_help_panel=each.metadata["panel"],
            hidden=shown is not None and each.name not in shown,
        )
        yield Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[each.type, info],
        )


def _value_of(parameter: Parameter, given: Mapping[str, Any]) -> Any:
    """Return the value of an option, or the dataclass that holds the values of several."""
    if not is_dataclass(parameter.annotation):
        return given[parameter.name]
    make: Any = parameter.annotation
    return make(**{each.name: given[each.name] for each in fields(make)})


def _panel(option: Parameter) -> str | None:
    return next((each.rich_help_panel for each in get_args(option.annotation)[1:]), None)
