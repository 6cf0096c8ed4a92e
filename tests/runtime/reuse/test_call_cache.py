"""Check the cache of prepared calls: identical calls hit it, different calls do not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
import attnkit.runtime.reference
from attnkit import AuxRequest, create_block_mask, flex_attention, masks
from attnkit.runtime import api
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.reuse import call_cache
from attnkit.tracing import guards
from attnkit.tracing.mask import Mask
from attnkit.tracing.tracer import trace

LENGTH = 40
CPU = torch.device("cpu")


class Counter:
    def __init__(self) -> None:
        self.prepared = 0


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    count, prepare = Counter(), api.prepare

    def counted(*arguments: Any) -> Any:
        count.prepared += 1
        return prepare(*arguments)

    monkeypatch.setattr(api, "prepare", counted)
    attnkit.clear_caches()
    return count


def inputs(dtype: torch.dtype = torch.float32, length: int = LENGTH, heads: int = 2) -> Any:
    return tuple(torch.randn(1, heads, length, 8).to(dtype) for _ in range(3))


def expected(qkv: Any, score_mod: Any = None, mask: Any = None, scale: float | None = None) -> Any:
    """Compute dense attention with torch operators, from traces that are not cached."""
    q, k, v = qkv
    score = None if score_mod is None else trace(score_mod, "score")
    kept = None if mask is None else trace(mask, "mask")
    return attnkit.runtime.reference.attention(
        q, k, v, score, kept, scale=scale or q.shape[-1] ** -0.5
    )[0]


def check(qkv: Any, score_mod: Any = None, mask: Any = None, block: Any = None) -> None:
    out = flex_attention(*qkv, score_mod, mask if block is None else block, backend="cpu")
    torch.testing.assert_close(out, expected(qkv, score_mod, mask))


def window(size: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= size)


# -- calls that hit the cache --------------------------------------------------------------------


def test_repeated_calls_are_prepared_once(counter: Counter) -> None:
    documents, table = torch.arange(LENGTH) // 9, torch.randn(2, 2 * LENGTH)
    mod = lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH]
    causal = masks.causal()
    lists = create_block_mask(causal, None, None, LENGTH, LENGTH)
    theirs = flex.create_block_mask(window(5), None, None, LENGTH, LENGTH, device="cpu")
    variants = [
        (None, None),
        (mod, None),
        (None, causal),
        (mod, lists),
        (None, theirs),
        (mod, lambda b, h, q, kv: documents[q] == documents[kv]),
        (None, masks.document(documents) & causal),
    ]
    for score_mod, mask in variants:
        before = counter.prepared
        for _ in range(3):
            qkv = inputs()
            mask_mod = getattr(mask, "mask_mod", mask)
            check(qkv, score_mod, mask_mod, mask)
        assert counter.prepared == before + 1


def test_new_functions_of_the_same_code_share(counter: Counter) -> None:
    def biased(bias: Tensor) -> Any:
        return lambda s, b, h, q, kv: s + bias[h]

    for _ in range(3):
        check(inputs(), biased(torch.randn(2)), window(4))
    assert counter.prepared == 1
    check(inputs(), biased(torch.randn(3)), window(4))  # another shape: other proofs
    check(inputs(), biased(torch.randn(2)), window(5))
    assert counter.prepared == 3


def test_results_of_every_kind(counter: Counter) -> None:
    qkv, mask = inputs(), window(7)
    for _ in range(2):
        out, lse = flex_attention(*qkv, block_mask=mask, return_lse=True)
        same, aux = flex_attention(
            *qkv, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        only, none = flex_attention(*qkv, block_mask=mask, return_aux=AuxRequest())
        dense = flex_attention(
            *qkv, block_mask=mask, backend="eager", return_aux=AuxRequest(True, True)
        )
        assert torch.equal(out, same)
        assert torch.equal(out, only)
        assert not any(t is not None for t in none)
        assert torch.equal(lse, aux.lse)
        torch.testing.assert_close((same, *aux), (dense[0], *dense[1]))
    assert counter.prepared == 2 + 2  # with and without maxima; the oracle


# -- calls that miss it --------------------------------------------------------------------------


def test_geometry_and_options(counter: Counter) -> None:
    mask = window(6)
    for dtype in (torch.float32, torch.float64):
        for length in (LENGTH, 33):
            check(inputs(dtype, length), None, mask)
            check(inputs(dtype, length), None, mask)
    assert counter.prepared == 4
    q, k, v = inputs()
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        assert flex_attention(turned, k, v).stride() == turned.stride()
        assert flex_attention(q, k, v).stride() == q.stride()
    for scale in (0.5, 0.25, -0.5, 0.0, -0.25, 0.5):
        out = flex_attention(q, k, v, None, mask, scale=scale)
        dense = attnkit.runtime.reference.attention(
            q, k, v, None, trace(mask, "mask"), scale=scale
        )[0]
        torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides_of_each_input_are_told_apart(counter: Counter, place: int) -> None:
    """A change of the strides of query, key or value prepares a new call."""
    for step in range(2):
        qkv = list(inputs())
        check(tuple(qkv))
        assert counter.prepared == 1 + step
        qkv[place] = qkv[place].transpose(1, 2).contiguous().transpose(1, 2)
        check(tuple(qkv))
        assert counter.prepared == 2


@pytest.mark.parametrize("of", ["score", "mask"])
def test_strides_of_captured_tensors_are_told_apart(counter: Counter, of: str) -> None:
    """A captured tensor whose strides changed in place gives another cache key."""
    tall = torch.randn(LENGTH, LENGTH)
    mod = lambda s, b, h, q, kv: s + tall[q, kv]
    mask = lambda b, h, q, kv: (tall[q, kv] > 0) | (q == kv)
    keys = []
    for _ in range(2):
        arguments = (mod, None) if of == "score" else (None, mask)
        check(inputs(), *arguments)
        key = call_cache.key_of(AttentionCall(*inputs(), *arguments))
        assert key is not None
        keys.append(key.key)
        tall.set_(tall.untyped_storage(), 0, tall.shape, (1, LENGTH))
    assert keys[0] != keys[1]
    check(inputs(), *arguments)


def test_a_deterministic_call_is_another(counter: Counter) -> None:
    """A deterministic call is prepared separately from one that is not.

    Only the backward on a GPU computes differently, so on the CPU the test counts prepared calls.
    """
    for step in range(2):
        flex_attention(*inputs(), backend="cpu")
        flex_attention(*inputs(), backend="cpu", deterministic=True)
        torch.use_deterministic_algorithms(True)
        try:
            flex_attention(*inputs(), backend="cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        assert counter.prepared == 2, step


def test_wrong_arguments_stay_wrong() -> None:
    q, k, v = inputs()
    flex_attention(q, k, v, scale=1.0)
    flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    for error, options in (
        (attnkit.OptionError, {"scale": True}),
        (attnkit.OptionError, {"enable_gqa": 0}),
        (attnkit.OptionError, {"enable_gqa": 1}),
        (attnkit.OptionError, {"return_lse": 1}),
        (attnkit.OptionError, {"deterministic": 0}),
        (attnkit.OptionError, {"scale": float("nan")}),
        (attnkit.OptionError, {"backend": "gpu"}),
        (attnkit.OptionError, {"kernel_options": {"BLOCK_X": 1}}),
        (attnkit.OptionError, {"return_lse": True, "return_aux": AuxRequest()}),
    ):
        with pytest.raises(error):
            flex_attention(q, k, v, **options)
    with pytest.raises(attnkit.ShapeError, match="enable_gqa"):
        flex_attention(q, k[:, :1], v[:, :1])
    mask = Mask(window(3), lengths=(LENGTH, LENGTH))
    flex_attention(q, k, v, block_mask=mask)
    with pytest.raises(attnkit.ShapeError, match="built for"):
        flex_attention(q[:, :, :9], k, v, block_mask=mask)
    block = create_block_mask(window(3), None, None, LENGTH, LENGTH)
    flex_attention(q, k, v, block_mask=block)
    with pytest.raises(attnkit.ShapeError, match="created for"):
        flex_attention(q[:, :, :9], k, v, block_mask=block)
    longer = create_block_mask(window(3), None, None, LENGTH, LENGTH + 1)
    with pytest.raises(attnkit.ShapeError, match="created for"):
        flex_attention(q, k, v, block_mask=longer)


def test_the_same_lists_for_other_tiles() -> None:
    """FlexAttention BlockMasks with equal tensors but different block sizes are told apart."""
    count, index = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 1).int()
    for size in (10, 20, 10):
        block = flex.BlockMask.from_kv_blocks(
            count, index, BLOCK_SIZE=(10, size), mask_mod=attnkit.noop_mask, seq_lengths=(40, 40)
        )
        check(inputs(), None, lambda b, h, q, kv, size=size: kv < size, block)


def test_edited_closures_and_masks() -> None:
    size: Any = 3
    table: Any = torch.arange(LENGTH) // 9
    bias: Any = torch.randn(2)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv <= size) & (table[q] == table[kv])

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * (1 + bias[h])

    ours = Mask(mask) & masks.causal()
    block = create_block_mask(ours, None, None, LENGTH, LENGTH)

    def both() -> None:
        for _ in range(2):
            check(inputs(), mod, mask)
            check(inputs(), mod, ours)
            check(inputs(), mod, block.mask_mod, block)

    both()
    size = 5
    both()
    table = torch.arange(LENGTH) // 4
    both()
    table[7:] = 90
    both()
    bias.mul_(2)
    both()
    bias = torch.randn(2, dtype=torch.float64)
    both()
    ours.parts = (ours.parts[0], Mask(window(2)))
    both()
    ours.op = "or"
    both()
    block.mask_mod = window(1)
    both()


def test_data_that_is_replaced() -> None:
    long = 300
    q, k, v = (torch.randn(1, 2, long, 8) for _ in range(3))
    table, place = torch.arange(long) // 100, torch.arange(long)
    bias = torch.randn(long)
    mask = lambda b, h, i, j: table[i] == table[j]
    mod = lambda s, b, h, i, j: s + bias[place[j]]
    block = create_block_mask(mask, None, None, long, long)

    def check() -> None:
        for _ in range(3):
            for given in (mask, block):
                ours = flex_attention(q, k, v, mod, given)
                traces = trace(mod, "score"), trace(mask, "mask")
                torch.testing.assert_close(
                    ours, attnkit.runtime.reference.attention(q, k, v, *traces)[0]
                )

    check()
    table.data = torch.arange(long) % 7
    check()
    table.set_(torch.arange(long) // 30)
    check()
    place.data = torch.arange(long).flip(0)
    check()
    place.data = torch.arange(long) + 5
    for _ in range(2):
        with pytest.raises(attnkit.BoundsError, match="bias"):
            flex_attention(q, k, v, mod, mask)


def test_an_edited_index_is_proven_again() -> None:
    place, bias = torch.arange(LENGTH), torch.randn(LENGTH)
    mod = lambda s, b, h, q, kv: s + bias[place[kv]]
    for _ in range(2):
        check(inputs(), mod)
    place.fill_(3)
    check(inputs(), mod)
    place[5] = LENGTH
    with pytest.raises(attnkit.BoundsError):
        flex_attention(*inputs(), mod)


@pytest.mark.parametrize("inference", [False, True])
def test_edited_tensors_of_any_kind(inference: bool) -> None:
    with torch.inference_mode(inference):
        table = torch.arange(LENGTH) // 9
        theirs = flex.create_block_mask(window(5), None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)  # fmt: skip
        mask = lambda b, h, q, kv: table[q] == table[kv]
        q, k, v = inputs()
        for divisor in (9, 9, 3):
            table.copy_(torch.arange(LENGTH) // divisor)
            check((q, k, v), None, mask)
        first = flex_attention(q, k, v, block_mask=theirs)
        theirs.kv_num_blocks.fill_(0)
        theirs.full_kv_num_blocks.fill_(0)
        out = flex_attention(q, k, v, block_mask=theirs)
        assert first.abs().sum() > 0
        assert out.abs().sum() == 0


def test_nothing_of_the_user_is_kept_alive() -> None:
    qkv = list(inputs())
    table, bias = torch.arange(LENGTH) // 9, torch.randn(2)
    mask = lambda b, h, q, kv: (table[q] == table[kv]) & (q >= kv)
    mod = lambda s, b, h, q, kv: s + bias[h]
    for _ in range(3):
        flex_attention(*qkv, mod, mask)
    alive = [weakref.ref(x) for x in (*qkv, table, bias, mask, mod)]
    qkv.clear()
    table = bias = mask = mod = None  # type: ignore[assignment]
    gc.collect()
    assert [r() for r in alive] == [None] * len(alive)


def test_bounded(monkeypatch: pytest.MonkeyPatch, counter: Counter) -> None:
    monkeypatch.setattr(call_cache, "_SIZE", 2)
    mask = window(3)
    for length in (10, 11, 12, 10):
        check(inputs(length=length), None, mask)
    assert len(call_cache._entries) == 2
    assert counter.prepared == 4


def test_a_trace_that_changed_on_the_way_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    size: Any = 3
    mask = lambda b, h, q, kv: q - kv <= size
    run = api.torch_ops.run

    def late(*arguments: Any) -> Any:
        nonlocal size
        result = run(*arguments)
        size = 30
        guards.trace_cached(mask, "mask", CPU)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(api.torch_ops, "run", late)
        flex_attention(*inputs(), block_mask=mask)
    check(inputs(), None, mask)


# -- gradients -----------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Dispatch mode that records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # fmt: skip
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def gradients(qkv: Any, mod: Any, mask: Any, captured: Any) -> Any:
    tensors = (*qkv, *captured)
    out, lse = flex_attention(*qkv, mod, mask, return_lse=True)
    return torch.autograd.grad(out.sin().sum() + lse.sum(), tensors)


def test_gradients_are_those_of_the_operators(counter: Counter) -> None:
    bias = torch.randn(2, requires_grad=True)
    table = torch.arange(LENGTH) // 9
    mod = lambda s, b, h, q, kv: torch.tanh(s) + bias[h]
    mask = lambda b, h, q, kv: (q >= kv) & (table[q] == table[kv])
    qkv = tuple(t.requires_grad_() for t in inputs())
    direct = [gradients(qkv, mod, mask, (bias,)) for _ in range(2)]
    assert counter.prepared == 1
    with Seen() as seen:
        through = gradients(qkv, mod, mask, (bias,))
    assert counter.prepared == 1
    assert "attnkit.attention.default" in seen.names
    assert "attnkit.attention_backward.default" in seen.names
    for found in direct:
        assert all(torch.equal(a, b) for a, b in zip(found, through, strict=True))


def test_which_gradients_are_wanted_may_change() -> None:
    bias = torch.randn(2)
    mod = lambda s, b, h, q, kv: s + s * bias[h]
    q, k, v = inputs()
    for wanted in ((), (q,), (q, v), (bias,), (q, k, v, bias)):
        for t in (q, k, v, bias):
            t.requires_grad_(any(t is w for w in wanted))
        for _ in range(2):
            out = flex_attention(q, k, v, mod, window(4))
            assert out.requires_grad == bool(wanted)
            if wanted:
                found = torch.autograd.grad(out.square().sum(), wanted)
                dense = flex_attention(q, k, v, mod, window(4), backend="eager")
                for a, b in zip(found, torch.autograd.grad(dense.square().sum(), wanted), strict=True):  # fmt: skip
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                assert not flex_attention(q, k, v, mod, window(4)).requires_grad


def test_only_one_output_is_used() -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    for _ in range(2):
        for part in (0, 1):
            found = flex_attention(q, k, v, return_lse=True)[part]
            dense = flex_attention(q, k, v, return_lse=True, backend="eager")[part]
            ours = torch.autograd.grad(found.sin().sum(), (q, k))
            for a, b in zip(ours, torch.autograd.grad(dense.sin().sum(), (q, k)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused() -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    for _ in range(2):
        (first,) = torch.autograd.grad(flex_attention(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(attnkit.UnsupportedError, match="no second derivative"):
            first.sum().backward()


@pytest.mark.parametrize("which", ["key", "mask"])
def test_a_tensor_edited_before_backward_is_an_error(which: str) -> None:
    table = torch.arange(LENGTH) // 9
    mask = lambda b, h, q, kv: table[q] == table[kv]
    q, k, v = inputs()
    q.requires_grad_()
    for _ in range(2):
        out = flex_attention(q, k, v, block_mask=mask)
        (k if which == "key" else table).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# -- modes and transforms around a call ----------------------------------------------------------


def test_modes_see_the_operator() -> None:
    qkv, mask = inputs(), window(3)
    flex_attention(*qkv, block_mask=mask)  # finds the tiles, in operators of its own
    for _ in range(3):
        with Seen() as seen:
            flex_attention(*qkv, block_mask=mask)
        assert seen.names == ["attnkit.attention.default"]
        with Seen() as seen, torch.device("cpu"):
            flex_attention(*qkv, block_mask=mask)
        assert seen.names == ["attnkit.attention.default"]


def test_forward_derivatives_are_not_dropped() -> None:
    q, k, v = inputs()
    flex_attention(q, k, v)
    for _ in range(2):
        with torch.autograd.forward_ad.dual_level():
            flex_attention(q, k, v)
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(attnkit.UnsupportedError, match="forward-mode"):
                flex_attention(dual, k, v)
    with pytest.raises(attnkit.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: flex_attention(q, k, v), (q,), (q,))
    eager = lambda q: flex_attention(q, k, v, backend="eager")
    assert torch.func.jvp(eager, (q,), (q,))[1].isfinite().all()


def test_views_that_are_not_what_memory_holds() -> None:
    q, k, v = inputs()
    for _ in range(2):
        negative = torch._neg_view(q)
        assert api.torch_ops.is_intercepted([negative])
        out = flex_attention(negative, k, v)
        torch.testing.assert_close(out, expected((-q, k, v)))


def test_subclasses_take_the_operator() -> None:
    class Named(Tensor):
        pass

    q, k, v = inputs()
    for _ in range(2):
        out = flex_attention(q.as_subclass(Named), k, v)
        torch.testing.assert_close(out.as_subclass(Tensor), expected((q, k, v)))
