"""Check that library mods refuse calls of other sizes than their tables, and can be shifted."""

from __future__ import annotations

import random
import re

import pytest
import torch

from attnkit import ScoreMod, ShapeError, flex_attention, mods
from attnkit.graph.ir import reads
from attnkit.tracing.tracer import trace

EXAMPLES = mods.examples(17)
BY_HEAD = [n for n, e in EXAMPLES.items() if "h" in reads(trace(e.mod, "score").root)]
BY_BATCH = [n for n, e in EXAMPLES.items() if "b" in reads(trace(e.mod, "score").root)]


def call(mod, batch, heads, q_len, kv_len, kv_heads=None):
    """Call attention with meta tensors, which checks the arguments but computes nothing."""
    key = torch.ones(batch, kv_heads or heads, kv_len, 4, device="meta")
    query = torch.ones(batch, heads, q_len, 4, device="meta")
    flex_attention(query, key, key, mod, enable_gqa=kv_heads is not None)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_declares_its_axes(name):
    mod, q_len, kv_len, batch, heads, _ = EXAMPLES[name]
    assert isinstance(mod, ScoreMod)
    assert repr(mod).startswith(name.partition("/")[0])
    call(mod, batch, heads, q_len, kv_len)
    if name in BY_HEAD:
        for other in (heads - 1, heads + 1, 2 * heads):
            with pytest.raises(ShapeError, match=f"{heads} query heads, got {other}"):
                call(mod, batch, other, q_len, kv_len)
    if name in BY_BATCH:
        for other in (batch - 1, batch + 1):
            with pytest.raises(ShapeError, match=f"batch size {batch}, got {other}"):
                call(mod, other, heads, q_len, kv_len)


@pytest.mark.parametrize(
    "name",
    ["bias_2d", "full_bias", "full_bias/shared", "graphormer", "graphormer/batch", "sandwich"],
)
def test_lengths_beyond_the_tables_are_refused(name):
    mod, q_len, kv_len, batch, heads, _ = EXAMPLES[name]
    call(mod, batch, heads, q_len - 1, kv_len - 1)
    with pytest.raises(ShapeError, match=f"for kv length {kv_len} at most, got {kv_len + 1}"):
        call(mod, batch, heads, q_len, kv_len + 1)


# weights as Hugging Face, Swin or FlashAttention's users hold them
TRANSPOSED = [
    (lambda: mods.t5_bias(torch.ones(32, 4)), "bias has shape (32, 4), read as [h, _]: for 32 query heads, got 4; it looks transposed: pass bias.T"),
    (lambda: mods.relative_bias(torch.ones(33, 4)[:, :3]), "bias has shape (33, 3), read as [h, _]: for 33 query heads, got 4"),
    (lambda: mods.graphormer(torch.ones(6, 4), torch.zeros(9, 9).int()), "it looks transposed: pass bias.T"),
    (lambda: mods.alibi(torch.ones(4, 2)), "heads has shape (4, 2), read as [b, h]: for batch size 4, got 2; it looks transposed: pass heads.T"),
    (lambda: mods.alibi(9), "heads is 9: for 9 query heads, got 4; build it for the heads of the query"),
    (lambda: mods.alibi(torch.ones(9)), "heads has shape (9,), read as [h]: for 9 query heads, got 4"),
    (lambda: mods.full_bias(torch.ones(4, 9, 8)), "it looks transposed: pass bias.transpose(1, 2)"),
    (lambda: mods.full_bias(torch.ones(2, 3, 8, 9)), "for 3 query heads, got 4"),
    (lambda: mods.compose(mods.softcap(2.0), mods.head_scale(torch.ones(3))), "scale has shape (3,), read as [h]: for 3 query heads, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), TRANSPOSED, ids=[m for _, m in TRANSPOSED])
def test_tables_in_another_layout_are_refused(make, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        call(make(), 2, 4, 8, 9)


def test_heads_are_query_heads():
    call(mods.alibi(4), 1, 4, 8, 8, kv_heads=2)
    with pytest.raises(
        ShapeError, match="heads is 2: for 2 query heads, got 4; it has an entry per kv head"
    ):
        call(mods.alibi(2), 1, 4, 8, 8, kv_heads=2)


@pytest.mark.parametrize("by", ["int", "shared", "by batch"])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_shifted_mod_is_the_mod_at_other_positions(name, by):
    mod, q_len, kv_len, batch, heads, _ = EXAMPLES[name]
    random.seed(name + by)
    shifts = [[random.randrange(5), random.randrange(5)] for _ in range(batch)]
    if by != "by batch":
        shifts = shifts[:1] * batch
    arguments = [shifts[0][axis] if by == "int" else torch.tensor([s[axis] for s in shifts]) for axis in (0, 1)]  # fmt: skip
    if by == "shared":
        arguments = [t[0] for t in arguments]
    moved = mod.shift(q=arguments[0], kv=arguments[1])
    for _ in range(20):
        b, h = random.randrange(batch), random.randrange(heads)
        q, kv = random.randrange(q_len - 5), random.randrange(kv_len - 5)
        own, there = (
            [torch.tensor(i, dtype=torch.int32) for i in place]
            for place in ((b, h, q, kv), (b, h, q + shifts[b][0], kv + shifts[b][1]))
        )
        score = torch.randn(())
        torch.testing.assert_close(moved(score, *own), mod(score, *there), equal_nan=True)


def test_a_cached_decode_is_a_part_of_the_whole():
    """A shifted mod on the last queries gives that part of the full result, and its gradients."""
    torch.manual_seed(0)
    slopes = torch.rand(2, requires_grad=True)
    query, key, value = torch.randn(3, 1, 2, 12, 8).unbind(0)
    mod = mods.alibi(slopes, symmetric=True)
    whole = flex_attention(query, key, value, mod)[:, :, 9:]
    part = flex_attention(query[:, :, 9:], key, value, mod.shift(q=9))
    torch.testing.assert_close(part, whole)
    torch.testing.assert_close(
        torch.autograd.grad(part.sum(), slopes), torch.autograd.grad(whole.sum(), slopes)
    )
