"""Check that a tensor's state is valid as long as its data, and that fingerprints differ."""

from __future__ import annotations

import gc
import weakref

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.util import data_state
from attnkit.util.data_state import invalidate, set_own, state_of
from attnkit.util.fingerprint import CHUNK, fingerprint, words_of

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw a strided view of a tensor; return the view and all bytes of its memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=9))
    memory = torch.randint(0, 2, shape).to(dtype)
    t = memory.permute(draw(st.permutations(range(memory.ndim))))
    for axis in range(t.ndim):
        first, step = draw(st.integers(0, t.shape[axis] - 1)), draw(st.integers(1, 3))
        t = t[(slice(None),) * axis + (slice(first, None, step),)]
    if draw(st.booleans()):
        t = t.unsqueeze(0).expand(3, *t.shape)
    return t, memory.view(torch.uint8).view(-1)


@given(views(), st.data())
def test_a_byte_counts_if_the_tensor_holds_it(
    case: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    t, raw = case
    state, before, values = state_of(t), fingerprint(t), t.clone()
    assert state_of(t) is state
    raw.numpy()[data.draw(st.integers(0, raw.numel() - 1))] ^= 1  # no version counter sees it
    edited = not torch.equal(t, values)
    assert (state_of(t) is not state) is edited
    assert torch.equal(fingerprint(t), before) is not edited


@given(views())
def test_words_are_the_data_without_repetitions(case: tuple[Tensor, Tensor]) -> None:
    t, _ = case
    words = words_of(t)
    assert words.numel() * words.element_size() <= t.numel() * t.element_size()
    if t.is_contiguous() and t.data_ptr() % 4 == 0 and t.numel() * t.element_size() % 4 == 0:
        assert (words.dtype, words.ndim) == (torch.int32, 1)


@given(st.integers(1, 3 * CHUNK), st.integers(0, 2**31), st.data())
def test_fingerprints_see_order_and_pairs_of_edits(n: int, seed: int, data: st.DataObject) -> None:
    random = torch.Generator().manual_seed(seed)
    t = torch.randint(-3, 3, (n,), dtype=torch.int32, generator=random)
    before = fingerprint(t)
    assert before.shape == (-(-n // CHUNK), 2)
    i, j = (data.draw(st.integers(0, n - 1)) for _ in range(2))
    for edited in (t.index_copy(0, torch.tensor([i, j]), t[[j, i]]), t.clone()):
        if i != j:
            edited[[i, j]] += torch.tensor([1, -1], dtype=torch.int32)
        assert torch.equal(fingerprint(edited), before) is torch.equal(edited, t)
    signs = t.clone()
    signs[[i, j]] ^= -(2**31)
    assert not torch.equal(fingerprint(signs), before)


def test_pieces_do_not_change_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.randn(5 * CHUNK + 7)
    before = fingerprint(t)
    monkeypatch.setattr("attnkit.util.fingerprint._PIECE", 2)
    assert torch.equal(fingerprint(t), before)


def test_nan_is_equal_to_itself_and_empty_tensors_have_a_state() -> None:
    for t in (torch.full((3,), torch.nan), torch.empty(0), torch.empty(0, 3).T, torch.tensor(2.0)):
        assert state_of(t) is state_of(t)


def test_invalidate_reaches_views_and_no_other_tensor() -> None:
    base, other = torch.zeros(4, 4), torch.zeros(4)
    tensors = [base, base[1], base.T, other]
    states = [state_of(t) for t in tensors]
    invalidate(base[2:])
    assert [state_of(t) is s for t, s in zip(tensors, states, strict=True)] == [False] * 3 + [True]


def test_nothing_is_kept_for_a_deleted_tensor() -> None:
    t = torch.zeros(1 << 16)
    key, state = id(t), state_of(t)
    copy = weakref.ref(state._copy)
    del t
    gc.collect()
    assert key not in data_state._states
    assert copy() is None
    assert state.storage() is None
    assert not state.valid  # another tensor may get the id and the address


def test_the_content_of_own_tensors_is_not_compared() -> None:
    t = torch.zeros(4)
    set_own(t)
    state = state_of(t)
    t.numpy()[0] = 1
    assert state_of(t) is state
    t.add_(1)
    assert state_of(t) is not state
