"""The CPU template against a dense float64 reference that is written here, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.sparse import EMPTY, FULL, PARTIAL, BlockRuns
from attnkit.templates import cpu
from attnkit.templates.cpu import Tile

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[..., Tensor]  # score, b, h, q, kv, *captured

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class LambdaHooks:
    """Hooks of plain functions; derivatives by autograd."""

    def __init__(
        self,
        mask: Mask | None = None,
        score: Score | None = None,
        captured: Sequence[Tensor] = (),
        wanted: bool = False,
    ) -> None:
        self.mask, self._score, self._captured = mask, score, captured
        self.has_score = score is not None
        self.needs_captured_grad = wanted
        self.gradients = [torch.zeros_like(t) for t in captured]

    def keep(self, tile: Tile) -> Tensor:
        assert self.mask is not None
        return self.mask(tile.b, tile.h, tile.q, tile.kv)

    def score(self, s: Tensor, tile: Tile) -> Tensor:
        assert self._score is not None
        return self._score(s, tile.b, tile.h, tile.q, tile.kv, *self._captured)

    def _pull(self, s: Tensor, grad: Tensor, tile: Tile) -> tuple[Tensor | None, ...]:
        assert self._score is not None
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (s, *self._captured)]
            out = self._score(leaves[0], tile.b, tile.h, tile.q, tile.kv, *leaves[1:])
            out = out.expand(s.shape)
        if not out.requires_grad:
            return (None,) * len(leaves)
        return torch.autograd.grad(out, leaves, grad, allow_unused=True)

    def dscore(self, s: Tensor, grad: Tensor, tile: Tile) -> Tensor:
        found = self._pull(s, grad, tile)[0]
        return s.new_zeros(()) if found is None else found

    def captured_grad(self, s: Tensor, grad: Tensor, tile: Tile) -> None:
        for total, share in zip(self.gradients, self._pull(s, grad, tile)[1:], strict=True):
            if share is not None:
                total += share


@dataclass
class Case:
    """Inputs of one comparison: float64 tensors of float32 values, rounded to `dtype` when used."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    score: Score | None = None
    captured: tuple[Tensor, ...] = ()
    block: tuple[int, int] = (128, 128)
    own: tuple[bool, bool] = (False, False)  # whether runs are made by batch, by head
    dtype: torch.dtype = torch.float32
    allowed: Tensor | None = None  # the dense mask, if not that of `mask`
    runs: BlockRuns | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[3])

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """query, key, value and a gradient of out, rounded to the case's dtype, as `dtype`."""
        torch.manual_seed(3)
        grad = torch.randn(*self.query.shape[:3], self.value.shape[3])
        return [t.to(self.dtype).to(dtype) for t in (self.query, self.key, self.value, grad)]

    def grad_lse(self, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(4)
        return torch.randn(self.query.shape[:3], dtype=torch.float32).to(dtype)


def positions(*shape: int) -> list[Tensor]:
    return [
        torch.arange(n, dtype=torch.int32).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(shape)
    ]


def states_of(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """States of the tiles of bool [b, h, Sq, Skv], by counting."""
    short = [-n % size for n, size in zip(dense.shape[2:], block, strict=True)]

    def count(t: Tensor) -> Tensor:
        t = torch.nn.functional.pad(t.to(torch.int32), (0, short[1], 0, short[0]))
        t = t.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0]))
        return t.sum(dim=(3, 5))

    kept, size = count(dense), count(torch.ones_like(dense))
    states = torch.where(kept == size, FULL, torch.where(kept == 0, EMPTY, PARTIAL))
    return states.to(torch.int8)


def runs_of(case: Case) -> BlockRuns | None:
    if case.runs is not None or case.mask is None:
        return case.runs
    batch, heads, q_len = case.query.shape[:3]
    kv_len = case.key.shape[2]
    shape = (batch if case.own[0] else 1, heads if case.own[1] else 1, q_len, kv_len)
    dense = case.mask(*positions(*shape)).expand(shape)
    return BlockRuns.from_states(states_of(dense, case.block), q_len, kv_len, case.block)


def dense_attention(case: Case, dtype: torch.dtype, turned: bool = False) -> dict[str, Tensor]:
    """Results and gradients of dense attention in `dtype`; scores float32 for 16-bit dtypes.

    `turned` sums over q, kv and the width of the heads from the other end.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value, grad = case.inputs(dtype)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    captured = [t.detach().to(work).requires_grad_() for t in case.captured]
    heads = query.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    b, h, q, kv = positions(*query.shape[:3], key.shape[2])
    allowed = case.allowed
    if allowed is None and case.mask is not None:
        allowed = case.mask(b, h, q, kv)
    if turned:
        query, k, v, q, kv = query.flip(2, 3), k.flip(2, 3), v.flip(2), q.flip(2), kv.flip(3)
        if allowed is not None:
            allowed = allowed.expand(*allowed.shape[:2], q.shape[2], kv.shape[3]).flip(2, 3)
    s = (query @ k.mT).to(work) * case.scale
    if case.score is not None:
        s = case.score(s, b, h, q, kv, *captured).expand(s.shape)
    if allowed is not None:
        s = torch.where(allowed, s, -math.inf)
    top = s.detach().amax(-1, keepdim=True)
    alive = top > -math.inf
    weights = torch.exp(torch.where(alive, s - torch.where(alive, top, 0), -math.inf))
    total = torch.where(alive, weights.sum(-1, keepdim=True), 1)
    out = (weights / total).to(dtype) @ v
    lse = torch.where(alive, torch.where(alive, top, 0) + total.log(), -math.inf).squeeze(-1)
    if turned:
        out, lse, top, alive = out.flip(2), lse.flip(2), top.flip(2), alive.flip(2)
    grad_lse = torch.where(alive.squeeze(-1), case.grad_lse(work), 0)
    loss = (out * grad).sum() + (torch.where(alive.squeeze(-1), lse, 0) * grad_lse).sum()
    found = torch.autograd.grad(loss, [*leaves, *captured], allow_unused=True)
    names = ["dq", "dk", "dv", *(f"dcaptured{i}" for i in range(len(captured)))]
    gradients = {
        name: torch.zeros_like(leaf) if g is None else g
        for name, g, leaf in zip(names, found, [*leaves, *captured], strict=True)
    }
    results = {"out": out, "lse": lse, "max": top.squeeze(-1), **gradients}
    return {name: t.detach() for name, t in results.items()}


def template_attention(case: Case) -> dict[str, Tensor]:
    query, key, value, grad = case.inputs(case.dtype)
    work = torch.float64 if case.dtype == torch.float64 else torch.float32
    captured = [t.to(work) for t in case.captured]
    hooks = LambdaHooks(case.mask, case.score, captured, wanted=bool(captured))
    runs = runs_of(case)
    # memory that is freed now is likely to be what the template gets next
    torch.full((1 << 20,), math.nan)
    out, lse, top = cpu.forward(query, key, value, runs, hooks, case.scale, need_max=True)
    assert top is not None
    dq, dk, dv = cpu.backward(
        grad, case.grad_lse(work), query, key, value, out, lse, runs, hooks, case.scale
    )
    found = {"out": out, "lse": lse, "max": top, "dq": dq, "dk": dk, "dv": dv}
    return found | {f"dcaptured{i}": g for i, g in enumerate(hooks.gradients)}


def rms(parts: list[Tensor]) -> float:
    return torch.cat([t.double().flatten() for t in parts]).square().mean().sqrt().item()


def check(case: Case) -> dict[str, Tensor]:
    """Errors against float64 are at most twice those of dense attention in the same dtype.

    Errors are root mean squares, of results and of gradients by dtype: the largest error of a few
    numbers is a matter of luck. The dense error is the larger of two orders of summation. For
    float64 itself the error of dense float32 is scaled down to the precision of float64, and the
    reference may be wrong by as much.
    """
    narrow, factor = case.dtype, 2.0
    if case.dtype == torch.float64:
        narrow = torch.float32
        factor = 3 * torch.finfo(torch.float64).eps / torch.finfo(narrow).eps
    exact = dense_attention(case, torch.float64)
    dense = [dense_attention(case, narrow, turned) for turned in (False, True)]
    found = template_attention(case)
    assert found.keys() == exact.keys()
    groups: dict[tuple[bool, torch.dtype], list[str]] = {}
    for name, result in found.items():
        other = dense[0][name].dtype
        assert result.shape == exact[name].shape, name
        assert result.dtype == (torch.float64 if narrow != case.dtype else other), name
        finite = exact[name].isfinite()
        assert torch.equal(result.double()[~finite], exact[name][~finite]), name
        if finite.any():
            groups.setdefault((name.startswith("d"), other), []).append(name)
    for (_, dtype), names in groups.items():
        want = [exact[n][exact[n].isfinite()] for n in names]
        error, *allowed = (
            rms([r[n][exact[n].isfinite()] - w for n, w in zip(names, want, strict=True)])
            for r in (found, *dense)
        )
        # what rounding the exact results costs, and rounding 1 where cancellation leaves nothing
        floor = max(torch.finfo(dtype).eps * rms(want), torch.finfo(torch.float32).eps)
        assert error <= factor * max(*allowed, floor), (names, error, allowed)
    return found


def random_inputs(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 96,
    kv_len: int | None = None,
    width: int = 16,
    value_width: int | None = None,
    kv_batch: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    kv = (kv_batch or batch, kv_heads or heads, kv_len or q_len)
    return {
        "query": torch.randn(batch, heads, q_len, width).double(),
        "key": torch.randn(*kv, width).double(),
        "value": torch.randn(*kv, value_width or width).double(),
    }


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 40)


def two_sided(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return ((q - kv).abs() < 24) | (kv < 5)


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    ends = torch.tensor([37, 50, 51, 140, 201], dtype=torch.int32)
    return (torch.bucketize(q, ends) == torch.bucketize(kv, ends)) & (q >= kv)


def dead_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((q < 30) | (q > 70)) & (q % 7 != 3)


def dilated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv) % 3 == 0


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 16 * (h + 1))


def by_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv < 20 + 33 * b


def by_both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < 20 + 33 * b) & (q - kv < 16 * (h + 1))


def nothing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q < 0) & (kv < 0)


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s - (q - kv).abs() * torch.exp2(-(h + 1.0)).to(s.dtype)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2)


def learned_bias(
    s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, table: Tensor, gain: Tensor
) -> Tensor:
    return s * gain[h.long()] + table[h.long(), (q - kv).clamp(-20, 20).long() + 20]


def constant(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv.to(s.dtype) / 16


def minus_infinity(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where((q % 5 == 2) | (kv % 4 == 1), -math.inf, s)


def test_both_orders_of_the_reference_agree() -> None:
    inputs = random_inputs(batch=2, heads=4, kv_heads=2, q_len=50, kv_len=70)
    for mask in (None, dead_rows):
        case = Case(**inputs, mask=mask, score=learned_bias, dtype=torch.float64)
        case.captured = (torch.randn(4, 41), torch.rand(4))
        one, other = (dense_attention(case, torch.float64, turned) for turned in (False, True))
        torch.testing.assert_close(one, other)


MASKS = [None, causal, window, two_sided, documents, dead_rows, dilated, nothing]
SCORES = [alibi, softcap, constant, minus_infinity]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_mask_alone(mask: Mask | None, dtype: torch.dtype) -> None:
    check(Case(**random_inputs(q_len=200), mask=mask, block=(32, 32), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_score_alone(score: Score, dtype: torch.dtype) -> None:
    check(Case(**random_inputs(q_len=150), score=score, dtype=dtype))


@pytest.mark.parametrize("mask", [window, documents, dead_rows])
@pytest.mark.parametrize("score", SCORES)
def test_mask_and_score(mask: Mask, score: Score) -> None:
    check(Case(**random_inputs(q_len=200), mask=mask, score=score, block=(64, 32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_tensors_get_their_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    captured = (torch.randn(2, 41), torch.rand(2) + 0.5)
    case = Case(**random_inputs(q_len=140), mask=causal, score=learned_bias, dtype=dtype)
    case.captured, case.block = captured, (32, 32)
    check(case)


@pytest.mark.parametrize(
    ("mask", "own"),
    [
        (by_head, (False, True)),
        (by_batch, (True, False)),
        (by_both, (True, True)),
        (by_both, (False, False)),  # shared runs: the mask itself tells heads and batches apart
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kv_batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_by_batch_and_head(
    mask: Mask, own: tuple[bool, bool], kv_heads: int, kv_batch: int, dtype: torch.dtype
) -> None:
    inputs = random_inputs(batch=3, heads=4, kv_heads=kv_heads, q_len=90, kv_batch=kv_batch)
    case = Case(**inputs, mask=mask, own=own, block=(32, 32), dtype=dtype)
    if own == (False, False):
        case.runs = BlockRuns.from_states(
            torch.full((1, 1, 3, 3), PARTIAL, dtype=torch.int8), 90, 90, case.block
        )
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_broadcast_batch_and_other_value_width(dtype: torch.dtype) -> None:
    inputs = random_inputs(
        batch=3, heads=6, kv_heads=2, q_len=70, kv_len=130, width=24, value_width=40, kv_batch=1
    )
    check(Case(**inputs, mask=two_sided, score=softcap, block=(32, 32), dtype=dtype))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (300, 1), (129, 257), (127, 640), (5, 3)])
def test_ragged_and_unequal_lengths(q_len: int, kv_len: int) -> None:
    for mask in (None, causal, two_sided, dead_rows):
        check(Case(**random_inputs(q_len=q_len, kv_len=kv_len), mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_any_strides(order: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(batch=2, heads=2, q_len=75)
    inverse = [order.index(axis) for axis in range(4)]
    plain = Case(**inputs, mask=causal, score=softcap, block=(32, 32), dtype=dtype)
    turned = Case(**inputs, mask=causal, score=softcap, block=(32, 32), dtype=dtype)
    for name in ("query", "key", "value"):
        t = inputs[name].permute(order).contiguous().permute(inverse)
        setattr(turned, name, t)
    found, want = template_attention(turned), template_attention(plain)
    for name, result in found.items():
        torch.testing.assert_close(result, want[name])
    assert found["dq"].stride() == turned.query.stride()
    assert found["dk"].stride() == turned.key.stride()
    assert found["out"].stride(3) == 1
    outer = [axis for axis in order if axis != 3]
    strides = [found["out"].stride(axis) for axis in outer]
    assert strides == sorted(strides, reverse=True)


def test_strided_views_of_one_tensor() -> None:
    packed = torch.randn(2, 60, 3, 4, 8)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    check(Case(query.double(), key.double(), value.double(), mask=causal, block=(16, 16)))
    hooks = LambdaHooks()
    out, lse, _ = cpu.forward(query, key, value, None, hooks, 0.5)
    dense = [t.contiguous() for t in (query, key, value)]
    want = cpu.forward(*dense, None, hooks, 0.5)
    torch.testing.assert_close((out, lse), want[:2])
    assert out.stride() == torch.empty(2, 60, 4, 8).transpose(1, 2).stride()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_block(data: st.DataObject) -> None:
    size = lambda high, low=1: data.draw(st.integers(low, high))
    heads = size(4)
    group = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
    batch = size(3)
    inputs = random_inputs(
        batch=batch,
        heads=heads,
        kv_heads=heads // group,
        q_len=size(160),
        kv_len=size(160),
        width=size(20),
        value_width=size(20),
        kv_batch=data.draw(st.sampled_from([1, batch])),
        seed=size(1000),
    )
    q_len, kv_len = inputs["query"].shape[2], inputs["key"].shape[2]
    own = data.draw(st.tuples(st.booleans(), st.booleans()))
    shape = (batch if own[0] else 1, heads if own[1] else 1, q_len, kv_len)
    cells = tuple(-(-n // data.draw(st.integers(1, 40))) for n in shape[2:])
    torch.manual_seed(size(1000))
    coarse = torch.rand(*shape[:2], *cells) < data.draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    table = torch.nn.functional.interpolate(coarse.double(), size=shape[2:]).bool()

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        b, h = (t if own[i] else torch.zeros_like(t) for i, t in enumerate((b, h)))
        return table[b.long(), h.long(), q.long(), kv.long()]

    check(
        Case(
            **inputs,
            mask=mask,
            score=data.draw(st.sampled_from([None, alibi, softcap, minus_infinity])),
            block=(size(150), size(150)),
            own=own,
            dtype=data.draw(st.sampled_from(DTYPES)),
        )
    )


@pytest.mark.parametrize("score", [None, softcap])
def test_block_size_does_not_matter(score: Score | None) -> None:
    inputs = random_inputs(q_len=300, kv_len=270)
    results = [
        check(Case(**inputs, mask=window, score=score, block=block))
        for block in [(16, 16), (128, 128), (300, 7), (100, 256), (64, 128)]
    ]
    for other in results[1:]:
        for name, result in other.items():
            torch.testing.assert_close(result, results[0][name])


def test_runs_decide_over_the_mask() -> None:
    """A BlockMask made by hand keeps FULL tiles whole and leaves EMPTY ones out."""
    torch.manual_seed(5)
    states = torch.randint(0, 3, (1, 1, 14, 9), dtype=torch.int8)
    q_len, kv_len, block = 14 * 16 - 3, 9 * 24 - 10, (16, 24)
    tiles = states.repeat_interleave(16, 2).repeat_interleave(24, 3)[:, :, :q_len, :kv_len]
    allowed = (tiles == FULL) | ((tiles == PARTIAL) & causal(*positions(1, 1, q_len, kv_len)))
    case = Case(**random_inputs(q_len=q_len, kv_len=kv_len), mask=causal, allowed=allowed)
    case.runs = BlockRuns.from_states(states, q_len, kv_len, block)
    check(case)


def test_scores_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a chunk are merged online, whichever tiles the cuts go through."""
    import sys

    for name in ("forward", "backward"):
        monkeypatch.setattr(sys.modules[f"attnkit.templates.cpu.{name}"], "SCORES", 128 * 2 * 50)
    for mask in (None, window, two_sided, dead_rows, dilated):
        for score in (None, softcap, minus_infinity):
            check(Case(**random_inputs(q_len=260), mask=mask, score=score, block=(64, 32)))


def test_large_scores_do_not_overflow() -> None:
    inputs = random_inputs(q_len=100)
    inputs["query"] *= 300
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check(Case(**inputs, mask=causal, block=(32, 32), dtype=dtype))


def test_equal_inputs_give_equal_bits() -> None:
    for dtype in DTYPES:
        case = Case(**random_inputs(heads=4, kv_heads=2, q_len=200), mask=documents, dtype=dtype)
        case.score, case.block = softcap, (32, 32)
        first, second = template_attention(case), template_attention(case)
        for name, result in first.items():
            assert torch.equal(result, second[name]), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", [None, softcap])
def test_what_the_mask_hides_does_not_leak(bad: float, score: Score | None) -> None:
    """Keys hold rubbish where no row looks; the partial tiles around them stay clean."""
    inputs = random_inputs(q_len=64)
    query, key, value = (t.float() for t in inputs.values())
    mask = lambda b, h, q, kv: (q >= kv) & (kv != 13) & (kv < 60)
    shape = (1, 1, 64, 64)
    states = states_of(mask(*positions(*shape)).expand(shape), (32, 32))
    runs = BlockRuns.from_states(states, 64, 64, (32, 32))
    hooks = LambdaHooks(mask, score)
    clean = cpu.forward(query, key, value, runs, hooks, 0.25, need_max=True)
    grads = cpu.backward(value, None, query, key, value, *clean[:2], runs, hooks, 0.25)
    key[:, :, 13], key[:, :, 60:] = bad, bad
    dirty = cpu.forward(query, key, value, runs, hooks, 0.25, need_max=True)
    for found, want in zip(dirty, clean, strict=True):
        assert torch.equal(found, want)
    if score is None:  # dq multiplies a weight of 0 with the key itself
        _, dk, dv = cpu.backward(value, None, query, key, value, *dirty[:2], runs, hooks, 0.25)
        assert torch.equal(dk, grads[1])
        assert torch.equal(dv, grads[2])


@pytest.mark.parametrize("chunked", [False, True])
def test_nan_reaches_its_row_and_no_other(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    if chunked:
        monkeypatch.setattr(sys.modules["attnkit.templates.cpu.forward"], "SCORES", 128 * 2 * 10)
    query, key, value = (t.float() for t in random_inputs(q_len=64).values())
    for wrong in ((10, 3), (63, 63), (20, 0)):

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.where((q == wrong[0]) & (kv == wrong[1]), math.nan, s)  # noqa: B023

        out, lse, top = cpu.forward(
            query, key, value, None, LambdaHooks(score=score), 0.25, need_max=True
        )
        assert top is not None
        rows = torch.arange(64) == wrong[0]
        for result in (out.isnan().all(-1), lse.isnan(), top.isnan()):
            assert torch.equal(result, rows.expand(1, 2, 64))
        assert not out[:, :, ~rows].isnan().any()


def test_infinite_score_has_infinite_lse() -> None:
    query, key, value = (t.float() for t in random_inputs(q_len=8).values())
    score = lambda s, b, h, q, kv: torch.where((q == 2) & (kv == 3), math.inf, s)
    out, lse, _ = cpu.forward(query, key, value, None, LambdaHooks(score=score), 0.25)
    assert (lse[:, :, 2] == math.inf).all()
    assert out[:, :, 2].isnan().all()
    assert lse[:, :, 3:].isfinite().all()


def test_derivative_that_is_infinite_under_the_mask() -> None:
    """sqrt has no derivative at 0 and no value below: rows that do not look there are unharmed."""
    score = lambda s, b, h, q, kv: torch.sqrt((q - kv).to(s.dtype) * s.abs())
    case = Case(**random_inputs(q_len=50), mask=lambda b, h, q, kv: q > kv, score=score)
    for name, result in template_attention(case).items():
        assert not result.isnan().any(), name


def test_rows_without_keys_ignore_the_gradient_of_their_lse() -> None:
    query, key, value = (t.float() for t in random_inputs(q_len=40).values())
    runs = BlockRuns.from_states(torch.zeros(1, 1, 2, 1, dtype=torch.int8) + 1, 40, 40, (20, 40))
    hooks = LambdaHooks(lambda b, h, q, kv: (q >= kv) & (q % 2 == 0))
    out, lse, _ = cpu.forward(query, key, value, runs, hooks, 1.0)
    grad_lse = torch.full_like(lse, math.nan)
    grad_lse[:, :, ::2] = 1
    grads = cpu.backward(out, grad_lse, query, key, value, out, lse, runs, hooks, 1.0)
    for grad in grads:
        assert grad.isfinite().all()
    assert not grads[0][:, :, 1::2].any()


class Watch(LambdaHooks):
    """Records which positions the mask and the score are asked for."""

    def __init__(self, mask: Mask, shape: tuple[int, int]) -> None:
        super().__init__(mask, lambda s, b, h, q, kv: s)
        self.kept, self.scored = (torch.zeros(shape, dtype=torch.int32) for _ in range(2))

    def keep(self, tile: Tile) -> Tensor:
        q, kv = torch.broadcast_tensors(tile.q.long(), tile.kv.long())
        self.kept[q, kv] += 1
        return super().keep(tile)

    def score(self, s: Tensor, tile: Tile) -> Tensor:
        q, kv = torch.broadcast_tensors(tile.q.long(), tile.kv.long())
        self.scored[q, kv] += 1
        return super().score(s, tile)


def test_cost_follows_the_tiles() -> None:
    """Full tiles are not asked for the mask, empty ones not for a score, others once."""
    size, block = 1000, (128, 128)
    mask = lambda b, h, q, kv: (q >= kv) & ((q - kv < 300) | (kv < 40))
    dense = mask(*positions(1, 1, size, size))
    states = states_of(dense, block)
    runs = BlockRuns.from_states(states, size, size, block)
    hooks = Watch(mask, (size, size))
    query = torch.randn(1, 1, size, 8)
    cpu.forward(query, query, query, runs, hooks, 1.0)
    tiles = states[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:size, :size]
    assert torch.equal(hooks.scored, (tiles != EMPTY).to(torch.int32))
    assert torch.equal(hooks.kept > 0, tiles == PARTIAL)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(dtype: torch.dtype) -> None:
    """No tensor of the size of the scores, for masks that touch them all or only a band."""
    size = 1 << 14
    query = torch.randn(1, 1, 512, 4, dtype=dtype)
    key = torch.randn(1, 1, size, 4, dtype=dtype)
    hooks = LambdaHooks(lambda b, h, q, kv: (q + kv) % 2 == 0)
    states = torch.full((1, 1, 4, size // 128), PARTIAL, dtype=torch.int8)
    for runs in (None, BlockRuns.from_states(states, 512, size, (128, 128))):
        with Largest() as largest:
            out, lse, _ = cpu.forward(query, key, key, runs, hooks, 1.0)
            cpu.backward(out, None, query, key, key, out, lse, runs, hooks, 1.0)
        assert largest.elements <= 1 << 22 < 512 * size


def test_strips_are_planned_once_per_runs() -> None:
    import gc
    import sys

    plans = sys.modules["attnkit.templates.cpu.strips"]._plans
    runs = BlockRuns.from_states(torch.ones(1, 1, 2, 2, dtype=torch.int8), 200, 200, (128, 128))
    query = torch.randn(1, 1, 200, 8)
    hooks = LambdaHooks(causal)
    cpu.forward(query, query, query, runs, hooks, 1.0)
    (first,) = plans[runs].values()
    cpu.forward(query, query, query, runs, hooks, 1.0)
    assert next(iter(plans[runs].values())) is first
    count = len(plans)
    del runs
    gc.collect()
    assert len(plans) == count - 1
