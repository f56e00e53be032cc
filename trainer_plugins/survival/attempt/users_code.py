"""Users' code: decides whether a function or an object is the user's or a known library's."""

import functools
import sys
from collections.abc import Iterator
from types import CodeType

_LIBRARIES = frozenset((
    "accelerate", "bitsandbytes", "deepspeed", "kernels", "liger_kernel", "peft", "pyarrow",
    "tokenizers", "torch", "torchao", "trainer_plugins", "transformer_engine", "transformers",
    "trl", "wandb",
))  # fmt: skip
_KNOWN = _LIBRARIES | sys.stdlib_module_names


def is_library(module: str) -> bool:
    """Return whether a module, by its full name, belongs to a known library."""
    return module.partition(".")[0] in _LIBRARIES


def is_users_function(function: object) -> bool:
    """Return whether a function, a bound method or a partial comes from no known library."""
    return not is_library(home_of(function))


def is_users_object(value: object) -> bool:
    """Return whether an object's class, or one of its bases, is the user's."""
    homes = {module_of(kind).partition(".")[0] for kind in type(value).__mro__}
    return not homes <= _KNOWN


def module_of(kind: type) -> str:
    """Return the module of a class; that of Python where older versions of Cython name none."""
    home: object = kind.__module__
    return home if isinstance(home, str) else "builtins"


def home_of(function: object) -> str:
    """Return the module in which a function was written, looking through `functools.wraps`."""
    function = getattr(function, "__func__", function)
    function = function.func if isinstance(function, functools.partial) else function
    names = getattr(function, "__globals__", None)
    return str(names["__name__"]) if names is not None else type(function).__module__


def name_of(function: object) -> str:
    """Return the full name of the user's function inside a wrapped function."""
    named = next((one for one in walk_wrapped(function) if is_users_function(one)), function)
    return f"{home_of(named)}.{getattr(named, '__qualname__', type(named).__name__)}"


def walk_wrapped(function: object) -> Iterator[object]:
    """Yield a function, and those that it wraps according to `__wrapped__`."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        yield function.func if isinstance(function, functools.partial) else function
        function = getattr(function, "__wrapped__", None)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code reads, including functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
