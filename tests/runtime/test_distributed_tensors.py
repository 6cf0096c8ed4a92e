"""Check that calls on parts of tensors are refused: DTensors, and torch's context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import attnkit
from attnkit import flex_attention, masks

LENGTH = 32


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of two ranks, of which this process is rank 0 and the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(length: int = LENGTH) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 16) for _ in range(3)]


def attend(query: Any, key: Any, value: Any) -> Any:
    return flex_attention(query, key, value, None, masks.causal())


def compiled() -> Any:
    return torch.compile(attend, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("placement", [Shard(1), Shard(2), Replicate()])
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_dtensors(mesh: DeviceMesh, placement: Any, argument: str) -> None:
    made = dict(zip(("query", "key", "value"), inputs(), strict=True))
    made[argument] = DTensor.from_local(made[argument], mesh, [placement])
    with pytest.raises(attnkit.UnsupportedError, match=rf"{argument} is a DTensor.*\.to_local\(\)"):
        attend(**made)
    with pytest.raises(torch._dynamo.exc.UserError, match=rf"{argument} is a DTensor"):
        compiled()(**made)


def test_a_dtensor_that_a_mod_reads(mesh: DeviceMesh) -> None:
    table = DTensor.from_local(torch.randn(LENGTH), mesh, [Replicate()])
    call = lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j])
    with pytest.raises(attnkit.TraceError, match=r"got a DTensor; capture what its \.to_local\(\)"):
        call(*inputs())
    with pytest.raises(torch._dynamo.exc.UserError, match="got a DTensor; capture"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs())


def test_context_parallel(mesh: DeviceMesh) -> None:
    """Each rank would attend to its part alone; calls of the same shapes came before."""
    whole, part, whole_graph = inputs(), inputs(LENGTH // 2), compiled()
    expected = attend(*part)
    assert torch.equal(whole_graph(*part), expected)
    with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
        assert whole[0].shape == part[0].shape
        for call in (attend, whole_graph):
            with pytest.raises(attnkit.UnsupportedError, match="this rank's part of the sequence"):
                call(*whole)
    for call in (attend, whole_graph):
        assert torch.equal(call(*part), expected)
