"""Check calls on tensors without storage of their own: meta, fake and distributed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import attnkit
from attnkit import AuxRequest, create_block_mask, flex_attention, masks, mods

IDS = torch.arange(60) // 7


def inputs(device: str = "cpu") -> list[Tensor]:
    shapes = (2, 4, 60, 16), (2, 2, 50, 16), (2, 2, 50, 24)
    return [torch.randn(s, dtype=torch.float16, device=device).requires_grad_() for s in shapes]


def packed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return IDS.to(q.device)[q] == IDS.to(q.device)[kv]


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_dtypes_and_gradients(device: str, backend: str) -> None:
    slopes = torch.rand(4, device=device, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    real = FakeTensorMode(allow_non_fake_inputs=True) if device == "cpu" else torch.device("meta")
    with real:
        q, k, v = inputs(device)
        block_mask = create_block_mask(packed, None, None, 60, 50, device=device)
        for mask in (None, masks.causal() & masks.sliding_window(7), packed, block_mask):
            out, aux = flex_attention(
                *(q, k, v, mod, mask),
                enable_gqa=True,
                return_aux=AuxRequest(lse=True, max_scores=True),
                backend=backend,
            )
            assert out.shape == (2, 4, 60, 24)
            assert out.dtype == torch.float16
            assert aux.lse.shape == aux.max_scores.shape == (2, 4, 60)
            assert aux.lse.dtype == torch.float32
            assert out.device.type == device
            assert isinstance(out, FakeTensor) == (device == "cpu")
            grads = torch.autograd.grad(out.sum() + aux.lse.sum(), (q, k, v, slopes))
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, slopes.shape]


def test_wrong_arguments_are_wrong_without_data() -> None:
    q, k, v = inputs("meta")
    with pytest.raises(attnkit.ShapeError, match="enable_gqa"):
        flex_attention(q, k, v)
    with pytest.raises(attnkit.TraceError):
        flex_attention(q, k, v, mods.softcap, enable_gqa=True)
    with pytest.raises(attnkit.ArgumentError, match="block_mask"):
        flex_attention(q, k, v, None, torch.ones(60, 50), enable_gqa=True)
    with pytest.raises(attnkit.OptionError, match="scale"):
        flex_attention(q, k, v, None, None, float("nan"), enable_gqa=True)
    with pytest.raises(attnkit.OptionError, match="gpu"):
        flex_attention(q, k, v, enable_gqa=True, backend="gpu")


def test_a_real_call_follows() -> None:
    mask = masks.causal()
    with FakeTensorMode():
        flex_attention(*inputs(), block_mask=mask, enable_gqa=True)
    q, k, v = inputs()
    ours = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    exact = flex_attention(
        *(t.double() for t in (q, k, v)), block_mask=mask, enable_gqa=True, backend="eager"
    )
    assert (ours - exact).abs().max() < 1e-2


def test_distributed_tensors_are_refused() -> None:
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, k, v = (distribute_tensor(t.detach(), mesh, [Shard(1)]) for t in inputs())
        with pytest.raises(attnkit.UnsupportedError, match=r"query is a DTensor.*to_local\(\)"):
            flex_attention(q, k, v, enable_gqa=True)
        local = (t.to_local() for t in (q, k, v))
        assert flex_attention(*local, enable_gqa=True).shape == (2, 4, 60, 24)
    finally:
        distributed.destroy_process_group()
