"""Check that tables by distance change neither a score_mod nor its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.codegen.distance_tables import distance_tables
from attnkit.graph.eval_torch import evaluate, positions
from attnkit.graph.ir import Node
from attnkit.splice.distance_values import DistanceValues
from attnkit.splice.kept_distances import CallSizes
from attnkit.tracing.tracer import trace

BATCH, HEADS, REACH = 2, 3, 12
EPSILON = 2.0**-23
_random = torch.Generator().manual_seed(0)


def _learned(*sizes: int) -> Tensor:
    return torch.rand(sizes, generator=_random).add(0.1).requires_grad_()


BUCKETS = torch.randint(8, (40,), generator=_random)
TABLES = {
    "bucket": _learned(HEADS, 8),
    "near": _learned(2 * REACH + 1),
    "turned": _learned(8, HEADS),
    "heads": _learned(HEADS),
    "pairs": _learned(HEADS, BATCH),
    "gain": _learned(),
    "rows": _learned(20),
    "frozen": torch.rand(HEADS, generator=_random),
    "half": _learned(HEADS, 8).detach().bfloat16().requires_grad_(),
}

# Expressions of q - kv. Their derivatives are finite at distances from 0 on.
Part = Callable[[Any, Any, Any, dict[str, Tensor]], Any]
PARTS: dict[str, Part] = {
    "bucket": lambda b, h, d, t: t["bucket"][h, d.abs().clamp(max=7)],
    "gather of a gather": lambda b, h, d, t: t["bucket"][h, BUCKETS[d.abs()]],
    "one side": lambda b, h, d, t: t["near"][d.clamp(-REACH, REACH) + REACH],
    "negative index": lambda b, h, d, t: t["near"][d.clamp(-REACH, REACH)],
    "turned": lambda b, h, d, t: t["turned"][d.abs() // 6, h],
    "kerple": lambda b, h, d, t: t["heads"][h] * torch.log1p(t["frozen"][h] * d.abs()),
    "of pairs": lambda b, h, d, t: t["pairs"][h, b] * torch.log1p(d.abs() * t["gain"]),
    "logarithm": lambda b, h, d, t: t["heads"][h] * torch.log1p(d),
    "root": lambda b, h, d, t: torch.sqrt(t["gain"] * (d + 0.5)) * torch.sin(d.float()),
    "of one head": lambda b, h, d, t: t["heads"][h // 2] * torch.sin(t["gain"] * d),
    "shifted": lambda b, h, d, t: t["near"][d * 0 + 3] * t["near"][d.clamp(0, REACH) + 2],
    "selected": lambda b, h, d, t: torch.where(d > 2, t["bucket"][h, d.abs() % 8], t["gain"]),
    "half": lambda b, h, d, t: t["half"][h, d.abs().clamp(max=7)].float(),
    "constant": lambda b, h, d, t: torch.log1p(d.abs()) * torch.cos(d.float()),
    "plain": lambda b, h, d, t: t["near"][d.clamp(-2, 2) + 9],
}
Shape = Callable[[Any, Any, Any, Any], Any]
SHAPES: dict[str, Shape] = {
    "sum": lambda s, x, y, row: s + x + row - y,
    "factor": lambda s, x, y, row: s * x * row + y,
    "inside": lambda s, x, y, row: torch.tanh(s + x) * row + y,
    "product": lambda s, x, y, row: s + x * y * row,
    "twice": lambda s, x, y, row: s * x + x + y,
    "difference": lambda s, x, y, row: -(x - s) + row,
}


def _close(found: Tensor, direct: Tensor, exact: Tensor, terms: int) -> None:
    """Check that `found` is as near to `exact` as `direct`, up to a factor of two.

    Args:
        found: float32, computed with tables.
        direct: float32, computed without tables.
        exact: the same in float64.
        terms: number of terms whose order of summation may differ.
    """
    assert not found.isnan().any()
    if not exact.numel():
        return
    error, size = (direct.double() - exact).abs().max(), exact.abs().max()
    limit = 2 * error + 8 * EPSILON * size * max(1.0, terms**0.5)
    assert (found.double() - exact).abs().max() <= limit


def _places(keep: Tensor) -> dict[str, Tensor]:
    places = keep.nonzero().unbind(1)
    return {name: at.int() for name, at in zip(("b", "h", "q", "kv"), places, strict=True)}


def _direct(
    root: Node, tensors: list[Tensor], score: Tensor, grad: Tensor, keep: Tensor, kind: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Evaluate a score_mod and its gradients at the kept positions only, without tables."""
    env = _places(keep)
    raw = score[keep].to(kind).requires_grad_()
    leaves = [t.detach().to(kind if t.is_floating_point() else t.dtype) for t in tensors]
    for leaf, t in zip(leaves, tensors, strict=True):
        leaf.requires_grad_(t.requires_grad)
    (value,) = evaluate([root], env | {"score": raw}, leaves, kind)
    value = value.expand(raw.shape)
    wanted = [raw, *(leaf for leaf in leaves if leaf.requires_grad)]
    found = torch.autograd.grad(value, wanted, grad[keep].to(kind), allow_unused=True)
    pairs = zip(found, wanted, strict=True)
    return value.detach(), [torch.zeros_like(t) if g is None else g for g, t in pairs]


def _staged(
    root: Node, tensors: list[Tensor], score: Tensor, grad: Tensor, keep: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Evaluate the same with tables, whose gradients are 0 at distances that are not kept."""
    tables = distance_tables(root)
    assert tables is not None
    sizes = CallSizes(*score.shape)
    needs = [t.requires_grad for t in tensors]
    with torch.no_grad():
        values = DistanceValues(tables, sizes, torch.device("cpu"), tensors)
        at = torch.arange(sizes.q_len).view(-1, 1) - torch.arange(sizes.kv_len) + sizes.kv_len - 1
        counts = torch.zeros(BATCH, HEADS, sizes.distances, dtype=torch.int64)
        counts.scatter_add_(
            2, at.expand(keep.shape).reshape(BATCH, HEADS, -1), keep.flatten(2).long()
        )
        values.prepare_gradients(needs, counts > 0)
        found, memo = values.values(tensors)
    assert [tuple(t.shape) for t in found] == [values.shape(e) for e in tables.expressions]
    learned = [t.requires_grad_(n) for t, n in zip(found, values.needs_grad(needs), strict=True)]
    kept = [tensors[slot].detach().requires_grad_(needs[slot]) for slot in tables.kept]
    env = _places(keep)
    last = torch.tensor(sizes.kv_len - 1, dtype=torch.int32)
    raw = score[keep].requires_grad_()
    (value,) = evaluate([tables.score], env | {"score": raw, "kv_last": last}, [*kept, *learned])
    value = value.expand(raw.shape)
    wanted = [raw, *kept, *learned]
    parts = torch.autograd.grad(
        value, [t for t in wanted if t.requires_grad], grad[keep], materialize_grads=True
    )
    results = iter(parts)
    draw, *rest = (next(results) if t.requires_grad else None for t in wanted)
    assert draw is not None
    with torch.no_grad():
        totals = values.gradients(tensors, memo, rest[len(kept) :], needs, ordered=False)
    for slot, part in zip(tables.kept, rest, strict=False):
        if part is not None:
            totals[slot] = totals.get(slot, 0.0) + part
    grads = [totals.get(i, torch.zeros(t.shape)) for i, t in enumerate(tensors) if needs[i]]
    return value.detach(), [draw, *grads]


def _keep(name: str, shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """Return a mask that keeps distances from 0 on only."""
    b, h, q, kv = positions(shape, torch.device("cpu")).values()
    keep = {
        "all": q >= kv,
        "window": (q >= kv) & (q < kv + 5),
        "by head": (q >= kv) & ((q - kv) % (h + 1) == 0),
        "by batch": (q >= kv) & (q < 4 + 3 * b),
        "head without a key": (q >= kv) & (h > 0),
        "scattered": (q >= kv)
        & (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.1),
    }[name]
    return keep.expand(shape)


@given(
    st.sampled_from(sorted(PARTS)),
    st.sampled_from(sorted(PARTS)),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(["all", "window", "by head", "by batch", "head without a key", "scattered"]),
    st.integers(1, 18),
    st.integers(1, 18),
    st.frozensets(st.sampled_from(["bucket", "near", "heads", "gain", "rows"]), max_size=2),
)
def test_tables_change_no_value_and_no_gradient(
    first: str, second: str, shape: str, mask: str, q_len: int, kv_len: int, frozen: frozenset[str]
) -> None:
    tables = {n: t.detach() if n in frozen else t for n, t in TABLES.items()}

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x, y = (PARTS[n](b, h, q - kv, tables) for n in (first, second))
        return SHAPES[shape](s, x, y, tables["rows"][q])

    traced = trace(mod, "score")
    tensors = list(traced.tensors)
    sizes = (BATCH, HEADS, q_len, kv_len)
    random = torch.Generator().manual_seed(q_len * 20 + kv_len)
    score, grad = (torch.randn(sizes, generator=random) for _ in range(2))
    keep = _keep(mask, sizes, kv_len)
    value, grads = _staged(traced.root, tensors, score, grad, keep)
    (direct, directs), (exact, exacts) = (
        _direct(traced.root, tensors, score, grad, keep, kind)
        for kind in (torch.float32, torch.float64)
    )
    _close(value, direct, exact, 1)
    assert len(grads) == len(exacts)
    for own, one, true in zip(grads, directs, exacts, strict=True):
        _close(own, one, true, int(keep.sum()))


def test_constants_are_on_the_device_of_the_points() -> None:
    """A number on the CPU in `torch.where` would make every call on a GPU wait for its copy."""
    height, width = TABLES["heads"], TABLES["frozen"]
    traced = trace(
        lambda s, b, h, q, kv: s - height[h].abs() * torch.log1p(width[h] * (q - kv).abs()), "score"
    )
    tables, tensors, device = distance_tables(traced.root), traced.tensors, torch.device("meta")
    assert tables is not None
    near = [t.detach().to(device) for t in tensors]
    values = DistanceValues(tables, CallSizes(BATCH, HEADS, 9, 9), device, near)
    needs = [t.requires_grad for t in tensors]
    values.prepare_gradients(needs, None)
    _, memo = values.values(near)
    evaluators = [values.forward, *(g.evaluator for g in values._gradients[tuple(needs)] if g)]
    assert any(e.constants for e in evaluators)
    assert {t.device for e in evaluators for t in e.constants.values()} == {device}
    assert {t.device for t in memo.values()} == {device}
