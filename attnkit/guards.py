"""When a trace may be used again.

A trace depends on the function's code and on whatever the code reads: closure cells, defaults,
globals, the functions it calls. `traced` walks all of that into a fingerprint. Numbers and strings
enter by value, tensors by shape and dtype (they are arguments of the graph, never baked in), so
another closure of the same code over another tensor of the same shape needs no second trace.
Anything that cannot be read this way (an object with attributes, a numpy array) makes the function
unprovable: it is traced again at every call rather than trusted.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit.mask import Mask
from attnkit.trace import Kind, Traced, trace

_CACHE_SIZE = 1024
_cache: OrderedDict[tuple[Any, ...], tuple[Traced, tuple[int, ...]]] = OrderedDict()

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_MODULES = frozenset({"torch", "math", "numpy", "operator", "functools", "attnkit", "typing"})


class _Unprovable(Exception):
    """Something was read that may change without trace."""


class _Walk:
    """One walk over a function: hashable parts, and the tensors met in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.seen: dict[int, int] = {}

    def key(self, x: Any) -> Any:
        """A hashable stand-in for `x`, equal only if the trace cannot tell the difference."""
        if isinstance(x, _PLAIN):
            return (type(x), str(x) if isinstance(x, float) else x)
        if type(x) is Tensor or type(x) is torch.nn.Parameter:
            return self._tensor(x)
        known = self.seen.setdefault(id(x), len(self.seen))
        if known < len(self.seen) - 1:
            return ("again", known)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            return ("partial", self.key(x.func), self.key(x.args), self.key(x.keywords))
        if type(x) in (tuple, list):
            return (type(x), tuple(self.key(item) for item in x))
        if type(x) is dict:
            return (dict, tuple((self.key(k), self.key(v)) for k, v in x.items()))
        if type(x) is Mask:
            return (Mask, x.op, self.key(x.function), self.key(x.parts))
        return self._fixed(x)

    def _tensor(self, x: Tensor) -> Any:
        known = self.seen.setdefault(id(x), len(self.seen))
        if known == len(self.seen) - 1:
            self.tensors.append(x)
        return (known, type(x), x.shape, x.dtype, x.device, x.requires_grad)

    def _fixed(self, x: Any) -> Any:
        """Objects that cannot change: library functions and modules, classes."""
        if isinstance(x, types.ModuleType) and x.__name__.partition(".")[0] in _MODULES:
            return x
        if isinstance(x, types.BuiltinFunctionType):
            owner = x.__self__
            if owner is None or isinstance(owner, type | types.ModuleType):
                return x
        if isinstance(x, type | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return x
        raise _Unprovable

    def _function(self, x: types.FunctionType) -> Any:
        if x.__module__.partition(".")[0] == "torch":
            return x
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self.key(cell.cell_contents))
            except ValueError:  # an empty cell
                raise _Unprovable from None
        scope = x.__globals__
        read = tuple((n, self.key(scope[n])) for n in _names_read(x.__code__) if n in scope)
        defaults = self.key(x.__defaults__), self.key(x.__kwdefaults__)
        return (x.__code__, tuple(cells), read, defaults)


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[str, ...]:
    """Global names that the code, or a function defined in it, may read."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_names_read(inner)))
    return tuple(names)


def traced(function: Callable[..., Any], kind: Kind, device: torch.device) -> Traced:
    """The trace of a function: a known one if it is provably still true, else a new one.

    Args:
        function: `score_mod` or `mask_mod`.
        kind: "score" or "mask".
        device: where the query lives.

    Raises:
        TraceError: as `attnkit.trace.trace`.
    """
    walk = _Walk()
    try:
        key = (kind, device, walk.key(function))
        found = _cache.get(key)
    except (_Unprovable, TypeError):  # TypeError: something in the key does not hash
        return _trace(function, kind, device)
    if found is not None:
        _cache.move_to_end(key)
        known, places = found
        tensors = tuple(walk.tensors[i] for i in places)
        return Traced(known.kind, known.root, tensors, known.names)
    fresh = _trace(function, kind, device)
    order = {id(t): i for i, t in enumerate(walk.tensors)}
    if not fresh.derived and all(id(t) in order for t in fresh.tensors):
        places = tuple(order[id(t)] for t in fresh.tensors)
        _cache[key] = (Traced(kind, fresh.root, (), fresh.names), places)
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return fresh


def _trace(function: Callable[..., Any], kind: Kind, device: torch.device) -> Traced:
    result = trace(function, kind, device)
    custom = _custom_gradient(function)
    if custom and kind == "score":
        warnings.warn(
            f"{custom.__name__} is a torch.autograd.Function: attnkit traces its forward and "
            "derives the gradient from that; its own backward is not used",
            stacklevel=2,
        )
    return result


def _custom_gradient(function: Any) -> type | None:
    """A torch.autograd.Function that the function reads by name, if any."""
    if isinstance(function, functools.partial):
        return _custom_gradient(function.func)
    if not isinstance(function, types.FunctionType):
        return None
    read = [function.__globals__.get(n) for n in _names_read(function.__code__)]
    for cell in function.__closure__ or ():
        try:
            read.append(cell.cell_contents)
        except ValueError:
            continue
    for value in read:
        owner = getattr(value, "__self__", value)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return owner
        if isinstance(value, types.FunctionType) and value is not function:
            inner = None if value.__module__.startswith("torch") else _custom_gradient(value)
            if inner is not None:
                return inner
    return None
