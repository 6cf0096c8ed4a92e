"""Say what a check passes over: NaN scores, gradients of zero, jumps of a score_mod."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.quantities import DenseCall, Quantities
from attnkit.testing.report import Row

STEPS = 50  # bisections of an interval of scores; its ends are then 1e-13 apart
JUMP = 1e-4  # a larger difference between two scores 1e-13 apart is a jump
MOST = 20_000  # positions at which jumps are looked for


def nan_scores(call: DenseCall) -> str:
    """Return the place [b, h, q, kv] of the first NaN among the scores that are kept; "" if none.

    Args:
        call: what is computed.
    """
    if call.score_mod is None:
        return ""
    query, key, _ = (t.detach().to(torch.float64) for t in call.case.inputs(call.device))
    with torch.no_grad():
        scores = plain.modified(call.score_mod, plain.raw_scores(query, key, call.case.scale))
    lost = scores.isnan() if call.kept is None else scores.isnan() & call.kept
    return str(lost.nonzero()[0].tolist()) if lost.any() else ""


def tested_gradients(gold: Quantities, rows: Iterable[Row]) -> dict[str, bool]:
    """Return for each gradient whether a result of zeros would have failed.

    Args:
        gold: results of the oracle, by name.
        rows: comparisons of one backend.
    """
    allowed = {row.quantity: row.allowed for row in rows}
    return {
        name: name in allowed and float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) > allowed[name]
        for name, t in gold.items()
        # the LSE does not depend on value
        if name.startswith("d") and name != "dvalue through lse"
    }


def jump_note(score_mod: Callable[..., Any], cases: Iterable[Case], device: torch.device) -> str:
    """Look for a jump of a score_mod, in the largest of some cases that is small; "" if none.

    Args:
        score_mod: the user's function.
        cases: calls whose sizes it allows.
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
    """Bisect an interval of scores at every position, towards the larger difference."""
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
        f"score_mod jumps from {float(at_low[place]):.4g} to {float(at_high[place]):.4g} at a score "
        f"of {float(low[place]):.4g} (b, h, q, kv = {list(place)}); rounding decides on which side "
        "a score is, so calls with a score next to a jump are compared with a tolerance as large "
        "as the jump"
    )


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|, 0 where both are the same infinity or NaN, infinity where one is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0)
