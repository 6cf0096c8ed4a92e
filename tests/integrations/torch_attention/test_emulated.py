"""PyTorch's `varlen_attn` on the emulated Hopper kernel, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.integrations.torch_attention.registration import override
from attnkit.jit import emulation
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import offsets, with_gradients
from tests.integrations.packed_reference import check_close
from tests.integrations.torch_attention.versions import GROUPED


def test_on_hopper() -> None:
    """The second call relaunches kernels, and its backward gets the output of its forward."""
    cu_q, cu_k = offsets([30, 50]), offsets([40, 70])
    handle = override(backend="emulate", dispatch_key="CPU")
    try:
        for step in range(2):
            random = torch.Generator().manual_seed(step)
            shapes = (80, 2, 64), (110, 1, 64), (110, 1, 64)
            tensors = [torch.randn(s, generator=random).bfloat16() for s in shapes]

            def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
                out, lse = varlen.varlen_attn(
                    *(q, k, v, cu_q, cu_k, 50, 70),
                    window_size=(-1, 0),
                    **GROUPED,
                    return_aux=varlen.AuxRequest(lse=True),
                )
                return out, lse.detach()

            def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
                ends = cu_q.tolist(), cu_k.tolist()
                out, lse = packed_reference.attend(q, k, v, *ends, window=(-1, 0))
                return out, lse.detach()

            with emulation.session(mode="eager") as session:
                found = with_gradients(run, tensors)
            names = [name.split()[0] for name, _ in session.reports]
            assert names[0] == "forward"
            assert "backward" in names
            exact = with_gradients(reference, [t.double() for t in tensors])
            check_close(found, exact, with_gradients(reference, tensors))
    finally:
        handle.remove()
