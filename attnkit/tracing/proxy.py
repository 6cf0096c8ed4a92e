"""Define `Value`, the proxy that a traced function receives in place of a tensor.

A `Value` of shape [] holds the graph node of its number. A `Value` with a shape, such as a row of a
captured tensor, holds a function from index nodes to the node of an element; it must be indexed or
reduced before the traced function returns it. Operations whose arguments are all captured tensors
run eagerly. `attnkit.tracing.ops` defines the handler of each torch function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnkit.errors import TraceError
from attnkit.graph import ir
from attnkit.graph.ir import Node, Type
from attnkit.tracing.dtypes import Converter, kind_of, refusal_to_capture
from attnkit.tracing.numbers import Unknown
from attnkit.util.package import FOLDER
from attnkit.util.torch_private import (
    OpOverload,
    OpOverloadPacket,
    is_fake,
    recorded,
    shares_storage,
)

Pick: TypeAlias = Callable[..., Node]
# Which part of a captured tensor a Value covers: "" for the whole tensor, "end" for slices that
# reach the end of their dimensions, "inner" for other slices. An index that is out of bounds in a
# part may be in bounds in the whole tensor.
Part: TypeAlias = Literal["", "end", "inner"]
Handler: TypeAlias = Callable[..., Any]

# torch function or method -> handler for calls with Values; `attnkit.tracing.ops` registers them.
HANDLERS: dict[Any, Handler] = {}

_NUMBER = "it stands for one number, as a tensor of shape []"

# Random functions are rejected: neither FlexAttention nor a kernel can draw a number per score.
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "poisson dropout alpha_dropout uniform_ normal_ random_ bernoulli_ exponential_".split()
)

# Eager calls that do not read the data of a tensor ("__get__" is any attribute: shape, dtype, ...).
_METADATA = frozenset(
    "__get__ size stride dim ndimension numel nelement element_size is_floating_point is_complex "
    "is_contiguous get_device __len__ data_ptr storage_offset is_signed type".split()
)


class Tracer:
    """Holds the state of one trace: captured tensors, results of eager operations, the first error.

    Attributes:
        device: device that `.device` of a traced value returns.
        converter: converts nodes to the dtypes that torch would compute.
        slots: id of each captured tensor -> its slot.
        tensors: captured tensors by slot.
        results: id of each tensor that an eager operation returned -> (the tensor, whether it
            depends on captured tensors).
        derived: whether the function computed a captured tensor from others, so that the trace is
            valid for one call only.
        products: number of products that linear layers and products of matrices have unrolled.
        outputs: (id of the object of a call of an autograd.Function, place among its results) ->
            (that object, the result with its gradient).
        grad: whether gradients are recorded around the trace; within it they always are, so that
            torch.no_grad in the user's function shows.
        error: the first error, even if the user's function catches it.
    """

    def __init__(self, device: torch.device, *, rounds: bool = False) -> None:
        self.device = device
        self.converter = Converter(rounds)
        self.slots: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.results: dict[int, tuple[Tensor, bool]] = {}
        self.derived = False
        self.products = 0
        self.outputs: dict[tuple[int, int], tuple[Any, Value]] = {}
        self.grad = torch.is_grad_enabled()
        self.error: TraceError | None = None

    def failure(self, message: str) -> TraceError:
        """Return a TraceError that names the user's line; record it in case the user catches it."""
        error = TraceError(message + _user_line())
        if self.error is None:
            self.error = error
        return error

    def fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        """Raise a TraceError with `message` that names the user's line."""
        raise self.failure(message) from cause

    def record_result(self, result: Any, arguments: Sequence[Any]) -> Any:
        """Record the tensors in the `result` of an eager operation; return `result`."""
        if isinstance(result, Tensor):
            inputs = [a for a in _leaves(arguments) if isinstance(a, Tensor)]
            captured = any(id(a) not in self.results or self.results[id(a)][1] for a in inputs)
            if not any(result is a for a in inputs):
                self.results[id(result)] = (result, captured)
        elif isinstance(result, tuple | list) and any(isinstance(r, Tensor) for r in result):
            for r in result:
                self.record_result(r, arguments)
        return result

    def is_local(self, x: Any) -> bool:
        """Return whether the memory of tensor `x` was allocated during this trace."""
        base = x if not isinstance(x, Tensor) or x._base is None else x._base
        return id(base) in self.results

    def record_read(self, function: Any, arguments: Sequence[Any]) -> None:
        """Set `derived` if an eager operation may have read data of a captured tensor."""
        if _title(function) not in _METADATA:
            tensors = [a for a in arguments if isinstance(a, Tensor)]
            self.derived |= any(
                id(t) not in self.results or self.results[id(t)][1] for t in tensors
            )

    def lift(self, x: Any) -> Value:
        """Convert a tensor or a number that the user combines with a Value to a Value.

        Raises:
            TraceError: `x` cannot be combined with a traced value.
        """
        if isinstance(x, Value):
            return self.settle(x)
        if isinstance(x, Tensor):
            return self._capture(x)
        if isinstance(x, bool | int | float):
            return self._number(x)
        if isinstance(x, np.generic):
            return self._number(x.item())
        if isinstance(x, np.ndarray):
            self.fail("a numpy array cannot be used with a traced value; use torch.from_numpy(...)")
        self.fail(
            f"cannot combine a traced value with {type(x).__name__}; use numbers and torch tensors"
        )

    def settle(self, x: Value) -> Value:
        """Return the Value with its gradient, if an autograd.Function returned it; else `x`.

        Torch marks the results of such a function: one with a gradient holds the object that runs
        the function's own backward, one without a gradient no longer requires grad.
        """
        if x.settled is not None:
            return x.settled
        if x.kind != "f32" or self.converter.rounds:
            return x  # a mask has no gradient
        function, differentiable, place = recorded(x)
        if function is None and differentiable:
            return x
        x.settled = x.copy()  # what the backward reads, if it reads its output
        x.settled = HANDLERS[torch.autograd.Function](self, x.settled, function, place)
        self.outputs[id(function), place] = function, x.settled
        return x.settled

    def unknown_number(self, index: int, kind: type[int] | type[float]) -> Value:
        """Return a Value for a Python number that is known only when a call runs."""
        dtype = self.converter.default if kind is float else torch.int64
        return Value(self, None, dtype, number=Unknown(index, kind_of(dtype)))

    def capture_view(self, x: Tensor) -> Value:
        """Capture `x`, a view of a captured tensor, as a separate tensor; return its Value."""
        self.results[id(x)] = (x, True)
        return self._capture(x)

    def _number(self, x: bool | int | float | complex) -> Value:
        if isinstance(x, complex):
            self.fail("complex numbers are not supported")
        dtype = torch.bool if isinstance(x, bool) else torch.int64
        return Value(
            self, None, self.converter.default if isinstance(x, float) else dtype, number=x
        )

    def _capture(self, x: Tensor) -> Value:
        if refusal := refusal_to_capture(x):
            self.fail(refusal)
        if _has_no_data(x):
            self.fail(
                "a tensor that C++ code of torch made of a traced value is not known to attnkit, "
                "such as the input of an autograd.Function that its forward returns; return a "
                "copy, as x.clone()"
            )
        result, captured = self.results.get(id(x), (None, False))
        if result is not None and not captured and x.ndim == 0:  # torch.tensor(0.5) inside
            return Value(self, self.converter.number(x.item(), x.dtype), x.dtype)
        self.derived |= captured
        slot = self.slots.setdefault(id(x), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(x)
        kind = kind_of(x.dtype)

        def pick(*index: Node) -> Node:
            n = ir.load(slot, kind, index)
            self.converter.loaded(n, x.dtype)
            return n

        if x.ndim == 0:
            return Value(self, pick(), x.dtype)
        return Value(self, None, x.dtype, tuple(x.shape), pick, x)


# Every Value aliases this tensor, which has no data and is never read.
_NO_DATA = torch.empty((), device="meta")


def _has_no_data(x: Tensor) -> bool:
    return x.is_meta and not is_fake(x) and shares_storage(x, _NO_DATA)


class Value(Tensor):
    """Proxy for a tensor during tracing; records the operations of the user's function.

    It is a subclass of Tensor, so that `isinstance(x, torch.Tensor)` is true for it, as for the
    tensor that it represents.

    Attributes:
        tracer: the trace.
        dtype: the dtype that torch would give to the value.
        sizes: the shape; () for one number.
        kind: type of the node in the graph.
        pick: function from index nodes, one per dimension, to the node of that element.
        origin: the captured tensor, or the view of one, that this Value represents; None for
            computed values.
        part: which part of the captured tensor this Value covers.
        number: the Python number that this Value represents, maybe an unknown one; None for a
            tensor. In type promotion a tensor takes precedence over a number.
        settled: the Value that replaces a result of an autograd.Function, see `Tracer.settle`.
    """

    __array_ufunc__ = None  # numpy scalars leave `np.int64(3) * value` to us

    def __new__(
        cls, tracer: Tracer, node: Node | None, dtype: torch.dtype, *_: Any, **__: Any
    ) -> Value:
        # floats require grad in torch's eyes, so that an autograd.Function records its backward
        return Tensor._make_subclass(cls, _NO_DATA, dtype.is_floating_point)

    def __init__(
        self,
        tracer: Tracer,
        node: Node | None,
        dtype: torch.dtype,
        sizes: tuple[int, ...] = (),
        pick: Pick | None = None,
        origin: Tensor | None = None,
        part: Part = "",
        number: bool | int | float | Unknown | None = None,
    ) -> None:
        self.tracer = tracer
        self.sizes = sizes
        self.number = number
        self._node = node
        self._dtype = dtype
        self.kind: Type = kind_of(dtype)
        self.pick: Pick = pick or (lambda: node)  # type: ignore[assignment,return-value]
        self.origin = origin
        self.part = part
        self.settled: Value | None = None

    @property
    def node(self) -> Node:
        """Return the graph node of a Value of shape [].

        Raises:
            TraceError: the Value has a shape.
        """
        if self._node is None and self.number is not None:
            try:
                self._node = self.tracer.converter.number(self.number, self._dtype)
            except (TypeError, ValueError) as error:
                self.tracer.fail(str(error), error)
        if self._node is None:
            self.tracer.fail(
                f"a value of shape {self.sizes} was used where one number per (q, kv) pair is "
                "needed; index every dimension or reduce it with sum, any or dot"
            )
        return self._node

    def copy(self) -> Value:
        """Return another object that represents the same tensor."""
        return Value(
            self.tracer,
            self._node,
            self._dtype,
            self.sizes,
            self.pick,
            self.origin,
            self.part,
            self.number,
        )

    # --- tensor attributes that users read -------------------------------------------------
    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.sizes)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.sizes)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.tracer.device

    requires_grad = False
    is_cuda = property(lambda self: self.tracer.device.type == "cuda")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Value({self._node})" if self._node else f"Value(shape={self.sizes})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    # --- operations that need a number while tracing ---------------------------------------
    def __bool__(self) -> bool:
        raise self.tracer.failure(
            "the truth of a traced value is not known while tracing, so `if`, `and`, `or`, `not`, "
            "`a < b < c`, assert, min() and max() cannot depend on the score or an index; write "
            "torch.where(condition, a, b), `&`, `|`, `~`, torch.minimum or torch.maximum"
        )

    def _no_number(self, *_: Any) -> NoReturn:
        self.tracer.fail(
            "a traced value cannot become a Python number: int(), float(), .item(), range(), "
            "math.* and indexing a list or a numpy array need one; use the torch.* function, and "
            "a torch tensor in place of a list or an array"
        )

    __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = _no_number
    item = tolist = numpy = _no_number  # type: ignore[assignment]

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.tracer.fail("a traced value cannot become a numpy array; use torch functions")

    def __setitem__(self, *_: Any) -> NoReturn:
        self.tracer.fail("assigning into a traced value is not supported; use torch.where")

    def __iter__(self) -> Any:
        if not self.sizes:
            self.tracer.fail(f"a traced number cannot be iterated over; {_NUMBER}")
        return iter([self[i] for i in range(self.sizes[0])])

    def __len__(self) -> int:
        if not self.sizes:
            self.tracer.fail(f"a traced number has no len(); {_NUMBER}")
        return self.sizes[0]

    def __getitem__(self, index: Any) -> Any:
        return dispatch(self.tracer, Tensor.__getitem__, (self, index), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # torch and Python ask for such names themselves
            raise AttributeError(name)
        method = getattr(Tensor, name, None)
        if method is not None:
            self.tracer.fail(f"the attribute {name!r} is not known while tracing; {_NUMBER}")
        self.tracer.fail(f"a tensor has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tracer = _tracer_of((args, kwargs or {}))
        if tracer is None:
            raise AssertionError("a torch function without a traced argument")
        return dispatch(tracer, function, args, kwargs or {})

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if not isinstance(other, Value | Tensor | bool | int | float | np.generic | np.ndarray):
            return NotImplemented
        if isinstance(self.number, Unknown) and isinstance(other, Value) and other.number is None:
            # Python calls the other operand's method if the first one is a number
            return dispatch(self.tracer, getattr(Tensor, _reflected(name)), (other, self), {})
        return dispatch(self.tracer, getattr(Tensor, name), (self, other), {})

    return method


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _reflected(name: str) -> str:
    stem = name.strip("_")
    return f"__{_MIRRORED[stem]}__" if stem in _MIRRORED else f"__r{stem}__"


def _unary(name: str) -> Callable[[Value], Any]:
    return lambda self: dispatch(self.tracer, getattr(Tensor, name), (self,), {})


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Value, f"__r{_name}__", _operator(f"__r{_name}__"))
    setattr(Value, f"__i{_name}__", _operator(f"__{_name}__"))  # `x += 1` names a new value x
for _name in "lt le gt ge eq ne".split():
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "neg abs invert pos".split():
    setattr(Value, f"__{_name}__", _unary(f"__{_name}__"))


class TracingMode(TorchFunctionMode):
    """Torch function mode that passes every torch call of the user's function to `dispatch`."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(self.tracer, function, args, kwargs or {})


def _instead_of(name: str) -> str:
    """Return advice on what to write instead of the torch function `name`."""
    from attnkit.tracing.alternatives import instead_of  # of use to messages only

    return instead_of(name)


def dispatch(tracer: Tracer, function: Any, args: Any, kwargs: Any) -> Any:
    """Handle a torch call of the user's function: trace it if an argument is a Value, else run it.

    Args:
        tracer: the trace.
        function: the torch function.
        args, kwargs: its arguments.

    Returns:
        The result of the handler, or of the eager call.

    Raises:
        TraceError: the call is not supported, or its arguments are wrong.
    """
    leaves = _leaves((args, kwargs))
    if not any(isinstance(x, Value) for x in leaves):
        if _title(function) in _RANDOM:
            name = _title(function)
            tracer.fail(
                f"{name} is random, a score_mod or mask_mod must not be; {_instead_of(name)}"
            )
        if any(not tracer.is_local(t) for t in _mutated(function, args, kwargs)):
            tracer.fail(
                f"{_title(function)} changes a captured tensor whenever the function is traced; "
                "change it outside of the function"
            )
        if function is Tensor.__getitem__ and _static(args[1]):
            return HANDLERS[function](tracer, tracer.lift(args[0]), args[1])
        if any(isinstance(x, Tensor) for x in leaves):
            with torch.set_grad_enabled(tracer.grad and torch.is_grad_enabled()):
                result = function(*args, **kwargs)
        else:  # perhaps the switch of torch.no_grad itself
            result = function(*args, **kwargs)
        if not isinstance(result, Tensor):
            tracer.record_read(function, leaves)
        return tracer.record_result(result, leaves)
    handler = HANDLERS.get(function)
    if handler is None:
        if all(x.origin is not None for x in leaves if isinstance(x, Value)):
            return dispatch(tracer, function, _origins(args), _origins(kwargs))
        result = _through_operator(tracer, function, args, kwargs)
        if result is not NotImplemented:
            return result
        name = _title(function)
        if name == "__get__":
            attribute = getattr(function.__self__, "__name__", "")
            tracer.fail(f"the attribute {attribute!r} is not known while tracing")
        if name == "__setitem__":
            tracer.fail("assigning at a traced index is not supported; use torch.where")
        if _in_place(function):
            tracer.fail(f"{name} changes a value in place; write {name[:-1]} and use its result")
        way = _instead_of(name)
        if isinstance(function, OpOverload | OpOverloadPacket) and not _of_aten(function):
            way = (
                "register a decomposition, which is a Python kernel for CompositeImplicitAutograd; "
                f"or {way}"
            )
        tracer.fail(f"{name} is not supported in a score_mod or mask_mod; {way}")
    try:
        result = handler(tracer, *_settled(tracer, args), **_settled(tracer, kwargs))
        if isinstance(result, Value) and not torch.is_grad_enabled():
            return HANDLERS[Tensor.detach](tracer, result)  # under torch.no_grad
        return result
    except TraceError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        tracer.fail(f"{_title(function)}: {error}", error)


def _title(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _in_place(function: Any) -> bool:
    name = _title(function)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _mutated(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that a torch call changes in place."""
    first = _in_place(function) or bool(kwargs.get("inplace"))
    return [*args[:first], *_leaves(kwargs.get("out", ()))]


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, tuple | list):
        return [leaf for item in x for leaf in _leaves(item)]
    if isinstance(x, dict):
        return [leaf for item in x.values() for leaf in _leaves(item)]
    return [x]


def _of_aten(operator: OpOverload | OpOverloadPacket) -> bool:
    return str(operator).startswith("aten.")


def _through_operator(tracer: Tracer, function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator of `torch.ops` with a decomposition, or NotImplemented."""
    try:
        return HANDLERS[OpOverload](tracer, function, args, kwargs)
    except (TypeError, ValueError, IndexError) as error:
        if isinstance(error, TraceError):
            raise
        tracer.fail(f"{_title(function)}: {error}", error)


def _settled(tracer: Tracer, x: Any) -> Any:
    if isinstance(x, Value):
        return tracer.settle(x)
    if type(x) in (tuple, list):
        return type(x)(_settled(tracer, item) for item in x)
    return {k: _settled(tracer, v) for k, v in x.items()} if type(x) is dict else x


def _origins(x: Any) -> Any:
    if isinstance(x, Value):
        return x.origin
    if isinstance(x, tuple | list):
        return type(x)(_origins(item) for item in x)
    return {k: _origins(v) for k, v in x.items()} if isinstance(x, dict) else x


def _static(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items)


def _tracer_of(x: Any) -> Tracer | None:
    return next((v.tracer for v in _leaves(x) if isinstance(v, Value)), None)


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _user_line() -> str:
    """Format the file, line and source of the user's code, see `source_line`."""
    from attnkit.util.source_line import source_line  # only messages need it

    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((FOLDER, _TORCH)):
        frame = frame.f_back
    return source_line(frame)
