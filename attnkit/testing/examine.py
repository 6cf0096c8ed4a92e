"""Check a variant for one case: results of the backends, traced graph and tiles."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.runtime.bind import Bound
from attnkit.runtime.variant import Variant
from attnkit.testing import plain, reproducer
from attnkit.testing.backends import backend_rows, chosen_backends
from attnkit.testing.case import Case
from attnkit.testing.report import CheckError, Report, Row
from attnkit.testing.tolerance import exact
from attnkit.testing.trace_and_tiles import mask_row, score_row, tile_rows
from attnkit.testing.user_reference import Reference
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import check_type
from attnkit.util.devices import resolve_device


@dataclass(frozen=True, eq=False)
class Findings:
    """Holds the comparisons of one case and notes on what was not compared.

    Attributes:
        rows: the comparisons.
        notes: what was not compared, and why.
        tested: maps the name of a gradient to whether an all-zero result would have failed.
        nan_score: index [b, h, q, kv] of the first unmasked NaN score, as text; "" if none.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    tested: dict[str, bool]
    nan_score: str


def bind(variant: Variant, case: Case, device: torch.device) -> Bound:
    """Bind `variant` for the sizes of `case`, without allocating query, key and value.

    Raises:
        BoundsError: the variant's captured tensors do not allow these sizes.
        TraceError, ShapeError, DeviceError: as documented for `flex_attention`.
    """
    one = torch.empty(1, dtype=case.dtype, device=device)
    query, key = (one.expand(shape) for shape in case.shapes[:2])
    return variant.bind(query, key, case.block)


def examine(
    variant: Variant,
    case: Case,
    *,
    device: torch.device,
    backends: Sequence[str],
    bound: Bound | None = None,
    reference: Reference | None = None,
) -> Findings:
    """Run all comparisons of `variant` for one case.

    These compare every backend with the oracle, the traced graphs with the user's functions, and
    the tiles with the dense mask.

    Args:
        variant: the variant to check.
        case: sizes, dtype, strides and seed.
        device: where to run.
        backends: names of the backends to compare.
        bound: result of `bind` for this case; None calls `bind`.
        reference: the user's dense attention, see `check_variant`.
    """
    bound = bind(variant, case, device) if bound is None else bound
    rows: list[Row] = []
    score, mask = variant.trace(device)
    kept = None if mask is None else _dense_mask(variant, mask, bound, case, device, rows)
    if score is not None and variant.score_mod is not None:
        rows.append(score_row(variant.score_mod, score, case, device))
    notes: list[str] = []
    compared = backend_rows(variant, bound, kept, case, device, backends, notes, reference)
    rows += compared.rows
    return Findings(tuple(rows), tuple(notes), compared.tested, compared.nan_score)


def all_notes(findings: Mapping[Case, Findings]) -> tuple[str, ...]:
    """Return the notes of all cases, with added notes on NaN scores and untested gradients."""
    notes = list(dict.fromkeys(note for found in findings.values() for note in found.notes))
    lost = {case: found.nan_score for case, found in findings.items() if found.nan_score}
    if lost:
        case, place = next(iter(lost.items()))
        notes.append(
            f"scores are NaN in {len(lost)} of {len(findings)} calls, first at "
            f"(b, h, q, kv) = {place} of {case}: rows with a NaN are not compared, nor are "
            "gradients of such calls"
        )
    names = dict.fromkeys(name for found in findings.values() for name in found.tested)
    untested = [n for n in names if not any(f.tested.get(n) for f in findings.values())]
    if untested:
        notes.append(
            f"{', '.join(untested)}: zero, or as small as rounding errors, in every call, so that "
            "no error in them can be found"
        )
    return tuple(notes)


def _dense_mask(
    variant: Variant,
    traced: Traced,
    bound: Bound,
    case: Case,
    device: torch.device,
    rows: list[Row],
) -> Tensor:
    """Return the dense mask; append rows that compare the traced graph and the tiles with it."""
    function = getattr(variant.mask, "mask_mod", variant.mask)
    kept = plain.dense_mask(function, case.dense_shape, device)
    rows.append(mask_row(kept, traced, case))
    if bound.lists_override_mask:
        return _listed(variant.mask, kept)
    if bound.runs is not None:
        rows += tile_rows(kept, bound.runs, case)
    else:
        rows.append(exact("mask", "tiles", kept, torch.ones_like(kept), case))
    return kept


def _listed(mask: object, kept: Tensor) -> Tensor:
    """Return the dense mask of a PyTorch BlockMask, whose full blocks ignore the mask_mod."""
    grids = []
    for prefix in ("", "full_"):
        counts = getattr(mask, f"{prefix}kv_num_blocks")
        if counts is None:
            grids.append(torch.zeros_like(kept))
            continue
        indices = getattr(mask, f"{prefix}kv_indices").long()
        listed = torch.arange(indices.shape[-1], device=kept.device) < counts[..., None]
        grid = torch.zeros(*indices.shape[:3], indices.shape[-1] + 1, device=kept.device)
        grid.scatter_(-1, indices.where(listed, indices.shape[-1]), 1.0)
        q_size, kv_size = mask.BLOCK_SIZE  # type: ignore[attr-defined]
        dense = grid[..., :-1].repeat_interleave(q_size, -2).repeat_interleave(kv_size, -1)
        grids.append(dense[..., : kept.shape[-2], : kept.shape[-1]].bool().expand(kept.shape))
    return (grids[0] & kept) | grids[1]


def check_case(
    variant: Variant,
    case: Case,
    *,
    device: torch.device | str = "cpu",
    backends: Sequence[str] | None = None,
    reference: Reference | None = None,
    code: str = "",
) -> Report:
    """Check a variant for one case and return the report.

    The program that a failed `check_variant` prints calls this function.

    Args:
        variant: the variant to check.
        case: sizes, dtype, strides and seed.
        device: where to run; the captured tensors must be on this device.
        backends: names of the backends to compare; None compares all that can run.
        reference: the user's dense attention, see `check_variant`.
        code: Python source that defines `variant`, for the report of a failure.

    Raises:
        CheckError: a comparison failed.
        BoundsError: the variant's captured tensors do not allow these sizes.
        ArgumentError, DeviceError, OptionError: an argument has the wrong type.
    """
    began = time.perf_counter()
    check_type("variant", variant, Variant, "an attnkit.Variant")
    check_type("case", case, Case, "an attnkit.testing.Case")
    device = resolve_device(device)
    chosen = chosen_backends(backends, device)
    findings = examine(variant, case, device=device, backends=chosen, reference=reference)
    failed = any(not row.ok for row in findings.rows)
    report = Report(
        name=str(variant),
        rows=findings.rows,
        seconds=time.perf_counter() - began,
        notes=all_notes({case: findings}),
        failed=case if failed else None,
        code=reproducer.program(variant, case, device, code, reference) if failed else "",
    )
    if failed:
        raise CheckError(report)
    return report
