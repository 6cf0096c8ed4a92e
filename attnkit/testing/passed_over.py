"""Find what a check cannot test: NaN scores, zero gradients and jumps of a score_mod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.quantities import DenseCall, Quantities
from attnkit.testing.tolerance import compare

STEPS = 50  # bisection steps, after which the ends of the interval of scores are 1e-13 apart
JUMP = 1e-4  # results for scores 1e-13 apart that differ by more than this are a jump
MOST = 20_000  # largest number of positions that are searched for jumps


def nan_scores(call: DenseCall) -> str:
    """Return the index [b, h, q, kv] of the first unmasked NaN score, as text; "" if none.

    Args:
        call: the call whose scores, after `score_mod`, are searched.
    """
    if call.score_mod is None:
        return ""
    query, key, _ = (t.detach().to(torch.float64) for t in call.case.inputs(call.device))
    with torch.no_grad():
        scores = plain.modified(call.score_mod, plain.raw_scores(query, key, call.case.scale))
    lost = scores.isnan() if call.kept is None else scores.isnan() & call.kept
    return str(lost.nonzero()[0].tolist()) if lost.any() else ""


def tested_gradients(
    gold: Quantities, results: Quantities, rough: Sequence[Quantities], case: Case
) -> dict[str, bool]:
    """Return, for the name of each gradient, whether an all-zero result would have failed.

    Args:
        gold: results of the oracle, by name.
        results: results of a backend, for their dtypes.
        rough: see `compare`.
        case: the call.
    """
    zeros = {name: torch.zeros_like(t) for name, t in results.items()}
    failed = {row.quantity for row in compare(zeros, gold, rough, case, "") if not row.ok}
    # statistics do not depend on value
    names = (n for n in gold if n.startswith("d") and not n.startswith("dvalue through "))
    return {name: name in failed for name in names}


def jump_note(score_mod: Callable[..., Any], cases: Iterable[Case], device: torch.device) -> str:
    """Return a note on a jump (discontinuity) of `score_mod`, or "" if no jump is found.

    The search uses the largest of `cases` that has at most `MOST` positions.

    Args:
        score_mod: the user's function.
        cases: calls whose sizes `score_mod` allows.
        device: where to run.
    """
    by_size = sorted(cases, key=lambda case: torch.Size(case.dense_shape).numel())
    small = [case for case in by_size if torch.Size(case.dense_shape).numel() <= MOST]
    shape = (small or by_size[:1])[-1].dense_shape
    for reach in (3.0, 30.0):
        found = _jump(score_mod, shape, device, reach)
        if found:
            return found
    return ""


@torch.no_grad()
def _jump(score_mod: Callable[..., Any], shape: Any, device: torch.device, reach: float) -> str:
    """Return a note on the largest jump for scores within 1.5 * `reach` of 0, or "" if none.

    At every position the search bisects an interval of scores and keeps the half over which the
    result of `score_mod` differs more.
    """
    generator = torch.Generator().manual_seed(0)
    ends = 0.5 + torch.rand(2, *shape, generator=generator, dtype=torch.float64).to(device)
    low, high = -reach * ends[0], reach * ends[1]
    at_low, at_high = (plain.modified(score_mod, t) for t in (low, high))
    for _ in range(STEPS):
        middle = (low + high) / 2
        at_middle = plain.modified(score_mod, middle)
        left = _difference(at_low, at_middle) >= _difference(at_middle, at_high)
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
        at_low = torch.where(left, at_low, at_middle)
        at_high = torch.where(left, at_middle, at_high)
    sizes = _difference(at_low, at_high)
    if float(sizes.max()) <= JUMP:
        return ""
    place = tuple(int(i) for i in torch.unravel_index(sizes.argmax(), sizes.shape))
    return (
        f"score_mod jumps from {float(at_low[place]):.4g} to {float(at_high[place]):.4g} at a "
        f"score of {float(low[place]):.4g} (b, h, q, kv = {list(place)}); rounding decides on "
        "which side a score is, so calls with a score next to a jump are compared with a tolerance "
        "as large as the jump"
    )


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|; 0 where both are NaN or equal infinities, inf where the result is NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0)
