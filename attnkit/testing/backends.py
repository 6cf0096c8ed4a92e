"""Compare the results of backends with the float64 oracle, for one case."""

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
    THROUGH,
    DenseCall,
    Quantities,
    dense,
    differentiated,
    oracle,
    run,
    with_sink,
)
from attnkit.testing.report import Row
from attnkit.testing.rounding import SAMPLES, perturbed
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import compare
from attnkit.testing.user_reference import Reference, reference_rows
from attnkit.util.arguments import check_type, shown

CERTAIN = 1000.0  # an error that exceeds its limit by this factor is not due to rounding


def present_backends(device: torch.device) -> tuple[str, ...]:
    """Return the names of the backends that can run on `device`, except the dense reference."""
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
    """Check the argument `backends` and return it as a tuple; None gives all that can run.

    Raises:
        DeviceError: `device` is meta, whose tensors have no data to compare.
        ArgumentError: `backends` is not a list or tuple of names.
        OptionError, UnsupportedError: a backend is unknown, or cannot run on this machine.
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
    """Holds the comparisons of all backends with the oracle for one case.

    Attributes:
        rows: one comparison for each quantity and backend.
        tested: maps the name of a gradient to whether an all-zero result would have failed.
        nan_score: index [b, h, q, kv] of the first unmasked NaN score, as text; "" if none.
    """

    rows: list[Row]
    tested: dict[str, bool]
    nan_score: str


class _Samples:
    """Collects sample results whose errors show how large rounding errors in a dtype can be.

    A sample is the result of a dense reference, or of float64 attention with noise as large as
    rounding errors. A sum over thousands of scores may be (nearly) exact by chance, so more samples
    are taken before a result counts as wrong.

    Attributes:
        results: the samples taken so far.
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
        # In float64 the dense reference is the oracle itself. The error of float32, scaled by the
        # ratio of the machine epsilons, estimates the error of the oracle.
        narrow = dataclasses.replace(case, dtype=torch.float32)
        rough = dense(dataclasses.replace(call, case=narrow))
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        pairs = ((name, t, rough[name].to(t.dtype)) for name, t in gold.items())
        self.results.append({name: t + (r - t).nan_to_num() * ratio for name, t, r in pairs})
        self.add()

    def add(self) -> bool:
        """Add one sample of each kind; return False if `SAMPLES` of each were already added."""
        if self._count == SAMPLES:
            return False
        self._count += 1
        for sample in (shuffled, perturbed):
            self.results.append(sample(self._call, self._count))
        return True


def _blocks(variant: Variant, case: Case) -> tuple[tuple[int, int] | None, ...]:
    """Return the tile sizes to test: the plan's (None) and, if the mask allows it, `case.block`."""
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
    """Compare the outputs and gradients of each backend with the oracle, for each tile size.

    Args:
        variant: the variant to run.
        bound: the variant bound for this case.
        kept: the dense mask, bool [B, Hq, Sq, Skv]; None without a mask.
        case: sizes, dtype and seed.
        device: where to run.
        backends: names of the backends to compare.
        notes: list to which notes on values that are not compared are appended.
        reference: the user's dense attention, which is also compared with the oracle.
    """
    sink = case.sinks(device)
    captured = with_sink(differentiated(variant.score_mod, bound.score, device), sink)
    survivors = case.survivors(device)
    call = DenseCall(variant.score_mod, kept, case, captured, device, sink, survivors)
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
                results = run(
                    variant, case, captured, backend=backend, device=device, block=block, sink=sink
                )
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
            tested = tested or tested_gradients(gold, results, samples.results, case)
            rows.append(_masked_row(results, gold, kept, case, label))
    lost = nan_scores(call) if gold.get("lse", gold["out"]).isnan().any() else ""
    return Compared(rows, tested, lost)


def _in_doubt(rows: Sequence[Row]) -> bool:
    """Return whether some rows fail, but every error is below `CERTAIN` times its limit."""
    ratios = [row.ratio for row in rows if not row.ok and row.allowed > 0]
    return any(not row.ok for row in rows) and all(ratio < CERTAIN for ratio in ratios)


def _not_compared(gold: Quantities, samples: Sequence[Quantities]) -> list[str]:
    """Return notes on non-finite values that are not compared, apart from LSE and row maxima."""
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
    """Check that fully masked rows and columns give exact zeros, -inf as maximum, and their LSE.

    That LSE is -inf, or the sink if the case has one. Their entropy is 0.
    """
    if "max_scores" in gold:
        masked = gold["max_scores"] == -torch.inf
    elif kept is not None:
        masked = ~kept.expand(case.dense_shape).any(-1)
    else:
        masked = torch.zeros(gold["out"].shape[:3], dtype=torch.bool, device=gold["out"].device)
    wrong = (results["out"][masked] != 0).sum()
    for name in set(gold).intersection(("lse", "max_scores", "entropy")):
        wrong += (results[name][masked] != gold[name][masked]).sum()
    unused = torch.zeros(case.shapes[1][:3], dtype=torch.bool, device=masked.device)
    if kept is not None:
        seen = kept.expand(case.dense_shape).any(2)
        seen = seen.unflatten(1, (case.kv_heads, -1)).any(2)
        unused = ~(seen.any(0, keepdim=True) if case.kv_batch == 1 else seen)
    for suffix in (through for name, through in THROUGH.items() if name in case.results):
        wrong += (results["dquery" + suffix][masked] != 0).sum()
        for name in ("dkey", "dvalue"):
            wrong += (results[name + suffix][unused] != 0).sum()
    return Row("fully masked rows", label, float(wrong), 0.0, case)
