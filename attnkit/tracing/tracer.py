"""Trace a user's function: run it once on proxy values and return its expression graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnkit.errors import ArityError, DTypeError, TraceError
from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node
from attnkit.graph.simplify import cast
from attnkit.tracing import ops  # noqa: F401  (registers the handlers of torch functions)
from attnkit.tracing.dtypes import without_float32, without_wraps_in_indices
from attnkit.tracing.proxy import Tracer, TracingMode, Value
from attnkit.util import caches
from attnkit.util.arguments import index_instead, shown

Kind: TypeAlias = Literal["score", "mask"]

ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q", "kv"),
    "mask": ("b", "h", "q", "kv"),
}


_ARGUMENT_DTYPES: dict[ir.Type, torch.dtype] = {F32: torch.float32, I32: torch.int32}

caches.register(ir.clear_caches)  # here, as `graph` imports nothing of `util`


class DTypeTraceError(TraceError, DTypeError):
    """Raised if a traced function returns a value of the wrong dtype."""


@dataclass(frozen=True)
class Traced:
    """Holds the graph of a traced function and its captured tensors.

    Attributes:
        kind: "score" or "mask".
        root: float32 expression of score, b, h, q, kv for a score_mod; bool expression of b, h, q,
            kv for a mask_mod.
        tensors: captured tensors by load slot.
        names: names of the captured tensors in the user's code, by slot.
        derived: whether the function computed a captured tensor from others. The trace is then
            valid for one call only.
    """

    kind: Kind
    root: Node
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    derived: bool = False

    def __str__(self) -> str:
        arguments = ", ".join(ARGUMENTS[self.kind])
        return f"{self.kind}({arguments}) = {ir.formula(self.root, self.names)}"


def trace(function: Callable[..., Any], kind: Kind, device: torch.device | str = "cpu") -> Traced:
    """Trace a `score_mod(score, b, h, q, kv)` or a `mask_mod(b, h, q, kv)` to a graph.

    Args:
        function: the function, any callable with these positional arguments.
        kind: "score" or "mask".
        device: device that `.device` of a traced value returns.

    Returns:
        The graph, with the captured tensors by slot.

    Raises:
        TraceError: the function cannot be traced, or does not return one number per score.
        DTypeTraceError: the function returns a number of the wrong dtype.
    """
    tracer = Tracer(torch.device(device), rounds=kind == "mask")
    names = ARGUMENTS[kind]
    _check_arity(function, kind)
    arguments = [
        Value(tracer, ir.arg(name), _ARGUMENT_DTYPES[ir.ARG_TYPES[name]]) for name in names
    ]
    try:
        with torch.enable_grad(), TracingMode(tracer):
            result = function(*arguments)
            if tracer.error is None:
                root = _root(tracer, function, kind, result)
    except TraceError:
        if tracer.error is None:
            raise
    except Exception as error:
        if tracer.error is None:
            raise TraceError(
                f"{_name_of(function)} raised {type(error).__name__} while it was traced: "
                f"{_message_of(error)}"
            ) from error
    if tracer.error is not None:
        raise tracer.error
    root, tensors = _renumber_slots(root, tracer.tensors)
    return Traced(kind, root, tensors, _names(function, tensors), tracer.derived)


def _message_of(error: Exception) -> str:
    """Return the message of an error in the user's code; explain numpy's error on a Value."""
    if "__array_ufunc__" in str(error):
        return "a numpy function takes no traced value; use the torch function of that name"
    return str(error)


def _renumber_slots(root: Node, tensors: list[Tensor]) -> tuple[Node, tuple[Tensor, ...]]:
    """Renumber slots by first use, so that equal functions have equal graphs; drop unused ones."""
    loads = [n for n in ir.topo(root) if n.op == "load"]
    order = {slot: i for i, slot in enumerate(dict.fromkeys(n.attr for n in loads))}
    if all(slot == i for slot, i in order.items()):
        return root, tuple(tensors[: len(order)])
    root = ir.renumber(root, lambda slot: order[slot])
    return root, tuple(tensors[int(slot)] for slot in order)  # type: ignore[arg-type]


def _check_arity(function: Callable[..., Any], kind: Kind) -> None:
    names = ARGUMENTS[kind]
    signature = f"{kind}_mod({', '.join(names)})"
    if not callable(function):
        raise TraceError(
            f"{kind}_mod must be a callable {signature}, got {shown(function)}{index_instead(function)}"
        )
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself raises
    try:
        parameters.bind(*names)
    except TypeError as error:
        shown_names = ", ".join(
            str(p.replace(default=p.empty, annotation=p.empty))
            for p in parameters.parameters.values()
        )
        raise ArityError(
            f"{_name_of(function)}({shown_names}) cannot be called as {signature}: {error}. "
            + _advice(function, kind)
        ) from None


def takes(function: Any, kind: Kind) -> bool:
    """Return whether `function` accepts the arguments of a score_mod or a mask_mod."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*ARGUMENTS[kind])
    except (TypeError, ValueError):
        return False
    return True


def _advice(function: Callable[..., Any], kind: Kind) -> str:
    """Return a hint for a function that does not accept the arguments of `kind`."""
    other: Kind = "mask" if kind == "score" else "score"
    if not takes(function, other):
        return f"If it makes a {kind}_mod, pass what it returns: {_name_of(function)}(...)"
    place = "block_mask" if other == "mask" else "score_mod"
    return f"It takes what a {other}_mod takes: pass it as {place}"


def _root(tracer: Tracer, function: Callable[..., Any], kind: Kind, result: Any) -> Node:
    what = f"{kind}_mod {_name_of(function)}"
    if not isinstance(result, Value | Tensor | bool | int | float | np.generic):
        raise TraceError(f"{what} returned {type(result).__name__}; expected one tensor")
    value = tracer.lift(result)
    if value.sizes:
        raise TraceError(
            f"{what} returned a value of shape {value.sizes}; expected one number per (q, kv) pair"
        )
    node = value.node
    if kind == "mask" and node.type != BOOL:
        raise DTypeTraceError(
            f"{what} returned {value.dtype}; expected torch.bool. Compare (`!= 0`) or "
            "convert with .bool()"
        )
    if kind == "score" and node.type == BOOL:
        raise DTypeTraceError(
            f"{what} returned torch.bool; expected a score (float). A mask belongs in block_mask, "
            'or write torch.where(condition, score, -float("inf"))'
        )
    node = without_wraps_in_indices(node)
    if kind == "score":
        return cast(node, F32)
    return node if tracer.converter.has_float64 else without_float32(node)


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"partial({_name_of(function.func)})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _names(function: Any, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return the name of each captured tensor in the user's code; `t0`, `t1`, ... if unknown."""
    if not tensors:
        return ()
    name_of = {id(t): "" for t in tensors}
    _find_names(function, name_of, depth=4)
    names = [name_of[id(t)] or f"t{i}" for i, t in enumerate(tensors)]
    return tuple(name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names))


def _find_names(function: Any, name_of: dict[int, str], depth: int) -> None:
    """Fill `name_of` (id of a tensor -> name) from the scopes of `function` and its callees."""
    if depth == 0:
        return
    for name, value in _scope(function).items():
        if isinstance(value, Tensor):
            if name_of.get(id(value)) == "":
                name_of[id(value)] = name
        elif isinstance(value, tuple | list):
            for item in value:
                if callable(item):
                    _find_names(item, name_of, depth - 1)
        elif callable(value) and not inspect.ismodule(value) and not inspect.isclass(value):
            _find_names(value, name_of, depth - 1)


def _scope(function: Any) -> dict[str, Any]:
    """Return the values that a function reads by name: cells, globals, defaults, attributes."""
    scope: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        scope = {**{f"arg{i}": a for i, a in enumerate(function.args)}, **function.keywords}
        scope["func"] = function.func
    elif inspect.isfunction(function):
        code = function.__code__
        if function.__closure__:
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
                try:
                    scope[name] = cell.cell_contents
                except ValueError:
                    continue  # the name has no value yet
        scope.update((n, function.__globals__.get(n)) for n in code.co_names)
        defaults = function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        scope.update(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        scope.update(function.__kwdefaults__ or {})
    else:
        slots = (n for c in type(function).__mro__ for n in getattr(c, "__slots__", ()))
        scope = {name: getattr(function, name, None) for name in slots}  # for example a Mask
        scope.update(getattr(function, "__dict__", {}))
        for kind in ("_parameters", "_buffers", "_modules"):
            scope.update(getattr(function, kind, {}))
    return scope
