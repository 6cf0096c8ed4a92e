"""Check in about a microsecond that a function still reads the same objects as when it was traced.

A fingerprint (`guards`) visits everything that a function reads. Once a function has a fingerprint,
later calls need only a cheaper check: each visited place (closure cell, global, default, part of a
mask) still holds the same object, and that object is immutable (a number, a string, a library
function). For functions and masks, the places inside them are checked; for tensors, the shape, the
dtype and other properties. A guard holds functions and masks by weak references, so it keeps
nothing large alive.

Of a tensor a guard knows the id and the place. Another tensor may get the id of a deleted one. That
does no harm: the tensor is read from its place, and a trace depends on its properties alone. A weak
reference would keep `torch.utils.swap_tensors` from converting a module whose parameter a mod
captures.
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

from attnkit.tracing.axes import Axes
from attnkit.tracing.mask import Mask
from attnkit.tracing.score_mod import ScoreMod
from attnkit.util import caches

# Exceptions that a check raises if an object was deleted or a closure cell was emptied.
READ_ERRORS = (AttributeError, TypeError, ValueError)

_MISSING = object()  # stands for a global that does not exist
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
)
_WEAK = (types.FunctionType, functools.partial, Mask, ScoreMod)
_DEPTH = 4  # largest depth of lists within lists, because a list may contain itself

# Description of the value that a place without tensors must hold. (object, None): this object. (None, reference):
# the target of the weak reference. (type, entries): a list, tuple or dict with these entries.
Expected: TypeAlias = tuple[Any, Any]


class CannotGuardError(Exception):
    """Raised if a function reads a mutable object that an identity guard cannot check."""


def expect(x: Any, depth: int = 0) -> Expected:
    """Return the `Expected` description of a place that holds `x` now, in which no tensor is.

    Raises:
        CannotGuardError: `x` is mutable, so its identity does not show changes.
    """
    kind = type(x)
    if kind in _IMMUTABLE or (isinstance(x, np.generic) and not isinstance(x, np.void)):
        return x, None
    if isinstance(x, _WEAK):
        return None, weakref.ref(x)
    if depth < _DEPTH and kind in (list, tuple):
        return kind, [expect(item, depth + 1) for item in x]
    if depth < _DEPTH and kind is dict:
        return kind, [expect(item, depth + 1) for pair in x.items() for item in pair]
    if isinstance(x, list | tuple | dict | int | float | complex | str | bytes | np.void):
        raise CannotGuardError
    return x, None  # a module, class or function of a library: other objects have no fingerprint


def matches(x: Any, expected: Expected) -> bool:
    """Return whether `x` is the value that `expected` describes."""
    value, how = expected
    if how is None:
        return x is value
    if isinstance(how, list):
        if type(x) is not value:
            return False
        items = [item for pair in x.items() for item in pair] if value is dict else x
        return len(items) == len(how) and all(map(matches, items, how))
    return x is not None and x is how()


def _has_tensor(x: Any, depth: int = 0) -> bool:
    """Return whether `x` is a tensor, or a list, tuple or dict with a tensor in it."""
    if type(x) is dict:
        x = _flat(x)
    if type(x) in (list, tuple) and depth < _DEPTH:
        return any(_has_tensor(item, depth + 1) for item in x)
    return isinstance(x, Tensor)


def _flat(x: dict[Any, Any]) -> list[Any]:
    """Return the keys and values of a dict, in turn."""
    return [item for pair in x.items() for item in pair]


class IdentityGuard:
    """Checks that a function still reads the same objects as when it was traced.

    `guards._Walk` calls one of the methods `add_...` for each object that the function reads, once
    per object. The guard then generates straight-line Python that compares all places, because the
    check runs at every call.
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {
            **{"matches": matches, "MISSING": _MISSING, "flat": _flat},
            **{"tuple": tuple, "list": list, "dict": dict, "len": len, "id": id},
        }
        # Python expressions; each is true if a place, or a setting that traces read, has changed
        dtype = torch.get_default_dtype
        self._conditions = [f"{self._constant(dtype)}() is not {self._constant(dtype())}"]
        self._references: dict[int, str] = {}  # id of a weak reference -> variable of its object
        self._tensor_names: dict[int, str] = {}  # id of a tensor -> its variable
        self._tensors: list[tuple[str, Any, Any, Any, Any, Any]] = []
        self._read: Callable[[], tuple[Tensor, ...] | None] | None = None

    def add_function(self, f: types.FunctionType, names: Sequence[str]) -> None:
        """Guard the code, closure cells, defaults and attributes of `f`, and the globals `names`.

        Raises:
            CannotGuardError: one of them is mutable.
        """
        name = self._object(f)
        changed = [f"{name}.__code__ is not {self._constant(f.__code__)}"]
        if f.__defaults__ is not None or f.__kwdefaults__ is not None or f.__dict__:
            extras = f"{self._constant(_extras)}({name})"
            changed.append(self._differs(extras, _extras(f)))
        else:
            changed += [f"{name}.__defaults__ is not None", f"{name}.__kwdefaults__ is not None"]
            changed.append(f"{name}.__dict__")
        for i, cell in enumerate(f.__closure__ or ()):
            place = f"{name}.__closure__[{i}].cell_contents"
            changed.append(self._differs(place, cell.cell_contents))
        scope = f.__globals__
        for global_name in names:
            place = f"{name}.__globals__.get({self._constant(global_name)}, MISSING)"
            changed.append(self._differs(place, scope.get(global_name, _MISSING)))
        self._conditions += changed

    def add_mask(self, m: Mask) -> None:
        """Guard the function, parts, lengths and declared tables of a mask.

        Raises:
            CannotGuardError: the function is a mutable object.
        """
        name = self._object(m)
        self._conditions += [
            f"{name}.op is not {self._constant(m.op)}",
            f"{name}.lengths is not {self._constant(m.lengths)}",
            self._differs(f"{name}.function", m.function),
            f"{name}.parts.__class__ is not tuple",
            f"len({name}.parts) != {len(m.parts)}",
            *(f"{name}.parts[{i}] is not {self._object(p)}" for i, p in enumerate(m.parts)),
            *self._other_axes(name, m.axes),
        ]

    def add_score_mod(self, mod: ScoreMod) -> None:
        """Guard the function and the declared tables of a score_mod.

        Raises:
            CannotGuardError: the function is a mutable object.
        """
        name = self._object(mod)
        self._conditions.append(self._differs(f"{name}.function", mod.function))
        self._conditions += self._other_axes(name, mod.axes)

    def _other_axes(self, name: str, axes: tuple[Axes, ...]) -> list[str]:
        """Return Python expressions that are true if variable `name` declares other tables now."""
        return [
            f"{name}.axes.__class__ is not tuple",
            f"len({name}.axes) != {len(axes)}",
            *(f"{name}.axes[{i}] is not {self._object(table)}" for i, table in enumerate(axes)),
            *(self._differs(f"{self._object(table)}.table", table.table) for table in axes),
        ]

    def add_partial(self, p: functools.partial[Any]) -> None:
        """Guard the function and the arguments of a functools.partial.

        Raises:
            CannotGuardError: one of them is mutable.
        """
        fields = f"{self._constant(_partial_fields)}({self._object(p)})"
        self._conditions.append(self._differs(fields, _partial_fields(p)))

    def add_tensor(self, t: Tensor) -> None:
        """Guard the properties of a tensor on which a trace depends."""
        name = self._tensor_name(t)
        self._tensors.append((name, type(t), t.shape, t.dtype, t.device, t.requires_grad))

    def check(self) -> list[Tensor] | None:
        """Return the guarded tensors, in the order of `add_tensor`; None if the guard fails.

        The guard fails if the function reads another object, or if the class, shape, dtype, device
        or requires_grad of a tensor has changed.
        """
        try:
            if self._read is None:
                self._read = self.reader(range(len(self._tensors)))
            tensors = self._read()
        except READ_ERRORS:
            return None
        if tensors is None:
            return None
        for t, (_, kind, shape, dtype, device, grad) in zip(tensors, self._tensors, strict=True):
            if (
                t.__class__ is not kind
                or t.shape != shape
                or t.dtype is not dtype
                or t.device != device
                or t.requires_grad is not grad
            ):
                return None
        return list(tensors)

    def reader(self, positions: Sequence[int]) -> Callable[[], tuple[Tensor, ...] | None]:
        """Compile a function that compares all identities and returns the selected tensors.

        The compiled function returns None if the guarded function reads other objects now. It
        raises one of `READ_ERRORS` if an object was deleted or a closure cell is empty. It does not
        compare the shapes of the tensors.

        Args:
            positions: positions of the tensors to return, in the order of `add_tensor`.
        """
        objects = self._references.values()
        changed = [*(f"{name} is None" for name in objects), *self._conditions]
        text = "\n".join(
            [
                "def read():",
                *(f"    {name} = {name.replace('o', 'x')}()" for name in objects),
                f"    if {' or '.join(changed)}: return None",
                f"    return ({''.join(f'{self._tensors[i][0]}, ' for i in positions)})",
            ]
        )
        names = dict(self._names)
        exec(_code(text), names)
        # popped, so that the function is in no reference cycle and is freed with the guard
        read: Callable[[], tuple[Tensor, ...] | None] = names.pop("read")
        return read

    def _constant(self, x: Any) -> str:
        """Register a value; return its name (`x3`, `x4`, ...) in the generated code."""
        name = f"x{len(self._names)}"
        self._names[name] = x
        return name

    def _object(self, x: Any) -> str:
        """Register a weak reference; return the object's name (`o3`, ...) in the generated code."""
        reference = weakref.ref(x)  # the same one for the same object, as it has no callback
        key = id(reference)
        if key not in self._references:
            self._references[key] = self._constant(reference).replace("x", "o")
        return self._references[key]

    def _tensor_name(self, t: Tensor) -> str:
        """Return the variable (`t0`, `t1`, ...) that holds a tensor in the generated code."""
        return self._tensor_names.setdefault(id(t), f"t{len(self._tensor_names)}")

    def _differs(self, place: str, x: Any, depth: int = 0) -> str:
        """Return a Python expression that is true if `place` does not hold `x` any more.

        If it is false, the variables of the tensors in `x` have been assigned.

        Raises:
            CannotGuardError: see `expect`.
        """
        if isinstance(x, Tensor):
            kind, number = self._constant(type(x)), self._constant(id(x))
            name = self._tensor_name(x)
            return f"({name} := {place}).__class__ is not {kind} or id({name}) != {number}"
        if _has_tensor(x, depth):
            return self._items_differ(place, x, depth)
        expected = value, how = expect(x, depth)
        if how is None:
            return f"{place} is not {self._constant(value)}"
        if isinstance(how, list):
            return f"not matches({place}, {self._constant(expected)})"
        return f"{place} is not {self._object(x)}"

    def _items_differ(self, place: str, x: Any, depth: int) -> str:
        """Return an expression as `_differs` does, for a list, tuple or dict with tensors."""
        name = self._constant(None).replace("x", "c")
        changed = [f"({name} := {place}).__class__ is not {type(x).__name__}"]
        if type(x) is dict:
            changed.append(f"len({name} := flat({name})) != {2 * len(x)}")
            x = _flat(x)
        else:
            changed.append(f"len({name}) != {len(x)}")
        changed += [self._differs(f"{name}[{i}]", y, depth + 1) for i, y in enumerate(x)]
        return " or ".join(changed)


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> types.CodeType:
    return compile(text, "<identity guard>", "exec")


caches.register(_code.cache_clear)


def _extras(f: types.FunctionType) -> tuple[Any, ...]:
    return f.__defaults__, f.__kwdefaults__, f.__dict__


def _partial_fields(p: functools.partial[Any]) -> tuple[Any, ...]:
    return p.func, p.args, p.keywords
