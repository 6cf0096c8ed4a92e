"""Compare every backend that can run on a device with the oracle, for one case."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DeviceError, UnsupportedError
from attnkit.runtime.bind import Bound
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import BACKENDS, choose, parse_backend
from attnkit.testing.case import Case
from attnkit.testing.passed_over import nan_scores, tested_gradients
from attnkit.testing.quantities import (
    DenseCall,
    Quantities,
    dense,
    differentiated,
    oracle,
    run,
)
from attnkit.testing.report import Row
from attnkit.testing.rounding import SAMPLES, perturbed
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import compare
from attnkit.testing.user_reference import Reference, reference_rows
from attnkit.util.arguments import check_type, shown

CERTAIN = 1000.0  # an error this many times too large is not due to rounding


def present_backends(device: torch.device) -> tuple[str, ...]:
    """List the backends that can run on a device, except the dense reference."""
    present = []
    for name in BACKENDS:
        if name in ("auto", "eager"):  # an alias; the reference
            continue
        try:
            choose(name, device=device.type)
        except UnsupportedError:
            continue
        present.append(name)
    return tuple(present)


def chosen_backends(backends: Any, device: torch.device) -> tuple[str, ...]:
    """Check the backends that a caller names; None for all that can run on a device.

    Raises:
        DeviceError: the device is meta, on which there is nothing to compare.
        ArgumentError: it is no sequence.
        OptionError, UnsupportedError: a backend is unknown, or cannot run here.
    """
    if device.type == "meta":
        raise DeviceError("device='meta' holds no data, so there is nothing to compare; use 'cpu'")
    if backends is None:
        return present_backends(device)
    if not isinstance(backends, tuple | list):
        raise ArgumentError(f"backends must be a list of names, got {shown(backends)}")
    for name in backends:
        parse_backend(check_type("a backend", name, str, "a name such as 'cpu'"))
    return tuple(backends)


@dataclass(frozen=True)
class Compared:
    """Holds the comparisons of one case.

    Attributes:
        rows: one for each quantity and backend.
        tested: gradient -> whether a result of zeros would have failed.
        nan_score: the place of the first NaN score that is kept; "" if there is none.
    """

    rows: list[Row]
    tested: dict[str, bool]
    nan_score: str


class _Samples:
    """Collects samples of the results that rounding in a dtype allows.

    A sample is a dense reference, or attention in float64 with noise of the size of rounding. A sum
    over thousands of scores may round to (nearly) the right number by luck, so more samples are
    taken before a result counts as wrong.

    Attributes:
        results: the samples so far.
    """

    def __init__(self, call: DenseCall, gold: Quantities) -> None:
        self._call = call
        self._count = 0
        self.results: list[Quantities] = []
        case = call.case
        if case.dtype != torch.float64:
            self.results.append(dense(call))
            self.results.append(perturbed(call, 0))
            return
        # In float64 the dense reference is the oracle itself. The errors of float32, scaled down by
        # the ratio of the units in the last place, show how exact the oracle is.
        narrow = dataclasses.replace(case, dtype=torch.float32)
        rough = dense(dataclasses.replace(call, case=narrow))
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        pairs = ((name, t, rough[name].to(t.dtype)) for name, t in gold.items())
        self.results.append({name: t + (r - t).nan_to_num() * ratio for name, t, r in pairs})
        self.add()

    def add(self) -> bool:
        """Add one sample of each kind, at most `SAMPLES` times; return whether any were added."""
        if self._count == SAMPLES:
            return False
        self._count += 1
        for sample in (shuffled, perturbed):
            self.results.append(sample(self._call, self._count))
        return True


def _blocks(variant: Variant, case: Case) -> tuple[tuple[int, int] | None, ...]:
    """List the tile sizes to run with: the plan's (None), the case's unless the mask fixes them."""
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
    reference: Reference | None = None,
) -> Compared:
    """Compare outputs and gradients, with the plan's tiles and with the case's.

    Args:
        variant: what to run.
        bound: the variant for this case.
        kept: the dense mask [B, Hq, Sq, Skv]; None without a mask.
        case: sizes, dtype and seed.
        device: where to run.
        backends: what to compare.
        notes: receives notes on what is not compared.
        reference: the user's dense attention, compared with the oracle too.
    """
    captured = differentiated(variant.score_mod, bound.score, device)
    call = DenseCall(variant.score_mod, kept, case, captured, device)
    gold = oracle(call)
    samples = _Samples(call, gold)
    notes += _not_compared(gold, samples.results)
    rows: list[Row] = []
    tested: dict[str, bool] = {}
    if reference is not None:
        rows += reference_rows(reference, call, gold, samples.results, notes)
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
            compared = compare(results, gold, samples.results, case, label)
            while _in_doubt(compared) and samples.add():
                compared = compare(results, gold, samples.results, case, label)
            rows += compared
            tested = tested or tested_gradients(gold, compared)
            rows.append(_masked_row(results, gold, kept, case, label))
    lost = nan_scores(call) if gold["lse"].isnan().any() else ""
    return Compared(rows, tested, lost)


def _in_doubt(rows: Sequence[Row]) -> bool:
    """Return whether an error is too large, but small enough to be due to rounding."""
    ratios = [row.ratio for row in rows if not row.ok and row.allowed > 0]
    return any(not row.ok for row in rows) and all(ratio < CERTAIN for ratio in ratios)


def _not_compared(gold: Quantities, samples: Sequence[Quantities]) -> list[str]:
    """Say which values are not compared as they are not finite; LSE and maximum may be -inf."""
    notes = []
    names = [name for name in gold if name not in ("lse", "max_scores")]
    lost = sum(int((~gold[name].isfinite()).sum()) for name in names)
    if lost:
        notes.append("the oracle itself gives inf or NaN in some cases, which are not compared")
    if any(not t[name].isfinite()[gold[name].isfinite()].all() for t in samples for name in names):
        notes.append("the dense reference overflows in some cases, which are not compared there")
    return notes


def _masked_row(
    results: Quantities, gold: Quantities, kept: Tensor | None, case: Case, label: str
) -> Row:
    """Compare fully masked rows and columns, which must be exactly 0, with LSE and maximum -inf."""
    masked = gold["lse"] == -torch.inf
    wrong = (results["out"][masked] != 0).sum()
    for name in ("lse", "max_scores"):
        wrong += (results[name][masked] != -torch.inf).sum()
    unused = torch.zeros(case.shapes[1][:3], dtype=torch.bool, device=masked.device)
    if kept is not None:
        seen = kept.expand(case.dense_shape).any(2)
        seen = seen.unflatten(1, (case.kv_heads, -1)).any(2)
        unused = ~(seen.any(0, keepdim=True) if case.kv_batch == 1 else seen)
    for suffix in ("", " through lse"):
        wrong += (results["dquery" + suffix][masked] != 0).sum()
        for name in ("dkey", "dvalue"):
            wrong += (results[name + suffix][unused] != 0).sum()
    return Row("fully masked rows", label, float(wrong), 0.0, case)
