"""Check that a programmatic dependent kernel must not read before griddepcontrol.wait."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("cutlass")

import torch

import attnkit
from attnkit import masks
from attnkit.emulator import Executable
from attnkit.jit import emulation, emulator_runs, kernel

WAIT = "griddepcontrol.wait;"


def kinds() -> dict[str, set[str]]:
    """Return the kinds of findings in race mode, by kernel of a Hopper forward and backward."""
    inputs = [torch.randn(1, 1, 140, 64).bfloat16().requires_grad_() for _ in range(3)]
    with emulation.session(mode="race") as session:
        out = attnkit.flex_attention(*inputs, block_mask=masks.causal(), backend="emulate")
        torch.autograd.grad(out, inputs, torch.randn_like(out))
    return {name.split()[0]: {f.kind for f in r.findings} for name, r in session.reports}


def test_the_backward_without_its_wait_reads_what_the_preprocess_still_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set().union(*kinds().values()) == set()
    whole = kernel.CompiledKernel.executable

    def executable(self: kernel.CompiledKernel) -> Executable:
        exe = whole(self)
        if not self.name.startswith("backward"):
            return exe
        assert WAIT in exe.ptx
        return exe.with_ptx(exe.ptx.replace(WAIT, ""))

    monkeypatch.setattr(kernel.CompiledKernel, "executable", executable)
    monkeypatch.setattr(emulator_runs, "_executables", weakref.WeakKeyDictionary())
    found = kinds()
    assert found.pop("backward") == {"race"}
    assert set().union(*found.values()) == set()
