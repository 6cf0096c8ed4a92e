"""Build kernels and operands for the mutation study.

The operands are so long that every ring of stages is filled at least three times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from cutlass import BFloat16, Float32
from cutlass.cute import sym_int
from cutlass.cute.runtime import make_fake_compact_tensor

import attnkit
from attnkit import emulator, masks
from attnkit.emulator import Executable, Undefined
from attnkit.emulator.machine.global_memory import arrays
from attnkit.jit import emulator_runs
from tests.emulator.kernels import blackwell, hopper, micro, simt

Case = tuple[Executable, list[Any], Callable[[], str | None]]


def comparison(got: torch.Tensor, want: torch.Tensor, rtol: float) -> Callable[[], str | None]:
    """Return a check that `got` equals `want` within `rtol` of the largest value."""

    def wrong() -> str | None:
        error = (got.double() - want.double()).abs().max()
        top = want.abs().max()
        return (
            None if bool(error <= rtol * top) else f"error {float(error):.3g} of {float(top):.3g}"
        )

    return wrong


def padded(dtype: Any, divisor: int) -> Any:
    shape = (sym_int(), sym_int(divisibility=divisor))
    return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)


def hopper_case() -> Case:
    kernel = hopper.MappedGemm(30.0)
    specs = (padded(BFloat16, 8), padded(BFloat16, 8), padded(Float32, 4))
    exe = emulator.compile(kernel, *specs, options="--gpu-arch sm_90a")
    a, b = torch.randn(70, 400).bfloat16(), torch.randn(64, 400).bfloat16()
    c = torch.zeros(70, 64)
    want = 30 * torch.tanh(a.double() @ b.double().T / 30)
    return exe, [a, b, c], comparison(c, want, 1e-5)


def blackwell_case() -> Case:
    specs = (
        simt.matrix(BFloat16, None, 64),
        simt.matrix(BFloat16, None, 64),
        simt.matrix(Float32),
        simt.vector(Float32),
    )
    exe = emulator.compile(blackwell.Scores(), *specs, options="--gpu-arch sm_100a")
    a, b = torch.randn(128, 64).bfloat16() / 3, torch.randn(448, 64).bfloat16() / 3
    s, sums = torch.zeros(128, 448), torch.zeros(128)
    want = a.double() @ b.double().T
    first, second = comparison(s, want, 1e-5), comparison(sums, torch.exp2(want).sum(1), 1e-5)
    return exe, [a, b, Undefined(s), Undefined(sums)], lambda: first() or second()


def ring_case() -> Case:
    specs = (simt.vector(Float32), simt.vector(Float32))
    exe = emulator.compile(micro.Ring(), *specs, options="--gpu-arch sm_90a")
    x, y = torch.randn(320), torch.zeros(320)
    return exe, [x, Undefined(y)], comparison(y, 2 * x, 0.0)


def forward_case() -> Case:
    """Return attnkit's Hopper forward kernel, as `backend="emulate"` calls it, with a check.

    The problem is causal and ragged, with two work tiles per CTA. The rings of K and V are filled
    five times.
    """
    calls: list[tuple[Any, list[Any]]] = []

    def keep(kernel: Any, arguments: Any, **_: Any) -> None:
        calls.append((kernel.executable(), list(arguments)))

    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (420, 600, 600))
    mask = masks.causal("bottom-right", q_len=420, kv_len=600)
    with mock.patch.object(emulator_runs, "run_emulated", keep):
        attnkit.flex_attention(q, k, v, block_mask=mask, backend="emulate")
    ((exe, args),) = calls
    want = attnkit.flex_attention(
        q.double(), k.double(), v.double(), block_mask=mask, backend="eager"
    )
    got = next(a.array for a in args if isinstance(a, Undefined) and a.array.shape == want.shape)
    return exe, args, comparison(got, want, 0.02)


def backward_case() -> Case:
    """Return attnkit's main backward kernel for Hopper, with a check.

    The problem is causal and ragged. The rings of Q and dO are filled several times. The check
    compares results with those of the eager mode, with a tolerance for the order in which dQ is
    accumulated.
    """
    calls: list[tuple[Any, list[Any], list[Any], list[Any]]] = []

    def keep(kernel: Any, arguments: Any, **_: Any) -> None:
        exe, before = kernel.executable(), emulator.snapshot(arguments)
        emulator.run(exe, *arguments)
        if kernel.name.startswith("backward"):
            after = [a.clone() for a in arrays(arguments)]
            calls.append((exe, list(arguments), before, after))

    q, k, v = (torch.randn(1, 1, n, 64).bfloat16().requires_grad_() for n in (420, 600, 600))
    mask = masks.causal("bottom-right", q_len=420, kv_len=600)
    with mock.patch.object(emulator_runs, "run_emulated", keep):
        out = attnkit.flex_attention(q, k, v, block_mask=mask, backend="emulate")
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    ((exe, args, before, after),) = calls
    emulator.restore(args, before)
    wrong = [
        comparison(got, want.double(), 0.01)
        for got, want in zip(arrays(args), after, strict=True)
        if want.is_floating_point() and not torch.equal(got, want)
    ]
    assert len(wrong) == 3  # sums of dQ, dK, dV
    return exe, args, lambda: next((text for w in wrong if (text := w())), None)


# cases of the tests
CASES: dict[str, Callable[[], Case]] = {
    "hopper": hopper_case,
    "blackwell": blackwell_case,
    "ring": ring_case,
}
# cases of the command line of `mutation`
STUDIES = {**CASES, "forward": forward_case, "backward": backward_case}
# cases whose results may differ in their last bits, because the schedule decides an order of sums
UNORDERED = {"backward"}
