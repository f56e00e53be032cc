"""Turns the fields of dataclasses into options of a command."""

from collections.abc import Callable, Container, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args

MOST_USED = "Most used"
"""The first panel of a long help."""


def with_options(
    shown: Container[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take dataclasses: each of their fields is an option of the command line.

    A field is annotated as a parameter of a typer command is. The help lists it in the panel that
    its option names, else in the panel that its class names (`panel`); `MOST_USED` comes first. It
    lists only the options in `shown`, if that is given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = Signature.from_callable(command).parameters.values()
        options: list[Parameter] = []
        for each in own:
            if is_dataclass(each.annotation):
                options += _options_of(each.annotation, shown)
            else:
                options.append(each.replace(kind=Parameter.KEYWORD_ONLY))

        def called(**given: Any) -> None:
            command(**{each.name: value_of(each.annotation, given, each.name) for each in own})

        update_wrapper(called, command)
        options.sort(key=lambda option: _panel(option) != MOST_USED)
        called.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return called

    return decorate


def _options_of(kind: Any, shown: Container[str] | None) -> Iterator[Parameter]:
    """Make a typer option of each field of a dataclass, and of the dataclasses in it."""
    for field in fields(kind):
        if is_dataclass(field.type):
            yield from _options_of(field.type, shown)
            continue
        value_type, info = get_args(field.type)
        info = copy(info)
        info.rich_help_panel = info.rich_help_panel or kind.panel
        info.hidden = shown is not None and field.name not in shown
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[value_type, info],
        )


def value_of(kind: Any, given: Mapping[str, Any], name: str = "") -> Any:
    """Return the value of an option, or the dataclass that holds the values of several."""
    if not is_dataclass(kind):
        return given[name]
    make: Any = kind
    return make(**{each.name: value_of(each.type, given, each.name) for each in fields(kind)})


def _panel(option: Parameter) -> str | None:
    return next((each.rich_help_panel for each in get_args(option.annotation)[1:]), None)
