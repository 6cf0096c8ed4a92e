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

from attnkit.tracing.mask import Mask

ABSENT = object()  # in place of a global that does not exist
READ_ERRORS = (AttributeError, TypeError, ValueError)
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


class Watch:
    """All that a function reads, as a walk found it.

    `function`, `mask`, `partial` and `tensor` are called for each as it is met, at most once.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"holds": holds, "ABSENT": ABSENT, "tuple": tuple}
        self._references: dict[int, str] = {}  # by id of a reference the name of what it refers to
        self._tensors: list[tuple[str, Any, Any, Any, Any, Any]] = []
        self._found: Callable[[], tuple[Tensor, ...] | None] | None = None

    def function(self, f: types.FunctionType, names: Sequence[str]) -> None:
        """Watch a function's code, closure cells, defaults, attributes, and globals by name.

        Raises:
            Unsteady: one of them may change and remain the same object.
        """
        own, is_not = self._reference(f), []
        is_not.append(f"{own}.__code__ is not {self._name(f.__code__)}")
        if f.__defaults__ is not None or f.__kwdefaults__ is not None or f.__dict__:
            extras = f"{self._name(_extras)}({own})"
            is_not.append(self._differs(extras, held(_extras(f))))
        else:
            is_not += [f"{own}.__defaults__ is not None", f"{own}.__kwdefaults__ is not None"]
            is_not.append(f"{own}.__dict__")
        for i, cell in enumerate(f.__closure__ or ()):
            place = f"{own}.__closure__[{i}].cell_contents"
            is_not.append(self._differs(place, held(cell.cell_contents)))
        scope = f.__globals__
        for name in names:
            place = f"{own}.__globals__.get({self._name(name)}, ABSENT)"
            is_not.append(self._differs(place, held(scope.get(name, ABSENT))))
        self._lines += is_not

    def mask(self, m: Mask) -> None:
        """Watch a mask's function, parts and lengths.

        Raises:
            Unsteady: its function may change and remain the same object.
        """
        own = self._reference(m)
        self._lines += [
            f"{own}.op is not {self._name(m.op)}",
            f"{own}.lengths is not {self._name(m.lengths)}",
            self._differs(f"{own}.function", held(m.function)),
            f"{own}.parts.__class__ is not tuple",
            f"len({own}.parts) != {len(m.parts)}",
            *(f"{own}.parts[{i}] is not {self._reference(p)}" for i, p in enumerate(m.parts)),
        ]

    def partial(self, p: functools.partial[Any]) -> None:
        """Watch a partial's function and arguments.

        Raises:
            Unsteady: one of them may change and remain the same object.
        """
        fields = f"{self._name(_partial_fields)}({self._reference(p)})"
        self._lines.append(self._differs(fields, held(_partial_fields(p))))

    def tensor(self, t: Tensor) -> None:
        """Watch what a trace depends on in a tensor."""
        name = self._reference(t)
        self._tensors.append((name, type(t), t.shape, t.dtype, t.device, t.requires_grad))

    def met(self) -> list[Tensor] | None:
        """The tensors in the order in which they were met, None if other objects are read now.

        Of the tensors only the identity is told.
        """
        try:
            if self._found is None:
                self._found = self.reader(range(len(self._tensors)))
            found = self._found()
        except READ_ERRORS:
            return None
        return None if found is None else list(found)

    def check(self) -> list[Tensor] | None:
        """The same, None also if a trace would be another one for what the tensors are now."""
        found = self.met()
        if found is None:
            return None
        for t, (_, kind, shape, dtype, device, grad) in zip(found, self._tensors, strict=True):
            if (
                t.__class__ is not kind
                or t.shape != shape
                or t.dtype is not dtype
                or t.device != device
                or t.requires_grad is not grad
            ):
                return None
        return found

    # What is looked at stands in straight-line Python, as it is on the path of every call.

    def _name(self, x: Any) -> str:
        name = f"x{len(self._names)}"
        self._names[name] = x
        return name

    def _reference(self, x: Any) -> str:
        reference = weakref.ref(x)  # the same one for the same object, as it has no callback
        at = id(reference)
        if at not in self._references:
            self._references[at] = self._name(reference).replace("x", "o")
        return self._references[at]

    def _differs(self, place: str, wanted: Held) -> str:
        """Text that is true where a place does not hold what it must."""
        what, how = wanted
        if how is None:
            return f"{place} is not {self._name(what)}"
        if isinstance(how, list):
            return f"not holds({place}, {self._name(wanted)})"
        return f"{place} is not {self._reference(how())}"

    def reader(self, places: Sequence[int]) -> Callable[[], tuple[Tensor, ...] | None]:
        """Finds some of the tensors, None if other objects are read now; raises `READ_ERRORS` of one that
        is gone or of a cell that is empty.

        Args:
            places: which of those that were met, in order.
        """
        own = sorted(self._references.values(), key=lambda name: int(name[1:]))
        gone = [f"{name} is None" for name in own]
        tests = [*gone, *self._lines]
        text = "\n".join(
            [
                "def found():",
                *(f"    {name} = {name.replace('o', 'x')}()" for name in own),
                f"    if {' or '.join(tests)}: return None" if tests else "",
                f"    return ({''.join(f'{self._tensors[i][0]}, ' for i in places)})",
            ]
        )
        names = dict(self._names)
        exec(_code(text), names)
        found: Callable[[], tuple[Tensor, ...] | None] = names["found"]
        return found


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> types.CodeType:
    return compile(text, "<watch>", "exec")


def _extras(f: types.FunctionType) -> tuple[Any, ...]:
    return f.__defaults__, f.__kwdefaults__, f.__dict__


def _partial_fields(p: functools.partial[Any]) -> tuple[Any, ...]:
    return p.func, p.args, p.keywords
