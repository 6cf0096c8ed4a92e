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


def sums_in_python(words: list[int]) -> list[tuple[int, int]]:
    """Compute a fingerprint as its definition in `attnkit.util.fingerprint` says."""

    def mixed(x: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
        for shift, factor in zip(shifts, factors, strict=False):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> shifts[2])

    found = []
    for first in range(0, len(words), CHUNK):
        a = b = 0
        for i, word in enumerate(words[first : first + CHUNK]):
            key = (i + 1) * 0x9E3779B9 % 2**32
            a += mixed((word + key) % 2**32, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
            b += mixed(word % 2**32 ^ key, (16, 15, 16), (0x7FEB352D, 0x846CA68B))
        found.append((a % 2**32, b % 2**32))
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("count", [1, 2, CHUNK, 2 * CHUNK + 3])
def test_fingerprints_are_those_of_the_definition(dtype: torch.dtype, count: int) -> None:
    ends = torch.iinfo(dtype)
    random = torch.Generator().manual_seed(count)
    numbers = torch.randint(ends.min, ends.max + 1, (2 * count,), dtype=dtype, generator=random)
    t = numbers[::2]  # words of small integers are their sign-extended values
    found = [(a % 2**32, b % 2**32) for a, b in fingerprint(t).tolist()]
    assert found == sums_in_python(t.tolist())


def test_words_of_each_layout() -> None:
    long = torch.arange(24).view(2, 3, 4)
    assert words_of(long).tolist() == [w for i in range(24) for w in (i, 0)]
    assert words_of(long[:, :, ::2]).tolist() == [[i, 0] for i in range(0, 24, 2)]
    assert words_of(long[:, :2, :3])[1, 1].tolist() == [[16, 0], [17, 0], [18, 0]]
    assert words_of(torch.tensor(7, dtype=torch.int32)).tolist() == [7]
    assert words_of(torch.tensor([], dtype=torch.float32)).numel() == 0
    bools = torch.tensor([True, False, True, True])
    assert words_of(bools).tolist() == [0x01010001]
    assert words_of(bools[1:]).tolist() == [0, 1, 1]
    assert words_of(torch.tensor([[1], [2]], dtype=torch.int8).expand(2, 5)).tolist() == [1, 2]


def test_a_released_state_keeps_the_hash_of_its_data() -> None:
    t = torch.arange(12, dtype=torch.int32)
    state = state_of(t)
    assert state.digest() == state_of(t.clone()).digest() != state_of(t + 1).digest()
    assert len(state.digest()) == 8
    state.release()
    assert not state.valid
    assert state.has_content_of(t)
    assert state.has_content_of(t.clone())
    assert not state.has_content_of(t + 1)
    assert not state.has_content_of(t.view(3, 4))
    assert not state.has_content_of(t.view(torch.float32))


def test_a_state_gives_the_memory_that_it_recorded() -> None:
    memory = torch.arange(40)
    t = memory[3:33].view(5, 6)[:, 1:4]
    state = state_of(t)
    found = state.recorded()
    assert found is not None
    assert found.data_ptr() == t.data_ptr()
    assert found.stride() == t.stride()
    assert torch.equal(found, t)
    assert state.storage_pointer() == memory.data_ptr()
    t = torch.arange(3)
    state = state_of(t)
    del t
    gc.collect()
    assert state.recorded() is None
    assert state.storage() is None
    assert state.storage_pointer() == 0
    unrecorded = data_state.DataState(memory, compare=False)
    assert unrecorded.recorded() is None
    assert unrecorded.storage() is None
    assert unrecorded.storage_pointer() == memory.data_ptr()


def test_data_that_a_device_compares_is_compared_by_a_settled_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`state_of` leaves the comparison to a kernel; `settled_state_of` compares at once."""
    before = data_state.compare_on_devices(lambda device: True)
    try:
        t = torch.arange(12)
        state = state_of(t)
        assert state.expected is not None
        assert torch.equal(state.expected, fingerprint(t))
        assert data_state.settled_state_of(t) is state
        # a CUDA graph that is captured meanwhile does not matter to a tensor of the CPU
        monkeypatch.setattr(data_state, "is_stream_capturing", lambda: True)
        t.numpy()[3] = 50
        assert state_of(t) is state
        settled = data_state.settled_state_of(t)
        assert settled is not state
        assert not state.valid
        assert data_state.settled_state_of(t) is settled
    finally:
        assert data_state.compare_on_devices(*before)[0](t.device)
    assert not data_state.setting.compares_on(t.device)


def test_trust_ends_with_the_block() -> None:
    for value in (True, False):
        with data_state.trust_version_counters(value):
            assert data_state.setting.trusts == value
            with data_state.trust_version_counters(not value):
                assert data_state.setting.trusts != value
            assert data_state.setting.trusts == value
        assert not data_state.setting.trusts
    with data_state.trust_version_counters():
        assert data_state.setting.trusts
