"""Check that the call after an unnoticed write to captured data raises once and names the tensor.

The comparison runs on the host here, at the same point of a call as the kernel does on a GPU.
`tests/templates/test_fingerprint.py` checks that kernel, and `tests/gpu/test_stale_data.py` checks
both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit import StaleDataError, create_block_mask, flex_attention, masks
from attnkit.runtime import data_guard
from attnkit.splice.fingerprint_check import encode, stale_report
from attnkit.util.data_state import compare_on_devices
from attnkit.util.fingerprint import fingerprint
from tests.runtime.reuse.test_stale_data import (
    LENGTH,
    WAYS,
    calls,
    dense,
    documents,
    inputs,
    parameters,
)
from tests.runtime.reuse.writers import WRITERS


class HostCheck:
    """Compare tensors with their fingerprints on the host, as `FingerprintCheck` does on a GPU."""

    launches = 0

    def __init__(self, tensors: Mapping[int, tuple[Tensor, Tensor]], number: int) -> None:
        self.device = torch.device("cpu")
        self._tensors, self._number = tensors, number

    def __call__(self) -> None:
        HostCheck.launches += 1
        for position, (t, expected) in self._tensors.items():
            if not torch.equal(fingerprint(t), expected):
                stale_report.code[0] = encode(self._number, position)


@pytest.fixture(autouse=True)
def _beside_the_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_guard, "FingerprintCheck", HostCheck)
    attnkit.clear_caches()
    before = compare_on_devices(lambda device: True)
    yield
    compare_on_devices(*before)
    attnkit.clear_caches()
    assert stale_report.code[0] == 0


def write(ids: Tensor, size: int) -> None:
    WRITERS["memory"](ids, documents(size))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_raises_once(way: str, count: int) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    for size in (256, 64):
        for _ in range(count):
            qkv = inputs()
            torch.testing.assert_close(call(qkv), dense(qkv, ids))
        write(ids, size)
        call(inputs())  # computes with old tiles
        with pytest.raises(
            StaleDataError, match=r"'(ids|kv_doc|l_mask.*)' \(torch.int64, shape \(256,\)\)"
        ):
            call(inputs())
    qkv = inputs()
    torch.testing.assert_close(call(qkv), dense(qkv, ids))


def test_a_call_of_another_kind_raises_too() -> None:
    ids = documents(128)
    call = calls(ids)["function"]
    call(inputs())
    write(ids, 256)
    call(inputs())
    with pytest.raises(StaleDataError, match=r"attnkit\.invalidate"):
        flex_attention(*inputs())
    flex_attention(*inputs())


@pytest.mark.parametrize("way", WAYS)
def test_tiles_of_another_call_are_not_taken_for_new_ones(way: str) -> None:
    """After a write, a call that is not yet prepared computes new tiles despite cached old ones."""
    ids = documents(128)
    call = calls(ids)[way]
    for _ in range(3):
        call(inputs())
    write(ids, 256)
    for heads in (1, 2):  # not prepared yet; prepared for the old data
        qkv = [t[:, :heads] for t in inputs()]
        torch.testing.assert_close(call(qkv), dense(qkv, ids))


def test_tiles_that_are_looked_at_are_those_of_the_data() -> None:
    ids = documents(128)
    mask = masks.document(ids)
    block = create_block_mask(mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=4)
    for size in (128, 256, 64):
        write(ids, size)
        kept = (ids[:, None] == ids).view(64, 4, 64, 4).any(3).any(1)
        assert torch.equal(block.to_dense()[0, 0].bool(), kept)
        ends = attnkit.intervals(mask, LENGTH, LENGTH)
        assert ends is not None
        widths = ends.rows().diff(dim=-1).sum(dim=(-1, -2)).flatten()
        assert torch.equal(widths, (ids[:, None] == ids).sum(1).to(widths.dtype))


@pytest.mark.parametrize("way", WAYS)
def test_invalidate_after_the_write_is_enough(way: str) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    for size in (128, 256, 64):
        write(ids, size)
        attnkit.invalidate(ids)
        for _ in range(3):
            qkv = inputs()
            torch.testing.assert_close(call(qkv), dense(qkv, ids))


def test_edits_by_torch_need_nothing() -> None:
    ids = documents(128)
    call = calls(ids)["function"]
    for size in (128, 256, 64):
        ids.copy_(documents(size))
        for _ in range(3):
            qkv = inputs()
            torch.testing.assert_close(call(qkv), dense(qkv, ids))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_write_before_the_backward(way: str, repeated: bool) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    for _ in range(3 if repeated else 0):
        call(parameters()).sum().backward()
    out = call(parameters())
    write(ids, 256)
    out.sum().backward()
    with pytest.raises(StaleDataError):
        call(parameters())
    call(parameters()).sum().backward()


def test_a_backward_reads_no_memory_that_is_gone() -> None:
    ids = documents(128)
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    lists = flex.create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
    out = flex_attention(*parameters(), None, lists)
    launched = HostCheck.launches
    del lists
    out.sum().backward()
    assert HostCheck.launches == launched + 1
    out = flex_attention(*parameters(), None, mask)
    ids.data = documents(128)
    with pytest.raises(StaleDataError, match="between a forward and its backward"):
        out.sum().backward()


def test_a_report_of_calls_that_are_gone() -> None:
    ids = documents(128)
    call = calls(ids)["function"]
    call(inputs())
    write(ids, 256)
    call(inputs())
    attnkit.clear_caches()
    with pytest.raises(StaleDataError, match="a captured tensor did not hold"):
        flex_attention(*inputs())


def test_trust_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = documents(128)
    call = calls(ids)["function"]
    for _ in range(3):
        call(inputs())
    monkeypatch.setattr(HostCheck, "launches", 0)
    with attnkit.trust_version_counters():
        for _ in range(3):
            call(inputs())
        assert HostCheck.launches == 0
    call(inputs())
    assert HostCheck.launches == 1


def test_only_what_proofs_depend_on_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    index, table = torch.arange(LENGTH) % 4, torch.randn(4)
    mods: dict[int, Any] = {
        0: lambda s, b, h, q, kv: s + table[kv % 4],
        1: lambda s, b, h, q, kv: s + table[index[kv]],
    }
    for launches, mod in mods.items():
        flex_attention(*inputs(), mod)
        monkeypatch.setattr(HostCheck, "launches", 0)
        WRITERS["memory"](table, torch.randn(4))
        flex_attention(*inputs(), mod)
        assert HostCheck.launches == launches
    flex_attention(*inputs())  # no report
