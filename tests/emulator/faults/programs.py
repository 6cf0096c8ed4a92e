"""Define small correct PTX programs with named lines, which faults edit by name.

A line `instruction; // name` can be dropped or replaced by its name. Each program does a task that
real kernels do: rings of stages, copies, flags between CTAs, dependent kernels, matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnkit import emulator
from attnkit.emulator import CheckReport, Ptx, Stream, Undefined
from tests.emulator.matrix_kit import COPY_IN, TC_HIGH, core_image, descriptor
from tests.emulator.ptx_kit import kernel, pointers, wait

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Launch:
    """Describe one kernel of a program and the indices of the program's arguments that it takes."""

    body: str
    arguments: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arch: str = "sm_90a"

    def target(self, body: str) -> Ptx:
        """Return the kernel with its body replaced."""
        text = kernel(body, pointers(len(self.arguments)), arch=self.arch)
        return Ptx(text, **self.options)


@dataclass(frozen=True)
class Program:
    """Describe kernels that run one after another, and their arguments.

    `data` returns the arguments, and a function that checks the results. The function returns what
    is wrong with them, or None.
    """

    name: str
    launches: tuple[Launch, ...]
    data: Callable[[], tuple[Arguments, Callable[[], str | None]]]

    @property
    def text(self) -> str:
        """Return the bodies of all kernels, joined; faults edit this text."""
        return CUT.join(x.body for x in self.launches)

    def check(self, text: str, seeds: int = 2) -> CheckReport:
        """Run `emulator.check` on every kernel, with `strict_loads` and `strict_order`."""
        arguments, wrong = self.data()
        stream = Stream()
        reports = []
        for i, (launch, body) in enumerate(zip(self.launches, text.split(CUT), strict=True)):
            last = i == len(self.launches) - 1
            reports.append(
                emulator.check(
                    launch.target(body),
                    *(arguments[j] for j in launch.arguments),
                    seeds=seeds,
                    expect=wrong if last else None,
                    strict_loads=True,
                    strict_order=True,
                    stream=stream,
                )
            )
        return CheckReport(
            tuple(f for r in reports for f in r.static),
            tuple(x for r in reports for x in r.runs),
            tuple(f for r in reports for f in r.differences),
        )


CUT = "\n// next kernel\n"


def equals(out: Any, want: Any) -> Callable[[], str | None]:
    """Return a check that `out` equals `want` exactly."""
    return lambda: None if np.array_equal(out, want) else "values differ"


def init(offset: int, count: int, name: str) -> str:
    """Return code that initialises an mbarrier; the line is called `name`."""
    return f"mov.b32 %r98, {count}; mbarrier.init.shared.b64 [dynamic+{offset}], %r98; // {name}\n"


def by_first_thread(label: str, code: str) -> str:
    """Return code that runs `code` in thread 0 only."""
    return f"""
    mov.u32 %r99, %tid.x; setp.ne.s32 %p9, %r99, 0;
    @%p9 bra $L_{label};
    {code}
$L_{label}:
"""


PRELUDE = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31;
    mov.b32 %r20, dynamic; ld.param.u64 %d1, [p0];
"""
FENCE_INIT = "fence.mbarrier_init.release.cluster; // fence init\n"
MEET = "bar.sync 0; // meet\n"
NEXT = """
    add.s32 %r5, %r5, 1; setp.eq.s32 %p2, %r5, 2; selp.b32 %r5, 0, %r5, %p2;
    selp.b32 %r17, 1, 0, %p2; // lap of {role}
    xor.b32 %r6, %r6, %r17;
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, {steps};
    @%p3 bra $L_{label};
"""


# ---- a ring of two stages: one warp stores, one loads
def _ring() -> str:
    barriers = init(0, 32, "count full") + init(8, 32, "count full 1")
    barriers += init(16, 32, "count empty") + init(24, 32, "count empty 1")
    return (
        by_first_thread("init", barriers + FENCE_INIT)
        + MEET
        + PRELUDE
        + """
    mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $L_consumer;
$L_produce:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7; add.s32 %r10, %r8, 16;
    xor.b32 %r9, %r6, 1; // first parity
"""
        + wait("%r10", "%r9", "e").replace("\n", " ").replace("$L_wait_e:", "\n$L_wait_e:")
        + """ // wait empty
    shl.b32 %r11, %r5, 7; // stage of producer
    shl.b32 %r12, %r3, 2; add.s32 %r13, %r11, %r12; add.s32 %r14, %r20, %r13;
    mul.lo.s32 %r15, %r4, 100; add.s32 %r16, %r15, %r3;
    st.shared.b32 [%r14+128], %r16; // store
    mbarrier.arrive.shared.b64 %d9, [%r8]; // arrive full
"""
        + NEXT.format(role="producer", steps=12, label="produce")
        + """
    bra $L_end;
$L_consumer:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7; add.s32 %r10, %r8, 16;
"""
        + wait("%r8", "%r6", "f").replace("\n", " ").replace("$L_wait_f:", "\n$L_wait_f:")
        + """ // wait full
    shl.b32 %r11, %r5, 7; shl.b32 %r12, %r3, 2; add.s32 %r13, %r11, %r12; add.s32 %r14, %r20, %r13;
    ld.shared.b32 %r16, [%r14+128]; // load
    mbarrier.arrive.shared.b64 %d9, [%r10]; // arrive empty
    shl.b32 %r18, %r4, 5; add.s32 %r18, %r18, %r3; mul.wide.u32 %d2, %r18, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r16;
"""
        + NEXT.format(role="consumer", steps=12, label="consumer")
        + "$L_end:\n"
    )


def _ring_data() -> tuple[Arguments, Callable[[], str | None]]:
    out = np.zeros((12, 32), np.uint32)
    want = (100 * np.arange(12)[:, None] + np.arange(32)).astype(np.uint32)
    return (Undefined(out),), equals(out, want)


RING = Program("ring", (Launch(_ring(), (0,), {"block": (64, 1, 1), "shared": 1024}),), _ring_data)


# ---- a ring of two stages filled by bulk copies; one lane per consumer warp releases a stage
def _copies() -> str:
    barriers = init(0, 1, "count full") + init(8, 1, "count full 1")
    barriers += init(16, 2, "count empty") + init(24, 2, "count empty 1")
    return (
        by_first_thread("init", barriers + FENCE_INIT)
        + MEET
        + PRELUDE
        + """
    ld.param.u64 %d4, [p1];
    mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0;
    setp.ne.s32 %p1, %r2, 2;
    @%p1 bra $L_consumer;
    elect.sync %r30|%p4, -1;
    @!%p4 bra $L_end;
$L_produce:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7; add.s32 %r10, %r8, 16;
    xor.b32 %r9, %r6, 1;
"""
        + wait("%r10", "%r9", "e").replace("\n", " ").replace("$L_wait_e:", "\n$L_wait_e:")
        + """ // wait empty
    mov.b32 %r31, 128; mbarrier.arrive.expect_tx.shared.b64 %d9, [%r8], %r31; // expect
    shl.b32 %r11, %r5, 7; add.s32 %r14, %r20, %r11; // stage of producer
    add.s32 %r14, %r14, 128; mul.wide.u32 %d5, %r4, 128; add.s64 %d6, %d4, %d5; mov.b32 %r32, 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r14], [%d6], %r32, [%r8]; // copy
"""
        + NEXT.format(role="producer", steps=10, label="produce")
        + """
    bra $L_end;
$L_consumer:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7; add.s32 %r10, %r8, 16;
"""
        + wait("%r8", "%r6", "f").replace("\n", " ").replace("$L_wait_f:", "\n$L_wait_f:")
        + """ // wait full
    shl.b32 %r11, %r5, 7; shl.b32 %r12, %r3, 2; add.s32 %r13, %r11, %r12; add.s32 %r14, %r20, %r13;
    ld.shared.b32 %r16, [%r14+128]; // load
    bar.warp.sync -1; // meet lanes
    elect.sync %r30|%p4, -1;
    @%p4 mbarrier.arrive.shared.b64 %d9, [%r10]; // arrive empty
    shl.b32 %r18, %r4, 6; add.s32 %r18, %r18, %r1; mul.wide.u32 %d2, %r18, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r16;
"""
        + NEXT.format(role="consumer", steps=10, label="consumer")
        + "$L_end:\n"
    )


def _copies_data() -> tuple[Arguments, Callable[[], str | None]]:
    x = np.arange(320, dtype=np.uint32).reshape(10, 32)
    out = np.zeros((10, 2, 32), np.uint32)
    return (Undefined(out), x), equals(out, np.stack([x, x], axis=1))


COPIES = Program(
    "bulk copies", (Launch(_copies(), (0, 1), {"block": (96, 1, 1), "shared": 512}),), _copies_data
)


# ---- an epilogue: two warps write a tile, one thread stores it, three tiles through one buffer
EPILOGUE = Program(
    "bulk stores",
    (
        Launch(
            PRELUDE
            + """
    mov.b32 %r4, 0; shl.b32 %r12, %r1, 2; add.s32 %r14, %r20, %r12;
$L_tile:
    mul.lo.s32 %r15, %r4, 100; add.s32 %r16, %r15, %r1;
    st.shared.b32 [%r14], %r16; // store
    fence.proxy.async.shared::cta; // fence
    bar.sync 0; // meet
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_stored;
    mul.wide.u32 %d2, %r4, 256; add.s64 %d3, %d1, %d2; mov.b32 %r17, 256;
    cp.async.bulk.global.shared::cta.bulk_group [%d3], [dynamic], %r17; // copy
    cp.async.bulk.commit_group; // commit
    cp.async.bulk.wait_group.read 0; // wait
$L_stored:
    bar.sync 0; // meet again
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 3;
    @%p3 bra $L_tile;
""",
            (0,),
            {"block": (64, 1, 1), "shared": 512},
        ),
    ),
    lambda: _tiles(3, 64),
)


def _tiles(n: int, width: int) -> tuple[Arguments, Callable[[], str | None]]:
    out = np.zeros((n, width), np.uint32)
    want = (100 * np.arange(n)[:, None] + np.arange(width)).astype(np.uint32)
    return (Undefined(out),), equals(out, want)


# ---- lanes of one warp exchange values through shared memory, twice; one lane stores the last
WARP = Program(
    "one warp",
    (
        Launch(
            PRELUDE
            + """
    shl.b32 %r12, %r3, 2; add.s32 %r14, %r20, %r12; xor.b32 %r13, %r12, 4; add.s32 %r15, %r20, %r13;
    st.shared.b32 [%r14], %r3; // store
    bar.warp.sync -1; // meet
    ld.shared.b32 %r16, [%r15]; // load
    bar.warp.sync -1; // meet before reuse
    add.s32 %r17, %r16, 100; st.shared.b32 [%r14], %r17;
    fence.proxy.async.shared::cta; // fence
    bar.warp.sync -1; // meet before copy
    elect.sync %r30|%p4, -1;
    @!%p4 bra $L_end;
    mov.b32 %r18, 128;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [dynamic], %r18;
    cp.async.bulk.commit_group; // commit
    cp.async.bulk.wait_group 0; // wait
$L_end:
""",
            (0,),
            {"shared": 512},
        ),
    ),
    lambda: _exchanged(),
)


def _exchanged() -> tuple[Arguments, Callable[[], str | None]]:
    out = np.zeros(32, np.uint32)
    return (Undefined(out),), equals(out, (np.arange(32) ^ 1) + 100)


# ---- named barriers: two warps take turns with one buffer
NAMED = Program(
    "named barriers",
    (
        Launch(
            PRELUDE
            + """
    mov.b32 %r4, 0; shl.b32 %r12, %r3, 2; add.s32 %r14, %r20, %r12;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $L_consumer;
$L_produce:
    bar.sync 2, 64; // wait empty
    mul.lo.s32 %r15, %r4, 100; add.s32 %r16, %r15, %r3;
    st.shared.b32 [%r14], %r16; // store
    bar.arrive 1, 64; // arrive full
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 4;
    @%p3 bra $L_produce;
    bra $L_end;
$L_consumer:
    bar.arrive 2, 64; // arrive empty
    bar.sync 1, 64; // wait full
    ld.shared.b32 %r16, [%r14]; // load
    shl.b32 %r18, %r4, 5; add.s32 %r18, %r18, %r3; mul.wide.u32 %d2, %r18, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r16;
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 4;
    @%p3 bra $L_consumer;
$L_end:
""",
            (0,),
            {"block": (64, 1, 1), "shared": 512},
        ),
    ),
    lambda: _tiles(4, 32),
)

# ---- a flag in global memory: CTA 0 hands data to CTA 1
_SEND = """
    mov.u32 %r5, %ctaid.x; ld.param.u64 %d4, [p1]; ld.param.u64 %d7, [p2];
    mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; add.s64 %d8, %d7, %d2;
    setp.ne.s32 %p1, %r5, 0;
    @%p1 bra $L_receive;
    add.s32 %r16, %r1, 7;
    st.global.b32 [%d3], %r16; // store
    bar.sync 0; // meet
    setp.ne.s32 %p2, %r1, 0;
    @%p2 bra $L_end;
    mov.b32 %r17, 1;
    RELEASE
    bra $L_end;
$L_receive:
    setp.ne.s32 %p2, %r1, 0;
    @%p2 bra $L_received;
$L_spin:
    ACQUIRE
    setp.ne.s32 %p3, %r18, 1;
    @%p3 bra $L_spin;
    AFTER
$L_received:
    bar.sync 0; // meet after
    ld.global.b32 %r19, [%d3]; // load
    st.global.b32 [%d8], %r19;
$L_end:
"""


def _flag(release: str, acquire: str, after: str = "") -> Launch:
    body = _SEND.replace("RELEASE", release).replace("ACQUIRE", acquire).replace("AFTER", after)
    return Launch(PRELUDE + body, (0, 1, 2), {"block": (64, 1, 1), "grid": (2, 1, 1)})


def _flag_data() -> tuple[Arguments, Callable[[], str | None]]:
    data, flag, out = np.zeros(64, np.uint32), np.zeros(4, np.uint32), np.zeros(64, np.uint32)
    return (data, flag, Undefined(out)), equals(out, np.arange(64) + 7)


FLAG = Program(
    "flag",
    (
        _flag(
            "st.release.gpu.global.b32 [%d4], %r17; // release",
            "ld.acquire.gpu.global.b32 %r18, [%d4]; // acquire",
        ),
    ),
    _flag_data,
)
FENCED_FLAG = Program(
    "flag with fences",
    (
        _flag(
            "fence.acq_rel.gpu; // fence\n st.relaxed.gpu.global.b32 [%d4], %r17; // release",
            "ld.relaxed.gpu.global.b32 %r18, [%d4]; // acquire",
            "fence.acq_rel.gpu; // fence after",
        ),
    ),
    _flag_data,
)

# ---- CTA 0 writes with ordinary stores, CTA 1 reads the same memory by a bulk copy
_COPY_IN = """
    mov.b32 %r31, 256; mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], %r31;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [dynamic+128], [%d1], %r31, [dynamic];
"""
PROXIES = Program(
    "copy of what another CTA stored",
    (
        Launch(
            by_first_thread("init", init(0, 1, "count") + FENCE_INIT)
            + MEET.replace("meet", "meet first")
            + PRELUDE
            + _SEND.replace(
                "st.global.b32 [%d3], %r16; // store",
                "st.global.b32 [%d3], %r16; // store\n fence.proxy.async.global; // fence",
            )
            .replace("RELEASE", "st.release.gpu.global.b32 [%d4], %r17; // release")
            .replace("ACQUIRE", "ld.acquire.gpu.global.b32 %r18, [%d4]; // acquire")
            .replace("AFTER", _COPY_IN)
            .replace("bar.sync 0; // meet after\n", wait("dynamic", "0", "copied"))
            .replace(
                "ld.global.b32 %r19, [%d3]; // load",
                "shl.b32 %r12, %r1, 2; add.s32 %r14, %r20, %r12; ld.shared.b32 %r19, [%r14+128];",
            ),
            (0, 1, 2),
            {"block": (64, 1, 1), "grid": (2, 1, 1), "shared": 512},
        ),
    ),
    _flag_data,
)

# ---- CTA 0 writes by a bulk store, CTA 1 reads
LANDING = Program(
    "bulk store for another CTA",
    (
        Launch(
            PRELUDE
            + _SEND.replace(
                "st.global.b32 [%d3], %r16; // store",
                "shl.b32 %r12, %r1, 2; add.s32 %r14, %r20, %r12; st.shared.b32 [%r14], %r16;\n"
                "fence.proxy.async.shared::cta; // fence",
            )
            .replace(
                "RELEASE",
                """
    mov.b32 %r21, 256;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [dynamic], %r21; // copy
    cp.async.bulk.commit_group; // commit
    cp.async.bulk.wait_group 0; // wait
    fence.proxy.async.global;
    st.release.gpu.global.b32 [%d4], %r17; // release""",
            )
            .replace("ACQUIRE", "ld.acquire.gpu.global.b32 %r18, [%d4]; // acquire")
            .replace("AFTER", ""),
            (0, 1, 2),
            {"block": (64, 1, 1), "grid": (2, 1, 1), "shared": 512},
        ),
    ),
    _flag_data,
)

# ---- two kernels; the second is a programmatic dependent of the first
_FIRST = (
    PRELUDE
    + """
    griddepcontrol.launch_dependents;
    mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; add.s32 %r16, %r1, 5;
    st.global.b32 [%d3], %r16;
"""
)
_SECOND = (
    PRELUDE
    + """
    ld.param.u64 %d4, [p1]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; add.s64 %d5, %d4, %d2;
    setp.ne.s32 %p1, %r2, 0;
    griddepcontrol.wait; // wait
    bar.sync 0; // meet
    ld.global.b32 %r16, [%d3]; // load
    st.global.b32 [%d5], %r16;
"""
)


def _dependent_data() -> tuple[Arguments, Callable[[], str | None]]:
    middle, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    return (middle, Undefined(out)), equals(out, np.arange(64) + 5)


DEPENDENT = Program(
    "dependent kernels",
    (
        Launch(_FIRST, (0,), {"block": (64, 1, 1)}),
        Launch(_SECOND, (0, 1), {"block": (64, 1, 1), "dependent": True}),
    ),
    _dependent_data,
)

# ---- a cluster of two CTAs: each stores, arrives at the other's barrier, and loads from the other
CLUSTER = Program(
    "cluster",
    (
        Launch(
            by_first_thread("init", init(0, 32, "count") + FENCE_INIT)
            + PRELUDE
            + """
    mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1; mov.u32 %r7, %ctaid.x;
    shl.b32 %r12, %r3, 2; add.s32 %r14, %r20, %r12;
    mapa.shared::cluster.u32 %r15, %r14, %r6; // peer
    mapa.shared::cluster.u32 %r16, %r20, %r6;
    barrier.cluster.arrive.relaxed; // meet
    barrier.cluster.wait; // wait to meet
    mad.lo.s32 %r17, %r7, 100, %r3;
    st.shared.b32 [%r14+128], %r17; // store
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r16]; // arrive
"""
            + wait("dynamic", "0", "f").replace("\n", " ").replace("$L_wait_f:", "\n$L_wait_f:")
            + """ // wait full
    ld.shared::cluster.b32 %r18, [%r15+128]; // load
    mad.lo.s32 %r19, %r7, 32, %r3; mul.wide.u32 %d2, %r19, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r18;
    barrier.cluster.arrive; barrier.cluster.wait; // meet at exit
""",
            (0,),
            {"grid": (2, 1, 1), "cluster": (2, 1, 1), "shared": 512},
        ),
    ),
    lambda: _swapped(),
)


def _swapped() -> tuple[Arguments, Callable[[], str | None]]:
    out = np.zeros((2, 32), np.uint32)
    return (Undefined(out),), equals(out, np.array([[100], [0]]) + np.arange(32))


# ---- a product into tensor memory, read and read again after a store
_HIGH = descriptor(128, 256, TC_HIGH)
_IDESC = 1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24
TENSOR = Program(
    "tensor memory",
    (
        Launch(
            by_first_thread(
                "init", init(16392, 1, "count done") + init(16400, 4, "count loaded") + FENCE_INIT
            )
            + COPY_IN
            + f"""
    mov.u32 %r90, %tid.x; shr.u32 %r91, %r90, 5; setp.ne.s32 %p5, %r91, 0;
    @%p5 bra $L_allocated;
    mov.b32 %r92, 32;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+16384], %r92; // alloc
$L_allocated:
    fence.proxy.async.shared::cta; // fence operands
    tcgen05.fence::before_thread_sync; // before alloc
    bar.sync 0; // meet
    tcgen05.fence::after_thread_sync; // after alloc
    ld.shared.b32 %r93, [dynamic+16384];
    shl.b32 %r96, %r91, 21; add.s32 %r97, %r93, %r96;
    shr.u32 %r9, %r2, 4; cvt.u64.u32 %d10, %r9; add.s64 %d11, %d10, 512;
    or.b64 %d12, %d10, {_HIGH}; or.b64 %d13, %d11, {_HIGH};
    mov.b32 %r94, {_IDESC}; setp.ne.s32 %p7, %r94, %r94;
    mov.b32 %r4, 0;
$L_again:
    @%p5 bra $L_issued;
    elect.sync %r95|%p6, -1;
    @!%p6 bra $L_issued;
    tcgen05.mma.cta_group::1.kind::f16 [%r93], %d12, %d13, %r94, %p7; // mma
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic+16392]; // commit
$L_issued:
    and.b32 %r98, %r4, 1;
"""
            + wait("dynamic+16392", "%r98", "d")
            .replace("\n", " ")
            .replace("$L_wait_d:", "\n$L_wait_d:")
            + """ // wait product
    tcgen05.fence::after_thread_sync; // after product
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r100}, [%r97]; // load
    tcgen05.wait::ld.sync.aligned; // wait load
    add.s32 %r101, %r100, 1;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r97], {%r101}; // store
    tcgen05.wait::st.sync.aligned; // wait store
    tcgen05.fence::before_thread_sync; // before loaded
    bar.warp.sync -1;
    elect.sync %r95|%p6, -1;
    @%p6 mbarrier.arrive.shared.b64 %d9, [dynamic+16400]; // arrive loaded
"""
            + wait("dynamic+16400", "%r98", "l")
            .replace("\n", " ")
            .replace("$L_wait_l:", "\n$L_wait_l:")
            + """ // wait loaded
    tcgen05.fence::after_thread_sync; // after loaded
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 3;
    @%p3 bra $L_again;
    ld.param.u64 %d20, [p1]; mul.wide.u32 %d21, %r90, 4; add.s64 %d22, %d20, %d21;
    st.global.b32 [%d22], %r100;
    bar.sync 0;
    @%p5 bra $L_freed;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r93, %r92; // dealloc
$L_freed:
""",
            (0, 1),
            {"block": (128, 1, 1), "shared": 16416},
            "sm_100a",
        ),
    ),
    lambda: _product(),
)


def _product() -> tuple[Arguments, Callable[[], str | None]]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (n, 16)).astype(np.float32) for n in (128, 16))
    raw = [
        (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 16, 2)
        for x in (a, b)
    ]
    image = np.concatenate([core_image(x, 128, 256) for x in raw])
    out = np.zeros(128, np.float32)
    return (image, Undefined(out)), equals(out, (a @ b.T)[:, 0])
