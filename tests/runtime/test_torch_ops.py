"""Check the operators registered with torch.library: stable schema, fakes, autograd, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
import attnkit.graph.ir
from attnkit.runtime import torch_ops
from attnkit.sparsity.block_mask import create_block_mask
from attnkit.splice import Program
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
    program = Program(score.root, keep.root).text
    lists = list(score.tensors), list(keep.tensors), runs
    return *(t.requires_grad_() for t in qkv), *lists, layout, program, "cpu", 0.3, needed, needed


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_forward(dtype: torch.dtype, needed: bool, transposed: bool) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.attnkit.forward.default, arguments(dtype, needed, transposed), test_utils=tests
    )


def test_opcheck_with_aot_autograd() -> None:
    torch.library.opcheck(torch.ops.attnkit.forward.default, arguments(torch.float64))


def test_opcheck_backward() -> None:
    query, key, value, *rest = arguments()
    out, lse, _, entropy = torch.ops.attnkit.forward(query, key, value, *rest)
    saved = [t.detach() for t in (query, key, value, out, lse, entropy)]
    scores, masks, runs, layout, program, template, scale, *_ = rest
    detached = [t.detach() for t in scores]
    torch.library.opcheck(
        torch.ops.attnkit.backward.default,
        (
            *(torch.randn_like(t) for t in saved[3:]),
            *(*saved, detached, masks, runs, layout, program, template, scale, [True]),
        ),
    )


def test_schema_is_stable() -> None:
    schemas = [
        str(op.default._schema) for op in (torch.ops.attnkit.forward, torch.ops.attnkit.backward)
    ]
    assert schemas[0] == "attnkit::forward" + torch_ops.FORWARD
    assert schemas[1] == "attnkit::backward" + torch_ops.BACKWARD


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
        results = torch.ops.attnkit.forward(query, query, query, *arguments()[3:])
    out, lse, top, entropy = results
    assert out.shape == (1, 2, 70, 8)
    assert out.device.type == "meta"
    assert lse.dtype == top.dtype == entropy.dtype == torch.float32
    assert lse.shape == entropy.shape
