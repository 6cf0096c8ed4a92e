"""Check that no call uses tiles or proofs of overwritten data, whichever way it was overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import StaleDataError, create_block_mask, flex_attention, masks
from tests.runtime.reuse.writers import WRITERS, process_group

LENGTH = 256  # two blocks: a write changes which of their tiles are EMPTY, PARTIAL or FULL


def inputs() -> list[Tensor]:
    return [torch.randn(1, 2, LENGTH, 8) for _ in range(3)]


def documents(size: int) -> Tensor:
    return torch.arange(LENGTH) // size


def parameters() -> list[Tensor]:
    return [t.requires_grad_() for t in inputs()]


def dense(qkv: list[Tensor], ids: Tensor) -> Tensor:
    keep = ids[:, None] == ids[None, :]
    return sdpa(*qkv, attn_mask=keep)


def calls(ids: Tensor) -> dict[str, Callable[[list[Tensor]], Tensor]]:
    """Return functions that call attention with tiles that depend on `ids`, by kind of call."""
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    ours = create_block_mask(mask, None, None, LENGTH, LENGTH)
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, None, mask), backend="eager", fullgraph=True
    )
    return {
        "function": lambda qkv: flex_attention(*qkv, None, mask),
        "new function": lambda qkv: flex_attention(*qkv, None, lambda b, h, q, kv: ids[q] == ids[kv]),
        "library": lambda qkv: flex_attention(*qkv, None, masks.document(ids)),
        "block mask": lambda qkv: flex_attention(*qkv, None, ours),
        "operator": lambda qkv: compiled(*qkv),
    }  # fmt: skip


WAYS = list(calls(documents(128)))


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with process_group(tmp_path_factory.mktemp("gloo")):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", list(WRITERS))
def test_a_write_between_calls_counts(writer: str, way: str) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    for size in (256, 64, 256, 64):
        for _ in range(2):  # prepared calls, then the fast path
            qkv = inputs()
            torch.testing.assert_close(call(qkv), dense(qkv, ids))
        WRITERS[writer](ids, documents(size))
        assert torch.equal(ids, documents(size))
        qkv = inputs()
        torch.testing.assert_close(call(qkv), dense(qkv, ids))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_count(name: str) -> None:
    gate = torch.nn.Parameter(torch.full((LENGTH,), -1.0))
    optimizer = getattr(torch.optim, name)([gate], lr=0.7, fused=True)
    mask = lambda b, h, q, kv: (gate[kv] > 0) | (q == kv)
    seen = set()
    for _ in range(4):
        qkv = inputs()
        keep = (gate > 0)[None, :] | torch.eye(LENGTH, dtype=torch.bool)
        expected = sdpa(*qkv, attn_mask=keep)
        torch.testing.assert_close(flex_attention(*qkv, None, mask), expected)
        seen.add(int(keep.sum()))
        gate.grad = -torch.arange(1.0, LENGTH + 1) / LENGTH
        optimizer.step()
    assert len(seen) > 1


@pytest.mark.parametrize("writer", list(WRITERS))
def test_an_index_is_proven_again(writer: str) -> None:
    index, table = torch.arange(LENGTH) % 4, torch.randn(4)
    mod = lambda s, b, h, q, kv: s + table[index[kv]]
    for _ in range(3):
        flex_attention(*inputs(), mod)
    WRITERS[writer](index, torch.arange(LENGTH) % 5)
    with pytest.raises(attnkit.BoundsError, match="table"):
        flex_attention(*inputs(), mod)
    WRITERS[writer](index, torch.arange(LENGTH) % 3)
    qkv = inputs()
    bias = table[index].expand(LENGTH, LENGTH)
    expected = sdpa(*qkv, attn_mask=bias)
    torch.testing.assert_close(flex_attention(*qkv, mod), expected)


@pytest.mark.parametrize("writer", list(WRITERS))
def test_block_lists_count(writer: str) -> None:
    everything = lambda b, h, q, kv: q >= 0
    mask = flex.create_block_mask(
        everything, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=128
    )
    few, all_ = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[2, 2]]], dtype=torch.int32)  # fmt: skip
    for count in (few, all_, few):
        full = mask.full_kv_num_blocks
        assert full is not None
        WRITERS[writer](full, count)
        for _ in range(3):
            qkv = inputs()
            short = [qkv[0], qkv[1][:, :, : 128 * int(count[0, 0, 0])], qkv[2][:, :, : 128 * int(count[0, 0, 0])]]  # fmt: skip
            expected = sdpa(*short)
            torch.testing.assert_close(flex_attention(*qkv, None, mask), expected)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", ["detached_numpy", "dlpack", "storage", "memory", "data"])
def test_a_write_between_forward_and_backward_is_an_error(
    writer: str, way: str, repeated: bool
) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    for _ in range(3 if repeated else 0):
        call(parameters()).sum().backward()
    out = call(parameters())
    WRITERS[writer](ids, documents(256))
    with pytest.raises(StaleDataError, match="between a forward and its backward"):
        out.sum().backward()
    WRITERS[writer](ids, documents(128))
    call(parameters()).sum().backward()


def test_a_write_between_the_operators_of_a_mode_is_an_error() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    ids = documents(128)
    with Mode():
        out = calls(ids)["function"](parameters())
    WRITERS["memory"](ids, documents(256))
    with pytest.raises(StaleDataError, match="between a forward and its backward"):
        out.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_later_forward_does_not_hide_it(way: str) -> None:
    ids = documents(128)
    call = calls(ids)[way]
    out = call(parameters())
    WRITERS["memory"](ids, documents(256))
    call(parameters())
    with pytest.raises(StaleDataError):
        out.sum().backward()


def test_a_learned_table_may_be_edited_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnkit.runtime import api

    index, table = torch.arange(LENGTH) % 4, torch.randn(4)
    mod = lambda s, b, h, q, kv: s + table[index[kv]]
    for _ in range(3):
        flex_attention(*inputs(), mod)
    monkeypatch.setattr(api, "prepare", None)  # no call is prepared again
    for writer in ("torch", "memory"):
        WRITERS[writer](table, torch.randn(4))
        qkv = inputs()
        bias = table[index].expand(LENGTH, LENGTH)
        expected = sdpa(*qkv, attn_mask=bias)
        torch.testing.assert_close(flex_attention(*qkv, mod), expected)


def test_trust_and_invalidate() -> None:
    base = torch.zeros(2, LENGTH, dtype=torch.int64)
    ids = base[1]
    ids.copy_(documents(128))
    mask = masks.document(ids)
    with attnkit.trust_version_counters():
        for _ in range(3):
            flex_attention(*inputs(), None, mask)
        WRITERS["memory"](ids, documents(256))
        qkv = inputs()
        assert not torch.allclose(flex_attention(*qkv, None, mask), dense(qkv, ids))  # as promised
        attnkit.invalidate(base)  # it shares the storage
        torch.testing.assert_close(flex_attention(*qkv, None, mask), dense(qkv, ids))
        WRITERS["memory"](ids, documents(64))
    torch.testing.assert_close(flex_attention(*qkv, None, mask), dense(qkv, ids))
    with pytest.raises(attnkit.OptionError, match="trust must be True or False"):
        attnkit.trust_version_counters(1)  # type: ignore[arg-type]
    with pytest.raises(attnkit.ArgumentError, match=r"tensor must be a torch\.Tensor, got list"):
        attnkit.invalidate([1])  # type: ignore[arg-type]


def test_trust_may_be_set_for_good() -> None:
    try:
        attnkit.trust_version_counters()
        ids = documents(128)
        mask = masks.document(ids)
        qkv = inputs()
        flex_attention(*qkv, None, mask)
        WRITERS["memory"](ids, documents(256))
        assert not torch.allclose(flex_attention(*qkv, None, mask), dense(qkv, ids))
    finally:
        attnkit.trust_version_counters(False)
    torch.testing.assert_close(flex_attention(*qkv, None, mask), dense(qkv, ids))
