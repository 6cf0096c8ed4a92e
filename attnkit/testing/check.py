"""Test a variant on many random calls: `check_variant`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings

from attnkit.errors import ArgumentError, BoundsError, ShapeError
from attnkit.runtime.normalization import check_normalization
from attnkit.runtime.variant import Variant
from attnkit.testing import reproducer
from attnkit.testing.backends import chosen_backends
from attnkit.testing.case import Case
from attnkit.testing.examine import Findings, all_notes, bind, examine
from attnkit.testing.limits import Limits, Range, cut_notes, find_limits
from attnkit.testing.passed_over import jump_note
from attnkit.testing.report import CheckError, Report, worst
from attnkit.testing.sizes import cases
from attnkit.testing.user_reference import Reference
from attnkit.util.arguments import check_dtype, check_seed, check_size, check_type, shown
from attnkit.util.devices import resolve_device

SHRINK_SECONDS = 10.0  # time limit for shrinking a failure
REFUSALS = 200  # give up after this many draws of illegal sizes

Progress = Callable[[int, int], None]


def check_variant(
    score_mod: Callable[..., Any] | Variant | None = None,
    mask: Any = None,
    *,
    q_len: int | Range | None = None,
    kv_len: int | Range | None = None,
    batch: int | Range | None = None,
    heads: int | Range | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    examples: int = 40,
    seed: int = 0,
    device: torch.device | str = "cpu",
    backends: Sequence[str] | None = None,
    normalization: str = "softmax",
    reference: Reference | None = None,
    code: str = "",
    progress: Progress | None = None,
) -> Report:
    """Check a variant on many random calls against dense attention in float64.

    The calls differ in lengths (ragged, unequal), batch, heads (with and without GQA), head dims,
    dtype, strides, tile sizes, scale, values, and whether there is an attention sink, softmax1 or
    dropout. The check runs every backend that this machine supports, with several tile sizes. It
    compares the output, the LSE, the row maxima, in some calls the entropies and the column sums,
    fully masked rows and columns, and the gradients of query, key, value and captured tensors,
    through the output and through each statistic. It also compares the traced graph with the user's
    function called with torch tensors, and the tiles with the dense mask. In each row an error may
    be at most twice that of dense attention in the same dtype, plus a few roundings
    (`attnkit.testing.tolerance`).

    Args:
        score_mod: a score_mod, or a whole `Variant`, in which case `mask` must be None.
        mask: a mask, as for the argument `block_mask` of `flex_attention`.
        q_len, kv_len, batch, heads: a size or a range (low, high) to draw from. By default sizes
            are at most 200, 200, 3 and 8, or less if captured tensors are smaller.
        dtype: dtype of query, key and value, or several to draw from; None draws from all four.
        examples: number of calls to draw.
        seed: seed of the draws; the same seed draws the same calls.
        device: where to run; captured tensors must be on this device.
        backends: names of the backends to compare; None compares all that can run.
        normalization: what makes the weights, see `flex_attention`. With "softmax" some calls are
            drawn with softmax1.
        reference: your own dense attention, `reference(query, key, value, scale) -> out`, that
            defines the intended result. It is called with float64 query [B, Hq, Sq, D], key
            [B, Hq, Skv, D] and value [B, Hq, Skv, Dv], with the heads of a group repeated. Its
            output [B, Hq, Sq, Dv] and its gradients are compared with those of your functions. A
            failure of the backend "reference" means that the two differ.
        code: Python source that defines `variant`, for the program that a failure prints. It is not
            needed for functions that can be imported.
        progress: function that is called with (calls compared, calls to draw).

    Returns:
        A report whose `str` is a table of the worst error per quantity.

    Raises:
        CheckError: a comparison failed. Its report has the smallest failing call of the search and
            a program that reproduces the failure.
        ArgumentError: the captured tensors allow none of the sizes that were drawn.
        TraceError, DeviceError, ...: as documented for `flex_attention`.

    >>> from attnkit.masks import causal
    >>> check_variant(None, causal(), examples=3).ok
    True
    """
    began = time.perf_counter()
    if isinstance(score_mod, Variant):
        if mask is not None:
            raise ArgumentError("score_mod is a whole Variant and mask was given too; drop one")
        variant = score_mod
    else:
        variant = Variant(score_mod, mask)
    check_size("examples", examples)
    check_seed(seed)
    check_normalization(normalization)
    check_type("code", code, str, "Python source")
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress must be a function or None, got {shown(progress)}")
    for one in (
        () if dtype is None else [dtype] if isinstance(dtype, torch.dtype) else _listed(dtype)
    ):
        check_dtype("dtype", one)
    device = resolve_device(device)
    chosen = chosen_backends(backends, device)
    limits = find_limits(variant, device, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
    search = _Search(variant, device, chosen, examples, reference, progress, normalization)
    given = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
    search.notes += cut_notes(variant, device, limits, [n for n, x in given.items() if x is None])
    failed = search.run(limits, dtype, seed)
    if not search.findings:
        if isinstance(search.refusal, ShapeError):  # it says what sizes the variant is for
            raise search.refusal
        raise ArgumentError(
            f"no sizes could be drawn that the variant allows (q_len {limits.q_len}, kv_len "
            f"{limits.kv_len}, batch {limits.batch}, heads {limits.heads}); pass q_len, kv_len, "
            f"batch or heads. The last draw said: {search.refusal}"
        )
    report = _report(search, failed, time.perf_counter() - began, code)
    if failed is not None:
        raise CheckError(report)
    return report


def _listed(dtypes: Any) -> Sequence[Any]:
    """Check that `dtypes` is a non-empty list or tuple and return it.

    Raises:
        ArgumentError: `dtypes` is not a list or tuple, or is empty.
    """
    if not isinstance(dtypes, tuple | list) or not dtypes:
        raise ArgumentError(f"dtype must be a dtype or a list of dtypes, got {shown(dtypes)}")
    return dtypes


def _report(search: _Search, failed: Case | None, seconds: float, code: str) -> Report:
    shown = search.findings if failed is None else {failed: search.findings[failed]}
    variant, device = search.variant, search.device
    notes = [*search.notes, *all_notes(shown)]
    if variant.score_mod is not None and failed is None:
        notes.append(jump_note(variant.score_mod, shown, device))
    return Report(
        name=str(search.variant),
        rows=worst(row for findings in shown.values() for row in findings.rows),
        cases=len(search.findings),
        seconds=seconds,
        notes=tuple(note for note in notes if note),
        failed=failed,
        code=""
        if failed is None
        else reproducer.program(variant, failed, device, code, search.reference),
    )


class _Failure(Exception):
    """Raised in a hypothesis example to report a failed case, so that hypothesis shrinks it."""


class _Stop(BaseException):
    """Raised to stop the search.

    It derives from BaseException because hypothesis treats an Exception as a failed example.
    """


class _Search:
    """Runs one check: draws cases with hypothesis and examines each distinct case once."""

    def __init__(
        self,
        variant: Variant,
        device: torch.device,
        backends: Sequence[str],
        examples: int,
        reference: Reference | None,
        progress: Progress | None,
        normalization: str,
    ) -> None:
        self.variant = variant
        self.device = device
        self.backends = backends
        self.examples = examples
        self.reference = reference
        self.progress = progress
        self.normalization = normalization
        self.notes: list[str] = []
        self.findings: dict[Case, Findings] = {}
        self.refusals = 0
        self.refusal: BoundsError | ShapeError | None = None
        self.deadline: float | None = None  # set at the first failure
        self.last_failure: Case | None = None

    def run(
        self, limits: Limits, dtype: torch.dtype | Sequence[torch.dtype] | None, seed: int
    ) -> Case | None:
        """Draw and examine cases; return the smallest failing case, or None if all pass."""

        @hypothesis.seed(seed)
        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        # a reference of the user takes neither sink nor dropout, and returns the output alone
        @hypothesis.given(cases(limits, dtype=dtype, **self.drawn))
        def body(case: Case) -> None:
            self._one(case)

        # one thread is enough for small tensors, and fixes the order of every sum
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            body()
        except (_Failure, _Stop):
            # after a failure hypothesis tries smaller cases, so the last failure is the smallest
            return self.last_failure
        except hypothesis.errors.Unsatisfiable:
            return None
        finally:
            torch.set_num_threads(threads)
        return None

    @property
    def drawn(self) -> dict[str, Any]:
        """Return which options of a call `cases` draws besides sizes and dtypes."""
        extras = self.reference is None
        return {"sinks": extras, "statistics": extras, "normalization": self.normalization}

    def _one(self, case: Case) -> None:
        findings = self.findings.get(case)
        if findings is None:
            if self.deadline is not None and time.perf_counter() > self.deadline:
                raise _Stop
            findings = self._examine(case)
            self.findings[case] = findings
            if self.progress is not None:
                self.progress(min(len(self.findings), self.examples), self.examples)
        if not all(row.ok for row in findings.rows):
            self.last_failure = case
            if self.deadline is None:
                self.deadline = time.perf_counter() + SHRINK_SECONDS
            raise _Failure

    def _examine(self, case: Case) -> Findings:
        try:
            bound = bind(self.variant, case, self.device)
        except (BoundsError, ShapeError) as error:
            self.refusal = error
            self.refusals += 1
            if self.refusals >= REFUSALS and not self.findings:
                raise _Stop from None
            hypothesis.reject()
        return examine(
            self.variant,
            case,
            device=self.device,
            backends=self.backends,
            bound=bound,
            reference=self.reference,
        )
