"""Check which copies of the Hopper kernels ask L2 to evict their lines first or last.

A policy changes no result, so these tests look at the PTX. No kernel is executed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnkit import flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.templates.common.cache_policy import CachePolicy

FIRST, LAST = CachePolicy.EVICT_FIRST, CachePolicy.EVICT_LAST
NORMAL, NO_HINT = CachePolicy.EVICT_NORMAL, 0
LENGTH, HEADS = 256, 2
BOXES = 2  # TMA copies of a tile with rows of 128 columns
WARPGROUPS = 2

LOAD = r"cp\.async\.bulk\.tensor\.\S*shared::cta\.global\S*"
STORE = r"cp\.async\.bulk\.tensor\.\S*global\.shared::cta\S*"
BIAS = r"cp\.async\.cg\S*"
ADD_CHUNK = r"cp\.reduce\.async\.bulk\S*"
ADD = r"red\.\S*global\.add\.L2::cache_hint\.f32"


def compiled(score: Callable[..., Any] | None, batch: int = 1) -> list[str]:
    """Return the PTX of the forward and of the backward of a causal call."""
    q, k, v = (
        torch.zeros(batch, HEADS, LENGTH, 128, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(q, k, v, score, masks.causal(), backend="emulate:sm_90a")
        out.sum().backward()
    return [
        kernel.kernel(next(s for s in sources if s.name.startswith(name))).ptx
        for name in ("forward", "backward")
    ]


def policies(ptx: str, instruction: str) -> Counter[int | None]:
    """Count the policies of the instructions that match; None where a policy is not a constant."""
    known = {name: int(n) for name, n in re.findall(r"mov\.b64\s+(%rd\d+), (\d+);", ptx)}
    operands = re.findall(rf"{instruction}\s[^;]*, (%rd\d+|\d+);", ptx)
    assert operands
    return Counter(int(x) if x.isdigit() else known.get(x) for x in operands)


def test_what_is_read_or_written_once_leaves_first() -> None:
    forward, backward = compiled(None)
    own = BOXES * WARPGROUPS  # copies of Q in the forward, of K or V in the backward
    assert policies(forward, LOAD)[FIRST] == own  # Q
    assert policies(forward, LOAD)[NO_HINT] >= 2 * BOXES  # K and V
    assert policies(forward, STORE) == {FIRST: BOXES}  # the output
    assert policies(backward, LOAD) == {FIRST: 2 * own, NO_HINT: 2 * BOXES}  # K and V; Q and dO
    assert "st.global.cs.v4" in backward  # dK and dV


def test_sums_that_more_work_tiles_add_to_leave_last() -> None:
    _, backward = compiled(None)
    assert policies(backward, ADD_CHUNK) == {LAST: WARPGROUPS}


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_beside_a_full_bias_leave_as_others(batch: int) -> None:
    bias = torch.zeros(HEADS, LENGTH, LENGTH, requires_grad=True)
    _, backward = compiled(lambda s, b, h, q, kv: s + bias[h, q, kv], batch)
    assert policies(backward, ADD_CHUNK) == {NORMAL: WARPGROUPS}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_of_each_batch_element_leaves_first(batch: int) -> None:
    bias = torch.zeros(batch, HEADS, LENGTH, LENGTH)
    for ptx in compiled(lambda s, b, h, q, kv: s + bias[b, h, q, kv], batch):
        assert set(policies(ptx, BIAS)) == {FIRST}


def test_a_bias_that_the_batch_shares_leaves_with_the_last_element() -> None:
    bias = torch.zeros(HEADS, LENGTH, LENGTH, requires_grad=True)
    forward, backward = compiled(lambda s, b, h, q, kv: s + bias[h, q, kv], 2)
    for ptx in (forward, backward):
        assert set(policies(ptx, BIAS)) == {None}  # it depends on the batch element
    assert set(policies(backward, ADD)) == {FIRST}
