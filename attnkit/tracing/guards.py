"""Trace functions with a cache, keyed by a fingerprint of everything that a function reads.

A trace depends on the function's code and on everything that the code reads: closure cells,
defaults, globals, called functions. `trace_cached` visits all of these and builds a fingerprint.
Numbers and strings enter the fingerprint by value. Tensors enter by shape and dtype, because they
are arguments of the graph, not constants: another closure of the same code over another tensor of
the same shape reuses the trace.

Some values have no fingerprint: an object or a class with attributes, a numpy array, `eval`, an
import inside the function, a setting of torch. A function that reads one of them is traced again at
every call.

Building a fingerprint takes tens of microseconds. A function that already has one is checked by its
identity guard instead (`identity_guards`), if everything that it reads can be guarded.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import I32, Node
from attnkit.tracing.axes import Axes
from attnkit.tracing.float64_checks import float64_slots, rounding_sensitive_slots
from attnkit.tracing.identity_guards import CannotGuardError, IdentityGuard
from attnkit.tracing.mask import Mask
from attnkit.tracing.score_mod import ScoreMod
from attnkit.tracing.tracer import Kind, Traced, trace
from attnkit.util import caches
from attnkit.util.torch_private import OpOverload, OpOverloadPacket

_CACHE_SIZE = 1024

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_MODULES = frozenset({"torch", "math", "numpy", "operator", "functools", "attnkit", "typing"})
_TYPES = _MODULES | {"builtins"}  # modules whose classes do not change
_BUILTINS = _TYPES | {"_functools", "_operator"}  # modules whose C functions do not change
_IMPORT = dis.opmap["IMPORT_NAME"]
# Functions whose result depends on state that a fingerprint does not include.
_STATEFUL = frozenset(
    "eval exec globals locals vars input open __import__ import_module is_grad_enabled "
    "is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype "
    "are_deterministic_algorithms_enabled get_default_dtype get_default_device get_num_threads "
    "current_device device_count is_available initial_seed is_compiling get_rng_state backends "
    "get_float32_matmul_precision "
    "random".split()  # numpy.random, torch.random: a new number at every call, as in PyTorch
)


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """Holds the trace that all functions with the same fingerprint share.

    Attributes:
        root: the graph.
        names: names of the captured tensors, by slot.
        tensor_order: for each slot, the position of its tensor among the tensors that `_Walk`
            visits.
        data_slots: result of `data_slots` for the graph.
    """

    root: Node
    names: tuple[str, ...]
    tensor_order: tuple[int, ...]
    data_slots: tuple[int, ...]

    def tensors(self, visited: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the captured tensors by slot, selected from the `visited` tensors of a walk."""
        return tuple([visited[i] for i in self.tensor_order])


@dataclass(frozen=True, eq=False, slots=True)
class GuardedFunction:
    """Holds a traced function, its trace and its identity guard.

    Attributes:
        reference: weak reference to the function.
        record: the trace.
        guard: guard that checks whether the function still reads the same objects.
    """

    reference: weakref.ref[Any]
    record: TraceRecord
    guard: IdentityGuard


_cache: dict[tuple[Any, ...], TraceRecord] = {}
# The key holds the id of the function. Another function may reuse the id after this one is deleted.
_guarded: dict[tuple[int, Kind, torch.device], GuardedFunction] = {}


class _NoFingerprintError(Exception):
    """Raised if a function reads a value whose changes a fingerprint cannot detect."""


# TypeError: a part of the key is not hashable. RecursionError: lists are nested too deeply.
_NO_KEY = (_NoFingerprintError, TypeError, RecursionError)


class _Walk:
    """Visits every object that a function reads once and builds the fingerprint of the function.

    Attributes:
        tensors: the tensors that the function reads, in the order of the visits.
        seen: id of each visited object -> its number.
        guard: the identity guard of the same objects; None if one of them cannot be guarded.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.seen: dict[int, int] = {}
        self.guard: IdentityGuard | None = IdentityGuard()

    def key(self, x: Any) -> Any:
        """Return a hashable key of `x`. Equal keys guarantee equal traces.

        Raises:
            _NoFingerprintError: `x` may change in a way that a key cannot detect.
        """
        if isinstance(x, _PLAIN):
            return (type(x), str(x) if isinstance(x, float) else x)
        if type(x) is Tensor or type(x) is torch.nn.Parameter:
            return self._tensor(x)
        number = self.seen.get(id(x))
        if number is not None:
            return ("again", number)
        self.seen[id(x)] = len(self.seen)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            self._guard(IdentityGuard.add_partial, x)
            return ("partial", self.key(x.func), self.key(x.args), self.key(x.keywords))
        if type(x) in (tuple, list):
            return (type(x), tuple(self.key(item) for item in x))
        if type(x) is dict:
            return (dict, tuple((self.key(k), self.key(v)) for k, v in x.items()))
        if type(x) is Mask:
            self._guard(IdentityGuard.add_mask, x)
            axes = self._axes(x.axes)
            return (Mask, x.op, x.lengths, axes, self.key(x.function), self.key(x.parts))
        if type(x) is ScoreMod:
            self._guard(IdentityGuard.add_score_mod, x)
            return (ScoreMod, self._axes(x.axes), self.key(x.function))
        return self._immutable(x)

    def _guard(self, add: Callable[..., None], *what: Any) -> None:
        if self.guard is not None:
            try:
                add(self.guard, *what)
            except (CannotGuardError, AttributeError, TypeError):
                self.guard = None

    def _tensor(self, x: Tensor) -> Any:
        if x.is_nested or x.layout != torch.strided or x.is_quantized:  # the trace rejects these
            raise _NoFingerprintError
        number = self.seen.get(id(x))
        if number is None:
            number = self.seen[id(x)] = len(self.seen)
            self.tensors.append(x)
            self._guard(IdentityGuard.add_tensor, x)
        return (number, type(x), x.shape, x.dtype, x.device, x.requires_grad)

    def _axes(self, axes: tuple[Axes, ...]) -> Any:
        return tuple([(table.key, self.key(table.table)) for table in axes])

    def _immutable(self, x: Any) -> Any:
        """Return `x` as its own key if it is a function, module or class of a library.

        Raises:
            _NoFingerprintError: `x` is another object, or a function that reads hidden state.
        """
        if getattr(x, "__name__", None) in _STATEFUL:
            raise _NoFingerprintError
        if isinstance(x, types.ModuleType) and _root(x.__name__) in _MODULES:
            if _STATEFUL.isdisjoint(x.__name__.split(".")):
                return x
            raise _NoFingerprintError
        if isinstance(x, types.BuiltinFunctionType):
            owner = x.__self__
            if owner is None or _is_fixed_type(owner):
                return x
            if isinstance(owner, types.ModuleType) and _root(owner.__name__) in _BUILTINS:
                return x
        if _is_fixed_type(x) or isinstance(x, OpOverload | OpOverloadPacket):
            return x
        raise _NoFingerprintError

    def _function(self, x: types.FunctionType) -> Any:
        if x.__name__ in _STATEFUL:
            raise _NoFingerprintError
        # a function of torch, unless it is a closure over functions of the user, as the result of
        # and_masks(one, other). `__module__` is unreliable: functools.wraps copies it to a user's
        # function.
        if _root(str(x.__globals__.get("__name__"))) == "torch" and not x.__closure__:
            return x
        if _reads_state(x.__code__):
            raise _NoFingerprintError
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self.key(cell.cell_contents))
            except ValueError:  # an empty cell
                raise _NoFingerprintError from None
        scope, names = x.__globals__, _names_read(x.__code__)
        read = tuple((n, self.key(scope[n])) for n in names if n in scope)
        extras = self.key(x.__defaults__), self.key(x.__kwdefaults__), self.key(x.__dict__)
        self._guard(IdentityGuard.add_function, x, names)
        return (x.__code__, tuple(cells), read, extras)


def _root(name: str) -> str:
    """Return the top-level package of a module name: "torch" for "torch.nn"."""
    return name.partition(".")[0]


def _is_fixed_type(x: Any) -> bool:
    """Return whether `x` is a class of a library that can be found there under its own name.

    `__module__` alone is unreliable: it is "builtins" for a class defined by code that runs without
    a `__name__`.
    """
    if not isinstance(x, type) or _root(str(x.__module__)) not in _TYPES:
        return False
    found: Any = sys.modules.get(x.__module__)
    for name in x.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is x


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that `code`, or a function defined in it, may read."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_names_read(inner)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _reads_state(code: types.CodeType) -> bool:
    """Return whether `code`, or a function defined in it, may read state that is not a variable."""
    if not _STATEFUL.isdisjoint(code.co_names):
        return True
    if _IMPORT in code.co_code[::2]:  # rare: reading the instructions takes longer than a trace
        for step in dis.get_instructions(code):
            if step.opcode == _IMPORT and _root(str(step.argval)) not in _MODULES:
                return True
    return any(_reads_state(c) for c in code.co_consts if isinstance(c, types.CodeType))


def lookup_by_identity(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> tuple[TraceRecord, tuple[Tensor, ...]] | None:
    """Look up the trace of a function by its identity guard.

    Returns:
        The trace and the captured tensors by slot; None if the function has no identity guard, or
        if it reads other objects than when it was traced.
    """
    entry = guarded_function(function, kind, device)
    if entry is None:
        return None
    visited = entry.guard.check()
    return None if visited is None else (entry.record, entry.record.tensors(visited))


def guarded_function(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> GuardedFunction | None:
    """Return the record of a traced function and its identity guard; None if it has no guard."""
    entry = _guarded.get((id(function), kind, device))
    return entry if entry is not None and entry.reference() is function else None


def lookup_by_fingerprint(
    function: Callable[..., Any], kind: Kind, device: torch.device
) -> tuple[TraceRecord, tuple[Tensor, ...]] | None:
    """Look up a trace by the function's fingerprint; store an identity guard for later calls.

    Returns:
        The trace and the captured tensors by slot; None if the function has no fingerprint, or if
        no traced function has the same one.
    """
    walk = _Walk()
    try:
        record = _cache.get((kind, device, torch.get_default_dtype(), walk.key(function)))
    except _NO_KEY:
        return None
    if record is None:
        return None
    _guard(function, kind, device, record, walk.guard)
    return record, record.tensors(walk.tensors)


def trace_cached(function: Callable[..., Any], kind: Kind, device: torch.device) -> Traced:
    """Trace a function, or return a cached trace that is still valid.

    Args:
        function: a `score_mod` or a `mask_mod`.
        kind: "score" or "mask".
        device: device of the query.

    Raises:
        TraceError: see `attnkit.tracing.tracer.trace`.
    """
    cached = lookup_by_identity(function, kind, device) or lookup_by_fingerprint(
        function, kind, device
    )
    if cached is not None:
        record, tensors = cached
        return Traced(kind, record.root, tensors, record.names)
    walk = _Walk()
    try:
        key = (kind, device, torch.get_default_dtype(), walk.key(function))
        hash(key)
    except _NO_KEY:
        return trace(function, kind, device)
    fresh = trace(function, kind, device)
    order = {id(t): i for i, t in enumerate(walk.tensors)}
    if not fresh.derived and all(id(t) in order for t in fresh.tensors):
        record = TraceRecord(
            fresh.root,
            fresh.names,
            tuple(order[id(t)] for t in fresh.tensors),
            data_slots(fresh.root, float64_slots(fresh.tensors)),
        )
        _cache[key] = record
        if len(_cache) > _CACHE_SIZE:
            caches.drop_oldest(_cache)
        _guard(function, kind, device, record, walk.guard)
    return fresh


def _guard(
    function: Callable[..., Any],
    kind: Kind,
    device: torch.device,
    record: TraceRecord,
    guard: IdentityGuard | None,
) -> None:
    """Store the identity guard of a function until the function is deleted."""
    if guard is None:
        return
    key = (id(function), kind, device)

    def forget(reference: Any) -> None:
        entry = _guarded.get(key)
        if entry is not None and entry.reference is reference:
            _guarded.pop(key, None)

    try:
        _guarded[key] = GuardedFunction(weakref.ref(function, forget), record, guard)
    except TypeError:  # the function does not support weak references
        return


def _clear() -> None:
    _cache.clear()
    _guarded.clear()
    _names_read.cache_clear()
    data_slots.cache_clear()
    _reads_state.cache_clear()


caches.register(_clear)


@functools.lru_cache(maxsize=4096)
def data_slots(root: Node, slots: frozenset[int]) -> tuple[int, ...]:
    """Return the slots of the captured tensors on whose values the checks of a graph depend.

    The checks concern numbers from which integers, such as indices, are computed, and float64
    numbers that float32 must represent exactly. Tables of floats that are only read, which an
    optimizer may edit at every step, are not checked.

    Args:
        root: the graph.
        slots: slots of the float64 tensors of the graph.
    """
    found = set(rounding_sensitive_slots(root, slots))
    behind: dict[Node, frozenset[int]] = {}  # slots from which a node is computed
    for n in ir.topo(root):
        read = frozenset({int(str(n.attr))} if n.op == "load" else ())
        behind[n] = read.union(*[behind[a] for a in n.args])
        if n.type == I32:
            found |= behind[n]
    return tuple(sorted(found))
