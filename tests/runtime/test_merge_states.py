"""Compare merged partial attention results with one softmax over all keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnkit
from attnkit.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attnkit.runtime.merge_states import merge_states

F64 = torch.float64
INF = float("inf")


def attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [rows, Dv] and LSE [rows]; fully masked rows have 0 and -inf."""
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -INF, 0.0, lse)[:, None]).exp()
    return weights @ value, lse


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Draw scores with masked entries, values, and the positions at which to split the keys."""
    rows, keys = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1.0, 30.0, 1000.0]))
    scores = scale * torch.randn(rows, keys, generator=random, dtype=F64)
    dead = torch.rand(rows, keys, generator=random) < draw(st.sampled_from([0.0, 0.3, 0.8]))
    value = torch.randn(keys, 3, generator=random, dtype=F64)
    cuts = draw(st.lists(st.integers(0, keys), max_size=4))
    return scores.masked_fill(dead, -INF), value, sorted(cuts)


def parts(scores: Tensor, value: Tensor, cuts: list[int]) -> list[tuple[Tensor, Tensor]]:
    ends = [0, *cuts, scores.shape[1]]
    return [
        attend(scores[:, a:b], value[a:b]) if b > a else
        (scores.new_zeros(scores.shape[0], 3), scores.new_full((scores.shape[0],), -INF))
        for a, b in itertools.pairwise(ends)
    ]  # fmt: skip


@given(problem=problems(), backwards=st.booleans())
def test_any_chain_of_merges_is_the_unsplit_softmax(
    problem: tuple[Tensor, Tensor, list[int]], backwards: bool
) -> None:
    scores, value, cuts = problem
    pieces = parts(scores, value, cuts)
    out, lse = pieces.pop(-1 if backwards else 0)
    while pieces:
        piece = pieces.pop(-1 if backwards else 0)
        out, lse = merge_states(*piece, out, lse) if backwards else merge_states(out, lse, *piece)
    expected = attend(scores, value)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-13, atol=1e-13)


@given(problem=problems())
def test_gradients_are_those_of_the_unsplit_softmax(
    problem: tuple[Tensor, Tensor, list[int]],
) -> None:
    scores, value, cuts = problem
    cut = cuts[0] if cuts else scores.shape[1] // 2
    alive = torch.isfinite(scores[:, :cut]).any(-1) | torch.isfinite(scores[:, cut:]).any(-1)
    tangents = torch.randn(scores.shape[0], 3, dtype=F64), torch.randn(scores.shape[0], dtype=F64)
    found = []
    for split in (False, True):
        inputs = scores.clone().requires_grad_(), value.clone().requires_grad_()
        if split:
            (out_a, lse_a), (out_b, lse_b) = parts(*inputs, [cut])
            out, lse = merge_states(out_a, lse_a, out_b, lse_b)
        else:
            out, lse = attend(*inputs)
        total = (out * tangents[0])[alive].sum() + (lse * tangents[1])[alive].sum()
        found.append(torch.autograd.grad(total, inputs))
    # rows without keys in one part get no gradient there, where logsumexp itself gives NaN
    for mine, theirs in zip(found[1], found[0], strict=True):
        theirs, mine = (t.nan_to_num(nan=0.0) for t in (theirs, mine))
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_gradcheck_with_a_dead_part_and_a_dead_row() -> None:
    lse_a = torch.tensor([0.3, -INF, 1.0, -INF], dtype=F64)
    lse_b = torch.tensor([0.1, 0.7, -INF, -INF], dtype=F64)
    out_a, out_b = (torch.randn(4, 2, dtype=F64, requires_grad=True) for _ in range(2))
    a, b = (t.clone().requires_grad_() for t in (lse_a, lse_b))
    out, lse = merge_states(out_a, a, out_b, b)
    assert lse.tolist()[3] == -INF
    assert torch.equal(out[3], torch.zeros(2, dtype=F64))
    assert torch.equal(out[1], out_b[1])
    assert torch.equal(out[2], out_a[2])
    assert lse[1:3].tolist() == [0.7, 1.0]
    gradients = torch.autograd.grad(out.sum() + lse[:3].sum(), (out_a, a, out_b, b))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert [float(g[3].abs().sum()) for g in gradients] == [0, 0, 0, 0]
    finite = [t[:1].detach().clone().requires_grad_() for t in (out_a, a, out_b, b)]
    assert torch.autograd.gradcheck(merge_states, finite)
    assert torch.autograd.gradgradcheck(merge_states, finite)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_outputs_are_merged_in_the_dtype_of_the_lse(dtype: torch.dtype) -> None:
    scores, value = torch.randn(64, 96, dtype=F64), torch.randn(96, 3, dtype=F64)
    exact, exact_lse = attend(scores, value)
    (out_a, lse_a), (out_b, lse_b) = parts(scores, value, [40])
    out, lse = merge_states(out_a.to(dtype), lse_a.float(), out_b.to(dtype), lse_b.float())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    rounding = (exact.to(dtype).double() - exact).abs().max()
    # the parts were rounded once, the result once more
    assert (out.double() - exact).abs().max() <= 4 * rounding
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_nan_is_passed_on() -> None:
    out, lse = merge_states(torch.ones(2, 1), torch.tensor([float("nan"), 0.0]), torch.ones(2, 1),
                     torch.zeros(2))  # fmt: skip
    assert lse.isnan().tolist() == [True, False]
    assert out.isnan().squeeze(1).tolist() == [True, False]


def test_what_does_not_fit_is_refused() -> None:
    out, lse = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ShapeError, match=r"one shape \[..., Dv\].*\(2, 3\), \(3, 3\)"):
        merge_states(out, lse, torch.zeros(3, 3), lse)
    with pytest.raises(ShapeError, match=r"must be \(2,\), got \(3,\)"):
        merge_states(out, torch.zeros(3), out, torch.zeros(3))
    with pytest.raises(DTypeError, match="one dtype"):
        merge_states(out, lse, out.half(), lse)
    with pytest.raises(DTypeError, match="one floating dtype"):
        merge_states(out, lse.int(), out, lse.int())
    whole: Any = (out, lse)
    with pytest.raises(ArgumentError, match=r"out_a must be a torch\.Tensor, got tuple"):
        merge_states(whole, lse, out, lse)
    with pytest.raises(DeviceError, match="lse_b is on meta, out_a is on cpu"):
        merge_states(out, lse, out, lse.to("meta"))


def test_the_old_name_warns() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    with pytest.warns(DeprecationWarning, match="attnkit.merge is now attnkit.merge_states"):
        found = attnkit.merge(out, lse, out, lse)
    assert torch.equal(found[0], attnkit.merge_states(out, lse, out, lse)[0])
