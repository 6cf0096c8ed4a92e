"""List the sections of the PTX ISA that specify what the emulator's tests check.

Titles are the headings of the document; for instructions, without the text before the colon.
Numbers are those of PTX ISA 9.2. They change from version to version, while titles rarely do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_TABLE = """
5.1.2 Special Register State Space
5.1.3 Constant State Space
5.1.4 Global State Space
5.1.5 Local State Space
5.1.7 Shared State Space
5.4.2 Vectors
5.5.3.3 Out of Boundary Access
5.5.7 Swizzling Modes
8.8 Release and Acquire Patterns
8.9.5 Causality Order
9.3.1.2 Floating Point Comparisons
9.3.2 Manipulating Predicates
9.5 Divergence of Threads in Control Constructs
9.7.1 Integer Arithmetic Instructions
9.7.2 Extended-Precision Integer Arithmetic Instructions
9.7.3 Floating-Point Instructions
9.7.3.3 Floating Point Instructions: add
9.7.4.4 Half Precision Floating Point Instructions: fma
9.7.5.3 Mixed Precision Floating Point Instructions: fma
9.7.6 Comparison and Selection Instructions
9.7.6.2 setp
9.7.8 Logic and Shift Instructions
9.7.9 Data Movement and Conversion Instructions
9.7.9.6 shfl.sync
9.7.9.8 ld
9.7.9.11 st
9.7.9.12 st.async
9.7.9.17 discard
9.7.9.20 cvta
9.7.9.21 cvt
9.7.9.23 mapa
9.7.9.25.1.1 Async-group mechanism
9.7.9.25.2 Async Proxy
9.7.9.25.3.1 cp.async
9.7.9.25.3.2 cp.async.commit_group
9.7.9.25.3.3 cp.async.wait_group / cp.async.wait_all
9.7.9.25.4.1 cp.async.bulk
9.7.9.25.5.2 cp.async.bulk.tensor
9.7.9.25.5.3 cp.reduce.async.bulk.tensor
9.7.9.25.6.1 cp.async.bulk.commit_group
9.7.9.25.6.2 cp.async.bulk.wait_group
9.7.12.3 bra
9.7.13.1 bar, barrier
9.7.13.2 bar.warp.sync
9.7.13.3 barrier.cluster
9.7.13.4 membar / fence
9.7.13.5 atom
9.7.13.6 red
9.7.13.9 vote.sync
9.7.13.10 match.sync
9.7.13.12 redux.sync
9.7.13.14 elect.sync
9.7.13.15.2 Contents of the mbarrier object
9.7.13.15.5.1 expect-tx operation
9.7.13.15.5.2 complete-tx operation
9.7.13.15.6 Phase Completion of the mbarrier object
9.7.13.15.8 mbarrier support with shared memory
9.7.13.15.9 mbarrier.init
9.7.13.15.13 mbarrier.arrive
9.7.13.15.16 mbarrier.test_wait / mbarrier.try_wait
9.7.13.17 clusterlaunchcontrol.try_cancel
9.7.13.18 clusterlaunchcontrol.query_cancel
9.7.14.5.6 Matrix Fragments for mma.m16n8k4
9.7.14.5.7 Matrix Fragments for mma.m16n8k8
9.7.14.5.8 Matrix Fragments for mma.m16n8k16 with floating point type
9.7.14.5.10 Matrix Fragments for mma.m16n8k32
9.7.14.5.14 Multiply-and-Accumulate Instruction: mma
9.7.14.5.15 Warp-level matrix load instruction: ldmatrix
9.7.14.5.16 Warp-level matrix store instruction: stmatrix
9.7.15.1 Warpgroup
9.7.15.5.1.1 Register Fragments
9.7.15.5.1.1.1 Matrix Fragments for wgmma.mma_async.m64nNk16
9.7.15.5.1.2.2 Matrix Descriptor Format
9.7.15.5.2 Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async
9.7.15.7.1 Asynchronous Multiply-and-Accumulate Instruction: wgmma.fence
9.7.15.7.3 Asynchronous Multiply-and-Accumulate Instruction: wgmma.wait_group
9.7.16.1.1 Tensor Memory Addressing
9.7.16.1.2 Tensor Memory Allocation
9.7.16.2.1 Matrix Shape
9.7.16.2.3.1.3 Matrix fragments for shape .16x128b
9.7.16.2.3.1.4 Matrix fragments for shape .16x256b
9.7.16.3 Major-ness supported by Strides
9.7.16.3.3 Canonical Layouts
9.7.16.4.1 Shared Memory Descriptor
9.7.16.4.2 Instruction Descriptor
9.7.16.5 Issue Granularity
9.7.16.5.1 CTA Pair
9.7.16.6.2.1.1 mbarrier based completion mechanism
9.7.16.7.1 tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit
9.7.16.8.3 tcgen05.ld
9.7.16.9.2 tcgen05.cp
9.7.16.10.5 Data Path Layout Organization
9.7.16.10.5.1 Layout A (M = 256)
9.7.16.10.5.2 Layout B (M = 128 + cta-group::2 + Dense A matrix)
9.7.16.10.5.4 Layout D (M = 128 + cta-group::1)
9.7.16.10.5.6 Layout F (M = 64 + non .ws mode)
9.7.16.10.9.1 tcgen05.mma
9.7.16.12.1 tcgen05.commit
"""
SECTIONS = {title: number for number, title in (x.split(" ", 1) for x in _TABLE.split("\n") if x)}

Test = TypeVar("Test", bound=Callable[..., None])


def section(*titles: str) -> Callable[[Test], Test]:
    """Return a decorator that marks a test with the sections that specify what it checks."""
    for title in titles:
        if title not in SECTIONS:
            raise KeyError(f"{title!r} is no section of the PTX ISA that is listed in {__name__}")

    def mark(test: Test) -> Test:
        test.sections = titles  # type: ignore[attr-defined]
        return test

    return mark


def ours(test: Test) -> Test:
    """Mark a test of behaviour outside the PTX ISA: reports, limits, modes."""
    test.sections = ()  # type: ignore[attr-defined]
    return test
