"""Check the granules in which races on shared memory are found, and that barriers forget clocks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnkit.emulator.machine.barriers import ClusterBarrier, NamedBarrier
from attnkit.emulator.machine.knowledge import ROWS, Knowledge
from attnkit.emulator.machine.race_detector import RaceDetector
from tests.emulator.ptx_kit import run


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
)
def test_an_element_has_the_granules_of_all_its_bytes(
    grain: int, size: int, elements: list[int]
) -> None:
    race = RaceDetector(2, 64, 8, grain)
    offsets = size * np.array(elements)
    want = {race.stride + b // grain for o in offsets.tolist() for b in range(o, o + size)}
    assert race.granules(1, offsets, size).tolist() == sorted(want)


HEAD = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31;
    mov.b32 %r4, dynamic; cvta.shared.u64 %d1, dynamic; cvt.u64.u32 %d2, %r2; add.s64 %d1, %d1, %d2;
    setp.ne.s32 %p1, %r3, 0;
    setp.eq.s32 %p2, %r2, 0;
    mov.b16 %h1, 1;
"""


def findings(body: str) -> list[str]:
    """Return the kinds of findings of two warps that run `body` in race mode."""
    report = run(HEAD + body, block=(64, 1, 1), shared=64, mode="race")
    return [f.kind for f in report.findings]


def test_warps_may_store_neighbouring_bytes_at_generic_addresses() -> None:
    assert findings("@%p1 bra $L_end; st.u8 [%d1], %h1; $L_end:") == []


@pytest.mark.parametrize(("at", "kinds"), [(2, []), (0, ["race"])])
def test_an_atomic_of_16_bits_leaves_the_other_half_of_a_word_alone(
    at: int, kinds: list[str]
) -> None:
    body = f"""
    @%p1 bra $L_ready;
    @%p2 st.shared.b32 [%r4], %r1;
$L_ready:
    bar.sync 0;
    @%p1 bra $L_end;
    @%p2 bra $L_add;
    ld.shared.b16 %h2, [%r4+{at}]; cvt.u32.u16 %r5, %h2; st.shared.b32 [%r4+8], %r5;
    bra $L_end;
$L_add:
    red.shared.add.noftz.f16 [%r4], %h1;
$L_end:
    """
    assert findings(body) == kinds


@pytest.mark.parametrize(("order", "kinds"), [("", []), (".relaxed.cta", ["race"])])
def test_a_wait_that_may_miss_its_phase(order: str, kinds: list[str]) -> None:
    """A warp that completes two phases must know that the other one has seen the first of them.

    A relaxed wait comes late enough here, but orders nothing.
    """
    body = f"""
    @%p1 bra $L_ready;
    @!%p2 bra $L_ready;
    mbarrier.init.shared.b64 [%r4], 1; mbarrier.init.shared.b64 [%r4+8], 1;
$L_ready:
    bar.sync 0;
    @%p1 bra $L_end;
    @%p2 bra $L_twice;
$L_first:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;
    @!%p3 bra $L_first;
    mbarrier.arrive.shared.b64 %d3, [%r4+8];
$L_second:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4], 1;
    @!%p3 bra $L_second;
    bra $L_end;
$L_twice:
    mbarrier.arrive.shared.b64 %d3, [%r4];
$L_seen:
    mbarrier.try_wait.parity{order}.shared.b64 %p3, [%r4+8], 0;
    @!%p3 bra $L_seen;
    mbarrier.arrive.shared.b64 %d3, [%r4];
$L_end:
    """
    assert findings(body) == kinds


def knowledge() -> Knowledge:
    return Knowledge(0, np.zeros((ROWS, 4), np.int32))


@pytest.mark.parametrize("barrier", [NamedBarrier(0), ClusterBarrier(1)], ids=["named", "cluster"])
def test_a_barrier_forgets_what_earlier_generations_released(barrier: Any) -> None:
    old = []
    for _ in range(4):
        barrier.released.add(knowledge())
        old.append(weakref.ref(barrier.released.knowledge))
        barrier.arrive(*((32, 32, (0,)) if isinstance(barrier, NamedBarrier) else (1,)))
    gc.collect()
    assert [r() for r in old[:3]] == [None] * 3
