"""Compute the dtypes that torch gives to the results of a traced function, and convert to them.

The graph knows integers, floats and bools only. What a dtype changes in a value is written into the
graph where the value is computed: a uint8 sum is taken modulo 256, a bfloat16 product is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, const
from attnkit.graph.simplify import build, cast, int32
from attnkit.tracing.int_ranges import IntRanges

_INT32 = torch.iinfo(torch.int32)
_WRAPPED = (torch.int8, torch.uint8, torch.int16, torch.uint16)  # wrap below 32 bits
# Operations on int32 that may wrap. Where their result indexes a tensor they must not.
_RING = ("add", "sub", "mul", "neg", "abs", "shl")
# Positions and captured int32 numbers below this bound never wrap, so that their sums keep the forms
# that tiles are classified by. Where larger ones leave int32, the call is refused.
_USUAL = 1 << 22
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Operations whose result needs no more digits than their arguments have.
_EXACT = frozenset("neg abs min max where floor".split())


class Operand(Protocol):
    """Describes what the dtype of a result depends on; see `proxy.Value`."""

    sizes: tuple[int, ...]
    number: bool | int | float | None

    @property
    def dtype(self) -> torch.dtype: ...


def kind_of(dtype: torch.dtype) -> Type:
    """Return the type in the graph of a value of a dtype."""
    return BOOL if dtype == torch.bool else F32 if dtype.is_floating_point else I32


def result_dtype(values: Iterable[Operand]) -> torch.dtype:
    """Return the dtype in which torch computes with these values.

    As `torch.result_type`: a tensor with dimensions takes precedence over one without, and that
    over a Python number, unless the other is of a higher category (bool, integer, float).

    Raises:
        TypeError: torch does not combine these dtypes.
    """
    found: list[torch.dtype | None] = [None, None, None]  # with dimensions, without, numbers
    for value in values:
        place = 0 if value.sizes else 1 if value.number is None else 2
        before = found[place]
        found[place] = value.dtype if before is None else _promote(before, value.dtype)
    return _combine(found[0], _combine(found[1], found[2])) or torch.int64


def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    try:
        return torch.promote_types(a, b)
    except RuntimeError as error:
        raise TypeError(f"torch does not combine {a} with {b}; convert one of them") from error


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_floating_point:
        return higher
    return _promote(higher, lower) if higher == torch.bool or lower.is_floating_point else higher


def refusal_to_capture(x: Tensor) -> str:
    """Return why single elements of a tensor cannot be read as numbers; "" if they can."""
    if x.is_nested:
        got = "a nested tensor; pad it with torch.nested.to_padded_tensor, or mask by document"
    elif x.layout != torch.strided:
        got = f"layout {x.layout}; convert it with .to_dense()"
    elif x.is_quantized:
        got = f"the quantized dtype {x.dtype}; convert it with .dequantize()"
    elif x.dtype.is_complex:
        got = f"{x.dtype}; capture its parts, torch.view_as_real(...)"
    elif x.dtype.is_floating_point and x.dtype not in _FLOATS:
        got = f"{x.dtype}; convert it with .float() outside of the function"
    else:
        return ""
    return f"a captured tensor must be dense and real, got {got}"


class Converter:
    """Converts nodes to dtypes within one trace.

    Attributes:
        rounds: whether float16, bfloat16 and float32 results are rounded. They are in a mask, where
            rounding decides; a score is computed in its own precision throughout, as FlexAttention
            does when it is compiled.
        default: dtype of a float that is computed from integers.
        has_float64: whether some value of the trace is a float64.
    """

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds
        self.default = torch.get_default_dtype()
        self.has_float64 = False
        self._stored: dict[Node, torch.dtype] = {}  # float nodes that a dtype holds exactly
        self._ranges = IntRanges(position=_INT32.max)
        self._usual = IntRanges(position=_USUAL)

    def loaded(self, n: Node, dtype: torch.dtype) -> None:
        """Record the dtype of the captured tensor that a node loads from."""
        if dtype.is_floating_point:
            self.has_float64 |= dtype == torch.float64
            self._stored[n] = dtype
        elif dtype in _WRAPPED:
            limits = torch.iinfo(dtype)
            self._ranges.set(n, limits.min, limits.max)
            self._usual.set(n, limits.min, limits.max)
        else:
            self._usual.set(n, -_USUAL, _USUAL)

    def number(
        self,
        x: bool | int | float,
        dtype: torch.dtype,
        *,
        strict: bool = False,
        wraps: bool = False,
    ) -> Node:
        """Return a Python number in the dtype of the tensor that it is combined with.

        Args:
            x: the number.
            dtype: the dtype.
            strict: whether torch refuses a number that the dtype does not hold, as `where` does.
                Else it wraps.
            wraps: whether an int32 wraps too. A comparison with a number beyond int32 would have
                another result than with int64 positions, and is refused.

        Raises:
            TypeError: the number does not fit, and torch refuses it.
            ValueError: the number needs more than 32 bits.
        """
        if dtype == torch.bool:
            return const(bool(x))
        if dtype.is_floating_point:
            half = self.rounds and dtype in _HALVES
            return self.fit(
                const(torch.tensor(float(x), dtype=dtype).item() if half else float(x)), dtype
            )
        x = int(x)
        if dtype in _WRAPPED:
            limits = torch.iinfo(dtype)
            least = -limits.max if not limits.min else limits.min  # torch wraps -1 to 255
            if strict and not least <= x <= limits.max:
                raise TypeError(f"the number {x} does not fit into {dtype}")
            return const((x - limits.min) % 2**limits.bits + limits.min)
        if wraps and dtype == torch.int32:
            return const(int32(x))
        if not _INT32.min <= x <= _INT32.max:
            raise ValueError(
                f"the integer {x} does not fit into 32 bits, and positions are int32; write "
                f"{float(x)} for a float, or {int32(x)} for its last 32 bits"
            )
        return const(x)

    def convert(self, n: Node, source: torch.dtype, dtype: torch.dtype) -> Node:
        """Convert a node from one dtype to another."""
        if source == dtype:
            return n
        return self.fit(cast(n, kind_of(dtype)), dtype)

    def fit(self, n: Node, dtype: torch.dtype) -> Node:
        """Return what torch stores for the exact result `n` of an operation in this dtype."""
        if dtype in _WRAPPED:
            return self._wrap(n, dtype)
        if dtype == torch.int32:
            return self._wrap_int32(n)
        self.has_float64 |= dtype == torch.float64
        if not dtype.is_floating_point or not self.rounds or self._holds(n, dtype):
            return n
        rounded = round_to(n, dtype)
        self._stored[rounded] = dtype
        return rounded

    def _holds(self, n: Node, dtype: torch.dtype) -> bool:
        """Return whether a dtype holds the float `n` exactly."""
        if n.op == "const":
            number = float(n.attr)  # type: ignore[arg-type]
            return math.isnan(number) or torch.tensor(number, dtype=dtype).item() == number
        if n in self._stored:
            return torch.promote_types(self._stored[n], dtype) == dtype
        if n.op == "cast":
            most = 1 / torch.finfo(dtype).eps  # every integer up to 2 / eps is a float
            return max(map(abs, self._ranges.of(n.args[0]))) <= most
        return n.op in _EXACT and all(self._holds(a, dtype) for a in n.args if a.type == F32)

    def _wrap(self, n: Node, dtype: torch.dtype) -> Node:
        limits = torch.iinfo(dtype)
        low, high = self._ranges.of(n)
        if limits.min <= low and high <= limits.max:
            return n
        n = _marked(n, self._ranges)
        # only the last bits count, so this may wrap too: ranges of `n` are not always tight
        shifted = build("wrap_sub", n, const(limits.min)) if limits.min else n
        above = build("and", shifted, const(2**limits.bits - 1))
        return build("add", above, const(limits.min))

    def _wrap_int32(self, n: Node) -> Node:
        # no form that tiles are classified by contains an abs, so nothing is lost by marking it
        return _marked(n, self._ranges if n.op == "abs" else self._usual)


def _marked(n: Node, ranges: IntRanges) -> Node:
    """Return a node by an operation that wraps if its range is not inside int32."""
    low, high = ranges.of(n)
    if n.op not in _RING or (_INT32.min <= low and high <= _INT32.max):
        return n
    if n.op == "shl":
        x, count = n.args
        if count.op != "const":
            return n
        return build("wrap_mul", x, const(int32(1 << int(count.attr))))  # type: ignore[arg-type]
    return build(f"wrap_{n.op}", *n.args)


def round_to(n: Node, dtype: torch.dtype) -> Node:
    """Round a float node to a dtype; a rounding to float64 tells that torch computes in float64."""
    return ir.node("round", n, attr=str(dtype).removeprefix("torch."))


def without_float32(root: Node) -> Node:
    """Remove the roundings to float32 from a graph whose floats are float32."""
    done: dict[Node, Node] = {}
    for n in ir.topo(root):
        args = tuple(done[a] for a in n.args)
        if n.op == "round" and n.attr == "float32":
            done[n] = args[0]
        else:
            done[n] = _rebuilt(n, args)
    return done[root]


def without_wraps_in_indices(root: Node) -> Node:
    """Replace operations that wrap, below the index of a load, by those that are proven not to."""
    if not any(n.op.startswith("wrap_") for n in ir.topo(root)):
        return root
    values: dict[Node, Node] = {}  # as the user wrote them
    indices: dict[Node, Node] = {}  # without operations that wrap
    for n in ir.topo(root):
        plain = tuple(indices[a] for a in n.args)
        indices[n] = _rebuilt(n, plain, n.op.removeprefix("wrap_"))
        values[n] = indices[n]
        if n.op != "load":
            values[n] = _rebuilt(n, tuple(values[a] for a in n.args))
    return values[root]


def _rebuilt(n: Node, args: tuple[Node, ...], op: str | None = None) -> Node:
    """Return a node with other arguments, or with another operation."""
    op = op or n.op
    if args == n.args and op == n.op:
        return n
    if op == "load":
        return ir.load(int(n.attr), n.type, args)  # type: ignore[arg-type]
    if op == "cast":
        return cast(args[0], n.type)
    return ir.node("round", *args, attr=n.attr) if op == "round" else build(op, *args)
