"""Evaluate emitted expressions on the CPU, with the DSL's compiler for host code.

Tests use this to check the emitter without a GPU. The operations are the same as in kernels (`emit`
with `fast=False`), and the same compiler compiles them for the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from attnkit.codegen.emit_cute import LOAD_INDICES, Value, emit
from attnkit.codegen.load_indices import LoadIndices
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, arg, reads

_DTYPES: dict[Type, torch.dtype] = {I32: torch.int32, F32: torch.float32, BOOL: torch.bool}


def run_on_cpu(
    roots: Sequence[Node],
    env: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    *,
    indices: LoadIndices = LOAD_INDICES,
) -> list[Tensor]:
    """Evaluate expressions on the CPU with the code that a kernel would use.

    Args:
        roots: the expressions. They are compiled into one function, which takes tens of
            milliseconds.
        env: argument name -> CPU tensor, of any shapes that broadcast together.
        tensors: captured CPU tensors by slot, of any number dtype.
        indices: which loads wrap negative indices, and which are clamped, as in `emit`.

    Returns:
        One int32, float32 or bool tensor per root, with the broadcast shape of the arguments that
        the roots read.
    """
    names = sorted(reads(*roots))
    arguments = torch.broadcast_tensors(*(env[name] for name in names)) if names else []
    shape = arguments[0].shape if names else torch.Size([])
    inputs = [
        value.to(_DTYPES[arg(name).type]).contiguous().view(-1)
        for name, value in zip(names, arguments, strict=True)
    ]
    outputs = [torch.empty(shape.numel(), dtype=_DTYPES[r.type]) for r in roots]
    if shape.numel() > 0 and roots:
        body = _Body(tuple(roots), tuple(names), indices)
        captured = [from_dlpack(t.detach().reshape(t.shape or (1,))) for t in tensors]
        values = [*(_flexible(t) for t in (*inputs, *outputs)), *captured]
        count = cutlass.Int32(shape.numel())
        compiled = cute.compile(_loop, count, values, body)  # unlike a call, writes no cache file
        compiled(count, values)
    return [o.view(shape) for o in outputs]


def _flexible(tensor: Tensor) -> Value:
    """Convert a flat tensor to a DSL tensor of dynamic length, not fixed at compile time."""
    return from_dlpack(tensor).mark_layout_dynamic()


class _Body:
    """Evaluates the roots at one position of the flattened arguments.

    It is an object because the DSL would rewrite the source of a function.
    """

    def __init__(
        self, roots: tuple[Node, ...], names: tuple[str, ...], indices: LoadIndices
    ) -> None:
        self.roots = roots
        self.names = names
        self.indices = indices

    def __call__(self, i: Value, values: Sequence[Value]) -> None:
        names, ends = len(self.names), len(self.names) + len(self.roots)
        inputs, outputs, captured = values[:names], values[names:ends], values[ends:]
        env = {name: tensor[i] for name, tensor in zip(self.names, inputs, strict=True)}
        results = emit(self.roots, env, captured, indices=self.indices)
        for tensor, value in zip(outputs, results, strict=True):
            tensor[i] = value


@cute.jit  # type: ignore[untyped-decorator, unused-ignore]
def _loop(count: cutlass.Int32, values: list[Value], body: cutlass.Constexpr) -> None:
    for i in cutlass.range(count):
        body(i, values)
