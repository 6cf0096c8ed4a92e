"""Check that kernels read nothing outside a captured tensor, even if its data was edited unseen."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import flex_attention

LENGTH = 48


def overwrite(t: Tensor, value: int) -> None:
    """Overwrite all elements of a tensor without changing its version counter."""
    new = torch.full_like(t, value)
    ctypes.memmove(t.data_ptr(), new.data_ptr(), new.numel() * new.element_size())


@pytest.mark.parametrize("backend", ["cpu", "emulate", "emulate:sm_100a"])
def test_an_index_from_edited_data_stays_inside(backend: str) -> None:
    """Loads stay inside captured tensors after an unseen edit of the indices.

    An access outside raises: the emulator faults outside every tensor of the kernel, and torch
    checks indices.
    """
    if backend != "cpu":
        pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    ids = (torch.arange(LENGTH) % 6).to(torch.int32)
    learned = torch.randn(6, requires_grad=True)
    limit = torch.tensor([9, 17, 47, 30, 22, 40])
    mod = lambda s, b, h, q, kv: s * 0.5 + learned[ids[kv]]
    mask = lambda b, h, q, kv: kv <= limit[ids[q]]

    def run() -> list[Tensor]:
        qkv = [torch.randn(1, 1, LENGTH, 64).bfloat16().requires_grad_() for _ in range(3)]
        out = flex_attention(*qkv, mod, mask, backend=backend)
        return [out, *torch.autograd.grad(out.float().sum(), [*qkv, learned])]

    run()
    with attnkit.trust_version_counters():  # so that nobody sees the edits
        run()
        for value in (2**31 - 1, -(2**31), 6, -7):
            overwrite(ids, value)
            assert all(t.isfinite().all() for t in run())
    with pytest.raises(attnkit.BoundsError, match=r"learned|limit"):
        run()
