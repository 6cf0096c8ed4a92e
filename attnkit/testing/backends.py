"""Every backend that can run here against the oracle, at one case."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.runtime.bind import Bound
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import BACKENDS, choose
from attnkit.testing.case import Case
from attnkit.testing.quantities import Captured, Quantities, captured_leaves, oracle, run
from attnkit.testing.report import Row
from attnkit.testing.rounding import SAMPLES, perturbed
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import compare

CERTAIN = 1000.0  # an error that many times too large is no matter of luck


def present_backends(device: torch.device) -> tuple[str, ...]:
    """The backends that can run here, beside the dense ones that they are compared with."""
    found = []
    for name in BACKENDS:
        if name in ("auto", "eager"):  # another name for one of these; the reference
            continue
        try:
            choose(name, device=device.type)
        except UnsupportedError:
            continue
        found.append(name)
    return tuple(found)


class _Samples:
    """What the dtype can give: dense references, and noise where it comes in.

    A sum over thousands of scores may round to (nearly) the right number by luck, so more samples
    are taken before a result is called wrong.
    """

    def __init__(
        self,
        variant: Variant,
        bound: Bound,
        kept: Tensor | None,
        case: Case,
        captured: Captured,
        device: torch.device,
        gold: Quantities,
    ) -> None:
        self._arguments = bound.score, kept, case, captured, device
        self._count = 0
        self.taken: list[Quantities] = []
        if case.dtype != torch.float64:
            self.taken.append(run(variant, case, captured, backend="eager", device=device))
            self.taken.append(perturbed(*self._arguments, 0))
            return
        # In float64 that would be the oracle itself. The errors of float32, scaled down by the
        # units of the two, tell how exact the oracle is.
        narrow = dataclasses.replace(case, dtype=torch.float32)
        found = run(variant, narrow, captured, backend="eager", device=device)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        pairs = ((name, t, found[name].to(t.dtype)) for name, t in gold.items())
        self.taken.append({name: t + (f - t).nan_to_num() * ratio for name, t, f in pairs})
        self.more()

    def more(self) -> bool:
        """Take two more, unless there are enough."""
        if self._count == SAMPLES:
            return False
        self._count += 1
        for sample in (shuffled, perturbed):
            self.taken.append(sample(*self._arguments, self._count))
        return True


def _blocks(variant: Variant, case: Case) -> tuple[tuple[int, int] | None, ...]:
    """Tile sizes to run with: the plan's own, and the case's where they are not the mask's."""
    fixed = variant.mask is None or hasattr(variant.mask, "BLOCK_SIZE")
    return (None,) if fixed else (None, case.block)


def backend_rows(
    variant: Variant,
    bound: Bound,
    kept: Tensor | None,
    case: Case,
    device: torch.device,
    backends: Sequence[str],
    notes: list[str],
) -> list[Row]:
    """Compare outputs and gradients, with the plan's own tiles and with the case's.

    Args:
        variant: what to run.
        bound: the variant for this case.
        kept: the dense mask [B, Hq, Sq, Skv]; None keeps everything.
        case: sizes, dtype and seed.
        device: where to run.
        backends: what to compare.
        notes: told what is left out.
    """
    captured = captured_leaves(bound.score)
    gold = oracle(bound.score, kept, case, captured, device)
    samples = _Samples(variant, bound, kept, case, captured, device, gold)
    notes += _left_out(gold, samples.taken)
    rows = []
    for backend in backends:
        for block in _blocks(variant, case):
            label = backend if block is None else f"{backend} other tiles"
            try:
                results = run(variant, case, captured, backend=backend, device=device, block=block)
            except UnsupportedError as error:
                notes.append(f"{backend} does not take some cases: {error}")
                continue
            except Exception as error:
                where = f"{type(error).__name__}: {error}"
                rows.append(Row("call", label, float("inf"), 0.0, case, where))
                continue
            compared = compare(results, gold, samples.taken, case, label)
            while _in_doubt(compared) and samples.more():
                compared = compare(results, gold, samples.taken, case, label)
            rows += compared
            rows.append(_dead_row(results, gold, kept, case, label))
    return rows


def _in_doubt(rows: Sequence[Row]) -> bool:
    """Whether an error is too large, and not so large that no rounding explains it."""
    ratios = [row.ratio for row in rows if not row.ok and row.allowed > 0]
    return any(not row.ok for row in rows) and all(ratio < CERTAIN for ratio in ratios)


def _left_out(gold: Quantities, samples: Sequence[Quantities]) -> list[str]:
    """Notes on values that cannot be compared. (LSE and maximum of a dead row can: -inf.)"""
    notes = []
    names = [name for name in gold if name not in ("lse", "max_scores")]
    lost = sum(int((~gold[name].isfinite()).sum()) for name in names)
    if lost:
        notes.append("the oracle itself gives inf or NaN in some cases, which are not compared")
    if any(not t[name].isfinite()[gold[name].isfinite()].all() for t in samples for name in names):
        notes.append("the dense reference overflows in some cases, which are not compared there")
    return notes


def _dead_row(
    results: Quantities, gold: Quantities, kept: Tensor | None, case: Case, label: str
) -> Row:
    """Rows that keep nothing, and keys that nobody keeps: exact zeros, LSE and maximum -inf."""
    dead = gold["lse"] == -torch.inf
    wrong = (results["out"][dead] != 0).sum()
    for name in ("lse", "max_scores"):
        wrong += (results[name][dead] != -torch.inf).sum()
    unused = torch.zeros(case.shapes[1][:3], dtype=torch.bool, device=dead.device)
    if kept is not None:
        seen = kept.expand(case.dense_shape).any(2)
        seen = seen.unflatten(1, (case.kv_heads, -1)).any(2)
        unused = ~(seen.any(0, keepdim=True) if case.kv_batch == 1 else seen)
    for suffix in ("", " through lse"):
        wrong += (results["dquery" + suffix][dead] != 0).sum()
        for name in ("dkey", "dvalue"):
            wrong += (results[name + suffix][unused] != 0).sum()
    return Row("dead rows", label, float(wrong), 0.0, case)
