"""Check unseen writes to captured data: the next call raises, and no access is out of bounds."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit import StaleDataError, create_block_mask, flex_attention, masks
from attnkit.splice.fingerprint_check import (
    FingerprintCheck,
    decode,
    fingerprint_on_device,
    stale_report,
)
from attnkit.util.fingerprint import fingerprint
from tests.gpu import cute_kit as kit

LENGTH = 900

Writer: TypeAlias = Callable[[Tensor, Tensor], None]


def by_dlpack(t: Tensor, new: Tensor) -> None:
    torch.from_dlpack(t.detach()).copy_(new)


def by_data(t: Tensor, new: Tensor) -> None:
    t.data.copy_(new)


def by_storage(t: Tensor, new: Tensor) -> None:
    t.untyped_storage().copy_(new.clone().untyped_storage())


def by_driver(t: Tensor, new: Tensor) -> None:
    """Overwrite `t` with `new` by a driver call, unseen by torch, like a custom CUDA kernel."""
    torch.cuda.synchronize()
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2
    size = new.numel() * new.element_size()
    places = ctypes.c_uint64(t.data_ptr()), ctypes.c_uint64(new.data_ptr())
    assert copy(*places, ctypes.c_size_t(size)) == 0
    torch.cuda.synchronize()


WRITERS: dict[str, Writer] = {
    name.removeprefix("by_"): writer
    for name, writer in list(globals().items())
    if name.startswith("by_")
}


def documents(size: int) -> Tensor:
    return torch.arange(LENGTH, device=kit.DEVICE) // size


def inputs(seed: int = 0, grad: bool = False) -> list[Tensor]:
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE}
    drawn = [torch.randn(2, 4, LENGTH, 64, **options).to(torch.bfloat16) for _ in range(3)]
    return [t.requires_grad_(grad) for t in drawn]


def calls(ids: Tensor, backend: str = kit.BACKEND) -> dict[str, Callable[[list[Tensor]], Tensor]]:
    """Return functions that call attention with tiles that depend on `ids`, by kind of call."""
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    ours = create_block_mask(mask, None, None, LENGTH, LENGTH, device=kit.DEVICE)
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, None, mask, backend=backend), fullgraph=True
    )
    return {
        "function": lambda qkv: flex_attention(*qkv, None, mask, backend=backend),
        "library": lambda qkv: flex_attention(
            *qkv, None, masks.document(ids) & masks.causal(), backend=backend
        ),
        "block mask": lambda qkv: flex_attention(*qkv, None, ours, backend=backend),
        "operator": lambda qkv: compiled(*qkv),
    }


WAYS = ["function", "library", "block mask", "operator"]


def fresh(call: Callable[[list[Tensor]], Tensor], qkv: list[Tensor]) -> Tensor:
    """Return the result of a call with empty caches."""
    attnkit.clear_caches()
    gc.collect()
    return call(qkv)


@pytest.fixture(autouse=True)
def _no_report_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    attnkit.clear_caches()
    yield
    torch.cuda.synchronize()
    assert stale_report.code[0] == 0


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", list(WRITERS))
def test_the_next_call_raises_once(writer: str, way: str, count: int) -> None:
    ids, qkv = documents(70), inputs()
    call = calls(ids)[way]
    for size in (300, 41):
        for _ in range(count):
            call(qkv)
        WRITERS[writer](ids, documents(size))
        call(qkv)  # computes with old tiles
        torch.cuda.synchronize()
        with pytest.raises(StaleDataError, match=r"\(torch.int64, shape \(900,\)\)"):
            call(qkv)
    assert torch.equal(call(qkv), fresh(call, qkv))


def test_a_triton_kernel() -> None:
    triton = pytest.importorskip("triton")
    from tests.gpu.triton_kernels import add_one_at

    ids, qkv = documents(70), inputs()
    call = calls(ids)["function"]
    for _ in range(3):
        call(qkv)
    add_one_at[(1,)](ids, 450)
    call(qkv)
    torch.cuda.synchronize()
    assert triton.__version__
    with pytest.raises(StaleDataError, match="'ids'"):
        call(qkv)
    assert torch.equal(call(qkv), fresh(call, qkv))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fused_optimizers(name: str) -> None:
    gate = torch.nn.Parameter(torch.full((LENGTH,), -1.0, device=kit.DEVICE))
    optimizer = getattr(torch.optim, name)([gate], lr=0.7, fused=True)
    mask = lambda b, h, q, kv: (gate[kv] > 0) | (q == kv)
    call = lambda qkv: flex_attention(*qkv, None, mask, backend=kit.BACKEND)
    qkv = inputs()
    for _ in range(3):
        for _ in range(3):
            call(qkv)
        gate.grad = -torch.arange(1.0, LENGTH + 1, device=kit.DEVICE) / LENGTH
        optimizer.step()
        call(qkv)  # right if the optimizer raised the version counter
        torch.cuda.synchronize()
        try:
            found = call(qkv)
        except StaleDataError:
            found = call(qkv)
        assert torch.equal(found, fresh(call, qkv))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", list(WRITERS))
def test_invalidate_after_the_write_is_enough(writer: str, way: str) -> None:
    ids, qkv = documents(70), inputs()
    call = calls(ids)[way]
    for size in (300, 41):
        for _ in range(3):
            call(qkv)
        WRITERS[writer](ids, documents(size))
        attnkit.invalidate(ids)
        found = call(qkv)
        torch.cuda.synchronize()
        again = call(qkv)
        assert torch.equal(found, again)
        assert torch.equal(found, fresh(call, qkv))


@pytest.mark.parametrize("way", WAYS)
def test_a_call_of_another_kind_has_tiles_of_its_own(way: str) -> None:
    """After an unseen write, a call that is not yet prepared computes new tiles.

    Its preparation waits for the GPU and compares data before it uses cached results.
    """
    ids, qkv = documents(70), inputs()
    call = calls(ids)[way]
    for _ in range(3):
        call(qkv)
    by_driver(ids, documents(300))
    few = [t[:, :2].contiguous() for t in qkv]
    for own in (few, qkv):
        assert torch.equal(call(own), fresh(call, own))


def test_many_edits_by_torch_raise_nothing() -> None:
    ids, qkv = documents(70), inputs()
    call = calls(ids)["library"]
    for size in (70, 300, 41, 900, 7):
        ids.copy_(documents(size))
        for _ in range(20):
            found = call(qkv)
        torch.cuda.synchronize()
        assert torch.equal(found, fresh(call, qkv))


@pytest.mark.parametrize("way", WAYS)
def test_a_write_before_the_backward(way: str) -> None:
    ids = documents(70)
    call = calls(ids)[way]
    for _ in range(3):
        call(inputs(grad=True)).sum().backward()
    out = call(inputs(grad=True))
    torch.cuda.synchronize()
    by_driver(ids, documents(300))
    out.sum().backward()
    torch.cuda.synchronize()
    with pytest.raises(StaleDataError):
        call(inputs())


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@pytest.mark.parametrize("writer", ["torch", *WRITERS])
def test_a_graph_that_is_replayed_after_a_write(writer: str) -> None:
    """A replay of a CUDA graph after a write to captured data is reported.

    This includes writes that torch saw, because a graph uses the tiles of its capture.
    """
    ids, qkv = documents(70), inputs()
    call = calls(ids)["function"]
    expected = call(qkv)
    graph, found = captured(lambda: call(qkv))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert stale_report.code[0] == 0
    if writer == "torch":
        ids.copy_(documents(300))
    else:
        WRITERS[writer](ids, documents(300))
    for _ in range(2):  # each replay with other data is reported
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(StaleDataError):
            call(qkv)
    assert torch.equal(call(qkv), fresh(call, qkv))


def test_a_graph_outlives_what_it_compares() -> None:
    qkv = inputs()

    def build() -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        ids = documents(70)
        mask = masks.document(ids)
        call = lambda: flex_attention(*qkv, None, mask, backend=kit.BACKEND)
        expected = call()
        return *captured(call), expected

    graph, found, expected = build()
    attnkit.clear_caches()
    gc.collect()
    junk = [torch.full((n,), 7, dtype=torch.int64, device=kit.DEVICE) for n in range(1, 4000, 3)]
    found.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert junk
    assert torch.equal(found, expected)
    assert stale_report.code[0] == 0


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 6, -7])
def test_an_index_from_edited_data_stays_inside(value: int) -> None:
    """Loads stay inside captured tensors after an unseen edit of the indices.

    The tables are between NaNs, which a read outside would bring into the result.
    """
    memory = torch.full((3, 1 << 20), torch.nan, device=kit.DEVICE)
    learned = memory[1, :6].copy_(torch.randn(6, device=kit.DEVICE)).requires_grad_()
    ids = (torch.arange(LENGTH, device=kit.DEVICE) % 6).to(torch.int32)
    limit = torch.tensor([90, 170, 470, 300, 220, 400], device=kit.DEVICE)
    mod = lambda s, b, h, q, kv: s * 0.5 + learned[ids[kv]]
    mask = lambda b, h, q, kv: kv <= limit[ids[q]]

    def run() -> list[Tensor]:
        qkv = inputs(grad=True)
        out = flex_attention(*qkv, mod, mask, backend=kit.BACKEND)
        return [out, *torch.autograd.grad(out.float().sum(), [*qkv, learned])]

    for _ in range(3):
        run()
    with attnkit.trust_version_counters():
        run()  # compares the data once
        by_driver(ids, torch.full_like(ids, value))
        results = run()
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in results)

    def again() -> None:
        for _ in range(2):  # the backward of the first may find the report already
            run()
            torch.cuda.synchronize()

    with pytest.raises(StaleDataError, match="'ids'"):
        again()
    with pytest.raises(attnkit.BoundsError):
        run()


def test_block_lists() -> None:
    everything = lambda b, h, q, kv: q >= 0
    mask = flex.create_block_mask(everything, None, None, LENGTH, LENGTH, device=kit.DEVICE)
    qkv = inputs()
    call = lambda: flex_attention(*qkv, None, mask, backend=kit.BACKEND)
    for _ in range(3):
        call()
    assert mask.full_kv_num_blocks is not None
    by_driver(mask.full_kv_num_blocks, mask.full_kv_num_blocks.clamp(max=1))
    call()
    torch.cuda.synchronize()
    with pytest.raises(StaleDataError, match="'full_kv_num_blocks'"):
        call()
    assert torch.equal(call(), fresh(lambda _: call(), qkv))


def test_torch_operators_compare_too() -> None:
    ids, qkv = documents(70), inputs()
    call = calls(ids, backend="cpu")["function"]
    call(qkv)
    by_driver(ids, documents(300))
    call(qkv)
    torch.cuda.synchronize()
    with pytest.raises(StaleDataError):
        call(qkv)
    assert torch.equal(call(qkv), fresh(call, qkv))


def test_calls_do_not_wait_for_the_device() -> None:
    ids, qkv = documents(70), inputs()
    call = calls(ids)["function"]
    for _ in range(3):
        call(qkv)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        for _ in range(5):
            call(qkv)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_streams_and_devices() -> None:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            ids = torch.arange(LENGTH, device=device) // 70
            qkv = [t.to(device) for t in inputs()]
            call = calls_on(ids)
            for _ in range(3):
                call(qkv)
            torch.cuda.synchronize()
            by_driver(ids, torch.zeros_like(ids))
            call(qkv)
            torch.cuda.synchronize()
        with pytest.raises(StaleDataError):
            call(qkv)


def calls_on(ids: Tensor) -> Callable[[list[Tensor]], Tensor]:
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    return lambda qkv: flex_attention(*qkv, None, mask, backend=kit.BACKEND)


def kinds() -> Iterator[Tensor]:
    """Yield tensors of many dtypes and strides."""
    wide = torch.randint(-(2**60), 2**60, (60, 50, 40), device=kit.DEVICE)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64):
        t = wide.to(dtype)
        yield from (t, t[:, ::2, 1], t[3:, 7:, 5:], t.permute(2, 0, 1), t[0, 0, :3], t[:1].expand(4, 50, 40))  # fmt: skip
    yield torch.randn(1 << 24, device=kit.DEVICE)


def test_the_kernel_agrees_with_the_definition() -> None:
    for number, t in enumerate(kinds(), 1):
        assert torch.equal(fingerprint_on_device(t), fingerprint(t))
        check = FingerprintCheck({3: (t, fingerprint(t))}, number)
        check()
        torch.cuda.synchronize()
        assert stale_report.code[0] == 0
        place = t[tuple(n // 2 for n in t.shape)]
        place.fill_(bool(place == 0))
        check()
        torch.cuda.synchronize()
        code, stale_report.code[0] = stale_report.code[0], 0
        assert decode(code) == (number, 3)
