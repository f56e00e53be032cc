"""Read the source of a loss to see whether it divides by the label count of the whole step.

Follows the argument `num_items_in_batch`, and the `**kwargs` that carry it, from function to
function. Nothing is run; a path that cannot be followed counts as unknown.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.loss import _Loss

_ITEMS = "num_items_in_batch"
_LIBRARIES = ("accelerate", "liger_kernel", "peft", "torch", "transformers", "trl")
_DEEPEST = 8  # longest chain of calls to follow from `compute_loss` to the division
_SMOOTHER = "LabelSmoother.__call__"  # a mean over labels, at least before transformers 5.15
_ABOUT_LOSS = ("loss", "label", "target", "cross_entropy", "criterion")


class Use(Enum):
    """The ways in which a loss uses `num_items_in_batch`."""

    DIVIDES = "divides"
    IGNORES = "ignores"
    UNKNOWN = "unknown"


class Reading(NamedTuple):
    """The result of reading the code of a loss."""

    use: Use
    where: str  # qualified name of the function that decides
    reduction: str = ""  # if it ignores the number: `mean`, `sum`, or empty if unknown
    is_by_trainer: bool = False  # `Trainer.compute_loss` receives the number and acts on it


class Code(NamedTuple):
    """A function that takes part in computing a loss, with the objects it can reach."""

    function: Any
    receiver: Any = None  # its `self`
    owner: type | None = None  # the defining class, for `super()`
    model: nn.Module | None = None  # the model that `compute_loss` calls as `model`

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def method(self, name: str) -> "Code":
        """Return the method of this name that `super()` would find."""
        kinds = type(self.receiver).__mro__
        later = kinds[kinds.index(self.owner) + 1 :] if self.owner else kinds
        owner = next((kind for kind in later if name in vars(kind)), None)
        if owner is None:
            raise LookupError(name)
        return self._replace(function=_inner(vars(owner)[name]), owner=owner)


def code_of(receiver: Any, name: str, model: nn.Module | None = None) -> Code:
    """Return a method as it would run: the one set on the object, or else its class's."""
    if name not in vars(receiver):
        return Code(None, receiver, None, model).method(name)
    function = _inner(vars(receiver)[name])  # the class's own, if a library only wrapped it
    kinds = type(receiver).__mro__
    owner = next((kind for kind in kinds if _inner(vars(kind).get(name)) is function), None)
    return Code(function, receiver, owner, model)


def read_code(code: Code, depth: int = 0) -> Reading:
    """Follow `num_items_in_batch` through a function and its callees."""
    if (called := _find_callee(code)) is not None:
        return read_code(called, depth + 1)._replace(is_by_trainer=True)
    tree = _parse(code.function)
    if tree is None or depth > _DEEPEST:
        return Reading(Use.UNKNOWN, code.name)
    function = _Function(code, tree, depth)
    found = function.readings()
    for use in (Use.DIVIDES, Use.UNKNOWN):
        if told := [one for one in found if one.use is use]:
            return told[0]
    last = found[0] if found else Reading(Use.IGNORES, code.name)  # the callee, if it is passed on
    return last._replace(reduction=function.reduction())


def uses_labels(code: Code) -> bool:
    """Return whether a `compute_loss` takes `labels` from its batch, or a loss that needs them."""
    tree = _parse(code.function)
    text = "" if tree is None else ast.unparse(tree)
    return any(sign in text for sign in ("'labels'", "super().compute_loss", ".loss", "'loss'"))


def _find_callee(code: Code) -> Code | None:
    """Return the code that transformers' `compute_loss` calls; None for any other function."""
    home = getattr(code.function, "__module__", "")
    if home != "transformers.trainer" or code.name != "Trainer.compute_loss":
        return None
    trainer = code.receiver
    if callable(trainer.compute_loss_func):
        return Code(_inner(trainer.compute_loss_func), model=code.model)
    if trainer.label_smoother is not None:
        return code_of(trainer.label_smoother, "__call__")
    assert code.model is not None
    return code_of(code.model, "forward")


class _Function(NamedTuple):
    code: Code
    tree: ast.FunctionDef
    depth: int

    def readings(self) -> list[Reading]:
        parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        found = [
            self._read(name, parents)
            for name in names
            if name.id in self._carriers and isinstance(name.ctx, ast.Load)
        ]
        return [one for one in found if one is not None]

    @property
    def _parameters(self) -> set[str]:
        arguments = self.tree.args
        return {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}

    @property
    def _carriers(self) -> set[str]:
        rest = self.tree.args.kwarg
        return (self._parameters & {_ITEMS}) | ({rest.arg} if rest else set())

    def _read(self, name: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> Reading | None:
        parent, unknown = parents[name], Reading(Use.UNKNOWN, self.code.name)
        call = parents[parent] if isinstance(parent, (ast.keyword, ast.Starred)) else parent
        if isinstance(call, ast.Call) and name is not call.func:
            called = self._resolve(call)
            return read_code(called, self.depth + 1) if isinstance(called, Code) else called
        if isinstance(parent, ast.Compare):  # compared with None, or a test of the keys of `kwargs`
            return None
        if name.id == _ITEMS:
            arithmetic = (ast.BinOp, ast.IfExp, ast.AugAssign, ast.Attribute)
            return (
                Reading(Use.DIVIDES, self.code.name) if isinstance(parent, arithmetic) else unknown
            )
        if isinstance(parent, (ast.Attribute, ast.Subscript)):  # kwargs.get("..."), kwargs["..."]
            keys = [n.value for n in ast.walk(parents[parent]) if isinstance(n, ast.Constant)]
            if _ITEMS in keys:
                return Reading(Use.DIVIDES, self.code.name)
            return None if keys else unknown
        return unknown

    def _resolve(self, call: ast.Call) -> Code | Reading | None:
        names = ast.unparse(call.func).split(".")
        if names[-1] == "model" and self.code.model is not None:
            return code_of(self.code.model, "forward")
        if not self._concerns_loss(call):
            return None
        unknown = Reading(Use.UNKNOWN, self.code.name)
        try:
            if _is_super(call.func):
                return self.code.method(names[-1])
            value = self._value(names)
        except (LookupError, AttributeError, TypeError, ValueError):
            return unknown
        if isinstance(value, type):
            forward = getattr(value, "forward", None)  # output classes have none
            return Code(_inner(forward), owner=value) if forward is not None else None
        if isinstance(value, nn.Module):
            return code_of(value, "forward")
        if not callable(value):
            return unknown
        receiver = getattr(value, "__self__", None)
        owner = None if receiver is None else type(receiver)
        return Code(_inner(value), receiver, owner, self.code.model)

    def _value(self, names: list[str]) -> Any:
        first, *rest = names
        if self._is_self(first):
            return functools.reduce(getattr, rest, self.code.receiver)
        seen = inspect.getclosurevars(self.code.function)
        value = {**seen.builtins, **seen.globals, **seen.nonlocals}[first]
        return functools.reduce(getattr, rest, value)

    def _is_self(self, name: str) -> bool:
        own = [each.arg for each in self.tree.args.args[:1]]
        return self.code.receiver is not None and name in own

    def _concerns_loss(self, call: ast.Call) -> bool:
        rest = self.tree.args.kwarg
        has_labels = any("label" in name for name in self._parameters)
        given = [*call.args, *(each.value for each in call.keywords)]
        names = [ast.unparse(call.func), *(each.arg or "" for each in call.keywords)]
        names += [each.id for each in given if isinstance(each, ast.Name)]
        if rest is not None and rest.arg in names and not has_labels:
            return True
        return any(part in name.lower() for name in names for part in _ABOUT_LOSS)

    def reduction(self) -> str:
        """Return `mean` or `sum` if this loss, or the one it calls, certainly reduces that way."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        if self.code.name == _SMOOTHER:
            return "mean"
        is_own = not _is_of_library(self.code.function)
        if is_own and any(_ends_in(each, "sum") for each in calls):
            return ""
        if "gradient_accumulation_steps" in ast.unparse(self.tree):  # may divide by it
            return ""
        found = {self._reduction_of(call) for call in calls} - {""}
        if found == {"none"} and any(_ends_in(each, "mean") for each in calls):
            return "mean"
        return found.pop() if len(found) == 1 else ""

    def _reduction_of(self, call: ast.Call) -> str:
        given = next((each.value for each in call.keywords if each.arg == "reduction"), None)
        if _ends_in(call, "mean"):
            return "mean" if self._concerns_loss(call) else ""
        if _is_torchs_loss(call):
            return self._read_reduction(given)
        called = self._resolve(call)
        if not isinstance(called, Code) or self.depth > _DEEPEST:
            return ""
        if isinstance(called.receiver, _Loss):
            return called.receiver.reduction
        if given is not None or called.function.__module__ == nn.functional.__name__:
            return self._read_reduction(given)
        called = _find_callee(called) or called
        tree = _parse(called.function)
        return "" if tree is None else _Function(called, tree, self.depth + 1).reduction()

    def _read_reduction(self, given: ast.expr | None) -> str:
        if given is None:
            return "mean"
        if isinstance(given, ast.Constant):
            return str(given.value)
        first, *rest = ast.unparse(given).split(".")
        if self._is_self(first):  # a setting on the model
            return str(
                functools.reduce(lambda it, name: getattr(it, name, ""), rest, self.code.receiver)
            )
        # A variable in transformers; it is "sum" only if `num_items_in_batch` is passed.
        return "mean" if _is_of_library(self.code.function) else "?"


def _is_torchs_loss(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    kind = getattr(nn, name, None)
    if isinstance(kind, type):
        return issubclass(kind, _Loss)
    is_named = name.endswith(("_loss", "cross_entropy", "_with_logits"))
    return is_named and hasattr(nn.functional, name)


def _ends_in(call: ast.Call, name: str) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] == name


def _is_super(target: ast.expr) -> bool:
    inner = target.value if isinstance(target, ast.Attribute) else None
    return isinstance(inner, ast.Call) and ast.unparse(inner.func) == "super"


def _is_of_library(value: object) -> bool:
    names = getattr(value, "__globals__", None)
    home = names["__name__"] if names is not None else type(value).__module__
    return str(home).partition(".")[0] in _LIBRARIES


def _inner(function: Any) -> Any:
    """Unwrap a bound method, a partial, or a library's wrapper."""
    while True:
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__") and _is_of_library(function):
            function = function.__wrapped__
        else:
            return function


def _parse(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None
