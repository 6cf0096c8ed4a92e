"""Whether a function still reads the very same objects, found out in a microsecond.

A fingerprint (`guards`) walks over all that a function reads, every time. Once it is known, it is
enough that each place that was walked over (closure cell, global, default, part of a mask) still
holds the same object, where that object cannot change: a number, a string, a library function. A
tensor's shape, and a function's or mask's own places, are looked at again. Nothing is kept alive
by a watch: what may be large, or lead to what is large, is held weakly.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnkit.mask import Mask

ABSENT = object()  # in place of a global that does not exist
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
)
_WEAK = (types.FunctionType, functools.partial, Mask, Tensor)
_DEPTH = 4  # of lists within lists; a list may hold itself

# What a place must hold, as (object, None): this one; as (None, reference): the one that it
# refers to; as (type, entries): a list, tuple or dict of such.
Held: TypeAlias = tuple[Any, Any]


class Unsteady(Exception):
    """Something was read that may change and remain the same object."""


def held(x: Any, depth: int = 0) -> Held:
    """What a place must hold for `x` to be in it unchanged.

    Raises:
        Unsteady: `x` may change and remain the same object.
    """
    kind = type(x)
    if kind in _IMMUTABLE or (isinstance(x, np.generic) and not isinstance(x, np.void)):
        return x, None
    if isinstance(x, _WEAK):
        return None, weakref.ref(x)
    if depth < _DEPTH and kind in (list, tuple):
        return kind, [held(item, depth + 1) for item in x]
    if depth < _DEPTH and kind is dict:
        return kind, [held(item, depth + 1) for pair in x.items() for item in pair]
    if isinstance(x, list | tuple | dict | int | float | complex | str | bytes | np.void):
        raise Unsteady
    return x, None  # a module, a class or a function of a library: the fingerprint saw to that


def holds(x: Any, wanted: Held) -> bool:
    """Whether `x` is what a place must hold."""
    what, how = wanted
    if how is None:
        return x is what
    if isinstance(how, list):
        if type(x) is not what:
            return False
        items = [item for pair in x.items() for item in pair] if what is dict else x
        return len(items) == len(how) and all(map(holds, items, how))
    return x is not None and x is how()


def _parted(places: Sequence[tuple[Any, Held]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Places that hold one object, an object that is referred to weakly, or a list."""
    firm = [(at, h[0]) for at, h in places if h[1] is None]
    lists = [(at, h) for at, h in places if isinstance(h[1], list)]
    weak = [(at, h[1]) for at, h in places if h[1] is not None and not isinstance(h[1], list)]
    return firm, weak, lists


class Watch:
    """All that a function reads, as a walk found it.

    `function`, `mask`, `partial` and `tensor` are called for each as it is met, at most once.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[Any, ...]] = []
        self._masks: list[tuple[Any, ...]] = []
        self._rest: list[tuple[Any, Callable[[Any], tuple[Any, ...]], Held]] = []
        self._tensors: list[tuple[Any, ...]] = []

    def function(self, f: types.FunctionType, names: Sequence[str]) -> None:
        """Watch a function's code, closure cells, defaults, attributes, and globals by name.

        Raises:
            Unsteady: one of them may change and remain the same object.
        """
        closure = f.__closure__ or ()
        cells = _parted([(i, held(cell.cell_contents)) for i, cell in enumerate(closure)])
        scope = _parted([(n, held(f.__globals__.get(n, ABSENT))) for n in names])
        if f.__defaults__ is not None or f.__kwdefaults__ is not None or f.__dict__:
            self._rest.append((weakref.ref(f), _extras, held(_extras(f))))
            bare = False
        else:
            bare = True
        self._functions.append((weakref.ref(f), f.__code__, bare, *cells, *scope))

    def mask(self, m: Mask) -> None:
        """Watch a mask's function, parts and lengths.

        Raises:
            Unsteady: its function may change and remain the same object.
        """
        firm, function = held(m.function)
        parts = [weakref.ref(p) for p in m.parts]
        self._masks.append((weakref.ref(m), m.op, m.lengths, firm, function, parts))

    def partial(self, p: functools.partial[Any]) -> None:
        """Watch a partial's function and arguments.

        Raises:
            Unsteady: one of them may change and remain the same object.
        """
        self._rest.append((weakref.ref(p), _partial_fields, held(_partial_fields(p))))

    def tensor(self, t: Tensor) -> None:
        """Watch what a trace depends on in a tensor."""
        self._tensors.append((weakref.ref(t), type(t), t.shape, t.dtype, t.device, t.requires_grad))

    def check(self) -> list[Tensor] | None:
        """The tensors in the order in which they were met, None if anything has changed."""
        try:
            if self._same_functions() and self._same_masks():
                for reference, fields, wanted in self._rest:
                    if not holds(fields(reference()), wanted):
                        return None
                return self._same_tensors()
        except (AttributeError, TypeError, ValueError):  # one is gone, or a cell is empty
            pass
        return None

    # Written out, as these are on the path of every call.

    def _same_functions(self) -> bool:
        for function, code, bare, cells, weak, lists, names, weak_names, listed in self._functions:
            f = function()
            if f.__code__ is not code:
                return False
            if bare and (f.__defaults__ is not None or f.__kwdefaults__ is not None or f.__dict__):
                return False
            closure, scope = f.__closure__, f.__globals__
            for i, x in cells:
                if closure[i].cell_contents is not x:
                    return False
            for i, reference in weak:
                x = reference()
                if x is None or closure[i].cell_contents is not x:
                    return False
            for i, wanted in lists:
                if not holds(closure[i].cell_contents, wanted):
                    return False
            for name, x in names:
                if scope.get(name, ABSENT) is not x:
                    return False
            for name, reference in weak_names:
                x = reference()
                if x is None or scope.get(name) is not x:
                    return False
            for name, wanted in listed:
                if not holds(scope.get(name), wanted):
                    return False
        return True

    def _same_masks(self) -> bool:
        for mask, op, lengths, firm, weak, parts in self._masks:
            m = mask()
            if m.op is not op or m.lengths is not lengths:
                return False
            function = firm if weak is None else weak()
            if m.function is not function or (function is None and weak is not None):
                return False
            own = m.parts
            if own.__class__ is not tuple or len(own) != len(parts):
                return False
            for part, reference in zip(own, parts, strict=True):
                if part is None or part is not reference():
                    return False
        return True

    def _same_tensors(self) -> list[Tensor] | None:
        found = []
        for reference, kind, shape, dtype, device, requires_grad in self._tensors:
            t = reference()
            if (
                t.__class__ is not kind
                or t.shape != shape
                or t.dtype is not dtype
                or t.device != device
                or t.requires_grad is not requires_grad
            ):
                return None
            found.append(t)
        return found


def _extras(f: types.FunctionType) -> tuple[Any, ...]:
    return f.__defaults__, f.__kwdefaults__, f.__dict__


def _partial_fields(p: functools.partial[Any]) -> tuple[Any, ...]:
    return p.func, p.args, p.keywords
