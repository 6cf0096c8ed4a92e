"""Compute the range of every integer in a graph, and raise a BoundsError if it may be invalid.

Interval arithmetic comes first. Where it is too coarse, sums are converted to affine form, and
one-sided expressions are evaluated at every position of their side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.affine import Affine, Side
from attnkit.graph.ir import F32, I32, Node
from attnkit.sparsity.ranges.eval_interval import INT_HIGH, INT_LOW, Interval, everything, transfer
from attnkit.sparsity.ranges.tables import Domain, value_range
from attnkit.util import caches
from attnkit.util.data_state import set_own
from attnkit.util.tensor_cache import VersionedCache

if TYPE_CHECKING:
    from attnkit.sparsity.ranges.boxes import Boxes

_INT32 = f"int32 ({INT_LOW} to {INT_HIGH})"
_DIVISIONS = ("fdiv", "mod", "tdiv")
_SHIFTS = ("shl", "shr")

# Ranges of captured tensors, on the CPU: every check needs them, and a read waits for the GPU.
_values: VersionedCache[Interval] = VersionedCache(256, copies=False)
caches.register(_values.clear)


def set_known_range(tensor: Tensor, low: int, high: int) -> None:
    """Record the range of an integer tensor made by attnkit, so that checks skip its data."""
    set_own(tensor)
    ends = _scalar(low), _scalar(high)
    _values.get((I32, None), (tensor,), lambda: ends)


def _scalar(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")  # not the default device


def known_range(tensor: Tensor, n: Node, dtype: torch.dtype) -> Interval:
    """Return the least and greatest value that load `n` can return, as 0-d tensors on the CPU."""

    def read() -> Interval:
        low, high = torch.stack(value_range(tensor, n, dtype)).cpu()
        return low, high

    return _values.get((n.type, dtype if n.type == F32 else None), (tensor,), read)


def to_numbers(ends: Interval) -> tuple[float, float]:
    """Convert both ends of a range to Python numbers."""
    return ends[0].item(), ends[1].item()


class _Range(NamedTuple):
    """Holds the bounds of an integer.

    Attributes:
        low, high: the bounds, both included.
        attained: whether both ends are known to occur.
    """

    low: int
    high: int
    attained: bool = False

    def within(self, low: int, high: int) -> bool:
        return low <= self.low and self.high <= high

    def outside(self, low: int, high: int) -> bool:
        """Return whether some value is certainly outside `low` to `high`."""
        disjoint = self.high < low or self.low > high
        return disjoint or (self.attained and not self.within(low, high))


class RangeChecker:
    """Computes and checks the range of each node. Arguments must be visited before their users.

    Attributes:
        unproven: loads whose index must be checked at run time.
        data_ranges: ranges of the captured tensors that were read, by load.
        uses_values: whether a check depends on the captured data by more than its ranges.
    """

    def __init__(self, domain: Domain, names: tuple[str, ...], truncates: bool) -> None:
        """Create a checker that has visited no node.

        Args:
            domain: positions and captured tensors of the graph.
            names: names of the captured tensors by slot, for messages.
            truncates: whether some float becomes an integer, so that ranges of floats matter.
        """
        self.unproven: set[Node] = set()
        self.data_ranges: dict[Node, Interval] = {}
        self.uses_values = False
        self._truncates = truncates
        self._domain = domain
        self._sides = domain.sides
        self._names = names
        self._ranges: dict[Node, Interval] = {}
        self._tight: dict[Node, _Range] = {}

    @cached_property
    def _boxes(self) -> Boxes:
        from attnkit.sparsity.ranges.boxes import Boxes

        return Boxes(self._domain)

    def visit(self, n: Node) -> None:
        """Compute the range of a node, and check its index, divisor or shift count.

        Raises:
            BoundsError: see `index_bounds.check_bounds`.
        """
        if n.op == "arg":
            self._ranges[n] = self._argument(n)
        elif n.op == "const":
            self._ranges[n] = self._constant(n)
        elif n.op == "load":
            self._check_index(n)
            self._ranges[n] = self._loaded(n)
        else:
            self._check_operand(n)
            self._ranges[n] = self._computed(n)

    # --- ranges by interval arithmetic, 0-d tensors on the CPU

    def _argument(self, n: Node) -> Interval:
        domain = self._domain
        if n.type != I32:
            return everything(n, _scalar(0), domain.dtype)
        size = {
            "b": domain.b.numel(),
            "h": domain.h.numel(),
            "q": domain.q_len,
            "kv": domain.kv_len,
        }[str(n.attr)]
        return _scalar(0), _scalar(size - 1)

    def _constant(self, n: Node) -> Interval:
        if n.type == I32 and not INT_LOW <= int(n.attr) <= INT_HIGH:  # type: ignore[arg-type]
            raise BoundsError(
                f"the constant {n.attr} does not fit {_INT32}; use a smaller one or a float"
            )
        value = _scalar(n.attr, self._domain.dtype if n.type == F32 else None)
        return value, value

    def _loaded(self, n: Node) -> Interval:
        tensor = self._domain.tensors[int(n.attr)]  # type: ignore[arg-type]
        needed = n.type == I32 or (n.type == F32 and self._truncates)
        if not tensor.numel() or not needed:  # do not read a large tensor without need
            return everything(n, _scalar(0), self._domain.dtype)
        low, high = self.data_ranges[n] = known_range(tensor, n, self._domain.dtype)
        if n.type == I32 and not (int(low) >= INT_LOW and int(high) <= INT_HIGH):
            raise BoundsError(
                f"captured tensor {self._name(n)} holds integers from {int(low)} to {int(high)}; "
                f"expected values in {_INT32}. Make them smaller, or capture floats"
            )
        return low, high

    def _computed(self, n: Node) -> Interval:
        result = transfer(n, [self._ranges[a] for a in n.args], self._domain.dtype)
        if n.type != I32 or _Range(int(result[0]), int(result[1])).within(INT_LOW, INT_HIGH):
            return result
        exact = self._tight_range(n)
        if not exact.within(INT_LOW, INT_HIGH):
            self._refuse(
                n,
                n,
                exact,
                f"stay in {_INT32}",
                "Divide before multiplying, or compute it with floats",
            )
        return _scalar(exact.low), _scalar(exact.high)

    def _range(self, n: Node) -> _Range:
        low, high = self._ranges[n]
        return _Range(int(low), int(high))

    # --- tighter ranges, where interval arithmetic does not suffice

    def _tight_range(self, n: Node) -> _Range:
        """Compute a tighter range of an i32 node whose arguments have been checked."""
        if n not in self._tight:
            sums = self._sides.affine(n)
            if sums.terms != ((n, 1),) or n.op == "arg":
                self._tight[n] = self._sum_range(sums)
            elif self._sides.side(n) is not Side.MIXED:
                self._tight[n] = self._operation_range(n)
            else:
                self._tight[n] = self._mixed_range(n)
        return self._tight[n]

    def _mixed_range(self, n: Node) -> _Range:
        if n.op == "mul" and {self._sides.side(a) for a in n.args} == {Side.Q, Side.KV}:
            # the factors vary independently, so the extreme products occur
            x, y = (self._tight_range(a) for a in n.args)
            ends = [i * j for i in (x.low, x.high) for j in (y.low, y.high)]
            return _Range(min(ends), max(ends), x.attained and y.attained)
        if n in self._ranges:
            return self._range(n)
        low, high = transfer(n, [self._ranges[a] for a in n.args], self._domain.dtype)
        return _Range(int(low), int(high))

    def _sum_range(self, sums: Affine) -> _Range:
        """Return the range of a sum: the sum of the ranges of its terms, grouped by side."""
        groups: dict[Side, list[tuple[Node, int]]] = {}
        for n, c in sums.terms:
            groups.setdefault(self._sides.side(n), []).append((n, c))
        mixed = groups.pop(Side.MIXED, [])
        attained = not mixed and (
            Side.DIAGONAL not in groups or groups.keys() <= {Side.DIAGONAL, Side.CONST}
        )
        low = high = torch.tensor(sums.offset, device=self._domain.device)
        for n, c in mixed:
            ends = [c * end for end in (self._range(n).low, self._range(n).high)]
            low, high = low + min(ends), high + max(ends)
        for side, terms in groups.items():
            least, most, certain = self._group_range(side, terms)
            low, high = low + least, high + most
            attained = attained and certain
        return _Range(int(low.min()), int(high.max()), attained)

    def _group_range(
        self, side: Side, terms: Sequence[tuple[Node, int]]
    ) -> tuple[Tensor, Tensor, bool]:
        """Return the least and greatest sum for each (b, h), and whether all values are exact."""
        parts = []
        for values in self._points([n for n, _ in terms], side):
            low, high = torch.zeros_like(values[0][0]), torch.zeros_like(values[0][0])
            for (least, most), (_, c) in zip(values, terms, strict=True):
                ends = (least * c, most * c) if c > 0 else (most * c, least * c)
                low, high = low + ends[0], high + ends[1]
            parts.append((low.amin(-1), high.amax(-1), bool((low == high).all())))
        lows, highs, certain = zip(*parts, strict=True)
        return torch.stack(lows).amin(0), torch.stack(highs).amax(0), all(certain)

    def _operation_range(self, n: Node) -> _Range:
        """Return the range of a one-sided operation, evaluated at every point in int64."""
        side = self._sides.join(n.args)
        low, high, attained = 2**63 - 1, -(2**63), True
        for values in self._points(n.args or [n], side):
            if n.op == "load":
                self.uses_values = True
                least, most = self._boxes.load(n, values) if n.args else values[0]
            else:
                least, most = transfer(n, values, self._domain.dtype)
            low, high = min(low, int(least.min())), max(high, int(most.max()))
            attained = attained and bool((least == most).all())
        return _Range(low, high, attained)

    def _points(self, nodes: Sequence[Node], side: Side) -> Iterator[list[Interval]]:
        from attnkit.sparsity.ranges.pointwise import point_intervals

        self.uses_values = self.uses_values or bool(ir.slots(*nodes))
        for start, stop in self._domain.pieces(nodes, side, 1):
            yield point_intervals(self._domain, self._boxes, nodes, side, start, stop)

    # --- checks

    def _check_index(self, n: Node) -> None:
        shape = self._domain.tensors[int(n.attr)].shape  # type: ignore[arg-type]
        for axis, (index, size) in enumerate(zip(n.args, shape, strict=True)):
            if self._range(index).within(-size, size - 1):
                continue
            values = self._tight_range(index)
            if values.outside(-size, size - 1):
                self._refuse_index(n, axis, size, values)
            if not values.within(-size, size - 1):
                self.unproven.add(n)

    def _check_operand(self, n: Node) -> None:
        """Check that a divisor is not zero and a shift count is 0 to 31."""
        if n.type != I32 or n.op not in _DIVISIONS + _SHIFTS:
            return
        operand = n.args[1]
        values = self._range(operand)
        if n.op in _SHIFTS:
            if not values.within(0, 31):
                values = self._tight_range(operand)
            if not values.within(0, 31):
                self._refuse(n, operand, values, "shift by 0 to 31", "Clamp the shift count")
        elif values.low <= 0 <= values.high:
            values = self._tight_range(operand)
            if values.low <= 0 <= values.high and (zero := self._is_zero(operand)) is not False:
                values = values._replace(attained=bool(zero))
                self._refuse(
                    n,
                    operand,
                    values,
                    "divide by other than zero",
                    "Keep the divisor away from zero, e.g. torch.clamp(x, min=1)",
                )

    def _is_zero(self, n: Node) -> bool | None:
        """Return whether a value is zero at some position, or None if that is unknown."""
        side = self._sides.side(n)
        if side is Side.MIXED:
            return None
        may_be_zero = False
        for ((low, high),) in self._points([n], side):
            if bool(((low == 0) & (high == 0)).any()):
                return True
            may_be_zero = may_be_zero or bool(((low <= 0) & (high >= 0)).any())
        return None if may_be_zero else False

    # --- messages

    def _name(self, n: Node) -> str:
        slot = int(n.attr)  # type: ignore[arg-type]
        return repr(self._names[slot] if slot < len(self._names) else f"t{slot}")

    def _at(self, n: Node) -> str:
        sizes = {
            "q": f"q_len={self._domain.q_len}",
            "kv": f"kv_len={self._domain.kv_len}",
            "b": f"batch={self._domain.b.numel()}",
            "h": f"heads={self._domain.h.numel()}",
        }
        reads = ir.reads(n)
        shown = [size for name, size in sizes.items() if name in reads]
        return f" at {', '.join(shown)}" if shown else ""

    def _refuse(
        self, n: Node, operand: Node, values: _Range, expected: str, advice: str
    ) -> NoReturn:
        verb = "does not" if values.attained else "cannot be proven to"
        subject = "it" if operand is n else f"`{ir.formula(operand, self._names)}`"
        raise BoundsError(
            f"`{ir.formula(n, self._names)}` {verb} {expected}: {subject} ranges from "
            f"{values.low} to {values.high}{self._at(operand)}. {advice}"
        )

    def _refuse_index(self, n: Node, axis: int, size: int, values: _Range) -> NoReturn:
        index = n.args[axis]
        tensor = self._domain.tensors[int(n.attr)]  # type: ignore[arg-type]
        where = f" in dimension {axis}" if tensor.dim() > 1 else ""
        worst = values.high if values.high >= size else values.low
        raise BoundsError(
            f"captured tensor {self._name(n)} has {size} entries{where} but index "
            f"`{ir.formula(index, self._names)}` reaches {worst}{self._at(index)} "
            f"(it ranges from {values.low} to {values.high}; expected {-size} to {size - 1}). "
            "Enlarge the tensor or clamp the index; torch.where does not protect it, "
            "both branches are evaluated"
        )
