"""Check that repeated calls take the fast path and that different calls do not."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import AuxRequest, create_block_mask, flex_attention, masks
from attnkit.runtime import reuse
from attnkit.runtime.reuse import fast_path
from attnkit.runtime.reuse.entries import ATTEMPTS, LIMIT
from attnkit.util import torch_private

LENGTH = 40

pytestmark = pytest.mark.skipif(
    torch_private.tensor_guard([]) is None, reason="torch does not compare tensors"
)


class Count:
    """Count the calls that took the fast path."""

    def __init__(self) -> None:
        self.made = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    count, made = Count(), fast_path.try_fast_path

    def counted(*arguments: Any) -> Any:
        found = made(*arguments)
        count.made += found is not None
        return found

    monkeypatch.setattr(reuse, "try_fast_path", counted)
    attnkit.clear_caches()
    return count


@contextmanager
def way(count: Count, *, short: bool) -> Iterator[None]:
    before = count.made
    yield
    assert (count.made > before) is short


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float32, heads: int = 2) -> Any:
    return [torch.randn(1, heads, length, 8).to(dtype) for _ in range(3)]


def parameters(qkv: Any) -> Any:
    return [t.detach().requires_grad_() for t in qkv]


def taught(call: Callable[[], Any]) -> None:
    """Call three times, so that the next identical call takes the fast path."""
    for _ in range(3):
        call()


def same_as_dense(qkv: Any, score_mod: Any = None, mask: Any = None, **options: Any) -> None:
    found = flex_attention(*qkv, score_mod, mask, **options)
    dense = flex_attention(*qkv, score_mod, getattr(mask, "mask_mod", mask), backend="eager", **options)  # fmt: skip
    torch.testing.assert_close(found, dense)


def test_new_tensors_of_any_variant(count: Count) -> None:
    table, bias = torch.arange(LENGTH) // 9, torch.randn(2)
    document = lambda b, h, q, kv: table[q] == table[kv]
    mod = lambda s, b, h, q, kv: s + bias[h]
    theirs = flex.create_block_mask(document, None, None, LENGTH, LENGTH, device="cpu")
    ours = create_block_mask(masks.document(table) & masks.causal(), None, None, LENGTH, LENGTH)
    for score_mod in (None, mod):
        for mask in (None, masks.causal(), document, ours, theirs):
            taught(lambda s=score_mod, m=mask: flex_attention(*inputs(), s, m))
            for _ in range(2):
                with way(count, short=True):
                    same_as_dense(inputs(), score_mod, mask)
                with way(count, short=True):
                    same_as_dense(inputs(), score_mod, mask, scale=0.3, return_lse=True)


def test_calls_that_differ_leave_the_fast_path(count: Count) -> None:
    mask = masks.causal()
    q, k, v = inputs()
    wide = q.view(2, 1, LENGTH, 8)
    taught(lambda: flex_attention(q, k, v, None, mask))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    grouped = inputs(heads=1)
    others: list[Callable[[], Any]] = [
        lambda: flex_attention(turned, k, v, None, mask),
        lambda: flex_attention(q.double(), k.double(), v.double(), None, mask),
        lambda: flex_attention(*inputs(33), None, mask),
        lambda: flex_attention(q, grouped[1], grouped[2], None, mask, enable_gqa=True),
        lambda: flex_attention(q, k, v, None, masks.causal()),
        lambda: flex_attention(q, k, v, None, mask, scale=-0.5),
        lambda: flex_attention(q, k, v, None, mask, scale=0.0),
        lambda: flex_attention(q, k, v, None, mask, deterministic=True),
        lambda: flex_attention(q, k, v, None, mask, backend="eager"),
        lambda: flex_attention(q, k, v, None, mask, return_aux=AuxRequest(max_scores=True)),
        lambda: flex_attention(q, k, v, None, mask, kernel_options={"BLOCK_M": 32}),
        lambda: flex_attention(q.clone().requires_grad_(), k, v, None, mask),
        lambda: flex_attention(wide, wide, wide, None, mask),
    ]
    for other in others:
        with way(count, short=False):
            other()
    for options in ({"return_lse": 1}, {"enable_gqa": 0}, {"deterministic": 0}, {"scale": True}):
        with way(count, short=False), pytest.raises(attnkit.OptionError):
            flex_attention(q, k, v, None, mask, **options)
    for wrong in (None, 3, q.numpy(), [1.0]):
        with way(count, short=False), pytest.raises(attnkit.AttnkitError):
            flex_attention(wrong, k, v, None, mask)
    with way(count, short=True):
        flex_attention(q, k, v, None, mask)


def test_edits_are_seen(count: Count) -> None:
    size: Any = 3
    table, bias = torch.arange(LENGTH) // 9, torch.randn(2)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv <= size) & (table[q] == table[kv])

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * (1 + bias[h])

    block = create_block_mask(mask, None, None, LENGTH, LENGTH)

    def check(short: bool) -> None:
        for own in (mask, block):
            with way(count, short=short):
                same_as_dense(inputs(), mod, own)
            taught(lambda own=own: flex_attention(*inputs(), mod, own))
            with way(count, short=True):
                same_as_dense(inputs(), mod, own)

    check(False)
    check(True)
    size = 5
    check(False)
    table[7:] = 90
    check(False)
    table.data = torch.arange(LENGTH) // 5  # counts no version
    check(False)
    bias.mul_(2)
    check(True)  # a value of the score, which decides nothing
    bias = torch.randn(2)
    check(False)
    bias.data = torch.randn(4)[::2]
    check(False)
    block.mask_mod = masks.causal()
    with way(count, short=False):
        same_as_dense(inputs(), mod, block)


def test_lists_of_blocks_are_watched(count: Count) -> None:
    theirs = flex.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)  # fmt: skip
    qkv = inputs()

    def call() -> Any:
        return flex_attention(*qkv, block_mask=theirs)

    taught(call)
    with way(count, short=True):
        assert call().abs().sum() > 0
    theirs.full_kv_num_blocks.fill_(0)
    with way(count, short=False):
        partial = call()
    taught(call)
    theirs.kv_num_blocks = torch.zeros_like(theirs.kv_num_blocks)
    with way(count, short=False):
        assert call().abs().sum() == 0
    assert partial.abs().sum() > 0


class Nothing(TorchDispatchMode):
    """Dispatch mode that has no effect."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # fmt: skip
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_modes_and_hooks_leave_the_fast_path(count: Count) -> None:
    q, k, v = inputs()

    def call() -> Any:
        return flex_attention(q, k, v)

    taught(call)
    expected = call()
    with way(count, short=False), Nothing():
        call()
    with way(count, short=False), torch.inference_mode():
        call()
    with way(count, short=False), torch.overrides.BaseTorchFunctionMode():
        call()
    with way(count, short=False), torch.autograd.forward_ad.dual_level():
        call()
    with way(count, short=False), torch.autocast("cpu"):
        assert call().dtype == torch.bfloat16
    refused = pytest.raises(attnkit.UnsupportedError, match=r"torch\.func")
    with way(count, short=False):
        torch.func.vmap(lambda x: (call(), x)[1])(q)
    with way(count, short=False), refused:
        torch.func.vmap(lambda x: flex_attention(x[None], k, v))(q)
    with way(count, short=False), refused:
        torch.func.grad(lambda x: flex_attention(x, k, v).sum())(q)
    with pytest.raises(attnkit.UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(flex_attention, (q, k, v), check_trace=False)
    with way(count, short=False):
        flex_attention(torch._neg_view(q), k, v)
    with way(count, short=False):
        flex_attention(q.as_subclass(type("Named", (Tensor,), {})), k, v)
    with way(count, short=True), torch.device("cpu"):
        torch.testing.assert_close(call(), expected)


def test_deterministic_algorithms(count: Count) -> None:
    qkv = inputs()

    def call() -> Any:
        return flex_attention(*qkv)

    taught(call)
    torch.use_deterministic_algorithms(True)
    try:
        with way(count, short=False):
            call()
    finally:
        torch.use_deterministic_algorithms(False)
    with way(count, short=True):
        call()


def test_gradients(count: Count) -> None:
    bias = torch.randn(2, requires_grad=True)
    mod = lambda s, b, h, q, kv: torch.tanh(s) + s * bias[h]
    mask = masks.causal()
    qkv = parameters(inputs())
    taught(lambda: flex_attention(*qkv, mod, mask))
    for wanted in ((*qkv, bias), (qkv[1],), (bias,)):
        with way(count, short=True):
            out = flex_attention(*qkv, mod, mask)
        dense = flex_attention(*qkv, mod, mask, backend="eager")
        found = torch.autograd.grad(out.sin().sum(), wanted)
        for a, b in zip(found, torch.autograd.grad(dense.sin().sum(), wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for _ in range(4):
        with torch.no_grad():
            assert not flex_attention(*qkv, mod, mask).requires_grad
        assert flex_attention(*qkv, mod, mask).requires_grad
    qkv = inputs()
    for _ in range(4):
        assert flex_attention(*qkv, mod, mask).requires_grad  # of the bias
    bias.requires_grad_(False)
    for _ in range(4):
        assert not flex_attention(*qkv, mod, mask).requires_grad


def test_nothing_of_the_user_is_kept_alive(count: Count) -> None:
    qkv = inputs()
    table, bias = torch.arange(LENGTH) // 9, torch.randn(2)
    mask = lambda b, h, q, kv: (table[q] == table[kv]) & (q >= kv)
    mod = lambda s, b, h, q, kv: s + bias[h]
    block = create_block_mask(mask, None, None, LENGTH, LENGTH)
    for own in (mask, block):
        taught(lambda own=own: flex_attention(*qkv, mod, own))
    assert len(fast_path._buckets) == 2
    alive = [weakref.ref(x) for x in (*qkv, table, bias, mask, mod, block)]
    qkv.clear()
    table = bias = mask = mod = block = own = None  # type: ignore[assignment]
    gc.collect()
    assert [r() for r in alive] == [None] * len(alive)
    assert not fast_path._buckets


def test_a_mask_may_outlive_the_module(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 8, 8)
    mask = masks.causal()
    for _ in range(3):
        flex_attention(query, query, query, block_mask=mask)
    monkeypatch.setattr(fast_path, "_buckets", None)  # as Python does when it ends
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    del mask
    gc.collect()
    assert not errors


def test_bounded(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_BUCKETS", 2)
    mask = masks.causal()
    for length in (9, 10, 11, 12):
        taught(lambda n=length: flex_attention(*inputs(n), None, mask))
    assert len(fast_path._buckets) == 2
    shapes = [(1, 2, 6, 8), (2, 1, 6, 8), (1, 1, 12, 8), (1, 1, 6, 16), (1, 3, 4, 8), (3, 1, 4, 8)]
    for _ in range(20):
        for shape in shapes:
            flex_attention(torch.randn(shape), torch.randn(shape), torch.randn(shape))
    (bucket,) = (b for b in fast_path._buckets.values() if not b.capturing)
    assert len(bucket.entries.all) == LIMIT
    assert bucket.entries.attempts == ATTEMPTS


def test_new_functions_at_every_call_are_not_cached(count: Count) -> None:
    for _ in range(5):
        flex_attention(*inputs(), lambda s, b, h, q, kv: s * 0.5)
    assert not fast_path._buckets


def test_without_what_torch_may_lack(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_TENSOR_GUARDS", None)
    qkv = inputs()
    taught(lambda: flex_attention(*qkv))
    with way(count, short=False):
        same_as_dense(qkv)


TWINS: dict[str, Callable[[Any], list[Tensor]]] = {
    "all": lambda t: [t[0]] * 3,
    "key and value": lambda t: [t[0], t[1], t[1]],
    "query and value": lambda t: [t[0], t[1], t[0]],
}


@pytest.mark.parametrize("which", TWINS)
def test_one_tensor_at_several_places_takes_the_fast_path(which: str, count: Count) -> None:
    """Calls with other tensors at those places are told apart, in both orders."""
    for first in (True, False):
        attnkit.clear_caches()
        twins = TWINS[which](parameters(inputs()))
        others = parameters(inputs())
        pair = (twins, others) if first else (others, twins)
        for qkv in pair:
            taught(lambda qkv=qkv: flex_attention(*qkv))  # type: ignore[misc]
        for qkv in (*pair, TWINS[which](parameters(inputs()))):
            with way(count, short=True):
                out = flex_attention(*qkv)
            exact = flex_attention(*qkv, backend="eager")
            torch.testing.assert_close(out, exact)
            leaves = list({id(t): t for t in qkv}.values())
            weight = torch.randn_like(out)
            for ours, theirs in zip(
                torch.autograd.grad(out, leaves, weight),
                torch.autograd.grad(exact, leaves, weight),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs)


def test_a_tensor_that_score_and_mask_capture_takes_the_fast_path(count: Count) -> None:
    qkv, ids = inputs(), torch.arange(LENGTH) // 7
    mod = lambda s, b, h, q, kv: s + 0.1 * ids[kv]
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    taught(lambda: flex_attention(*qkv, mod, mask))
    with way(count, short=True):
        same_as_dense(qkv, mod, mask)
    ids[-1] = 0  # in place, which moves tiles
    same_as_dense(qkv, mod, mask)
