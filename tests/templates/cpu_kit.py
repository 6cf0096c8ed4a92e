"""Help tests of the CPU template with hooks from plain functions and a dense torch reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns
from attnkit.templates import cpu
from attnkit.templates.cpu import Tile

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[..., Tensor]  # score, b, h, q, kv, *captured

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class LambdaHooks:
    """Hooks of the CPU template built from plain functions; derivatives come from autograd."""

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
        self.has_softmax = True
        self.sink = self.sink_grad = self.survivor_scale = None
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
    """Hold the inputs of a comparison: float64 tensors with float32 values, rounded when used."""

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
        """Return [query, key, value, gradient of out] in `dtype`, rounded to the case's dtype."""
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
    """Compute the tile states of a dense mask [b, h, Sq, Skv] by counting."""
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
    """Compute dense attention and its gradients in `dtype`, by name.

    For 16-bit dtypes the scores are in float32. `turned` reverses the order of summation over q, kv
    and the head dim.
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
    # the template's next allocations are likely to reuse this memory
    torch.full((1 << 20,), math.nan)
    out, lse, top, _ = cpu.forward(query, key, value, runs, hooks, case.scale, need_max=True)
    assert top is not None
    dq, dk, dv = cpu.backward(
        grad, case.grad_lse(work), query, key, value, out, lse, runs, hooks, case.scale
    )
    found = {"out": out, "lse": lse, "max": top, "dq": dq, "dk": dk, "dv": dv}
    return found | {f"dcaptured{i}": g for i, g in enumerate(hooks.gradients)}


def rms(parts: list[Tensor]) -> float:
    return torch.cat([t.double().flatten() for t in parts]).square().mean().sqrt().item()


def check(case: Case) -> dict[str, Tensor]:
    """Check that errors are at most twice those of dense attention in the same dtype.

    Errors are differences from float64, as root mean squares over all results and gradients of one
    dtype, because the largest error of a few numbers depends on chance. The dense error is the
    larger of two orders of summation. For float64 itself, the error of dense float32 is scaled down
    to the precision of float64, since the reference may be wrong by as much.
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
        # the rounding error of the exact results, and that of 1 where terms cancel
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
