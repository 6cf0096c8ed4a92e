"""Compare statistics read from CUBINs with the assembler's report, and code with nvdisasm."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from cutlass import cute

from attnkit.errors import ArgumentError
from attnkit.jit.cubin import kernel_code, kernel_stats
from attnkit.jit.kernel import Build
from attnkit.jit.sass_checks import late_fences, loops, problems
from tests.jit import compiled_kernels as kernels

BUILDS = {
    "affine": kernels.affine,
    "patient": lambda: kernels.register_product(False),
    "hasty": lambda: kernels.register_product(True),
    "spilling": kernels.spilling,
}


def compile_cubin(build: Build, folder: Path, options: str = "", arch: str = "sm_90a") -> bytes:
    keep = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder} {options}"
    cubin: bytes = cute.compile(build.function, *build.arguments, options=keep).artifacts.CUBIN
    return cubin


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("cubins")
    return {name: compile_cubin(build(), folder) for name, build in BUILDS.items()}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *(
            (name, arch)
            for name in ("affine", "spilling")
            for arch in ("sm_80", "sm_90a", "sm_100a")
        ),
        ("patient", "sm_90a"),
    ],
)
def test_stats_are_what_the_assembler_reports(
    name: str, arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build = BUILDS[name]()
    (stats,) = kernel_stats(compile_cubin(build, tmp_path, "--ptxas-options -v remarks{ptx}", arch))
    said = capfd.readouterr().err
    registers = re.search(r"Used (\d+) registers", said)
    stack = re.search(r"(\d+) bytes stack frame", said)
    assert registers is not None, said
    assert stats.registers == int(registers[1])
    assert stats.stack == (int(stack[1]) if stack else 0)
    assert stats.threads == (512 if name == "spilling" else 128)


def test_stats_of_shared_memory_and_code(cubins: dict[str, bytes]) -> None:
    (affine,) = kernel_stats(cubins["affine"])
    assert affine.shared == 0
    assert affine.code == len(kernel_code(cubins["affine"])[affine.name])
    assert affine.code % 128 == 0
    (product,) = kernel_stats(cubins["patient"])
    assert product.code > affine.code


def test_spilled_registers_are_a_problem(cubins: dict[str, bytes]) -> None:
    (stats,) = kernel_stats(cubins["spilling"])
    assert stats.stack > 1000
    (text,) = problems(cubins["spilling"], "sm_90a")
    assert text.startswith(f"{stats.name}: a stack frame of {stats.stack} bytes")


def test_serialised_products_are_a_problem(cubins: dict[str, bytes]) -> None:
    """A loop whose products the assembler serialises is reported as a problem.

    The two kernels have the same loop of four products and change A after the wait or before it.
    """
    assert problems(cubins["affine"], "sm_90a") == ()
    assert problems(cubins["patient"], "sm_90a") == ()
    (patient,) = loops(*kernel_code(cubins["patient"]).values())
    assert (patient.products, patient.waits, patient.serialised) == (4, 1, False)
    (hasty,) = loops(*kernel_code(cubins["hasty"]).values())
    assert (hasty.products, hasty.waits, hasty.serialised) == (4, 4, True)
    (text,) = problems(cubins["hasty"], "sm_90a")
    assert "4 HGMMA, 4 waits: products are serialised" in text
    assert problems(cubins["hasty"], "sm_100a") == ()  # other instructions


# As nvdisasm 13.5 prints them.
_ARRIVE = (0x00000000000079C5, 0x000FE20000000000)
_WAIT = (0x00008000000079C5, 0x000FE40000010000)
_FROM_SHARED = (0x00E00000101879F0, 0x000FE20008701818)
_FROM_REGISTERS = (0x00E0000C44187DF0, 0x000FE20000701818)
_NOP = (0x0000000000007918, 0x000FC00000000000)


_FENCE = (0x00000000000073C6, 0x002F220000000000)  # counter 4
_BARRIER = (0x00C4000000007B1D, 0x014FE20000010000)  # waits for counters 2 and 4
_BARRIER_LATE = (0x00C4000000007B1D, 0x004FE20000010000)  # for counter 2
_NOP_AFTER = (0x0000000000007918, 0x010FC00000000000)  # waits for counter 4
_BACK = (0xFFFFFFFC00E80947, 0x000FEA000383FFFF)


def _program(*words: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *w) for w in words)


def test_a_fence_that_is_waited_for_behind_a_branch_is_found() -> None:
    assert late_fences(_program(_NOP, _FENCE, _BACK, _BARRIER)) == [16]
    assert late_fences(_program(_NOP, _FENCE, _BARRIER, _BACK)) == []
    assert late_fences(_program(_NOP, _FENCE, _NOP_AFTER, _BACK, _BARRIER)) == []
    assert late_fences(_program(_FENCE, _BARRIER_LATE, _NOP, _BACK, _BARRIER)) == [0]
    assert late_fences(_program(_FENCE, _FENCE, _NOP)) == []


def test_branches_and_products_are_decoded() -> None:
    back = (0xFFFFFFFC00E87947, 0x000FEA000383FFFF)  # to 6 instructions before the next
    body = [_ARRIVE, _FROM_SHARED, _FROM_REGISTERS, _WAIT, _NOP]
    (loop,) = loops(_program(_NOP, *body, back, _NOP))
    assert (loop.start, loop.end) == (0x10, 0x60)
    assert (loop.products, loop.waits, loop.alone) == (2, 1, 1)
    forward = (0x0000000400407947, 0x000FEA0003800000)
    assert loops(_program(_NOP, *body, forward)) == []
    assert loops(_program(*[_NOP] * 6, back)) == []  # nothing to wait for in it


@pytest.mark.parametrize(
    ("address", "low", "high", "target"),
    [
        (0x00E0, 0x0000000000401947, 0x022FEA0003800000, 0x01F0),
        (0x0280, 0x00000004000C2947, 0x000FEC0003800000, 0x06C0),
        (0x0C60, 0xFFFFFFFC004C1947, 0x000FEA000383FFFF, 0x09A0),
        (0x0EB0, 0xFFFFFFF800240947, 0x000FEA000383FFFF, 0x0750),
    ],
)
def test_targets_of_branches_are_those_of_nvdisasm(
    address: int, low: int, high: int, target: int
) -> None:
    words = [_FROM_SHARED] * (address // 16) + [(low, high)]
    found = loops(_program(*words))
    assert [(x.start, x.end) for x in found] == [(target, address)] * (target <= address)


def test_what_is_no_cubin_is_refused(cubins: dict[str, bytes]) -> None:
    for data in (b"", b"\x7fELF", b"PTX text", b"\0" * 4096):
        with pytest.raises(ArgumentError, match="CUBIN"):
            kernel_stats(data)
        with pytest.raises(ArgumentError, match="CUBIN"):
            kernel_code(data)


@given(data=st.data())
def test_a_damaged_cubin_is_refused_or_read(cubins: dict[str, bytes], data: st.DataObject) -> None:
    """A damaged CUBIN raises no error other than ArgumentError."""
    damaged = bytearray(cubins["affine"])
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(damaged)))
    with contextlib.suppress(ArgumentError):
        problems(bytes(damaged[:length]), "sm_90a")
