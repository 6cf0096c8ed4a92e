"""Make masks and score_mods picklable, by recording the call of the function that built them.

A mask of the library is a closure, which `pickle` cannot store. `picklable` decorates the function
that builds it and records the call, so that a pickle holds the name of that function and its
arguments, and loading it calls the function again. Pickles therefore survive changes of the code.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, PicklingError

P = ParamSpec("P")
T = TypeVar("T", bound="Recorded")


class Call(NamedTuple):
    """Holds the call of a function that built a mask or a score_mod."""

    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorded:
    """Base class of `Mask` and `ScoreMod`, which pickle and copy by the call that built them.

    Attributes:
        call: the recorded call of a function that `picklable` decorates; None for another object,
            which is pickled by its attributes.
    """

    __slots__ = ("__weakref__", "call", "label")

    call: Call | None
    function: Callable[..., Any] | None
    label: str

    @property
    def __name__(self) -> str:
        """Return the label; as a function's name it may be assigned."""
        return self.label

    @__name__.setter
    def __name__(self, name: str) -> None:
        if not isinstance(name, str):
            raise ArgumentError(f"__name__ must be a str, got {type(name).__name__}")
        self.label = name

    def __reduce__(self) -> tuple[Any, ...]:
        if self.call is not None:
            parts = rebuild, tuple(self.call), (None, {"label": self.label})
            return reduced(parts, self.call)
        blank = copyreg.__newobj__, (type(self),), (None, self._slots())  # type: ignore[attr-defined]
        return reduced(blank, self.function)

    def __copy__(self: T) -> T:
        return self._filled(self._slots())

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        if self.call is not None:
            other = cast(T, rebuild(*copy.deepcopy(self.call, memo)))
            other.label = self.label
            return other
        return self._filled({name: copy.deepcopy(v, memo) for name, v in self._slots().items()})

    def _filled(self: T, slots: dict[str, Any]) -> T:
        other = type(self).__new__(type(self))
        for name, value in slots.items():
            setattr(other, name, value)
        return other

    def _slots(self) -> dict[str, Any]:
        """Return the attributes of the object, those of a subclass too."""
        found = dict(getattr(self, "__dict__", {}))
        for cls in type(self).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if name not in ("__weakref__", "__dict__") and hasattr(self, name):
                    found[name] = getattr(self, name)
        return found


@overload
def picklable(build: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def picklable(*copies: str) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def picklable(*copies: Any) -> Any:
    """Make the masks or score_mods that a function builds picklable, as a decorator.

    A closure cannot be pickled. The decorator records the call that built it. A pickle holds the
    name of the function and its arguments, and loading it calls the function again. `copy.deepcopy`
    calls it with copied arguments, so that the copy of a module reads the parameters of the copy.

    Use it as `@picklable`, or as `@picklable("lengths")` with the names of the tensors whose data
    the function reads while it builds the mask. The record keeps a copy of these tensors, because a
    later edit of them does not change the mask. It keeps the other arguments as they are.

    Args:
        copies: the decorated function; or names of its arguments.

    Returns:
        The function with the record; or the decorator.

    Raises:
        ArgumentError: the decorated object is no function, or has no argument of that name.

    >>> import copy
    >>> from attnkit import Mask, picklable
    >>> @picklable
    ... def every(n):
    ...     return Mask(lambda b, h, q, kv: kv % n == 0, f"every({n})")
    >>> copy.deepcopy(every(3))
    every(3)
    """
    if len(copies) == 1 and callable(copies[0]):
        return _recording(copies[0], ())
    if not all(isinstance(name, str) for name in copies):
        raise ArgumentError(
            "picklable decorates a function, or takes names of its arguments, got "
            f"{', '.join(type(c).__name__ for c in copies)}"
        )
    return lambda build: _recording(build, copies)


def _recording(build: Callable[P, T], copies: Sequence[str]) -> Callable[P, T]:
    """Return `build` with a record of each call; `copies` are the names of copied arguments."""
    name = getattr(build, "__name__", type(build).__name__)
    if isinstance(build, type):
        raise ArgumentError(f"picklable decorates a function, got the class {name}")
    missing = [copied for copied in copies if copied not in inspect.signature(build).parameters]
    if missing:
        raise ArgumentError(f"{name} has no argument {missing[0]!r}, which picklable names")

    @functools.wraps(build)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return build(*args, **kwargs)
        result = build(*args, **kwargs)
        if isinstance(result, Recorded):  # a function of the caller may return something else
            if copies:
                # not a variable of the closure: torch.compile cannot read one of this type
                bound = inspect.signature(build).bind(*args, **kwargs)
                bound.arguments |= {
                    name: _copied(bound.arguments[name])
                    for name in copies
                    if name in bound.arguments
                }
                args, kwargs = bound.args, bound.kwargs  # type: ignore[assignment]
            result.call = Call(recorded, _kept(args), _kept(kwargs))
        return result

    return recorded


def _kept(value: Any) -> Any:
    """Return a copy of lists and dicts, which the caller may edit; other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)([_kept(item) for item in value])
    if type(value) is dict:
        return {name: _kept(item) for name, item in value.items()}
    return value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def reduced(parts: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
    """Return `parts`, the result of a `__reduce__`, if `pickle` can store `values`, a part of it.

    Raises:
        PicklingError: the name of a function, or of an object's class, cannot be imported.
    """
    try:
        check_picklable(*values)
    except PicklingError as error:
        if threading.current_thread().name != "QueueFeederThread":
            raise
        # multiprocessing.Queue pickles in a thread. An error there is lost, and the receiver (a
        # DataLoader, for example) would wait forever. So the receiver gets the error instead.
        return refuse, (str(error),)
    return parts


def rebuild(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat a recorded call; pickles name this function."""
    return build(*args, **kwargs)


def refuse(message: str) -> None:
    """Raise the error of an object that another process could not pickle; pickles name it.

    Raises:
        PicklingError: always.
    """
    raise PicklingError(message)


def check_picklable(*values: Any) -> None:
    """Raise an error if `pickle` cannot store functions or objects, or what they consist of.

    Objects that define how they are stored, such as tensors and masks, are not looked into.

    Raises:
        PicklingError: the name of a function, or of an object's class, cannot be imported.
    """
    checked: dict[int, Any] = {}  # by id; kept alive, so that no id is used again
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) not in checked:
            checked[id(value)] = value
            waiting += _parts(value)


def _parts(value: Any) -> Sequence[Any]:
    """Return what `pickle` stores for a value, after a check of the name that it stores.

    Raises:
        PicklingError: the name cannot be imported.
    """
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):  # the object, and the name of the method
        return [value.__self__]
    if isinstance(value, types.FunctionType | type):
        _check_importable(value)
        return ()
    cls: Any = type(value)
    usual = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    if not usual or cls.__module__ == "builtins" or cls in copyreg.dispatch_table:
        return ()
    _check_importable(cls)
    has_state = hasattr(value, "__dict__") and cls.__getstate__ is object.__getstate__
    return [vars(value)] if has_state else ()


def _check_importable(named: types.FunctionType | type) -> None:
    """Raise an error if a function or a class cannot be imported by its name.

    Raises:
        PicklingError: it cannot.
    """
    found: Any = sys.modules.get(named.__module__ or "")
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is named or stores_code(_callers()):
        return
    if isinstance(named, type):
        raise PicklingError(
            f"an object of the class {named.__qualname__} cannot be pickled: another process cannot "
            "import the class. Define it at the top level of a module"
        )
    code = inspect.unwrap(named).__code__
    raise PicklingError(
        f"{named.__qualname__} ({code.co_filename}:{code.co_firstlineno}) cannot be pickled: it is "
        "a lambda, a function inside of a function, or a decorated class method, which another "
        "process cannot import. Define it at the top level of a module, or as a class with "
        "__call__; or decorate the function of a module that builds the mask or score_mod with "
        "@attnkit.picklable"
    )


def stores_code(callers: Iterable[str]) -> bool:
    """Return whether cloudpickle or dill called, which store functions by their code.

    Args:
        callers: names of the modules of the calling functions, innermost first.
    """
    for name in callers:
        parts = name.split(".")
        if parts[0] not in ("attnkit", "pickle", "copyreg"):
            return not {"cloudpickle", "dill"}.isdisjoint(parts)
    return False


def _callers() -> Iterator[str]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back
