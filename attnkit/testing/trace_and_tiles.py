"""Compare traced graphs with the user's functions, and tile states with the dense mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.graph.eval_torch import evaluate, mask_dtype, positions
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.quantities import in_dtype
from attnkit.testing.report import Row
from attnkit.testing.rounding import SAMPLES, noisy_values
from attnkit.testing.tolerance import FACTOR, ULPS, exact, place
from attnkit.tracing.tracer import Traced


def mask_row(kept: Tensor, mask: Traced, case: Case) -> Row:
    """Compare the traced graph of a mask with the dense mask, at every position.

    Floats in the graph have the dtypes that torch gives them, regardless of the query's dtype.

    Args:
        kept: the dense mask computed by the user's function, bool [B, Hq, Sq, Skv].
        mask: the traced mask.
        case: sizes and dtype.
    """
    env = positions(case.dense_shape, kept.device)
    (traced,) = evaluate([mask.root], env, mask.tensors, mask_dtype(mask.root, mask.tensors))
    return exact("mask", "trace", traced.expand(kept.shape), kept, case)


def score_row(function: Callable[..., Any], score: Traced, case: Case, device: torch.device) -> Row:
    """Compare the user's score_mod, called in float32, with its traced graph in float64.

    The limit is twice the error of the graph in float32, or twice the effect of noise of one
    machine epsilon at each graph node. Nodes that depend on 16-bit captured tensors get noise of
    that dtype, because torch computes them in 16 bits and the graph does not.
    """
    generator = torch.Generator().manual_seed(case.seed)
    raw = torch.randn(case.dense_shape, generator=generator).mul_(3 * case.spread).to(device)
    torch_values = plain.torch_scores(function, raw).to(torch.float64)
    env = {**positions(case.dense_shape, device), "score": raw}
    with torch.no_grad():
        (narrow,) = evaluate([score.root], env, score.tensors)
        env["score"] = raw.double()
        wide = in_dtype(score, torch.float64)
        (exact_values,) = evaluate([wide.root], env, wide.tensors, torch.float64)
        graph_values, gold = (t.to(torch.float64).expand(raw.shape) for t in (narrow, exact_values))
        # inf and NaN must be at the same positions as in the graph in float32
        odd = ~(torch_values.isfinite() & graph_values.isfinite() & gold.isfinite())
        same = (torch_values == graph_values) | (torch_values.isnan() & graph_values.isnan())
        error = (torch_values - gold).abs().masked_fill(odd, 0).masked_fill(odd & ~same, torch.inf)
        allowed = ULPS * torch.finfo(torch.float32).eps * _largest(gold, odd)
        allowed = max(allowed, FACTOR * _largest(graph_values - gold, odd))
        for _ in range(SAMPLES):
            if float(error.max()) <= allowed:
                break
            sample = noisy_values(wide, score.tensors, env, generator).expand(raw.shape)
            allowed = max(allowed, FACTOR * _largest(sample - gold, odd))
    return Row("score", "trace", float(error.max()), allowed, case, place(error))


def _largest(values: Tensor, ignored: Tensor) -> float:
    return float(values.nan_to_num().abs().masked_fill(ignored, 0).max())


def tile_rows(kept: Tensor, runs: BlockRuns, case: Case) -> list[Row]:
    """Compare the tile states of `runs` and of its transposed lists with the dense mask."""
    expected = brute_force(kept, runs.block)
    states = runs.states()
    transposed = 2 * runs.full_t.expanded(runs.q_blocks) + runs.partial_t.expanded(
        runs.q_blocks
    ).to(torch.int8)
    transposed = transposed.view(runs.batch, runs.heads, runs.kv_blocks, runs.q_blocks).mT
    return [
        exact("tiles", "tiles", states.expand(expected.shape), expected, case),
        exact("tiles transposed", "tiles", transposed.expand(expected.shape), expected, case),
    ]


def brute_force(kept: Tensor, block: tuple[int, int]) -> Tensor:
    """Compute tile states from a dense mask by counting the unmasked positions of each tile.

    Args:
        kept: the mask, bool [B, H, Sq, Skv].
        block: (q, kv) tile sizes.

    Returns:
        int8 [B, H, q tiles, kv tiles]: 0 EMPTY, 1 PARTIAL, 2 FULL.
    """
    counts, sizes = (t.to(torch.int32) for t in (kept, torch.ones_like(kept)))
    for axis, size in ((2, block[0]), (3, block[1])):
        counts, sizes = (
            torch.stack([part.sum(axis, dtype=torch.int32) for part in t.split(size, axis)], axis)
            for t in (counts, sizes)
        )
    return (counts > 0).to(torch.int8) + (counts == sizes).to(torch.int8)
