"""Check the arguments of the Hopper kernels at repeated calls, with a stub that records them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import AuxRequest, flex_attention, masks
from attnkit.splice import forward, forward_call, graph_capture, workers
from attnkit.util import devices
from tests.splice.test_graph_capture import Driver, destroy

LENGTH = 300


class There:
    """Stub of a tensor with a given address and the layout of another tensor."""

    def __init__(self, address: int, like: Tensor) -> None:
        self.address, self.like = address, like
        self.shape, self.dtype, self.ndim = like.shape, like.dtype, like.ndim

    def data_ptr(self) -> int:
        return self.address

    def stride(self, *axis: int) -> Any:
        return self.like.stride(*axis)


class Recorder:
    """Stub of compiled kernels that records their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], bool]] = []

    def kernel(self, source: Any) -> Any:
        recorder = self

        class Kernel:
            def __call__(self, *arguments: Any) -> None:
                recorder.calls.append((source.key, arguments, False))

            def relauncher(self, like: Any, changing: Any) -> Callable[..., None]:
                tensors = [i for i in changing if isinstance(like[i], Tensor)]
                others = [i for i in changing if i not in tensors]

                def run(stream: int, addresses: Any, numbers: Any = ()) -> None:
                    found = list(like)
                    for i, address in zip(tensors, addresses, strict=True):
                        assert address % 16 == 0 or like[i].dtype != torch.bfloat16
                        found[i] = There(address, like[i])
                    for i, number in zip(others, numbers, strict=True):
                        found[i] = number
                    recorder.calls.append((source.key, tuple(found), True))

                return run

        return Kernel()

    @property
    def last(self) -> tuple[Any, ...]:
        return self.calls[-1][1]

    @property
    def quick(self) -> bool:
        return self.calls[-1][2]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(devices, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(forward, "kernel", recorder.kernel)
    monkeypatch.setattr(workers, "sm_count", lambda device: 132)
    attnkit.clear_caches()
    yield recorder
    attnkit.clear_caches()


def inputs(length: int = LENGTH, dim: int = 64) -> list[Tensor]:
    return [torch.randn(1, 2, length, dim, dtype=torch.bfloat16) for _ in range(3)]


def attention(qkv: Any, score_mod: Any = None, mask: Any = None, **options: Any) -> Any:
    return flex_attention(*qkv, score_mod, mask, backend="cute", **options)


def same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def test_new_tensors_go_to_the_same_kernel(recorder: Recorder) -> None:
    mask = masks.causal()
    for step in range(4):
        qkv = inputs()
        out, lse = attention(qkv, None, mask, return_lse=True)
        given = recorder.last
        assert all(map(same_memory, given[:5], (*qkv, out, lse)))
        assert recorder.quick == (step > 0)
        assert len(recorder.calls) == step + 1
    first, *rest = [arguments for _, arguments, _ in recorder.calls]
    for arguments in rest:
        assert all(a is b for a, b in zip(first[6:9], arguments[6:9], strict=True))


def test_copies_are_made_where_a_kernel_cannot_read(recorder: Recorder) -> None:
    q, k, v = inputs()
    flat = torch.randn(q.numel() + 1, dtype=torch.bfloat16)
    for wrong in (flat[1:].view(q.shape), torch.randn(1, 2, 64, LENGTH).bfloat16().mT):
        for other in (q, wrong, q, wrong):
            attention((other, k, v))
            given = recorder.last[0]
            assert isinstance(given, There) or torch.equal(given, other)
            assert given.data_ptr() % 16 == 0
            assert given.stride(-1) == 1
            assert same_memory(given, other) == (other is q)
    wide = torch.randn(1, 2, LENGTH, 80, dtype=torch.bfloat16)[..., :64]
    for _ in range(2):
        attention((wide, k, v))
        assert same_memory(recorder.last[0], wide)


def test_the_output_has_the_order_of_the_query(recorder: Recorder) -> None:
    _, k, v = inputs()
    turned = torch.randn(1, LENGTH, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    for _ in range(2):
        out = attention((turned, k, v))
        assert out.stride() == turned.stride()
        assert same_memory(recorder.last[3], out)


def test_the_scale_and_its_sign(recorder: Recorder) -> None:
    qkv = inputs()
    keys = {}
    for scale in (None, 0.25, 0.5, -0.5, -0.25, 0.0, -0.0):
        for _ in range(2):
            attention(qkv, scale=scale)
            assert recorder.last[-3] == (0.125 if scale is None else scale)
            assert str(recorder.last[-3]) == str(0.125 if scale is None else scale)
        keys[scale] = recorder.calls[-1][0]
    assert keys[None] == keys[0.5] == keys[0.25]
    assert keys[-0.5] == keys[-0.25] == keys[0.0] != keys[0.5]


def test_edited_documents_give_other_tables(recorder: Recorder) -> None:
    table = torch.arange(LENGTH) // 130
    mask = masks.document(table) & masks.causal()
    block = attnkit.create_block_mask(mask, None, None, LENGTH, LENGTH)
    fresh = lambda t: masks.document(t.clone()) & masks.causal()
    for divisor in (130, 130, 50, 299):
        table.copy_(torch.arange(LENGTH) // divisor)
        for own in (mask, mask, block, block):
            attention(inputs(), None, own)
            found = recorder.last[6:9]
            attention(inputs(), None, fresh(table))
            assert all(torch.equal(a, b) for a, b in zip(found, recorder.last[6:9], strict=True))


def test_captured_tensors_are_read_where_they_are(recorder: Recorder) -> None:
    bias = torch.randn(2, LENGTH)
    flags, gain = torch.ones(LENGTH, dtype=torch.bool), torch.tensor(2.0)
    mod = lambda s, b, h, q, kv: torch.where(flags[kv], s * gain, 0.0) + bias[h, kv]
    qkv = inputs()
    pointers = lambda: sorted(t.data_ptr() for t in recorder.last[12:-3])
    for step in range(3):
        attention(qkv, mod)
        assert pointers() == sorted(t.data_ptr() for t in (bias, flags, gain))
        assert all(t.ndim and t.dtype != torch.bool for t in recorder.last[12:-3])
        assert recorder.quick == (step > 0)
    bias = torch.randn(2, LENGTH)
    attention(qkv, mod)
    assert bias.data_ptr() in pointers()
    bias = torch.randn(LENGTH, 2).mT
    attention(qkv, mod)
    assert any(same_memory(t, bias) for t in recorder.last[12:-3])
    bias.data = torch.randn(2, LENGTH)
    attention(qkv, mod)
    assert any(same_memory(t, bias) for t in recorder.last[12:-3])


def test_maxima_have_a_kernel_of_their_own(recorder: Recorder) -> None:
    qkv = inputs()
    for _ in range(2):
        _, aux = attention(qkv, return_aux=AuxRequest(lse=True, max_scores=True))
        assert same_memory(recorder.last[5], aux.max_scores)
        attention(qkv)
        assert same_memory(recorder.last[4], recorder.last[5])
    assert len({key for key, *_ in recorder.calls}) == 2


def test_the_operator_reaches_the_same_call(recorder: Recorder) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    table = torch.arange(LENGTH) // 130
    mask = lambda b, h, q, kv: (table[q] == table[kv]) & (q >= kv)
    attention(inputs(), None, mask)
    tables = recorder.last[6:9]
    with Mode():
        attention(inputs(), None, mask)
    assert recorder.quick  # found again: the identity of the mask's tensors survived
    assert all(a is b for a, b in zip(tables, recorder.last[6:9], strict=True))


def test_recording_gradients_changes_nothing_for_the_kernel(recorder: Recorder) -> None:
    bias = torch.randn(2, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + bias[h]
    for _ in range(3):
        qkv = [t.requires_grad_() for t in inputs()]
        out, lse = attention(qkv, mod, masks.causal(), return_lse=True)
        assert out.requires_grad
        assert lse.requires_grad
        assert all(map(same_memory, recorder.last[:5], (*qkv, out, lse)))
    assert recorder.quick


def test_rows_that_are_split_are_put_together(recorder: Recorder) -> None:
    """In every call the combine kernel reads the partial results that the forward kernel wrote."""
    q = torch.randn(1, 1, 16, 64, dtype=torch.bfloat16)
    keys = set()
    for step in range(4):
        k, v = (torch.randn(1, 1, 40_000, 64, dtype=torch.bfloat16) for _ in range(2))
        out, lse = attention((q, k, v), return_lse=True)
        assert len(recorder.calls) == 2 * step + 2
        (first, given, again), (second, joined, also) = recorder.calls[-2:]
        keys.add((first, second))
        assert again == also == (step > 0)
        assert all(map(same_memory, given[:5], (q, k, v, out, lse)))
        assert all(map(same_memory, joined[:2], given[10:12]))
        assert all(map(same_memory, joined[4:], (out, lse)))
    assert len(keys) == 1


def test_a_captured_call_keeps_its_tables(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of a captured call live until the graph is destroyed, whatever is cleared."""
    driver = Driver()
    monkeypatch.setattr(graph_capture, "driver", lambda: driver)
    monkeypatch.setattr(forward_call, "is_capturing", lambda device: True)
    attention(inputs(), None, masks.document(torch.arange(LENGTH) // 130))
    tables = [weakref.ref(t) for t in recorder.last[6:9]]

    def forget() -> None:
        recorder.calls.clear()
        attnkit.clear_caches()
        gc.collect()

    forget()
    assert all(t() is not None for t in tables)
    destroy(driver.captured)
    forget()
    assert all(t() is None for t in tables)
