"""Check torch transforms without a rule for attention, and unusual states of user tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnkit import clear_caches, create_block_mask, flex_attention, masks, mods
from attnkit.errors import ArgumentError, UnsupportedError
from attnkit.runtime import data_guard
from attnkit.util.data_state import compare_on_devices


def inputs() -> list[Tensor]:
    return [torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3)]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def batched(out: Tensor, query: Tensor) -> Any:
    return torch.autograd.grad(out, query, torch.randn(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("repeated", [False, True])
def test_batched_gradients_are_refused(repeated: bool) -> None:
    query, key, value = inputs()
    if repeated:  # the backward could be relaunched
        flex_attention(query, key, value, None, causal).sum().backward()
    out = flex_attention(query, key, value, None, causal)
    with pytest.raises(UnsupportedError, match="is_grads_batched") as caught:
        batched(out, query)
    assert "once for each gradient" in str(caught.value)


def test_a_vectorized_jacobian_is_refused() -> None:
    query, key, value = inputs()
    attend: Callable[[Tensor], Tensor] = lambda q: flex_attention(q, key, value, None, causal)
    with pytest.raises(UnsupportedError, match="jacobian with vectorize=True"):
        torch.autograd.functional.jacobian(attend, query, vectorize=True)
    rows = torch.autograd.functional.jacobian(attend, query)
    assert rows.shape == (1, 2, 8, 8) * 2


def test_the_dense_oracle_batches_gradients() -> None:
    query, key, value = inputs()
    out = flex_attention(query, key, value, None, causal, backend="eager")
    cotangents = torch.randn(3, *out.shape)
    (together,) = torch.autograd.grad(
        out, query, cotangents, is_grads_batched=True, retain_graph=True
    )
    alone = [torch.autograd.grad(out, query, c, retain_graph=True)[0] for c in cotangents]
    torch.testing.assert_close(together, torch.stack(alone))


def test_inference_tensors_in_a_recorded_call_are_refused() -> None:
    query, key, value = inputs()
    with torch.inference_mode():
        bias = torch.randn(8)
    with pytest.raises(UnsupportedError, match=r"was created in torch\.inference_mode"):
        flex_attention(query, key, value, lambda s, b, h, q, kv: s + bias[kv])
    with torch.no_grad():
        flex_attention(query, key, value, lambda s, b, h, q, kv: s + bias[kv])


@pytest.fixture(params=[True, False])
def swapping(request: Any) -> Iterator[bool]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("to", ["double", "bfloat16"])
def test_a_module_converted_after_a_call(swapping: bool, to: str) -> None:
    """A captured parameter may be converted to another dtype after a call.

    With swapping, the parameter keeps its identity but gets another dtype and other data.
    """
    module = nn.Module()
    module.bias = nn.Parameter(torch.randn(2, 8))
    mod = lambda s, b, h, q, kv: s + module.bias[h, kv]
    held = module.bias
    by_cell = lambda s, b, h, q, kv: s + held[h, kv]
    tensors = inputs()
    for f in (mod, by_cell):
        for _ in range(3):
            out = flex_attention(*tensors, f, causal)
            out.sum().backward()
    module.bias.grad = None
    del out
    getattr(module, to)()
    for f in (mod, by_cell) if swapping else (mod,):
        for _ in range(3):
            module.bias.grad = None
            out = flex_attention(*tensors, f, causal)
            expected = flex_attention(*tensors, f, causal, backend="eager")
            torch.testing.assert_close(out, expected)
            out.sum().backward()
            assert module.bias.grad is not None
            assert module.bias.grad.dtype == module.bias.dtype


BIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "closure": lambda p: lambda s, b, h, q, kv: s + p[h, kv],
    "default": lambda p: lambda s, b, h, q, kv, bias=p: s + bias[h, kv],
    "list": lambda p: (lambda held: lambda s, b, h, q, kv: s + held[0][h, kv])([p]),
    "dict": lambda p: (lambda held: lambda s, b, h, q, kv: s + held["p"][0][h, kv])({"p": (p,)}),
    "partial": lambda p: partial(lambda bias, s, b, h, q, kv: s + bias[h, kv], p),
    "library": lambda p: mods.t5_bias(p, bidirectional=False),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_captured_parameter_can_be_swapped(name: str) -> None:
    """Its identity stays, its data and dtype change. torch refuses it for weak references.

    The second swap follows calls with the other dtype.
    """
    held = nn.Parameter(torch.randn(2, 8))
    mod = BIASES[name](held)
    tensors = inputs()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float16):
        other = nn.Parameter(torch.randn(2, 8, dtype=dtype))
        torch.utils.swap_tensors(held, other)
        del other
        for _ in range(3):
            out = flex_attention(*tensors, mod, causal)
            expected = flex_attention(*tensors, mod, causal, backend="eager")
            torch.testing.assert_close(out, expected)
            out.sum().backward()
            assert held.grad is not None
            assert held.grad.dtype == dtype
            held.grad = None
        del out, expected


@pytest.mark.parametrize("size", [0, 8])
@pytest.mark.parametrize("kind", ["index", "mask"])
def test_a_storage_that_is_freed_after_a_call(kind: str, size: int) -> None:
    """FSDP frees the storages of parameters between uses."""
    table = torch.arange(8)
    weight = torch.randn(8)
    mod = None if kind == "mask" else lambda s, b, h, q, kv: s + weight[table[kv]]
    mask = (lambda b, h, q, kv: table[q] >= table[kv]) if kind == "mask" else None
    for _ in range(3):
        flex_attention(*inputs(), mod, mask)
    table.untyped_storage().resize_(size)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="storage is smaller than the tensor"):
            flex_attention(*inputs(), mod, mask)


MASKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "function": lambda p: lambda b, h, q, kv: (p[kv] > 0) | (q == kv),
    "library": lambda p: masks.document(p),
    "block mask": lambda p: create_block_mask(
        lambda b, h, q, kv: (p[kv] > 0) | (q == kv), None, None, 8, 8
    ),
}


@pytest.mark.parametrize("compares_on_device", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_parameter_that_a_mask_reads_can_be_swapped(
    name: str, compares_on_device: bool, request: pytest.FixtureRequest
) -> None:
    """Tiles depend on its data. On a device that compares data itself, the host does not."""
    if compares_on_device:
        request.addfinalizer(partial(compare_on_devices, *compare_on_devices(lambda device: True)))
        request.addfinalizer(clear_caches)
        request.getfixturevalue("monkeypatch").setattr(data_guard, "FingerprintCheck", NoCheck)
    dtypes = (torch.int64, torch.int32) if name == "library" else (torch.float32, torch.float16)

    def fresh(i: int) -> nn.Parameter:
        data = torch.arange(8) // (2 + i) - 1
        return nn.Parameter(data.to(dtypes[i % 2]), requires_grad=False)

    held = fresh(0)
    mask = MASKS[name](held)
    tensors = inputs()
    kept = [held.data]  # so that a later parameter does not get the memory of an earlier one
    for i in (1, 0, 2, 4, 3):
        for _ in range(3):
            out = flex_attention(*tensors, None, mask)
            expected = flex_attention(*tensors, None, mask, backend="eager")
            torch.testing.assert_close(out, expected)
            out.sum().backward()
        del out, expected
        other = fresh(i)
        torch.utils.swap_tensors(held, other)
        del other
        kept.append(held.data)
        if i == 2:
            kept.clear()


class NoCheck:
    """Stand for a GPU check of data that nobody edits in place."""

    def __init__(self, tensors: Any, number: int) -> None:
        self.device = torch.device("cpu")

    def __call__(self) -> None:
        pass
