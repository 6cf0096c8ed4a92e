"""Check that check_variant passes correct variants, and finds, names and shrinks faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attnkit import create_block_mask, masks, mods, testing
from attnkit.errors import ArgumentError, OptionError, TraceError
from attnkit.graph import simplify
from attnkit.graph.ir import arg, const
from attnkit.runtime import bind
from attnkit.runtime.variant import Variant
from attnkit.sparsity import classify
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.cpu import CpuHooks
from attnkit.templates import cpu
from attnkit.testing import Case, CheckError, Limits, Report, check, check_case, check_variant
from attnkit.testing.source import source_of
from attnkit.tracing.tracer import Traced

SLOPES = torch.rand(8, requires_grad=True)
BIAS = torch.randn(8, 99, requires_grad=True)
DOCUMENTS = torch.arange(64) // 20

SOFTCAP = testing.load_object("mods:softcap(3.0)")

SMALL = Limits(q_len=(1, 80), kv_len=(1, 80))


def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - SLOPES[h] * (q - kv)


def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv)


GOOD: dict[str, Variant] = {
    "no mod, no mask": Variant(),
    "documents, learned slopes": Variant(alibi, documents),
    "softcap in a window": Variant(mods.softcap(5.0), masks.sliding_window(20, 3)),
    "2-d table": Variant(lambda s, b, h, q, kv: s * torch.sigmoid(BIAS[h, q]) + BIAS[h, kv]),
    "derived table": Variant(lambda s, b, h, q, kv: s + (SLOPES * 2).exp()[h]),
    "fully masked rows": Variant(mods.softcap(2.0), lambda b, h, q, kv: (q % 3 > 0) & (kv > 5)),
    "score_mod that masks": Variant(lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf)),
    "block mask": Variant(None, create_block_mask(masks.causal(), None, None, 50, 70)),
    "PyTorch's block mask": Variant(
        alibi, create_flex_mask(lambda b, h, q, kv: q >= kv, 1, 1, 150, 140, "cpu")
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_passes(name: str) -> None:
    report = check_variant(GOOD[name], examples=6)
    assert report.ok
    assert report.cases == 6
    assert report.failures == ()
    assert report.code == ""
    assert f"passed: 6 cases, {len(report.rows)} quantities" in str(report)
    assert {"out", "dquery", "dkey through lse", "fully masked rows"} <= {
        r.quantity for r in report.rows
    }


def test_compares_captured_gradients_traces_tiles_and_other_tiles() -> None:
    report = check_variant(GOOD["documents, learned slopes"], examples=4)
    found = {(r.quantity, r.backend) for r in report.rows}
    assert {
        ("dSLOPES", "cpu"),
        ("dSLOPES through lse", "cpu other tiles"),
        ("score", "trace"),
        ("mask", "trace"),
        ("tiles", "tiles"),
        ("tiles transposed", "tiles"),
    } <= found


@settings(max_examples=25)
@given(testing.variants(SMALL), testing.cases(SMALL, normalization=None))
def test_any_variant_passes_any_case(drawn: Variant, case: Case) -> None:
    assert check_case(drawn, case).ok


@pytest.mark.exhaustive
@settings(max_examples=400)
@given(testing.variants(SMALL), testing.cases(SMALL, normalization=None))
def test_many_variants_pass_any_case(drawn: Variant, case: Case) -> None:
    assert check_case(drawn, case).ok


@pytest.mark.parametrize("normalization", ["sigmoid", "none", "softmax1"])
def test_checks_other_normalizations(normalization: str) -> None:
    report = check_variant(alibi, masks.causal(), normalization=normalization, examples=8)
    assert report.ok
    found = {row.quantity for row in report.rows}
    assert {"out", "dquery", "dkey", "dvalue", "column_sums", "fully masked rows"} <= found
    assert ("lse" in found) == (normalization == "softmax1")
    assert ("dkey through entropy" in found) == (normalization == "softmax1")


def test_a_reference_of_another_normalization() -> None:
    def sigmoid(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return (query @ key.mT * scale).sigmoid().tril() @ value

    options: dict[str, Any] = {"reference": sigmoid, "examples": 6, "q_len": 20, "kv_len": 20}
    assert check_variant(None, masks.causal(), normalization="sigmoid", **options).ok
    report = found(None, masks.causal(), normalization="none", **options)
    assert {row.backend for row in report.failures} == {"reference"}


# --- seeded faults: each must be found, under its own name


def _around(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    """Replace `owner.name` by `fault`, which gets the original as its first argument."""
    monkeypatch.setattr(owner, name, functools.partial(fault, getattr(owner, name)))


def _hook(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    real = getattr(CpuHooks, name)
    monkeypatch.setattr(CpuHooks, name, lambda self, *args: fault(real, self, *args))


def _wrong_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    _hook(
        monkeypatch, "dscore", lambda real, self, s, grad, tile: 1.001 * real(self, s, grad, tile)
    )


def _other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the bits of the next query head, which are as random."""
    _hook(monkeypatch, "survivors", lambda real, self, b, h, *ends: real(self, b, h + 1, *ends))


def _captured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(real: Any, self: Any, *args: Any) -> None:
        real(self, *args)
        real(self, *args)

    _hook(monkeypatch, "captured_grad", twice)


def _leaking_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    _hook(monkeypatch, "keep", lambda real, self, tile: real(self, tile) | (tile.kv == 3))


def _coarse_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(real: Any, self: Any, s: Tensor, tile: Any) -> Tensor:
        return real(self, s.to(torch.bfloat16).to(s.dtype), tile)

    _hook(monkeypatch, "score", coarse)


def _partial_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, *args: Any, **kwargs: Any) -> BlockRuns:
        runs = real(*args, **kwargs)
        states = runs.states()
        states[states == 1] = 2
        return BlockRuns.from_states(states, runs.q_len, runs.kv_len, runs.block)

    _around(monkeypatch, classify, "classify", wrong)


def _wrong_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, function: Any, kind: str, device: torch.device) -> Any:
        found = real(function, kind, device)
        if kind == "score":
            return found
        strict = simplify.build("lt", arg("kv"), arg("q"))
        return dataclasses.replace(found, root=simplify.build("and", found.root, strict))

    _around(monkeypatch, bind, "trace_cached", wrong)


def _score_trace(change: Callable[[Traced], Traced]) -> Callable[..., None]:
    """Return a patch that applies `change` to traced score_mods, which all backends share."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(real: Any, function: Any, kind: str, device: torch.device) -> Any:
            found = real(function, kind, device)
            return change(found) if kind == "score" else found

        _around(monkeypatch, bind, "trace_cached", wrong)

    return seed


def _scaled(trace: Traced) -> Traced:
    return dataclasses.replace(trace, root=simplify.build("mul", trace.root, const(1.01)))


def _detached(trace: Traced) -> Traced:
    return dataclasses.replace(trace, tensors=tuple(t.detach() for t in trace.tensors))


def _forward(change: Callable[..., tuple[Tensor, Tensor, Any]]) -> Callable[..., None]:
    """Return a patch that applies `change` to the arguments and results of the CPU forward."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(real: Any, query: Any, key: Any, value: Any, runs: Any, *a: Any, **k: Any) -> Any:
            *found, entropy = real(query, key, value, runs, *a, **k)
            return *change(query, key, value, runs, *found), entropy

        _around(monkeypatch, cpu, "forward", wrong)

    return seed


def _no_lse_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, grad_out: Tensor, grad_lse: Any, *args: Any, **options: Any) -> Any:
        return real(grad_out, None, *args, **options)

    _around(monkeypatch, cpu, "backward", wrong)


def _shared_key_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(
        real: Any, grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, *a: Any, **k: Any
    ) -> Any:
        dquery, dkey, dvalue = real(grad_out, grad_lse, query, key, *a, **k)
        return dquery, dkey / 2 if key.shape[0] < query.shape[0] else dkey, dvalue

    _around(monkeypatch, cpu, "backward", wrong)


def _crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if key.shape[2] > 20:
            raise RuntimeError("no such chunk")
        return real(query, key, *args, **kwargs)

    _around(monkeypatch, cpu, "forward", wrong)


def _shorter_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(real: Any, query: Any, key: Any, lse: Any, *rest: Any) -> Any:
        return real(query, key, lse.index_fill(2, torch.tensor([lse.shape[2] - 1]), 99.0), *rest)

    _around(monkeypatch, cpu, "column_sums", fault)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "wrong adjoint": (_wrong_adjoint, "dquery"),
    "captured gradient counted twice": (_captured_twice, "dSLOPES"),
    "mask that leaks": (_leaking_mask, "out"),
    "scores in 16 bits": (_coarse_score, "lse"),
    "crash": (_crash, "call"),
    "partial tiles taken as full": (_partial_as_full, "tiles"),
    "wrong trace": (_wrong_trace, "mask"),
    "wrong trace of the score": (_score_trace(_scaled), "lse"),
    "captured tensor that is lost": (_score_trace(_detached), "dcaptured tensor [8]"),
    "lse to base 2": (
        _forward(lambda q, k, v, runs, out, lse, top: (out, lse * math.log2(math.e), top)),
        "lse",
    ),
    "lse gradient dropped": (_no_lse_gradient, "dkey through lse"),
    "gradient of a shared key": (_shared_key_gradient, "dkey"),
    "fully masked rows that are not zero": (
        _forward(
            lambda q, k, v, runs, out, lse, top: (
                out.masked_fill(lse[..., None] == -math.inf, 1e-30),
                *(lse, top),
            )
        ),
        "fully masked rows",
    ),
    "tile size that changes the result": (
        _forward(
            lambda q, k, v, runs, out, lse, top: (
                out if runs.block[0] == 128 else 1.01 * out,
                *(lse, top),
            )
        ),
        "out",
    ),
    "strides ignored": (
        _forward(
            lambda q, k, v, runs, out, lse, top: (
                out if v.is_contiguous() else out.flip(-1),
                *(lse, top),
            )
        ),
        "out",
    ),
    "NaN": (
        _forward(
            lambda q, k, v, runs, out, lse, top: (
                out.masked_fill(out > 1.5, math.nan),
                *(lse, top),
            )
        ),
        "out",
    ),
    "random bits of another head": (_other_bits, "out"),
    "column sums without the last row": (_shorter_sums, "column_sums"),
}


def found(score_mod: Any, mask: Any, *, seconds: float = 0.5, **options: Any) -> Report:
    """Run a check that must fail, and make its case smaller for `seconds`; return its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "SHRINK_SECONDS", seconds)
        with pytest.raises(CheckError) as caught:
            check_variant(score_mod, mask, **options)
    assert str(caught.value) == str(caught.value.report)
    return caught.value.report


def window(name: str) -> Any:
    """Return a window that differs for each fault, so that no test uses cached tiles of another."""
    return masks.sliding_window(20 + list(FAULTS).index(name), 2)


@pytest.mark.parametrize("name", FAULTS)
def test_finds_and_names_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, quantity = FAULTS[name]
    fault(monkeypatch)
    report = found(alibi, window(name) & (lambda b, h, q, kv: q != 4), examples=40)
    assert not report.ok
    assert report.failed is not None
    assert any(row.quantity.startswith(quantity) for row in report.failures)
    assert "FAILED" in str(report)
    first = report.failures[0]
    assert f"\n  {first.quantity} ({first.backend}) " in str(report)


def test_a_fault_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["gradient of a shared key"][0](monkeypatch)
    case = found(alibi, masks.causal(), seconds=600.0, examples=40).failed
    assert case is not None
    assert (case.batch, case.kv_batch) == (2, 1)
    assert (case.q_len, case.kv_len, case.dtype) == (1, 1, torch.float32)


@pytest.mark.parametrize(
    "mask",
    [
        masks.sliding_window(51, 2),
        masks.sliding_window(52) | ~masks.prefix(3),
        documents,
        create_block_mask(masks.sliding_window(53, 2), None, None, 30, 20),
        testing.mask_mods(SMALL),
    ],
    ids=["library", "composed", "imported", "block mask", "drawn"],
)
def test_the_printed_code_fails_in_the_same_way(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["wrong adjoint"][0](monkeypatch)
    if isinstance(mask, SearchStrategy):
        mask = find(mask, lambda m: "t0[" in source_of(m, "mask").text)
    report = found(SOFTCAP, mask, examples=40)
    assert f"\nrun this to see it again:\n{report.code}" in str(report)
    with pytest.raises(CheckError) as again:
        exec(compile(report.code, "<report>", "exec"), {"__name__": "again"})
    assert again.value.report.failed == report.failed
    assert again.value.report.failures == report.failures


def test_code_that_cannot_be_found_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["wrong adjoint"][0](monkeypatch)
    scale = torch.tensor(0.5)
    report = found(lambda s, b, h, q, kv: s * scale, None, examples=5)
    assert "#   report = found(lambda s, b, h, q, kv: s * scale, None, examples=5)" in report.code
    with pytest.raises(NotImplementedError, match="put the definition of score_mod here"):
        exec(report.code, {"__name__": "again"})
    given_code = "variant = Variant(lambda s, b, h, q, kv: s * 0.5)"
    report = found(lambda s, b, h, q, kv: s * scale, None, examples=5, code=given_code)
    with pytest.raises(CheckError):
        exec(report.code, {"__name__": "again"})


# --- sizes and bad input


def test_sizes_follow_the_captured_tensors() -> None:
    table = torch.randn(3, 11)
    report = check_variant(lambda s, b, h, q, kv: s + table[h, q], examples=8)
    assert report.cases == 8
    assert max(row.case.q_len for row in report.rows) <= 11
    assert max(row.case.heads for row in report.rows) <= 3


def test_given_sizes_are_used() -> None:
    report = check_variant(alibi, q_len=7, kv_len=(8, 9), batch=2, heads=4, examples=4)
    for row in report.rows:
        assert (row.case.q_len, row.case.batch, row.case.heads) == (7, 2, 4)
        assert row.case.kv_len in (8, 9)


def test_only_the_given_dtype_is_drawn() -> None:
    report = check_variant(None, None, dtype=torch.bfloat16, examples=4)
    assert {row.case.dtype for row in report.rows} == {torch.bfloat16}


def test_the_same_seed_draws_the_same_cases() -> None:
    reports = [check_variant(alibi, examples=5, seed=seed) for seed in (3, 3, 4)]
    rows = [{r.quantity: (r.case, r.error) for r in report.rows} for report in reports]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_progress_counts_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    check_variant(None, documents, examples=5, progress=lambda *counts: told.append(counts))
    assert told == [(n, 5) for n in range(1, 6)]


def test_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    check_variant(None, None, examples=1)
    assert torch.get_num_threads() == before


def test_no_legal_sizes_asks_for_them() -> None:
    table = torch.randn(5)
    with pytest.raises(ArgumentError, match=r"pass q_len, kv_len, batch or heads.*'table'"):
        check_variant(lambda s, b, h, q, kv: s + table[q + 9], examples=3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_len": 0}, OptionError, "q_len must be a positive int or a range"),
        ({"heads": (4, 2)}, OptionError, "heads must be a positive int or a range"),
        ({"examples": 0}, OptionError, "examples must be a positive int"),
        ({"normalization": "max"}, OptionError, "normalization must be one of"),
        ({"mask": documents, "score_mod": Variant()}, ArgumentError, "a whole Variant and mask"),
        ({"score_mod": 3}, ArgumentError, "score_mod must be a function"),
        ({"mask": lambda b, h, q, kv: q - kv}, TraceError, "returned torch.int32"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_variant(**{"examples": 2, **options})


# --- differences that a check ignores


def notes(score_mod: Any, mask: Any = None, **options: Any) -> str:
    return "\n".join(check_variant(score_mod, mask, **{"examples": 5} | options).notes)


def test_says_where_scores_are_nan() -> None:
    said = notes(lambda s, b, h, q, kv: s + torch.log(kv - 2.5), q_len=4, kv_len=6, heads=1)
    # log of a negative number
    assert "scores are NaN in 5 of 5 calls, first at (b, h, q, kv) = [0, 0, 0, 0] of " in said
    kept = notes(
        lambda s, b, h, q, kv: s + torch.log(kv - 2.5),
        lambda b, h, q, kv: kv > 2,
        **{"q_len": 4, "kv_len": 6, "heads": 1},
    )
    assert "NaN" not in kept


def test_says_which_gradients_are_zero_everywhere() -> None:
    unused = torch.randn(8, requires_grad=True)
    said = notes(lambda s, b, h, q, kv: s + 0.0 * unused[h], heads=4)
    assert "dunused, dunused through lse, " in said
    assert ": zero, or as small as rounding errors, in every " in said
    # a number for a whole row changes the LSE, and no weight unless there is a sink
    said = notes(lambda s, b, h, q, kv: s + unused[h], heads=4, examples=1)
    assert "dunused: zero, or as small" in said
    assert "zero, or as small" not in notes(alibi, masks.causal(), q_len=20, kv_len=20, heads=4)


JUMPS: dict[str, tuple[Any, str]] = {
    "where": (
        lambda s, b, h, q, kv: torch.where(s > 0.25, s, -5.0),
        "score_mod jumps from -5 to 0.25 at a score of 0.25 ",
    ),
    "rounding": (lambda s, b, h, q, kv: torch.floor(s), "score_mod jumps from "),
    "to a mask": (
        lambda s, b, h, q, kv: torch.where(s > q + 0.5, -math.inf, s),
        "score_mod jumps from ",
    ),
}


@pytest.mark.parametrize("name", JUMPS)
def test_says_that_a_score_mod_jumps(name: str) -> None:
    score_mod, message = JUMPS[name]
    assert message in notes(score_mod, q_len=5, kv_len=5, examples=1)


@pytest.mark.parametrize("name", ["softcap", "log_sigmoid", "relu", "steps by position"])
def test_no_jump_is_seen_in_a_continuous_score_mod(name: str) -> None:
    score_mod = {
        "softcap": mods.softcap(3.0),
        "log_sigmoid": mods.log_sigmoid(),
        "relu": lambda s, b, h, q, kv: torch.relu(s) + s.abs().sqrt(),
        "steps by position": lambda s, b, h, q, kv: torch.where(q > kv, s, -10.0),
    }[name]
    assert "jumps" not in notes(score_mod, q_len=5, kv_len=5, examples=1)


def test_says_which_table_cuts_a_length() -> None:
    table = torch.randn(3, 11)
    said = notes(lambda s, b, h, q, kv: s + table[h, q])
    assert "q_len is drawn from 1 to 11 only: captured tensor 'table' has 11 " in said
    assert "heads is drawn from 1 to 3 only: " in said
    assert "kv_len" not in said
    given_sizes = notes(lambda s, b, h, q, kv: s + table[h, q], q_len=5, heads=(1, 2))
    assert "drawn from" not in given_sizes


# --- a reference of the user's own


def dense_alibi(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    heads, q_len, kv_len = query.shape[1], query.shape[2], key.shape[2]
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)
    scores = query @ key.mT * scale - SLOPES[:heads, None, None] * distance
    return scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ value


def test_a_reference_that_agrees() -> None:
    report = check_variant(alibi, masks.causal(), reference=dense_alibi, examples=6)
    compared = {row.quantity for row in report.rows if row.backend == "reference"}
    assert compared == {"out", "dquery", "dkey", "dvalue", "dSLOPES"}


def test_a_reference_that_means_something_else() -> None:
    report = found(alibi, masks.sliding_window(3, 0), reference=dense_alibi, examples=20)
    assert {row.backend for row in report.failures} == {"reference"}
    assert "reference=dense_alibi" in report.code
    with pytest.raises(CheckError):
        exec(report.code, {"__name__": "again"})


def test_a_reference_of_fully_masked_rows_gives_nan_and_a_note() -> None:
    def reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        scores = query @ key.mT * scale
        kept = torch.arange(query.shape[2])[:, None] % 2 == 0
        return scores.masked_fill(~kept, -math.inf).softmax(-1) @ value

    report = check_variant(
        None, lambda b, h, q, kv: q % 2 == 0, reference=reference, q_len=4, examples=3
    )
    assert any("the reference gives NaN in fully masked rows" in note for note in report.notes)
    assert {r.quantity for r in report.rows if r.backend == "reference"} == {"out"}


def test_a_reference_must_return_the_output() -> None:
    with pytest.raises(ArgumentError, match=r"reference must return the output.*got tuple"):
        check_variant(None, reference=lambda q, k, v, scale: (q, k), examples=1)


def test_the_oracle_may_be_infinite() -> None:
    report = check_variant(lambda s, b, h, q, kv: s + torch.log(q.float() - 1), examples=8)
    assert any("the oracle itself gives inf or NaN" in note for note in report.notes)
    assert "note: the oracle" in str(report)
