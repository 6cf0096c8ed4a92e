"""Infer the dtypes of torch for traced operations, and emit the conversions into the graph.

The graph has only three types: integers, floats and bools. Conversions to narrower dtypes are
explicit operations in the graph: a uint8 sum is taken modulo 256, a bfloat16 product is rounded.
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
from attnkit.tracing.int_ranges import USUAL, IntRanges
from attnkit.tracing.numbers import Unknown, rebuilt

_INT32 = torch.iinfo(torch.int32)
_WRAPPED = (torch.int8, torch.uint8, torch.int16, torch.uint16)  # integers below 32 bits
# Operations on int32 that may wrap. They must not wrap if their result indexes a tensor.
_RING = ("add", "sub", "mul", "neg", "abs", "shl")
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Operations whose result needs no more significant bits than their arguments.
_EXACT = frozenset("neg abs min max where floor".split())


class Operand(Protocol):
    """Protocol of an operand in type promotion; `proxy.Value` implements it."""

    sizes: tuple[int, ...]
    number: bool | int | float | Unknown | None

    @property
    def dtype(self) -> torch.dtype: ...


def kind_of(dtype: torch.dtype) -> Type:
    """Return the graph type (BOOL, F32 or I32) that represents a torch dtype."""
    return BOOL if dtype == torch.bool else F32 if dtype.is_floating_point else I32


def result_dtype(values: Iterable[Operand]) -> torch.dtype:
    """Return the dtype in which torch computes an operation on `values`.

    The rule is that of `torch.result_type`: tensors with dimensions take precedence over 0-d
    tensors, and these over Python numbers, unless the latter have a higher category (bool, integer,
    float).

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
    """Return an error message if tensor `x` cannot be captured; "" if it can."""
    if x.is_nested:
        got = "a nested tensor; pad it with torch.nested.to_padded_tensor, or mask by document"
    elif x.layout != torch.strided:
        got = f"layout {x.layout}; convert it with .to_dense()"
    elif x.is_quantized:
        got = f"the quantized dtype {x.dtype}; convert it with .dequantize()"
    elif type(x).__name__ == "DTensor":
        got = "a DTensor; capture what its .to_local() or .full_tensor() gives"
    elif x.dtype.is_complex:
        got = f"{x.dtype}; capture its parts, torch.view_as_real(...)"
    elif x.dtype.is_floating_point and x.dtype not in _FLOATS:
        got = f"{x.dtype}; convert it with .float() outside of the function"
    else:
        return ""
    return f"a captured tensor must be dense and real, got {got}"


class Converter:
    """Converts the nodes of one trace to torch dtypes.

    Attributes:
        rounds: whether float16, bfloat16 and float32 results are rounded. This is true for masks,
            where rounding may change a comparison. A score is computed in one precision throughout,
            as in compiled FlexAttention.
        default: dtype of a float that is computed from integers.
        has_float64: whether some value of the trace is float64.
    """

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds
        self.default = torch.get_default_dtype()
        self.has_float64 = False
        self._stored: dict[Node, torch.dtype] = {}  # float nodes that a dtype holds exactly
        self._ranges = IntRanges(position=_INT32.max)
        self._usual = IntRanges(position=USUAL)

    def loaded(self, n: Node, dtype: torch.dtype) -> None:
        """Record that load node `n` reads a captured tensor of `dtype`."""
        if dtype.is_floating_point:
            self.has_float64 |= dtype == torch.float64
            self._stored[n] = dtype
        elif dtype in _WRAPPED:
            limits = torch.iinfo(dtype)
            self._ranges.set(n, limits.min, limits.max)
            self._usual.set(n, limits.min, limits.max)
        else:
            self._usual.set(n, -USUAL, USUAL)

    def never_negative(self, n: Node) -> bool:
        """Return whether an integer node is at least 0, whatever positions and data are."""
        return self._ranges.of(n)[0] >= 0

    def number(
        self,
        x: bool | int | float | Unknown,
        dtype: torch.dtype,
        *,
        strict: bool = False,
        wraps: bool = False,
    ) -> Node:
        """Return the node of a Python number, converted to `dtype`.

        The node is a constant, except for an unknown number.

        Args:
            x: the number.
            dtype: dtype of the tensor that the number is combined with.
            strict: whether a number that does not fit into the dtype is an error, as in torch's
                `where`. Otherwise it wraps.
            wraps: whether a number wraps in int32 too. Otherwise a number beyond int32 is an error,
                because a comparison with it would differ from one with int64 positions.

        Raises:
            TypeError: the number does not fit into the dtype, and `strict` is set; or it is
                unknown, and the conversion depends on its value.
            ValueError: the number needs more than 32 bits.
        """
        if isinstance(x, Unknown):
            return self._unknown(x, dtype)
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

    def _unknown(self, x: Unknown, dtype: torch.dtype) -> Node:
        n = ir.number(x.index, x.type)
        if dtype.is_floating_point and not (self.rounds and dtype in _HALVES):
            return self.fit(cast(n, F32), dtype)
        if x.type == F32 or dtype not in (torch.int32, torch.int64):
            raise TypeError(f"the conversion of a number to {dtype} depends on its value")
        self._usual.set(n, -USUAL, USUAL)
        return n

    def convert(self, n: Node, source: torch.dtype, dtype: torch.dtype) -> Node:
        """Return node `n` converted from dtype `source` to `dtype`."""
        if source == dtype:
            return n
        return self.fit(cast(n, kind_of(dtype)), dtype)

    def fit(self, n: Node, dtype: torch.dtype) -> Node:
        """Return the exact result `n` of an operation, wrapped or rounded to `dtype` like torch."""
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
        """Return whether `dtype` represents the float node `n` exactly."""
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
        # only the low bits matter, so this subtraction may wrap too
        shifted = build("wrap_sub", n, const(limits.min)) if limits.min else n
        above = build("and", shifted, const(2**limits.bits - 1))
        return build("add", above, const(limits.min))

    def _wrap_int32(self, n: Node) -> Node:
        # tile classification has no form with an abs, so marking every abs that may wrap is free
        return _marked(n, self._ranges if n.op == "abs" else self._usual)


def _marked(n: Node, ranges: IntRanges) -> Node:
    """Return node `n` with its `wrap_` operation if its range exceeds int32, else unchanged."""
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
    """Build the node that rounds a float node to `dtype`.

    Rounding to float64 marks a value that torch computes in float64.
    """
    return ir.node("round", n, attr=str(dtype).removeprefix("torch."))


def without_float32(root: Node) -> Node:
    """Return the graph without its roundings to float32, for evaluation in float32."""
    done: dict[Node, Node] = {}
    for n in ir.topo(root):
        args = tuple(done[a] for a in n.args)
        if n.op == "round" and n.attr == "float32":
            done[n] = args[0]
        else:
            done[n] = rebuilt(n, args)
    return done[root]


def without_wraps_in_indices(root: Node) -> Node:
    """Replace `wrap_` operations in load indices by plain ones; return the new graph.

    The bounds check of indices proves that the plain operations do not overflow.
    """
    if not any(n.op.startswith("wrap_") for n in ir.topo(root)):
        return root
    values: dict[Node, Node] = {}  # node -> its form outside of indices, with `wrap_` operations
    indices: dict[Node, Node] = {}  # node -> its form in indices, without `wrap_` operations
    for n in ir.topo(root):
        plain = tuple(indices[a] for a in n.args)
        indices[n] = rebuilt(n, plain, n.op.removeprefix("wrap_"))
        values[n] = indices[n]
        if n.op != "load":
            values[n] = rebuilt(n, tuple(values[a] for a in n.args))
    return values[root]
