"""When a trace may be used again.

A trace depends on the function's code and on whatever the code reads: closure cells, defaults,
globals, the functions it calls. `trace_cached` walks all of that into a fingerprint. Numbers and strings
enter by value, tensors by shape and dtype (they are arguments of the graph, never baked in), so
another closure of the same code over another tensor of the same shape needs no second trace.
Anything that cannot be read this way (an object or a class with attributes, a numpy array, `eval`,
an import inside the function, a setting of torch) makes the function unprovable: it is traced again
at every call rather than trusted.

The walk takes tens of microseconds; a function that was walked over before is watched instead
(`watch`), where that tells as much.
"""

from __future__ import annotations

import dis
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import I32, Node
from attnkit.tracing.float64_checks import exposed, float64_slots
from attnkit.tracing.identity_guards import Unsteady, Watch
from attnkit.tracing.mask import Mask
from attnkit.tracing.tracer import Kind, Traced, trace

_CACHE_SIZE = 1024

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_MODULES = frozenset({"torch", "math", "numpy", "operator", "functools", "attnkit", "typing"})
_TYPES = _MODULES | {"builtins"}  # whose classes do not change
_BUILTINS = _TYPES | {"_functools", "_operator"}  # where functions in C say that they live
_IMPORT = dis.opmap["IMPORT_NAME"]
# What answers by more than its arguments: the walk cannot see what that is.
_LIVE = frozenset(
    "eval exec globals locals vars input open __import__ import_module is_grad_enabled "
    "is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype "
    "are_deterministic_algorithms_enabled get_default_dtype get_default_device get_num_threads "
    "current_device device_count is_available initial_seed is_compiling".split()
)


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """The trace that all functions with one fingerprint share; one object per fingerprint.

    Attributes:
        root: the graph.
        names: names of the captured tensors, by slot.
        tensor_order: for each slot, the position of its tensor among those that the walk visits.
        depends_on_data: whether proofs about the graph depend on the data of captured tensors:
            ranges of integers, or whether float32 represents its float64 numbers exactly.
    """

    root: Node
    names: tuple[str, ...]
    tensor_order: tuple[int, ...]
    depends_on_data: bool

    def tensors(self, visited: list[Tensor]) -> tuple[Tensor, ...]:
        """Select the captured tensors, by slot, from those that the walk visited."""
        return tuple([visited[i] for i in self.tensor_order])


@dataclass(frozen=True, eq=False, slots=True)
class GuardedFunction:
    """A traced function with the guard of what it reads.

    Attributes:
        reference: weak reference to the function.
        record: its trace.
        guard: checks that the function still reads the same objects.
    """

    reference: weakref.ref[Any]
    record: TraceRecord
    guard: Watch


_cache: dict[tuple[Any, ...], TraceRecord] = {}
# by id of the function, which is another one's once it is gone
_watched: dict[tuple[int, Kind, torch.device], GuardedFunction] = {}


class _Unprovable(Exception):
    """Something was read that may change without trace."""


class _Walk:
    """One walk over a function: hashable parts, the tensors met in order, and a watch."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.seen: dict[int, int] = {}
        self.watch: Watch | None = Watch()

    def key(self, x: Any) -> Any:
        """A hashable stand-in for `x`, equal only if the trace cannot tell the difference."""
        if isinstance(x, _PLAIN):
            return (type(x), str(x) if isinstance(x, float) else x)
        if type(x) is Tensor or type(x) is torch.nn.Parameter:
            return self._tensor(x)
        known = self.seen.get(id(x))
        if known is not None:
            return ("again", known)
        self.seen[id(x)] = len(self.seen)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            self._watch(Watch.partial, x)
            return ("partial", self.key(x.func), self.key(x.args), self.key(x.keywords))
        if type(x) in (tuple, list):
            return (type(x), tuple(self.key(item) for item in x))
        if type(x) is dict:
            return (dict, tuple((self.key(k), self.key(v)) for k, v in x.items()))
        if type(x) is Mask:
            self._watch(Watch.mask, x)
            return (Mask, x.op, x.lengths, self.key(x.function), self.key(x.parts))
        return self._fixed(x)

    def _watch(self, add: Callable[..., None], *what: Any) -> None:
        if self.watch is not None:
            try:
                add(self.watch, *what)
            except (Unsteady, AttributeError, TypeError):
                self.watch = None

    def _tensor(self, x: Tensor) -> Any:
        known = self.seen.get(id(x))
        if known is None:
            known = self.seen[id(x)] = len(self.seen)
            self.tensors.append(x)
            self._watch(Watch.tensor, x)
        return (known, type(x), x.shape, x.dtype, x.device, x.requires_grad)

    def _fixed(self, x: Any) -> Any:
        """Objects that cannot change: library functions, modules and classes."""
        if getattr(x, "__name__", None) in _LIVE:
            raise _Unprovable
        if isinstance(x, types.ModuleType) and _root(x.__name__) in _MODULES:
            return x
        if isinstance(x, types.BuiltinFunctionType):
            owner = x.__self__
            if owner is None or _is_fixed_type(owner):
                return x
            if isinstance(owner, types.ModuleType) and _root(owner.__name__) in _BUILTINS:
                return x
        if _is_fixed_type(x) or isinstance(x, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return x
        raise _Unprovable

    def _function(self, x: types.FunctionType) -> Any:
        if x.__name__ in _LIVE:
            raise _Unprovable
        # torch's own, but not what it makes around a user's: and_masks(one, other)
        if _root(str(x.__module__)) == "torch" and not x.__closure__:
            return x
        if _reads_more(x.__code__):
            raise _Unprovable
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self.key(cell.cell_contents))
            except ValueError:  # an empty cell
                raise _Unprovable from None
        scope, names = x.__globals__, _names_read(x.__code__)
        read = tuple((n, self.key(scope[n])) for n in names if n in scope)
        extras = self.key(x.__defaults__), self.key(x.__kwdefaults__), self.key(x.__dict__)
        self._watch(Watch.function, x, names)
        return (x.__code__, tuple(cells), read, extras)


def _root(name: str) -> str:
    """The package of a module."""
    return name.partition(".")[0]


def _is_fixed_type(x: Any) -> bool:
    return isinstance(x, type) and _root(str(x.__module__)) in _TYPES


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[str, ...]:
    """Global names that the code, or a function defined in it, may read."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_names_read(inner)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _reads_more(code: types.CodeType) -> bool:
    """Whether the code, or a function defined in it, may read what is not seen from its names."""
    if not _LIVE.isdisjoint(code.co_names):
        return True
    if _IMPORT in code.co_code[::2]:  # seldom: reading the instructions takes longer than a trace
        for step in dis.get_instructions(code):
            if step.opcode == _IMPORT and _root(str(step.argval)) not in _MODULES:
                return True
    return any(_reads_more(c) for c in code.co_consts if isinstance(c, types.CodeType))


def lookup_by_identity(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> tuple[TraceRecord, tuple[Tensor, ...]] | None:
    """What is known of a function's graph, and its captured tensors by slot.

    None where nothing is known or something that the function reads has changed: `trace_cached` finds
    out more.
    """
    found = guarded_function(function, kind, device)
    if found is None:
        return None
    met = found.guard.check()
    return None if met is None else (found.record, found.record.tensors(met))


def guarded_function(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> GuardedFunction | None:
    """What tells whether a function has changed; None where it is not watched."""
    found = _watched.get((id(function), kind, device))
    return found if found is not None and found.reference() is function else None


def lookup_by_fingerprint(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> tuple[TraceRecord, tuple[Tensor, ...]] | None:
    """The same of a function that is new, but has the fingerprint of one that is known."""
    walk = _Walk()
    try:
        known = _cache.get((kind, device, walk.key(function)))
    except (_Unprovable, TypeError):  # TypeError: something in the key does not hash
        return None
    if known is None:
        return None
    _watch(function, kind, device, known, walk.watch)
    return known, known.tensors(walk.tensors)


def trace_cached(function: Callable[..., Any], kind: Kind, device: torch.device) -> Traced:
    """The trace of a function: a known one if it is provably still true, else a new one.

    Args:
        function: `score_mod` or `mask_mod`.
        kind: "score" or "mask".
        device: where the query lives.

    Raises:
        TraceError: as `attnkit.tracing.tracer.trace`.
    """
    found = lookup_by_identity(function, kind, device) or lookup_by_fingerprint(
        function, kind, device
    )
    if found is not None:
        known, tensors = found
        return Traced(kind, known.root, tensors, known.names)
    walk = _Walk()
    try:
        key = (kind, device, walk.key(function))
        hash(key)
    except (_Unprovable, TypeError):
        return _trace(function, kind, device)
    fresh = _trace(function, kind, device)
    order = {id(t): i for i, t in enumerate(walk.tensors)}
    if not fresh.derived and all(id(t) in order for t in fresh.tensors):
        tensor_order = tuple(order[id(t)] for t in fresh.tensors)
        known = TraceRecord(
            fresh.root,
            fresh.names,
            tensor_order,
            depends_on_data(fresh.root, float64_slots(fresh.tensors)),
        )
        _cache[key] = known
        if len(_cache) > _CACHE_SIZE:
            _cache.pop(next(iter(_cache)), None)
        _watch(function, kind, device, known, walk.watch)
    return fresh


def _watch(
    function: Callable[..., Any],
    kind: Kind,
    device: torch.device,
    known: TraceRecord,
    watch: Watch | None,
) -> None:
    """Watch a function from now on, until it is gone."""
    if watch is None:
        return
    at = (id(function), kind, device)

    def forget(reference: Any) -> None:
        found = _watched.get(at)
        if found is not None and found.reference is reference:
            del _watched[at]

    try:
        _watched[at] = GuardedFunction(weakref.ref(function, forget), known, watch)
    except TypeError:  # it cannot be referred to weakly
        return


def depends_on_data(root: Node, slots: frozenset[int]) -> bool:
    """Whether what is proven of a graph depends on captured tensors' data.

    Args:
        root: the graph.
        slots: of its float64 tensors.
    """
    if exposed(root, slots):
        return True
    loaded: set[Node] = set()
    for n in ir.topo(root):
        if n.op == "load" or any(a in loaded for a in n.args):
            loaded.add(n)
            if n.type == I32:
                return True
    return False


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
