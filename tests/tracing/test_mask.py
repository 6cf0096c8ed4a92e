"""Check that masks combine like booleans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import create_block_mask, create_mask, masks
from attnkit.errors import ArgumentError, BoundsError, OptionError, ShapeError
from attnkit.graph.eval_torch import evaluate
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import Mask, and_masks, noop_mask, or_masks, per_batch, per_head
from attnkit.tracing.tracer import trace

N = 6
CAUSAL = Mask(lambda b, h, q, kv: q >= kv, "causal()")
NEAR = Mask(lambda b, h, q, kv: (q - kv).abs() <= 1, "near()")
ODD = Mask(lambda b, h, q, kv: kv % 2 == 1, "odd()")


def dense(mask: Any) -> torch.Tensor:
    env = {n: torch.zeros((), dtype=torch.int32) for n in "bh"}
    env["q"] = torch.arange(N, dtype=torch.int32).view(N, 1)
    env["kv"] = torch.arange(N, dtype=torch.int32)
    (kept,) = evaluate([trace(mask, "mask").root], env, ())
    return kept.expand(N, N)


MASKS = st.recursive(
    st.sampled_from([CAUSAL, NEAR, ODD]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] ^ p[1]),
        inner.map(lambda m: ~m),
        st.tuples(inner, st.integers(-2, 2), st.integers(-2, 2)).map(
            lambda p: p[0].shift(q=p[1], kv=p[2])
        ),
    ),
    max_leaves=6,
)


@given(MASKS, MASKS)
def test_operators_are_those_of_booleans(a: Mask, b: Mask) -> None:
    x, y = dense(a), dense(b)
    assert torch.equal(dense(a & b), x & y)
    assert torch.equal(dense(a | b), x | y)
    assert torch.equal(dense(a ^ b), x ^ y)
    assert torch.equal(dense(~a), ~x)
    assert torch.equal(dense(~~a), x)


@given(MASKS)
def test_label_is_the_expression(mask: Mask) -> None:
    names = {"causal": lambda: CAUSAL, "near": lambda: NEAR, "odd": lambda: ODD}
    assert torch.equal(dense(eval(repr(mask), names)), dense(mask))


def moved(keep: torch.Tensor, q: int, kv: int) -> torch.Tensor:
    """Return the dense mask [N, N] that `Mask.shift(q, kv)` should give, from a larger one."""
    result = torch.zeros(N, N, dtype=torch.bool)
    for row in range(N):
        for column in range(N):
            if row + q >= 0 and column + kv >= 0:
                result[row, column] = keep[row + q, column + kv]
    return result


@given(MASKS, st.integers(-8, 8), st.integers(-8, 8))
def test_shift(mask: Mask, q: int, kv: int) -> None:
    large = create_mask(mask, None, None, N + 8, N + 8)[0, 0]
    assert torch.equal(dense(mask.shift(q=q, kv=kv)), moved(large, q, kv))


def test_shift_by_batch_entry() -> None:
    context = torch.tensor([3, 0, -2])
    for by in (context, context.to(torch.int64)):
        shifted = create_mask(CAUSAL.shift(q=by), 3, None, N, N)
        for b, one in enumerate(context.tolist()):
            assert torch.equal(shifted[b, 0], dense(CAUSAL.shift(q=one)))
    one = torch.tensor(2)
    assert torch.equal(dense_of(CAUSAL.shift(kv=one)), dense(CAUSAL.shift(kv=2)))


def dense_of(mask: Any) -> torch.Tensor:
    """Evaluate a mask with captured tensors as a dense bool [N, N]."""
    return create_mask(mask, None, None, N, N)[0, 0]


def test_shift_does_not_read_a_table_from_its_end() -> None:
    ids = torch.tensor([0, 0, 1, 1, 0, 0])
    document = Mask(lambda b, h, q, kv: ids[q] == ids[kv], "document()")
    shifted = dense_of(document.shift(q=-2, kv=-2))
    assert not shifted[:2].any()
    assert not shifted[:, :2].any()
    assert torch.equal(shifted[2:, 2:], dense_of(document)[:-2, :-2])
    with pytest.raises(BoundsError):
        create_block_mask(document.shift(q=1), None, None, N, N).runs.counts()


def test_shift_labels() -> None:
    assert repr(CAUSAL.shift(q=3)) == "causal().shift(q=3)"
    assert repr((CAUSAL & ODD).shift(kv=-1)) == "(causal() & odd()).shift(kv=-1)"
    assert repr(CAUSAL.shift(q=torch.ones(4, dtype=torch.int32))) == "causal().shift(q=[4])"


@pytest.mark.parametrize("by", [1.5, True, "2", torch.ones(2), torch.ones(2, 2, dtype=torch.int32)])
def test_shift_by_something_else(by: Any) -> None:
    with pytest.raises(ArgumentError, match="shift takes an int or an integer tensor"):
        CAUSAL.shift(kv=by)


@given(st.lists(MASKS, min_size=1, max_size=4), st.booleans())
def test_choice(several: list[Mask], by_head: bool) -> None:
    several = [*several, several[0]]  # the same one twice
    count = len(several)
    if by_head:
        chosen = create_mask(per_head(several), None, count, N, N)[0]
    else:
        chosen = create_mask(per_batch(several), count, None, N, N)[:, 0]
    assert torch.equal(chosen, torch.stack([dense(m) for m in several]))


def test_choices_compose() -> None:
    mask = per_head([CAUSAL, NEAR, noop_mask]) & ~per_batch([ODD, CAUSAL])
    kept = create_mask(mask, 2, 3, N, N)
    for b, out in enumerate((ODD, CAUSAL)):
        for h, part in enumerate((CAUSAL, NEAR, noop_mask)):
            assert torch.equal(kept[b, h], dense(part) & ~dense(out))
    assert repr(mask) == "per_head([causal(), near(), noop_mask]) & ~per_batch([odd(), causal()])"
    many = torch.arange(N).view(1, N)
    assert torch.equal(per_head([CAUSAL, NEAR])(0, 1, many.T, many), dense(NEAR))  # as it is


@pytest.mark.parametrize("several", [[CAUSAL, NEAR], [CAUSAL, CAUSAL]])
def test_more_heads_than_masks(several: list[Mask]) -> None:
    with pytest.raises(ShapeError, match="number of masks is 2: for 2 query heads, got 3"):
        create_block_mask(per_head(several), None, 3, N, N).runs.counts()
    with pytest.raises(ShapeError, match="number of masks is 2: for batch size 2, got 3"):
        create_block_mask(per_batch(several), 3, None, N, N).runs.counts()


def test_choice_of_nothing() -> None:
    with pytest.raises(
        ArgumentError, match=r"per_head takes one mask per head in a list, got \[\]"
    ):
        per_head([])
    with pytest.raises(ArgumentError, match="per_batch takes one mask per batch entry"):
        per_batch(CAUSAL)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must be a function"):
        per_head([CAUSAL, 3])  # type: ignore[list-item]


def test_traces_of_new_forms_are_reused_while_true() -> None:
    device = torch.device("cpu")
    context = torch.tensor([1, 2])

    def made(q: int, masks: list[Any]) -> Mask:
        return per_head(masks).shift(q=q) & CAUSAL.shift(kv=context)

    mask = made(1, [CAUSAL, NEAR])
    roots = [trace_cached(mask, "mask", device).root for _ in range(3)]
    assert roots[0] is roots[1] is roots[2]
    tensors = [trace_cached(mask, "mask", device).tensors for _ in range(2)]
    assert all(x is y for x, y in zip(*tensors, strict=True))  # a cached trace keeps its tensors
    assert trace_cached(made(2, [CAUSAL, NEAR]), "mask", device).root is not roots[0]
    assert trace_cached(made(1, [CAUSAL, ODD]), "mask", device).root is not roots[0]
    by_value = trace_cached(made(1, [NEAR, CAUSAL]), "mask", device)
    kept = create_mask(made(1, [NEAR, CAUSAL]), 2, 2, N, N)
    assert not torch.equal(kept, create_mask(mask, 2, 2, N, N))
    assert by_value.root is not roots[0]


def test_plain_functions_mix_in() -> None:
    plain = lambda b, h, q, kv: kv > 2
    assert torch.equal(dense(CAUSAL & plain), dense(CAUSAL) & dense(plain))
    assert torch.equal(dense(plain | CAUSAL), dense(CAUSAL) | dense(plain))
    assert torch.equal(dense(plain ^ CAUSAL), dense(CAUSAL) ^ dense(plain))


def test_and_or_masks() -> None:
    assert torch.equal(dense(and_masks(CAUSAL, NEAR, ODD)), dense(CAUSAL & NEAR & ODD))
    assert torch.equal(dense(or_masks(CAUSAL, NEAR, ODD)), dense(CAUSAL | NEAR | ODD))
    assert dense(and_masks()).all()
    assert not dense(or_masks()).any()
    assert dense(noop_mask).all()


def test_plain_functions_on_the_left() -> None:
    even = lambda b, h, q, kv: q % 2 == 0
    expected = dense(even)
    for found, combine in (
        (even & CAUSAL, torch.logical_and),
        (even | CAUSAL, torch.logical_or),
        (even ^ CAUSAL, torch.logical_xor),
    ):
        assert torch.equal(dense(found), combine(expected, dense(CAUSAL)))


def test_truth_value_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no truth value; combine masks with `&`"):
        _ = CAUSAL and NEAR
    with pytest.raises(ArgumentError, match=r"the mask causal\(\)"):
        bool(CAUSAL)


def test_not_a_function() -> None:
    with pytest.raises(ArgumentError, match="must be a function"):
        Mask(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CAUSAL & 3  # type: ignore[operator]


def test_masks_per_head_are_on_the_device_of_the_positions() -> None:
    """The table of choices is int32 and on the device of the heads."""
    causal = masks.causal()
    options = [causal, masks.sliding_window(3), causal]
    for make, axis in ((per_head, "h"), (per_batch, "b")):
        expected = create_mask(make(options), 3, 3, N, N)
        with torch.device("meta"):  # on which nothing can be computed by mistake
            mask = make(options)
            found = create_mask(mask, 3, 3, N, N, device="cpu")
        assert torch.equal(found, expected)
        (table,) = trace(make(options), "mask").tensors
        assert table.tolist() == [0, 1, 0]
        assert table.dtype == torch.int32
        assert mask.axes[0].axes == (axis,)


def test_the_choice_of_masks_is_made_once() -> None:
    """It can be used outside of the inference mode in which it was made."""
    mask = per_head([CAUSAL, NEAR])
    with torch.inference_mode():
        (first,) = trace(mask, "mask").tensors
    (again,) = trace(mask, "mask").tensors
    assert again is first
    assert not first.is_inference()


def test_masks_per_head_are_named_by_their_parts() -> None:
    def own(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q == kv

    mask = per_head([own, masks.causal(), own])
    assert repr(mask) == "per_head([own, causal(), own])"
    with pytest.raises(ArgumentError, match="one mask per batch entry in a list, got 3"):
        per_batch(3)  # type: ignore[arg-type]


def test_a_complement_of_a_complement_is_the_mask() -> None:
    mask = masks.causal()
    assert ~~mask is mask
    assert repr(~mask) == "~causal()"
    assert ~~(mask & ~mask) is not mask


@pytest.mark.parametrize("by", [0, 3])
def test_a_shift_forward_needs_no_check_of_the_first_row(by: int) -> None:
    row, column = trace(CAUSAL.shift(q=by), "mask").root, trace(CAUSAL.shift(kv=by), "mask").root
    assert row is trace(lambda b, h, q, kv: CAUSAL(b, h, q + by, kv), "mask").root
    assert column is trace(lambda b, h, q, kv: CAUSAL(b, h, q, kv + by), "mask").root


def test_a_combination_has_the_frame_of_a_part_that_has_one() -> None:
    common, other, separate, last = (
        Mask(NEAR, label, frame=frame)  # type: ignore[arg-type]
        for label, frame in (
            ("first()", "common"), ("second()", "common"), ("third()", "separate"),
            ("fourth()", "separate"),
        )
    )  # fmt: skip
    for join in (and_masks, lambda *parts: per_head(parts), lambda *parts: per_batch(parts)):
        assert join(ODD, CAUSAL).frame == ""
        assert join(ODD, common, CAUSAL).frame == "common"
        assert join(separate, ODD).frame == "separate"
        message = r"^first\(\) compares .* queries and keys, but third\(\) packs them"
        for parts in ((common, other, separate, last), (ODD, separate, last, common, other)):
            with pytest.raises(OptionError, match=message):
                join(*parts)
