"""Check that kernels which compare captured data beside their own work report each difference.

The kernels run in the emulator. Data on the CPU is normally compared on the host; here the device
compares it, as on a GPU. `HostCheck` stands for the kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import attnkit
from attnkit import StaleDataError, emulator, flex_attention, masks
from attnkit.jit import emulation
from attnkit.jit.kernel import kernel
from attnkit.runtime import data_guard
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.prepare import prepare
from attnkit.schedule.targets import SM90
from attnkit.splice.backward_sources import preprocess_source
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.captured_arguments import tensor_kinds
from attnkit.splice.data_check import check_table, is_dense
from attnkit.splice.fingerprint_check import decode, stale_report
from attnkit.splice.template_registry import backward_template
from attnkit.util.data_state import compare_on_devices, state_of
from attnkit.util.fingerprint import CHUNK, words_of
from tests.runtime.reuse.test_stale_reports import HostCheck

LENGTH = 330
CAUSAL = masks.causal()


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_guard, "FingerprintCheck", HostCheck)
    monkeypatch.setattr(HostCheck, "launches", 0)
    attnkit.clear_caches()
    before = compare_on_devices(lambda device: True)
    yield
    compare_on_devices(*before)
    attnkit.clear_caches()
    assert stale_report.code[0] == 0


def documents(*, step: int = 1) -> Tensor:
    """Return ids of documents of 70 positions, with `step - 1` unused elements between them."""
    ids = torch.arange(LENGTH) // 70
    return torch.stack([ids] * step, -1)[..., 0]


def inputs(*, grad: bool = False, dim: int = 64) -> list[Tensor]:
    return [
        torch.randn(1, 1, LENGTH, dim, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)
    ]


def caller(ids: Tensor, backend: str = "emulate", dim: int = 64) -> Callable[..., Any]:
    mask = masks.document(ids) & CAUSAL
    return lambda *, grad=False: flex_attention(
        *inputs(grad=grad, dim=dim), None, mask, backend=backend
    )


def edit(ids: Tensor, at: int) -> None:
    ids.numpy()[at] ^= 1  # no version counter sees it


def reported() -> tuple[int, int]:
    """Return (number of the guard, position of the tensor) of the report, and clear it."""
    code, stale_report.code[0] = stale_report.code[0], 0
    return decode(code)


@pytest.mark.parametrize(
    ("ctas", "dim"), [(1, 64), (2, 64), pytest.param(2, 512, marks=pytest.mark.exhaustive)]
)
def test_the_forward_kernel_compares(ctas: int, dim: int) -> None:
    """Two warps of one CTA, or four of two, share the three chunks of the ids."""
    ids = documents()
    assert 2 * CHUNK < ids.view(torch.int32).numel() < 3 * CHUNK
    call = caller(ids, dim=dim)
    with emulation.session(mode="check", seeds=1, ctas=ctas) as session:
        call()
    assert session.ok, [str(report) for _, report in session.reports]
    assert stale_report.code[0] == 0
    with emulation.session(ctas=ctas):
        for at in (0, CHUNK // 2 - 1, CHUNK // 2, LENGTH - 1):
            call()
            assert stale_report.code[0] == 0
            edit(ids, at)
            call()
            assert stale_report.code[0]
            with pytest.raises(StaleDataError, match=r"\(torch.int64, shape \(330,\)\)"):
                call()
    assert HostCheck.launches == 0


@pytest.mark.parametrize("rows", [40, 500])
def test_the_preprocess_kernel_compares(rows: int) -> None:
    """Its warps share the chunks of each tensor of the table, and report which one differs."""
    tensors = [
        torch.arange(5 * CHUNK),
        torch.randn(CHUNK - 1),
        torch.randint(0, 2, (36, 5, 8)).bool().transpose(0, 2),
    ]
    states = {3 + i: state_of(t) for i, t in enumerate(tensors)}
    assert all(is_dense(s, torch.device("cpu")) for s in states.values())
    table = check_table(states, 9)
    assert table is not None
    config = {"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "block_q": 128}
    template = backward_template(SM90)
    settings = BackwardSettings(SM90, tuple(sorted(config.items())), (64, 64), template)
    source = preprocess_source(settings, False, checks=tensor_kinds([table.rows]))
    executable = kernel(source).executable()
    padded = -(-rows // 128) * 128
    out, lse = torch.zeros(1, 1, rows, 64, dtype=torch.bfloat16), torch.zeros(1, 1, rows)
    arguments = [out, out, lse, lse, *torch.zeros(2, padded), torch.ones(padded * 64)]
    arguments.append(emulator.Pointers(table.rows, table.reached()))
    report = emulator.check(executable, *arguments, seeds=1)
    assert report.ok, str(report)
    assert stale_report.code[0] == 0
    for position, t in zip(states, tensors, strict=True):
        raw = words_of(t).view(torch.uint8)
        for at in (0, raw.numel() // 2, raw.numel() - 1):
            raw[at] ^= 1
            emulator.run(executable, *arguments)
            raw[at] ^= 1
            assert reported() == (9, position)


def test_a_backward_compares_in_its_first_kernel() -> None:
    ids = documents()
    call = caller(ids)
    for repeats in (1, 2):  # prepared, then relaunched
        for _ in range(repeats):
            with emulation.session(mode="race" if repeats == 1 else "eager") as session:
                call(grad=True).sum().backward()
            assert session.ok, [str(report) for _, report in session.reports]
            assert [name.split()[0] for name, _ in session.reports][:2] == ["forward", "prepare"]
        out = call(grad=True)
        assert stale_report.code[0] == 0
        edit(ids, LENGTH - 1)
        out.sum().backward()
        with pytest.raises(StaleDataError):
            call()
    assert HostCheck.launches == 0


@pytest.mark.parametrize("backend", ["cpu", "emulate"])
def test_what_compares_nothing_launches_a_kernel(backend: str) -> None:
    """This is so for torch operators, and for data with gaps."""
    ids = documents(step=2 if backend == "emulate" else 1)
    with emulation.session(execute=False):
        call = caller(ids, backend)
        for count in (1, 2, 3):
            call()
            assert HostCheck.launches == count
        edit(ids, 100)
        call()
    assert reported()[0]


def test_forwards_that_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.document(documents())
    for backend, checks in (("emulate", True), ("emulate:sm_100a", False)):
        call = AttentionCall(*inputs(), block_mask=mask, backend=backend)
        prepared = prepare(call, launchable=False).call
        assert prepared.kernel_call.check is not None  # for the backward
        assert prepared.launches_check is not checks
    monkeypatch.setattr(data_guard, "is_capturing", lambda device: True)
    prepared = prepare(
        AttentionCall(*inputs(), block_mask=mask, backend="emulate"), launchable=False
    )
    assert prepared.call.kernel_call.check is None  # its table cannot be copied to the device
    assert prepared.call.launches_check


def test_trust_compares_nothing() -> None:
    """The kernel without the comparison runs, and the calls of before are kept."""
    ids = documents()
    call = caller(ids)
    with emulation.session():
        call()
        with attnkit.trust_version_counters():
            for _ in range(3):
                call()
            edit(ids, 3)
            call()
            assert stale_report.code[0] == 0
        call()
    assert reported()[0]
