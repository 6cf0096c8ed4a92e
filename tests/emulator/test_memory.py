"""Check state spaces, vectors, atomics and matrix moves.

PTX ISA sections: ld, st, atom, red, ldmatrix, stmatrix.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
import pytest

from attnkit import emulator
from attnkit.emulator import KernelFault, Undefined
from tests.emulator.ptx_kit import kernel, pointers, run
from tests.emulator.sections import ours, section

T = np.arange(32)


@section("ld", "st", "Vectors")
def test_vector_and_byte_accesses() -> None:
    body = """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d4];
    shl.b32 %r6, %r1, 4; mov.b32 %r7, dynamic; add.s32 %r8, %r7, %r6;
    st.shared.v4.b32 [%r8], {%r5, %r4, %r3, %r2};
    bar.sync 0;
    ld.shared.v2.b32 {%r10, %r11}, [%r8];
    ld.shared.u8 %h1, [%r8+9];
    ld.shared.s8 %h2, [%r8+9];
    cvt.u32.u16 %r12, %h1; cvt.s32.s16 %r13, %h2;
    st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13};
    """
    x = np.random.default_rng(1).integers(0, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    out = np.zeros((32, 4), np.uint32)
    run(body, x, out, shared=1024)
    byte = x[:, 1].copy().view(np.uint8).reshape(32, 4)[:, 1]
    np.testing.assert_array_equal(out[:, 0], x[:, 3])
    np.testing.assert_array_equal(out[:, 1], x[:, 2])
    np.testing.assert_array_equal(out[:, 2], byte)
    np.testing.assert_array_equal(out[:, 3].copy().view(np.int32), byte.view(np.int8))


@section("ld")
@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_a_load_to_a_wider_register_extends_the_sign_of_signed_types(kind: str) -> None:
    body = f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d1, %d3;
    ld.global.{kind} %d5, [%d4];
    mul.wide.u32 %d6, %r1, 8; add.s64 %d7, %d2, %d6;
    st.global.b64 [%d7], %d5;
    """
    x, out = (T - 16).astype(np.int32), np.zeros(32, np.int64)
    run(body, x, out)
    expected = x if kind == "s32" else x.view(np.uint32)
    np.testing.assert_array_equal(out, expected.astype(np.int64))


@section("ld", "st")
def test_a_warp_that_polls_waits_for_a_later_warp_of_its_block() -> None:
    body = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra SET;
    WAIT:
    ld.acquire.gpu.global.b32 %r2, [%d1];
    setp.ne.b32 %p2, %r2, 7;
    @%p2 bra WAIT;
    bra DONE;
    SET:
    mov.b32 %r3, 7;
    st.release.gpu.global.b32 [%d1], %r3;
    DONE:
    """
    flag = np.zeros(1, np.uint32)
    run(body, flag, block=(64, 1, 1))
    assert flag[0] == 7


@section("Local State Space", "Constant State Space", "cvta")
def test_local_constant_and_generic_memory() -> None:
    variables = ".const .align 4 .b32 table[4] = {10, 20, 30, 40};"
    body = """
    .local .align 16 .b8 depot[32];
    mov.u32 %r1, %tid.x;
    mov.u64 %d1, depot;
    cvta.local.u64 %d2, %d1;
    st.local.b32 [%d1+8], %r1;
    ld.b32 %r2, [%d2+8];
    and.b32 %r3, %r1, 3; mul.wide.u32 %d3, %r3, 4;
    mov.u64 %d4, table; add.s64 %d5, %d4, %d3;
    ld.const.b32 %r4, [%d5];
    cvta.shared.u64 %d6, dynamic;
    mul.wide.u32 %d7, %r1, 4; add.s64 %d8, %d6, %d7;
    st.b32 [%d8], %r4;
    ld.b32 %r5, [%d8];
    add.s32 %r6, %r2, %r5;
    ld.param.u64 %d9, [p0]; add.s64 %d10, %d9, %d7;
    st.b32 [%d10], %r6;
    """
    out = np.zeros(32, np.uint32)
    run(body, out, shared=256, variables=variables)
    assert out.tolist() == [t + 10 * (t % 4 + 1) for t in range(32)]


@section("atom", "red")
def test_atomics_on_global_and_shared_memory() -> None:
    body = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x;
    atom.global.add.u32 %r2, [%d1], 1;
    red.global.add.f32 [%d1+4], 0f3F800000;
    createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;
    red.global.add.L2::cache_hint.f32 [%d1+28], 0f40000000, %d9;
    atom.global.max.s32 %r3, [%d1+8], %r1;
    atom.global.inc.u32 %r4, [%d1+12], 9;
    atom.global.cas.b32 %r5, [%d1+16], 0, %r1;
    atom.global.exch.b32 %r6, [%d1+20], %r1;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_a;
    mov.b32 %r9, 0;
    st.shared.b32 [dynamic], %r9;
$L_a:
    bar.sync 0;
    atom.shared.add.u32 %r7, [dynamic], 2;
    bar.sync 0;
    ld.shared.b32 %r8, [dynamic];
    st.global.b32 [%d1+24], %r8;
    mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3+32], %r2;
    """
    out = np.zeros(8 + 64, np.uint32)
    run(body, out, block=(64, 1, 1), shared=64)
    assert out[0] == 64
    assert out[1:2].view(np.float32)[0] == 64.0
    assert out[2] == 63
    assert out[3] == 64 % 10
    assert out[4] == 1  # the first lane wrote 0, the second found 0 and wrote 1
    assert out[5] == 63
    assert out[6] == 128
    assert out[7:8].view(np.float32)[0] == 128.0
    assert sorted(out[8:].tolist()) == list(range(64))


ONE_BY_ONE = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    "exch": lambda a, b: b,
}


@pytest.mark.parametrize("how", ONE_BY_ONE)
@pytest.mark.parametrize("places", [1, 5, 64])
@pytest.mark.parametrize("space", ["global", "shared"])
@ours
def test_atomics_act_one_by_one(how: str, places: int, space: str) -> None:
    """Atomics of a warp act in the order of the lanes, wherever addresses coincide.

    The PTX ISA leaves this order open, and a GPU uses another.
    """
    rng = np.random.default_rng(places)
    start = rng.integers(0, 50, 64).astype(np.uint32)
    where = (rng.permutation(64) % places).astype(np.uint32)
    values = rng.integers(0, 40, 64).astype(np.uint32)
    found = np.zeros(64, np.uint32)
    base = "%d10" if space == "global" else "%r11"
    body = f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; ld.param.u64 %d4, [p3];
    mov.u32 %r1, %tid.x; mul.wide.u32 %d5, %r1, 4;
    add.s64 %d6, %d2, %d5; ld.global.u32 %r2, [%d6];
    add.s64 %d6, %d3, %d5; ld.global.u32 %r3, [%d6];
    mul.wide.u32 %d9, %r2, 4; add.s64 %d10, %d1, %d9;
    mov.u32 %r10, dynamic; shl.b32 %r12, %r1, 2; add.s32 %r13, %r10, %r12;
    shl.b32 %r12, %r2, 2; add.s32 %r11, %r10, %r12;
    add.s64 %d8, %d1, %d5; ld.global.u32 %r4, [%d8]; st.shared.u32 [%r13], %r4;
    bar.sync 0;
    atom.{space}.{how}.{"b32" if how == "exch" else "u32"} %r5, [{base}], %r3;
    bar.sync 0;
    ld.shared.u32 %r6, [%r13];
    add.s64 %d7, %d4, %d5; st.global.u32 [%d7], %r5;
    {"st.global.u32 [%d8], %r6;" if space == "shared" else ""}
    """
    want, old = start.tolist(), []
    for w, v in zip(where.tolist(), values.tolist(), strict=True):
        old.append(want[w])
        want[w] = ONE_BY_ONE[how](want[w], v)
    out = start.copy()
    run(body, out, where, values, found, block=(64, 1, 1), shared=1024)
    assert out.tolist() == want
    assert found.tolist() == old


@section("red")
def test_reductions_of_vectors_and_packed_halves() -> None:
    """Vector reductions add four floats per lane; bf16x2 reductions of all lanes add up."""
    body = """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d1, %d3;
    mov.b32 %r2, 0f3F800000; mov.b32 %r3, 0f40000000;
    red.global.add.v4.f32 [%d4], {%r2, %r3, %r2, %r3};
    mov.b32 %r4, 0x3F804000;
    red.global.add.noftz.bf16x2 [%d2], %r4;
    """
    sums, pair = np.full((32, 4), 10, np.float32), np.zeros(1, np.uint32)
    run(body, sums, pair)
    np.testing.assert_array_equal(sums, np.tile([11, 12, 11, 12], (32, 1)))
    assert pair[0] == 0x42004280  # 32 and 64


@pytest.mark.parametrize("trans", [False, True])
@section(
    "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix"
)
def test_ldmatrix_and_stmatrix_fragments(trans: bool) -> None:
    """Lane t holds row t // 4, columns 2 (t % 4) and + 1 of each matrix; .trans transposes."""
    t = ".trans" if trans else ""
    body = f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d9, [p2];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3; add.s64 %d10, %d9, %d3;
    mov.b32 %r7, dynamic; shl.b32 %r6, %r1, 4; add.s32 %r8, %r7, %r6;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d4];
    st.shared.v4.b32 [%r8], {{%r2, %r3, %r4, %r5}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{t}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8];
    st.global.v4.b32 [%d5], {{%r10, %r11, %r12, %r13}};
    stmatrix.sync.aligned.m8n8.x4{t}.shared.b16 [%r8+512], {{%r10, %r11, %r12, %r13}};
    bar.sync 0;
    ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r8+512];
    st.global.v4.b32 [%d10], {{%r2, %r3, %r4, %r5}};
    """
    x = np.random.default_rng(2).integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    frag, back = np.zeros((32, 4, 2), np.uint16), np.zeros((4, 8, 8), np.uint16)
    run(body, x, frag, back, shared=1024)
    m = x.transpose(0, 2, 1) if trans else x
    for j in range(4):
        np.testing.assert_array_equal(frag[:, j, 0], m[j, T // 4, 2 * (T % 4)])
        np.testing.assert_array_equal(frag[:, j, 1], m[j, T // 4, 2 * (T % 4) + 1])
    np.testing.assert_array_equal(back, x)


STORE = "ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4;"


def fault(body: str, *args: object, **launch: object) -> str:
    with pytest.raises(KernelFault) as error:
        run(body, *args, **launch)
    return error.value.finding.kind


@section("Shared State Space", "Global State Space")
def test_accesses_outside_memory_are_faults() -> None:
    x = np.zeros(31, np.uint32)
    assert fault(STORE + "add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r1;", x) == "bounds"
    assert fault("mov.b32 %r1, 0; st.shared.b32 [dynamic+4096], %r1;", shared=1024) == "bounds"
    assert fault("ld.shared.b32 %r1, [dynamic+-4];", shared=1024) == "bounds"


@section("ld", "st")
def test_misaligned_accesses_are_faults() -> None:
    x = np.zeros(40, np.uint32)
    assert fault(STORE + "add.s64 %d3, %d1, %d2; st.global.b32 [%d3+2], %r1;", x) == "alignment"
    body = "mov.b32 %r1, 0; st.shared.v2.b32 [dynamic+4], {%r1, %r1};"
    assert fault(body, shared=64) == "alignment"


@ours
def test_reads_of_undefined_global_memory_are_faults() -> None:
    x = np.zeros(32, np.uint32)
    read = STORE + "add.s64 %d3, %d1, %d2; ld.global.b32 %r2, [%d3];"
    write = STORE + "add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r1; ld.global.b32 %r2, [%d3];"
    target = emulator.Ptx(kernel(read, pointers(1)))
    assert emulator.run(target, x).ok
    with pytest.raises(KernelFault, match="uninitialised"):
        emulator.run(target, Undefined(x))
    assert emulator.run(emulator.Ptx(kernel(write, pointers(1))), Undefined(x)).ok


@section("discard")
def test_a_discarded_line_is_undefined_until_it_is_written() -> None:
    line = STORE + "shl.b64 %d2, %d2, 5; add.s64 %d3, %d1, %d2;"  # 128 bytes for each thread
    write = "st.global.b32 [%d3+8], %r1;"
    discard = "discard.global.L2 [%d3], 128;"
    read = "ld.global.b32 %r2, [%d3+8];"

    def of(*parts: str) -> emulator.Ptx:
        return emulator.Ptx(kernel(line + "".join(parts), pointers(1)))

    memory = np.zeros(33 * 32, np.float32)
    skip = -memory.ctypes.data % 128 // 4
    x = memory[skip : skip + 32 * 32]
    assert emulator.run(of(write, discard, write, read), Undefined(x)).ok
    with pytest.raises(KernelFault, match="uninitialised"):
        emulator.run(of(write, discard, read), Undefined(x))
    assert emulator.run(of(discard, read), x).ok
    assert np.isnan(x).all()


@ours
def test_a_report_says_where() -> None:
    text = kernel(
        STORE + "\nadd.s64 %d3, %d1, %d2;\n.loc 1 77 0\nst.global.b32 [%d3], %r1;", pointers(1)
    )
    text += '\n.file 1 "my_kernel.py"\n'
    line = next(i for i, s in enumerate(text.split("\n"), 1) if "st.global" in s)
    target = emulator.Ptx(text, block=(64, 1, 1)).describe(roles={"writer": [0, 1]})
    with pytest.raises(KernelFault) as error:
        emulator.run(target, np.zeros(40, np.uint32))
    place = error.value.finding.place
    assert (place.line, place.source, place.role) == (line, "my_kernel.py:77", "writer")
    assert place.warps == (0, 1)
    assert place.cta == (0, 0, 0)


@section("ld", "Vectors")
def test_vectors_of_64_bits_from_shared_memory() -> None:
    """A 64-bit vector load from shared memory fills whole registers (read by add.f32x2)."""
    body = """
    mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.b32 %r3, dynamic; add.s32 %r4, %r3, %r2;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 16; add.s64 %d3, %d1, %d2;
    ld.param.u64 %d4, [p1]; mul.wide.u32 %d5, %r1, 8; add.s64 %d6, %d4, %d5;
    ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%d3];
    st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};
    ld.shared.v2.b64 {%d7, %d8}, [%r4];
    add.rn.f32x2 %d9, %d7, %d8;
    st.global.b64 [%d6], %d9;
    """
    x = np.random.default_rng(2).normal(size=(32, 4)).astype(np.float32)
    out = np.zeros((32, 2), np.float32)
    run(body, x, out, shared=1024, arch="sm_100a")
    np.testing.assert_array_equal(out, x[:, :2] + x[:, 2:])


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="maps memory below 4 GiB"
)
@ours
def test_arrays_below_4_gib_are_global_memory() -> None:
    """Arrays below 4 GiB are read as global memory, not as shared memory.

    Some Python interpreters have their heap there. Generic addresses of shared memory are in the
    same range.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    private, anonymous, low = 0x2, 0x20, 0x40
    address = libc.mmap(None, 4096, 3, private | anonymous | low, -1, 0)
    assert address is not None
    assert address < 1 << 32
    x = np.ctypeslib.as_array((ctypes.c_uint32 * 32).from_address(address))
    x[:] = T
    body = """
    mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; ld.param.u64 %d1, [p0]; add.s64 %d3, %d1, %d2;
    ld.b32 %r2, [%d3]; add.s32 %r2, %r2, 7; st.b32 [%d3], %r2;
    cvta.shared.u64 %d4, dynamic; add.s64 %d5, %d4, %d2; st.b32 [%d5], %r2;
    """
    run(body, x, shared=256)
    np.testing.assert_array_equal(x, T + 7)


@ours
def test_an_element_that_a_wide_load_reads_and_nothing_uses_needs_no_value() -> None:
    """A wide load may read an unwritten element if nothing uses that element.

    Compilers load a vector of four where three are needed.
    """
    body = """
    mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.b32 %r3, dynamic; add.s32 %r4, %r3, %r2;
    st.shared.v2.b32 [%r4], {%r1, %r2}; st.shared.b32 [%r4+8], %r1;
    ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4];
    add.s32 %r9, %r5, %r6; add.s32 %r9, %r9, LAST;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r9;
    """
    out = np.zeros(32, np.uint32)
    good = run(body.replace("LAST", "%r7"), out, shared=512, mode="race")
    assert good.findings == ()
    assert out.tolist() == [18 * i for i in range(32)]
    bad = run(body.replace("LAST", "%r8"), out, shared=512, mode="race")
    assert [f.kind for f in bad.findings] == ["uninitialised"]


MIXED = """
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mul.wide.u32 %d2, %r1, 4;
    ld.param.u64 %d1, [p0]; add.s64 %d3, %d1, %d2;
    cvta.shared.u64 %d4, dynamic; add.s64 %d5, %d4, %d2;
    mov.u64 %d6, depot; cvta.local.u64 %d7, %d6;
    setp.eq.s32 %p1, %r2, 0; setp.eq.s32 %p2, %r2, 1;
    selp.b64 %d8, %d5, %d3, %p1;
"""


@section("ld", "st", "atom")
def test_lanes_of_one_generic_access_may_be_in_different_state_spaces() -> None:
    body = f"""
    .local .align 16 .b8 depot[32];
    {MIXED}
    selp.b64 %d9, %d7, %d8, %p2;
    st.b32 [%d9], %r1; ld.b32 %r3, [%d9];
    @!%p2 atom.add.u32 %r4, [%d8], 100;
    @!%p2 ld.b32 %r5, [%d8];
    @%p2 add.s32 %r4, %r3, 0; @%p2 add.s32 %r5, %r3, 100;
    add.s32 %r6, %r3, %r4; add.s32 %r6, %r6, %r5;
    st.global.b32 [%d3], %r6;
    """
    out = np.zeros(32, np.uint32)
    for mode in ("eager", "race"):
        run(body, out, shared=256, mode=mode)
        assert out.tolist() == [3 * t + 100 for t in range(32)]
    local = body.replace("@!%p2 atom.add.u32 %r4, [%d8]", "atom.add.u32 %r4, [%d9]")
    assert fault(local, out, shared=256) == "bounds"


@section("ld")
def test_generic_addresses_of_kernel_parameters() -> None:
    """Each lane reads the parameter at its own address."""
    text = kernel(
        """
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; mul.wide.u32 %d2, %r2, 4;
    mov.b64 %d3, p1; cvta.param.u64 %d4, %d3; add.s64 %d5, %d4, %d2;
    ld.b32 %r3, [%d5+OFFSET];
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d6, %r1, 4; add.s64 %d7, %d1, %d6;
    st.global.b32 [%d7], %r3;
    """,
        ".param .u64 p0, .param .u32 p1, .param .u32 p2",
    )
    out = np.zeros(32, np.uint32)
    assert emulator.run(emulator.Ptx(text.replace("OFFSET", "0")), out, 5, 9).ok
    assert out.tolist() == [5, 9] * 16
    with pytest.raises(KernelFault, match="kernel parameters at"):
        emulator.run(emulator.Ptx(text.replace("OFFSET", "8")), out, 5, 9)


@section("Shared State Space", "mapa")
def test_every_lane_must_address_a_cta_that_exists() -> None:
    body = """
    mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 7; mov.b32 %r2, dynamic;
    add.s32 %r3, %r2, 0x1000000; selp.b32 %r4, %r3, %r2, %p1;
    st.shared::cluster.b32 [%r4], %r1;
    """
    with pytest.raises(KernelFault, match="no CTA of rank 1"):
        run(body, shared=256)


@section(
    "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix"
)
@pytest.mark.parametrize("lane", [0, 5])
@pytest.mark.parametrize(
    "what", ["ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4];",
             "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r1};"]
)  # fmt: skip
def test_rows_of_matrices_are_in_the_own_cta(what: str, lane: int) -> None:
    body = f"""
    mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, {lane}; mov.b32 %r2, dynamic;
    add.s32 %r3, %r2, 0x1000000; selp.b32 %r4, %r3, %r2, %p1;
    {what}
    """
    assert fault(body, shared=256) == "bounds"
