"""Edits of offsets are seen: no call computes with the sequences of other data."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import StaleDataError
from attnkit.integrations.flash_attn import flash_attn_varlen_func
from attnkit.runtime import api, data_guard
from attnkit.runtime.prepare import prepare
from attnkit.splice.fingerprint_check import encode, stale_report
from attnkit.util.data_state import compare_on_devices
from attnkit.util.fingerprint import fingerprint
from tests.integrations import packed_reference

TOTAL = 30


class HostCheck:
    """Compare tensors with their fingerprints on the host, as kernels do on a GPU."""

    def __init__(self, tensors: Mapping[int, tuple[Tensor, Tensor]], number: int) -> None:
        self.device = torch.device("cpu")
        self._tensors, self._number = tensors, number

    def __call__(self) -> None:
        for position, (t, expected) in self._tensors.items():
            if not torch.equal(fingerprint(t), expected):
                stale_report.code[0] = encode(self._number, position)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_guard, "FingerprintCheck", HostCheck)
    attnkit.clear_caches()
    before = compare_on_devices(lambda device: True)
    yield
    compare_on_devices(*before)
    attnkit.clear_caches()
    assert stale_report.code[0] == 0


def inputs(heads: int = 2) -> list[Tensor]:
    return [torch.randn(TOTAL, heads, 8) for _ in range(3)]


def call(qkv: list[Tensor], cu: Tensor) -> Tensor:
    out: Tensor = flash_attn_varlen_func(*qkv, cu, cu, TOTAL, TOTAL, causal=True)
    return out


def check(qkv: list[Tensor], cu: Tensor) -> None:
    exact, _ = packed_reference.attend(*qkv, cu.tolist(), cu.tolist(), window=(-1, 0))
    torch.testing.assert_close(call(qkv, cu), exact)


def write(cu: Tensor, ends: list[int]) -> None:
    """Overwrite offsets without changing their version counter."""
    new = torch.tensor(ends, dtype=cu.dtype)
    ctypes.memmove(cu.data_ptr(), new.data_ptr(), new.numel() * new.element_size())


def test_edits_that_torch_counts() -> None:
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    for middle in (10, 17, 0, 30, 10):
        cu[1] = middle
        for _ in range(3):
            check(inputs(), cu)


def test_edits_that_torch_does_not_count() -> None:
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    for middle in (10, 17, 0, 30, 10):
        write(cu, [0, middle, TOTAL])
        for _ in range(3):
            check(inputs(), cu)


def test_another_tensor_of_the_same_length() -> None:
    for middle in (10, 17, 0, 30, 10):
        check(inputs(), torch.tensor([0, middle, TOTAL], dtype=torch.int32))


def test_an_edit_before_the_backward_is_an_error() -> None:
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    qkv = [t.requires_grad_() for t in inputs()]
    out = call(qkv, cu)
    write(cu, [0, 20, TOTAL])
    with pytest.raises(
        StaleDataError, match=r"'cu_seqlens_.' .* between a forward and its backward"
    ):
        out.sum().backward()


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_on_a_gpu_the_next_call_raises_once() -> None:
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    for middle in (17, 0):
        for _ in range(3):
            check(inputs(), cu)
        write(cu, [0, middle, TOTAL])
        call(inputs(), cu)  # with the old sequences
        with pytest.raises(StaleDataError, match=r"'cu_seqlens_.' \(torch.int32, shape \(3,\)\)"):
            call(inputs(), cu)
    check(inputs(), cu)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_on_a_gpu_a_new_kind_of_call_takes_the_new_data() -> None:
    """A call that is not prepared yet compares the data, and then the tables are made again."""
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    check(inputs(2), cu)
    write(cu, [0, 22, TOTAL])
    check(inputs(1), cu)
    check(inputs(2), cu)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_on_a_gpu_invalidate_is_enough() -> None:
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    for middle in (17, 0, 30):
        check(inputs(), cu)
        write(cu, [0, middle, TOTAL])
        attnkit.invalidate(cu)
        check(inputs(), cu)


def test_calls_find_what_was_made_for_the_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share offsets read them once, and repeated calls prepare nothing."""
    cu = torch.tensor([0, 10, TOTAL], dtype=torch.int32)
    reads = 0
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> object:
        nonlocal reads
        reads += tensor is cu
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    prepared = 0

    def prepare_counted(call: Any) -> Any:
        nonlocal prepared
        prepared += 1
        return prepare(call)

    monkeypatch.setattr(api, "prepare", prepare_counted)
    attnkit.clear_caches()
    score_mod = lambda s, b, h, q, kv: s + 0.5 * (kv - q)
    for causal in (True, False, True, False):
        for mod in (None, score_mod):
            flash_attn_varlen_func(
                *inputs(), cu, cu, TOTAL, TOTAL, causal=causal, softcap=2.0, score_mod=mod
            )
    assert reads == 2  # of queries, and of keys
    assert prepared == 4  # two masks with two score_mods
