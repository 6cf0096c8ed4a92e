"""Check the operators registered with torch.library: stable schema, fakes, autograd, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
import attnkit.graph.ir
from attnkit.runtime import torch_ops
from attnkit.runtime.compile import op
from attnkit.sparsity.block_mask import create_block_mask
from attnkit.splice import KernelCall, Program
from attnkit.tracing.tracer import trace

SLOPES = torch.rand(2, requires_grad=True)
DOCUMENTS = torch.arange(70) // 30


def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + SLOPES[h] * (kv - q)


def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv])


def arguments(
    dtype: torch.dtype = torch.float32, needed: bool = True, transposed: bool = False
) -> tuple[Any, ...]:
    shape = (1, 70, 2, 8) if transposed else (1, 2, 70, 8)
    qkv = [torch.randn(shape).to(dtype) for _ in range(3)]
    if transposed:
        qkv = [t.transpose(1, 2) for t in qkv]
    score, keep = trace(mod, "score"), trace(mask, "mask")
    runs, layout = torch_ops.unpack(create_block_mask(mask, None, None, 70, 70, BLOCK_SIZE=32).runs)
    call = KernelCall("cpu", Program(score.root, keep.root), None, needed, needed)
    lists = list(score.tensors), list(keep.tensors), runs
    request = torch_ops.request_of(call)
    return *(t.requires_grad_() for t in qkv), *lists, layout, [], [], request, 0.3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_forward(dtype: torch.dtype, needed: bool, transposed: bool) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.attnkit.attention.default,
        arguments(dtype, needed, transposed),
        test_utils=tests,
    )


def test_opcheck_with_aot_autograd() -> None:
    torch.library.opcheck(torch.ops.attnkit.attention.default, arguments(torch.float64))


def test_opcheck_backward() -> None:
    query, key, value, *rest = arguments()
    out, lse, _, entropy, digest = torch.ops.attnkit.attention(query, key, value, *rest)
    saved = [t.detach() for t in (query, key, value, out, lse, entropy)]
    scores, *others = rest
    detached = [t.detach() for t in scores]
    grads = (torch.randn_like(t) for t in saved[3:])
    torch.library.opcheck(
        torch.ops.attnkit.attention_backward.default,
        (*grads, *saved, digest, detached, *others, [True]),
    )


def test_schema_is_stable() -> None:
    operators = torch.ops.attnkit.attention, torch.ops.attnkit.attention_backward
    schemas = [str(operator.default._schema) for operator in operators]
    assert schemas[0] == "attnkit::attention" + op.ATTENTION
    assert schemas[1] == "attnkit::attention_backward" + op.ATTENTION_BACKWARD


def test_runs_survive_the_operator() -> None:
    runs = create_block_mask(mask, None, None, 70, 70, BLOCK_SIZE=32).runs
    tensors, layout = torch_ops.unpack(runs)
    assert torch_ops.pack(tensors, layout) is runs
    copies = [t.clone() for t in tensors]
    again = torch_ops.pack(copies, layout)
    assert again is not None
    assert again is not runs
    assert torch.equal(again.states(), runs.states())
    assert torch_ops.pack([], []) is None


def test_program_text_reads_back() -> None:
    score, keep = trace(mod, "score").root, trace(mask, "mask").root
    loads = frozenset(n for n in attnkit.graph.ir.topo(score) if n.op == "load")
    checked = Program(score, keep, loads, (("SLOPES",), ()))
    listed = Program(None, keep, lists_override_mask=True)
    for program in (Program(), Program(score), Program(None, keep), checked, listed):
        assert Program.parse(program.text) == program


def test_fake_tensors_need_no_data() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(1, 2, 70, 8, device="meta")
        results = torch.ops.attnkit.attention(query, query, query, *arguments()[3:])
    out, lse, top, entropy, _ = results
    assert out.shape == (1, 2, 70, 8)
    assert out.device.type == "meta"
    assert lse.dtype == top.dtype == entropy.dtype == torch.float32
    assert lse.shape == entropy.shape
