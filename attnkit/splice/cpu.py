"""Implement the hooks of `templates.cpu` by evaluating the graphs with torch operators.

The index tensors b, h, q and kv broadcast, so a value that depends on the head alone, for example,
is computed once per head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit.graph.adjoint import Adjoint, adjoint
from attnkit.graph.eval_torch import clamped, evaluate, mask_dtype
from attnkit.graph.ir import Node
from attnkit.splice.cpu_distances import (
    Diagonals,
    by_distance,
    diagonal_sums,
    distances,
    reads_diagonals,
)
from attnkit.splice.cpu_values import Values
from attnkit.splice.program import Program
from attnkit.templates.cpu import Tile
from attnkit.util import caches
from attnkit.util.dropout import kept, survivor_scale
from attnkit.util.shapes import broadcast

Ends: TypeAlias = tuple[int, int]  # first position and end


@functools.lru_cache(maxsize=1024)
def _adjoint(root: Node) -> Adjoint:
    return adjoint(root)


caches.register(_adjoint.cache_clear)


class CpuHooks:
    """Implements `attnkit.templates.cpu.hooks.Hooks` by evaluating the graphs of a program.

    The gradient of an attention sink is the last of `gradients`.

    Args:
        program: the score and mask graphs.
        score_tensors: captured tensors of the score graph, by slot; the state of dropout and the
            sink, if the program has them.
        mask_tensors: captured tensors of the mask graph, by slot.
        dtype: dtype in which scores are computed, float32 or float64.
        device: device of the scores.
        heads: number of query heads.
        needs_grad: for each tensor of `score_tensors`, whether its gradient is needed.
    """

    def __init__(
        self,
        program: Program,
        score_tensors: Sequence[Tensor],
        mask_tensors: Sequence[Tensor],
        dtype: torch.dtype,
        device: torch.device,
        heads: int,
        needs_grad: Sequence[bool] = (),
    ) -> None:
        program = program.weights
        self.program = program
        self.has_softmax = program.has_softmax
        self.score_tensors = score_tensors
        self.mask_tensors = mask_tensors
        self.dtype = dtype
        self.device = device
        self._values = Values()
        self._diagonals = Diagonals()
        self.has_score = program.score is not None
        scores, sink = program.split_sink(score_tensors)
        _, self._dropout = program.split_dropout(scores)
        self._heads = heads
        self.sink = None if sink is None else sink.detach().to(dtype)
        self.gradients: list[Tensor | None] = [
            torch.zeros(t.shape, dtype=dtype, device=device) if need else None
            for t, need in zip(score_tensors, needs_grad, strict=False)
        ]
        own, self.sink_grad = self.gradients, None
        if program.sink and own:
            *own, self.sink_grad = own
        self.needs_captured_grad = any(g is not None for g in own)

    @property
    def survivor_scale(self) -> Tensor | None:
        """Return the factor of elements of the softmax that dropout keeps; None without dropout."""
        return None if self._dropout is None else survivor_scale(self._dropout, self.dtype)

    def survivors(self, b: Tensor, h: Tensor, rows: Ends, columns: Ends) -> Tensor:
        """Return which elements of a rectangle dropout keeps, bool [nb, nh, rows, columns]."""
        assert self._dropout is not None
        return kept(self._dropout, b, h, self._heads, rows, columns)

    def _run(self, roots: Sequence[Node], env: dict[str, Tensor], mask: bool) -> list[Tensor]:
        tensors = self.mask_tensors if mask else self.score_tensors
        program = self.program
        names = program.names[mask]
        dtype = mask_dtype(roots[0], tensors) if mask else self.dtype
        return evaluate(
            roots, env, tensors, dtype, checked=program.checked, names=names, clamps=True
        )

    def _overwrite(self, root: Node, tile: Tile, **spent: Tensor) -> Tensor:
        """Evaluate `root`, and overwrite the arguments `spent` where that saves memory."""
        program, tensors = self.program, list(self.score_tensors)
        checks = {"checked": program.checked, "names": program.names[0], "clamps": True}
        rest, expressions = by_distance(root, len(tensors))
        line = distances(tile) if expressions else None
        if line is not None:
            found = self._run(expressions, _positions(line), mask=False)
            rows = tile.q.shape[-2]
            tensors += [self._diagonals.spread(i, t, rows) for i, t in enumerate(found)]
            root = rest
        env = {**_positions(tile), **spent}
        return self._values.evaluate([root], env, spent, tensors, self.dtype, **checks)[0]

    def score(self, s: Tensor, tile: Tile) -> Tensor:
        """Apply the score_mod to the raw scores `s` [b, h, q, kv]; return the modified scores."""
        if self.program.score is None:
            return s
        return self._overwrite(self.program.score, tile, score=s)

    def keep(self, tile: Tile) -> Tensor:
        """Evaluate the mask on a tile; return a bool tensor that broadcasts to the tile."""
        if self.program.mask is None:
            return torch.ones((), dtype=torch.bool, device=self.device)
        return self._run([self.program.mask], _positions(tile), mask=True)[0].to(self.device)

    def dscore(self, s: Tensor, grad: Tensor, tile: Tile) -> Tensor:
        """Compute the gradient of the raw scores `s` from `grad`, that of the modified scores."""
        if self.program.score is None:
            return grad
        return self._overwrite(_adjoint(self.program.score).dscore, tile, score=s, grad=grad)

    def captured_grad(self, s: Tensor, grad: Tensor, tile: Tile) -> None:
        """Add the contribution of a tile to `gradients`, those of the captured tensors."""
        if self.program.score is None:
            return
        env = {**_positions(tile), "score": s, "grad": grad}
        pairs = [
            (load, cotangent)
            for load, cotangent in _adjoint(self.program.score).loads
            if self.gradients[int(load.attr)] is not None  # type: ignore[arg-type]
        ]
        line = distances(tile)
        summed = [line is not None and reads_diagonals(load) for load, _ in pairs]
        roots = [c for _, c in pairs]
        for (load, _), diagonal in zip(pairs, summed, strict=True):
            roots += () if diagonal else load.args
        values = self._run(roots, env, mask=False)
        indices = iter(values[len(pairs) :])
        for (load, _), cotangent, diagonal in zip(pairs, values, summed, strict=False):
            total = self.gradients[int(load.attr)]  # type: ignore[arg-type]
            assert total is not None
            share = cotangent.expand(s.shape)
            if not diagonal:
                index = [next(indices) for _ in load.args]
                _scatter(total, clamped(load, index, total.shape), share)
                continue
            assert line is not None
            index = self._run(load.args, _positions(line), mask=False)
            sums = diagonal_sums(share)
            part = torch.zeros_like(total, dtype=sums.dtype)
            _scatter(part, clamped(load, index, total.shape), sums)
            total.add_(part)


def _positions(tile: Tile) -> dict[str, Tensor]:
    return {"b": tile.b, "h": tile.h, "q": tile.q, "kv": tile.kv}


def _scatter(total: Tensor, index: list[Tensor], cotangent: Tensor) -> None:
    """Add `cotangent` to `total[index]` in place; sum it over axes that `index` ignores first."""
    shape = broadcast(*(i.shape for i in index)) if index else (1,) * cotangent.ndim
    shape = (1,) * (cotangent.ndim - len(shape)) + tuple(shape)
    fixed = [axis for axis, n in enumerate(shape) if n == 1 and cotangent.shape[axis] != 1]
    if fixed:
        cotangent = cotangent.sum(dim=fixed, keepdim=True)
    if not index:
        total.add_(cotangent.reshape(()))
        return
    flat = torch.zeros((), dtype=torch.int64, device=cotangent.device)
    for at, size in zip(index, total.shape, strict=True):
        at = at.to(torch.int64)
        flat = flat * size + torch.where(at < 0, at + size, at)
    flat = flat.expand(shape).reshape(-1)
    # index_put_ sorts on CUDA, so the sum has a fixed order there too
    total.view(-1).index_put_((flat,), cotangent.reshape(-1), accumulate=True)
