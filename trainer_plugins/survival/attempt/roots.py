"""Roots: finds where to begin to look for values that users' code keeps beside a model or loss."""

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from trainer_plugins.survival.attempt.holders import (
    MOST_ITEMS,
    Holder,
    Roots,
    describe_mapping,
    is_code,
    own_names,
    walk,
)
from trainer_plugins.survival.attempt.users_code import (
    is_users_function,
    is_users_object,
    names_in,
)


def roots_of_state(model: nn.Module) -> Roots:
    """Find modules that the user wrote or hooked, users' objects in others, and their code."""
    objects: dict[str, object] = {}
    for path, module in model.named_modules():
        objects.update(_roots_in(path, module))
    apart = _find_apart(Roots(objects), model)
    objects.update(apart)
    return Roots(objects, find_code(objects), apart)


def _find_apart(roots: Roots, model: nn.Module) -> dict[str, nn.Module]:
    """Find modules, and those in them, that none of the model has registered, by their paths."""
    registered = {id(module) for module in model.modules()}
    found = dict(roots.objects)
    for holder, contents in walk(roots):
        found.update((holder.path_of(name), one) for name, one in contents.items())
    return {
        name: part
        for path, one in found.items()
        if isinstance(one, nn.Module) and id(one) not in registered
        for name, part in one.named_modules(prefix=path)
    }


def _roots_in(path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    users = [hook for hook in hooks if is_users_function(hook)]
    own = {name: vars(module)[name] for name in own_names(module)}
    if is_users_object(module) or users or is_users_function(module.forward):
        yield path, module
    for name, value in (dict(enumerate(users)) | own).items():
        is_function = isinstance(value, FunctionType | MethodType | partial)
        if (is_users_function if is_function else _is_users)(value):
            yield f"{path}.{name}" if path else str(name), value


def _is_users(value: object) -> bool:
    if isinstance(value, list | tuple | deque | dict):
        inside = value.values() if isinstance(value, dict) else value
        return any(map(is_users_object, inside)) if len(value) <= MOST_ITEMS else False
    return is_users_object(value) and not isinstance(value, nn.Module)


def find_code(objects: Mapping[str, object]) -> tuple[Holder, ...]:
    """Find the places that the code of these objects keeps: it never changes, so search once."""
    return tuple(
        holder
        for holder, contents in walk(Roots(objects))
        if holder.is_code and not all(map(is_code, contents.values()))
    )


def find_loss_roots(trainer: Any) -> Roots:
    """Find what a user's loss keeps, such as metrics: on its Trainer, or where its code does."""
    names, waiting = set[str](), ["compute_loss"]
    functions: dict[str, object] = {}
    while waiting:
        name = waiting.pop()
        for kind in type(trainer).__mro__:
            function = inspect.unwrap(vars(kind).get(name))  # type: ignore[arg-type]
            if isinstance(function, FunctionType) and is_users_function(function):
                functions[f"{kind.__name__}.{name}"] = function
                waiting.extend({*names_in(function.__code__)} - names)
                names.update(waiting)
    given = {"compute_loss_func": trainer.compute_loss_func}
    objects = given if callable(trainer.compute_loss_func) else {}  # TRL's marker is a string
    words, own = f"an attribute of {type(trainer).__name__}", vars(trainer)
    held = describe_mapping("trainer", words, own, lambda: [name for name in own if name in names])
    code = find_code({**functions, **objects})
    apart = _find_apart(Roots(objects, (held, *code)), trainer.model)
    for path, module in apart.items():
        objects.update(_roots_in(path, module))
    return Roots(objects, (held, *find_code({**functions, **objects})), apart)
