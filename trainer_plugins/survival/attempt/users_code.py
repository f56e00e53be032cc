"""Users' code: tell whether a function or an object is the user's or a known library's."""

import functools
import sys
from collections.abc import Iterator
from types import CodeType

_LIBRARIES = frozenset(
    (
        "accelerate",
        "bitsandbytes",
        "deepspeed",
        "kernels",
        "liger_kernel",
        "peft",
        "pyarrow",
        "tokenizers",
        "torch",
        "torchao",
        "trainer_plugins",
        "transformer_engine",
        "transformers",
        "trl",
        "wandb",
    )
)
_KNOWN = _LIBRARIES | sys.stdlib_module_names


def is_library(module: str) -> bool:
    """Tell whether a module, by its full name, belongs to a known library."""
    return module.partition(".")[0] in _LIBRARIES


def is_users_function(function: object) -> bool:
    """Tell whether a function, a bound method or a partial comes from no known library."""
    return not is_library(home_of(function))


def is_users_object(value: object) -> bool:
    """Tell whether an object's class, or one that it inherits from, is the user's."""
    homes = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not homes <= _KNOWN


def home_of(function: object) -> str:
    """Return the module in which a function was written, also behind `functools.wraps`."""
    function = getattr(function, "__func__", function)
    function = function.func if isinstance(function, functools.partial) else function
    names = getattr(function, "__globals__", None)
    return str(names["__name__"]) if names is not None else type(function).__module__


def name_of(function: object) -> str:
    """Return the full name of the user's function among those that a function wraps."""
    named = next((one for one in walk_wrapped(function) if is_users_function(one)), function)
    return f"{home_of(named)}.{getattr(named, '__qualname__', type(named).__name__)}"


def walk_wrapped(function: object) -> Iterator[object]:
    """Give a function, and those that it wraps, as far as `__wrapped__` tells."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        yield function.func if isinstance(function, functools.partial) else function
        function = getattr(function, "__wrapped__", None)


def names_in(code: CodeType) -> Iterator[str]:
    """Give the global names and attributes that code reads, and those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
