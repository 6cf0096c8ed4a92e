"""Find the interval normal form of a mask: each row keeps a union of few kv intervals.

A kernel then tests a score with two comparisons per interval, against ends that are known per row,
instead of evaluating the mask. For causal masks, windows, prefixes, sinks and padding the ends are
formulas. For documents, `ids[q] == ids[kv]` with sorted ids, the ends are tables computed from the
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import BoundsError, DTypeError
from attnkit.graph import ir
from attnkit.graph.affine import KV
from attnkit.graph.eval_torch import evaluate, indices
from attnkit.graph.ir import BOOL, Node
from attnkit.graph.simplify import FALSE, TRUE, build
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.intervals.search import search_in_passes
from attnkit.sparsity.intervals.solve import Solver
from attnkit.sparsity.intervals.spans import UNLIMITED, ZERO, SpanAlgebra, Spans, ends
from attnkit.sparsity.intervals.tables import Refusal, RowTables
from attnkit.sparsity.mask_rewrites import equate
from attnkit.sparsity.ranges.tables import Domain, shared_sides
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.tracer import Traced
from attnkit.util import caches
from attnkit.util.arguments import check_captured, check_size
from attnkit.util.data_state import settled_state_of
from attnkit.util.devices import resolve_device
from attnkit.util.tensor_cache import VersionedCache

MAX_INTERVALS = 4  # per row; with more intervals, evaluating the mask is as cheap


@dataclass(frozen=True, eq=False)
class Intervals:
    """Holds a mask in interval normal form.

    Row (b, h, q) keeps exactly the kv in 0 .. kv_len - 1 with `low <= kv < high` for at least one
    pair. Intervals of a row may overlap or be empty. Their ends may be outside 0 .. kv_len.

    Attributes:
        bounds: pairs (low, high) of int32 expressions of b, h, q and the tensors.
        tensors: captured tensors of the mask by slot, then int32 tables of ends computed from their
            data; valid until a captured tensor is edited.
        names: names of the tensors by slot.
        captured: number of captured tensors.
        shape: (batch, heads, q_len, kv_len) for which the intervals are valid; batch and heads are
            1 where the mask does not read b, or h.
    """

    bounds: tuple[tuple[Node, Node], ...]
    tensors: tuple[Tensor, ...] = field(repr=False)
    names: tuple[str, ...]
    captured: int
    shape: tuple[int, int, int, int]

    def __len__(self) -> int:
        return len(self.bounds)

    def predicate(self) -> Node:
        """Return the mask as a bool expression of b, h, q, kv that loads from `tensors`."""
        kept = []
        for low, high in self.bounds:
            above = TRUE if low is ZERO else build("le", low, KV)
            below = TRUE if high is UNLIMITED else build("lt", KV, high)
            kept.append(build("and", above, below))
        return reduce(lambda a, b: build("or", a, b), kept, FALSE)

    def rows(
        self, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        """Return the ends (low, high) of the intervals of every row.

        Args:
            dtype: dtype of the mask's floats.
            device: device of the result. None: the device of `tensors`, else the CPU.

        Returns:
            int32 [batch, heads, q_len, intervals, 2], clipped to 0 .. kv_len.
        """
        batch, heads, q_len, _ = self.shape
        values = self.ends(dtype, device)
        if not values:
            device = _device(self.tensors) if device is None else device
            return torch.zeros(batch, heads, q_len, 0, 2, dtype=torch.int32, device=device)
        return torch.stack(values, -1).view(batch, heads, q_len, -1, 2)

    def ends(
        self, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> list[Tensor]:
        """Return the ends that `rows` returns as a list of tensors: low, high, low, ...

        Each tensor is int32 [batch, heads, q_len].
        """
        batch, heads, q_len, kv_len = self.shape
        device = _device(self.tensors) if device is None else device
        names = (("b", batch, 2), ("h", heads, 1), ("q", q_len, 0))
        env = {name: indices(size, device).view(-1, *(1,) * after) for name, size, after in names}
        nodes = [n for pair in self.bounds for n in pair]
        values = evaluate(nodes, env, self.tensors, dtype)
        return [v.to(device).clamp(0, kv_len).expand(batch, heads, q_len) for v in values]

    def __str__(self) -> str:
        lines = [self._shown(low, high) for low, high in self.bounds] or ["nothing"]
        tables = [
            f"{name}: computed once, int32 {list(t.shape)}"
            for name, t in zip(
                self.names[self.captured :], self.tensors[self.captured :], strict=True
            )
        ]
        count = f"{len(self)} interval{'s' * (len(self) != 1)} a row"
        return "\n".join([count, *(f"  {line}" for line in [*lines, *tables])])

    def _shown(self, low: Node, high: Node) -> str:
        above = "" if low is ZERO else f"{ir.formula(low, self.names)} <= "
        below = "" if high is UNLIMITED else f" < {ir.formula(high, self.names)}"
        text = f"{above}kv{below}" if above or below else "every kv"
        return text.replace(str(UNLIMITED.attr), "kv_len")


class NoIntervals(NamedTuple):
    """Holds the reason why a mask has no interval normal form.

    Attributes:
        reason: the reason, as text.
    """

    reason: str

    def __str__(self) -> str:
        return f"no interval form: {self.reason}"


Result: TypeAlias = Intervals | NoIntervals

_results: VersionedCache[Result] = VersionedCache(64)
caches.register(_results.clear)


def intervals(
    mask: Callable[..., Any],
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    *,
    device: torch.device | str | None = None,
) -> Intervals | None:
    """Find the kv intervals that each query row of a mask attends to.

    Args:
        mask: a `Mask` or a `mask_mod(b, h, q, kv) -> bool`.
        q_len, kv_len, batch, heads: sizes for which the result is valid.
        device: device of query and key; None: that of the captured tensors, else the CPU.

    Returns:
        The intervals; their `rows()` are int32 [batch or 1, heads or 1, q_len, intervals, 2], with
        `low <= kv < high` for each pair. None if some row needs more than a few intervals;
        `intervals_of` also returns the reason.

    Raises:
        TraceError: the mask cannot be traced.
        BoundsError: an index leaves its captured tensor at these sizes.
        DeviceError: captured tensors are on several devices.
        OptionError: a size is not a positive int.
        ShapeError: the mask was built for other sizes.

    >>> form = intervals(lambda b, h, q, kv: (kv <= q) & (q - kv < 2), 4, 4)
    >>> print(form)
    1 interval a row
      q - 1 <= kv < q + 1
    >>> form.rows()[0, 0, :, 0].tolist()
    [[0, 1], [0, 2], [1, 3], [2, 4]]
    """
    at = None if device is None else resolve_device(device)
    form = intervals_of(mask, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, device=at)
    return form if isinstance(form, Intervals) else None


def intervals_of(
    mask_mod: Callable[..., Any],
    *,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str | None = None,
) -> Result:
    """Find the interval normal form of a mask_mod or Mask, or the reason why it has none.

    Args:
        mask_mod: the function.
        q_len, kv_len, batch, heads: sizes for which the result is valid.
        device: device of query and key; None: that of the captured tensors, else the CPU.

    Raises:
        TraceError: the mask cannot be traced.
        DeviceError: a captured tensor is on another device.
        ShapeError: the mask was built for other sizes.
        BoundsError, OptionError: see `find_intervals`.
    """
    check_built_for(mask_mod, Sizes(batch, heads, q_len, kv_len))
    if device is None:
        captured = trace_cached(mask_mod, "mask", torch.device("cpu")).tensors
        device = next((t.device for t in captured if t.device.type != "cpu"), torch.device("cpu"))
    mask = trace_cached(mask_mod, "mask", torch.device(device))
    check_captured("mask_mod", mask.names, mask.tensors, torch.device(device))
    for t in mask.tensors:
        settled_state_of(t)
    return find_intervals(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        dtype=compute_dtype(mask),
        device=torch.device(device),
    )


def find_intervals(
    mask: Traced,
    *,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    most: int = MAX_INTERVALS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    search: bool = True,
) -> Result:
    """Find the interval normal form of a traced mask, or the reason why it has none.

    The result is cached until a captured tensor is replaced or edited in place.

    Args:
        mask: a traced mask_mod; captured tensors on one device.
        q_len, kv_len, batch, heads: sizes for which the result is valid.
        most: largest number of intervals that a row may need.
        dtype: dtype of the mask's floats.
        device: device of tables; None: that of the captured tensors, else the CPU.
        search: whether to compute tables of ends where there is no formula; if False, such a mask
            has no interval form.

    Raises:
        BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
        DTypeError: the graph is not a mask.
        OptionError: a size is not a positive int.
    """
    if mask.root.type != BOOL:
        raise DTypeError(f"a mask must be bool, got {mask.root.type}: {mask.root}")
    for name, size in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        check_size(name, size)
    check_size("most", most)
    reads = ir.reads(mask.root)
    shape = (batch if "b" in reads else 1, heads if "h" in reads else 1, q_len, kv_len)
    device = _device(mask.tensors) if device is None else device
    key = (mask.root, mask.names, shape, most, dtype, device, search)
    return _results.get(key, mask.tensors, lambda: _find(mask, shape, most, dtype, device, search))


def _find(
    mask: Traced,
    shape: tuple[int, int, int, int],
    most: int,
    dtype: torch.dtype,
    device: torch.device,
    search: bool,
) -> Result:
    batch, heads, q_len, kv_len = shape
    b, h = indices(batch, device), indices(heads, device)
    domain = Domain(mask.tensors, q_len, kv_len, b, h, dtype, shared_sides())
    root, proven = _prepared(mask, domain)
    algebra = SpanAlgebra(domain.sides)
    tables = RowTables(domain, mask.names, algebra, proven, search=search)
    try:
        spans = Solver(domain.sides, algebra, tables).solve(root)
        spans = _reduced(spans, tables, most, kv_len)
    except Refusal as refusal:
        return NoIntervals(str(refusal))
    return _result(spans, tables, len(mask.tensors), shape)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the tensor with the most dimensions, or the CPU without tensors.

    0-d tensors may be on the CPU while the others are on a GPU.
    """
    return max(tensors, key=lambda t: t.ndim).device if tensors else torch.device("cpu")


def _prepared(mask: Traced, domain: Domain) -> tuple[Node, frozenset[Node]]:
    """Rewrite the mask by its equalities (`equate`), and find which nodes are proven in bounds.

    Returns:
        The rewritten mask, and the set of its nodes if all are proven, else an empty set.
    """

    def check(root: Node) -> frozenset[Node]:
        return check_bounds(
            [root],
            mask.tensors,
            mask.names,
            q_len=domain.q_len,
            kv_len=domain.kv_len,
            batch=domain.b.numel(),
            heads=domain.h.numel(),
            dtype=domain.dtype,
        )

    root, checked = mask.root, check(mask.root)
    rewritten = equate(root, domain.sides)
    if rewritten is not root:
        try:
            root = rewritten if check(rewritten) <= checked else root
        except BoundsError:  # only the equality, which was replaced, kept an index in range
            pass
    return root, frozenset() if checked else frozenset(ir.topo(root))


def _reduced(spans: Spans, tables: RowTables, most: int, kv_len: int) -> Spans:
    """Reduce spans to as few as the rows need, with ends that are formulas or else tables.

    Raises:
        Refusal: a row needs more than `most` spans.
    """
    nodes = [n for s in spans for n in ends(s)]
    tables.check(nodes)
    data = any(n >= tables.captured for n in ir.slots(*nodes))
    if len(spans) <= most and not (data and len(spans) > 1):
        return spans
    compacted = search_in_passes(lambda *rows: rows, tables.ends_of(spans), kv_len)
    if compacted is None:
        raise AssertionError("nothing was searched")
    count = compacted[0].shape[-1]
    if count > most:
        raise Refusal(f"a row keeps {count} separate intervals, more than {most}")
    return spans if count == len(spans) else tables.store(compacted, nodes)


def _result(
    spans: Spans, tables: RowTables, captured: int, shape: tuple[int, int, int, int]
) -> Intervals:
    """Build the `Intervals` of spans: drop unused tables and renumber the slots."""
    pairs = tuple(ends(s) for s in spans)
    used = [s for s in ir.slots(*(n for pair in pairs for n in pair)) if s >= captured]
    slots = [*range(captured), *used]
    number = {slot: i for i, slot in enumerate(slots)}
    bounds = tuple(
        (ir.renumber(low, number.__getitem__), ir.renumber(high, number.__getitem__))
        for low, high in pairs
    )
    return Intervals(
        bounds,
        tuple(tables.tensors[s] for s in slots),
        tuple(tables.names[s] for s in slots),
        captured,
        shape,
    )
