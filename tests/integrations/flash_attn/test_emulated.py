"""Packed sequences in the emulated Hopper kernel, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.integrations.flash_attn import flash_attn_varlen_func
from attnkit.jit import emulation
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import offsets, with_gradients
from tests.integrations.packed_reference import check_close


@pytest.mark.exhaustive  # `torch_attention` tests the same kernels
def test_on_hopper() -> None:
    """Sequences of unequal queries and keys, some empty, with slopes for each sequence."""
    cu_q, cu_k = offsets([20, 0, 70, 10]), offsets([40, 9, 0, 60])
    random = torch.Generator().manual_seed(0)
    shapes = (103, 2, 64), (110, 1, 64), (110, 1, 64)  # tokens after the last sequence
    tensors = [torch.randn(s, generator=random).bfloat16() for s in shapes]
    slopes = torch.rand(4, 2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, 70, 60),
            causal=True,
            alibi_slopes=slopes,
            return_softmax_lse=True,
            backend="emulate",
        )

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends = cu_q.tolist(), cu_k.tolist()
        return packed_reference.attend(q, k, v, *ends, window=(-1, 0), slopes=slopes)

    with emulation.session(mode="check", seeds=1) as session:
        found = with_gradients(run, tensors)
    assert session.ok, [str(report) for _, report in session.reports]
    assert any(name.startswith("backward") for name, _ in session.reports)
    exact = with_gradients(reference, [t.double() for t in tensors])
    check_close(found, exact, with_gradients(reference, tensors))
