"""Evaluate the graph with torch operators: the reference for every other interpretation.

Arguments are tensors that broadcast together. A value that depends only on the head or only on the
row is therefore computed once per head or row. Autograd can differentiate the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _trunc_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


class _WithSlope(torch.autograd.Function):
    """Returns a value and gives `x` the gradient times a slope, for the node `with_slope`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.shape = x.shape
        shape = torch.broadcast_tensors(value, x, slope)[0].shape
        # a constant lies on the CPU
        return value.to(x.device if x.ndim else value.device).expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return None, (grad * slope).sum_to_size(ctx.shape), None


_with_slope: Callable[..., Tensor] = _WithSlope.apply

_OPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "fdiv": _floor_divide,
    "mod": torch.remainder,
    "tdiv": _trunc_divide,
    "wrap_add": torch.add,  # torch's integers wrap
    "wrap_sub": torch.sub,
    "wrap_mul": torch.mul,
    "wrap_neg": torch.neg,
    "wrap_abs": torch.abs,
    "div": torch.div,
    "pow": torch.pow,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "floor": torch.floor,
    "with_slope": _with_slope,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "not": torch.logical_not,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "where": torch.where,
}


def mask_dtype(root: Node, tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype in which a mask's floats are computed: float32 or float64.

    It is float64 if the mask reads a float64 tensor or torch computes one of its floats in float64.
    Roundings to float32 in the graph then mark what torch computes in float32. The dtype of the
    query does not matter.
    """
    wide = computes_float64(root) or any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def computes_float64(root: Node) -> bool:
    """Return whether torch would round the result of some operation in `root` to float64.

    A load from a float64 tensor alone does not count.
    """
    return any(n.op == "round" and n.attr == "float64" for n in ir.topo(root))


def evaluate(
    roots: Sequence[Node],
    env: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    memo: dict[Node, Tensor] | None = None,
    checked: frozenset[Node] = frozenset(),
    names: Sequence[str] = (),
    clamps: bool = False,
    operation: Callable[[Node, Sequence[Tensor], torch.dtype], Tensor] | None = None,
) -> list[Tensor]:
    """Evaluate the expressions `roots` with torch operators.

    Args:
        roots: the expressions.
        env: argument name -> tensor; indices int32, score and grad of `dtype`; any shapes that
            broadcast together.
        tensors: captured tensors by slot; loads convert to int32, `dtype` or bool.
        dtype: dtype of the graph's f32, float32 or float64.
        memo: node -> value, for values that are already computed; receives all others.
        checked: loads whose index is not proven to be in range; each is checked.
        names: names of the captured tensors by slot, for messages.
        clamps: whether to clamp indices that depend on captured data to the range of their tensor.
            Data on a GPU may have changed since its indices were proven in range, and there an
            index out of range ends the process.
        operation: computes a node that is no leaf from the values of its arguments, as `apply`
            does; None for `apply`.

    Returns:
        One tensor per root, in its broadcast shape, not expanded.

    Raises:
        BoundsError: a checked load leaves its tensor.
    """
    values = {} if memo is None else memo
    kinds = kinds_of(dtype)
    operation = operation or apply
    for n in ir.topo(*roots):
        if n in values:
            continue
        args = [values[a] for a in n.args]
        if n.op == "arg":
            value = env[str(n.attr)]
        elif n.op == "const":
            value = torch.tensor(
                n.attr, dtype=kinds[n.type], device="cpu"
            )  # 0-d: combines with tensors of any device
        elif n.op == "load":
            tensor = tensors[int(n.attr)]  # type: ignore[arg-type]
            if n in checked:
                _check(n, tensor, args, names)
            if clamps and args:
                args = clamped(n, args, tensor.shape)
            value = (tensor[tuple(args)] if args else tensor).to(kinds[n.type])
        else:
            value = operation(n, args, dtype)
        values[n] = value
    return [values[r] for r in roots]


def kinds_of(dtype: torch.dtype) -> dict[ir.Type, torch.dtype]:
    """Return the dtype of each type of the graph, given that of its f32."""
    return {F32: dtype, I32: torch.int32, BOOL: torch.bool}


def apply(n: Node, args: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Apply the operation of a node that is no leaf to the values of its arguments.

    Args:
        n: the node.
        args: values of its arguments.
        dtype: dtype of the graph's f32.
    """
    if n.op == "cast":
        return args[0].to(kinds_of(dtype)[n.type])
    if n.op == "round":
        return args[0].to(getattr(torch, str(n.attr))).to(dtype)
    return _OPS[n.op](*args)


def clamped(n: Node, index: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Clamp those indices of a load that depend on captured data to the range of its tensor.

    Args:
        n: the load.
        index: its indices, one tensor per dimension. Negative ones count from the end.
        shape: shape of the tensor that it loads from.
    """
    return [
        at.clamp(-size, size - 1) if ir.slots(a) else at
        for a, at, size in zip(n.args, index, shape, strict=True)
    ]


def _check(n: Node, tensor: Tensor, index: list[Tensor], names: Sequence[str]) -> None:
    for axis, (at, size) in enumerate(zip(index, tensor.shape, strict=True)):
        low, high = int(at.min()), int(at.max())
        if low < -size or high >= size:
            slot = int(n.attr)  # type: ignore[arg-type]
            name = names[slot] if slot < len(names) else f"t{slot}"
            raise BoundsError(
                f"index {ir.formula(n.args[axis], names)} into dimension {axis} of captured "
                f"tensor {name!r} (shape {tuple(tensor.shape)}) takes values from {low} to {high}; "
                f"expected {-size} to {size - 1}. Clamp the index or enlarge the tensor; "
                "torch.where does not protect it, both branches are evaluated."
            )


def indices(count: int, device: torch.device | str) -> Tensor:
    """Return 0 to `count` - 1 as int32, the dtype of the arguments b, h, q and kv."""
    return torch.arange(count, dtype=torch.int32, device=device)


def positions(shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the index arguments b, h, q, kv as int32 tensors that broadcast to [B, H, Sq, Skv]."""
    return {
        name: indices(n, device).view([n if axis == at else 1 for axis in range(4)])
        for at, (name, n) in enumerate(zip(("b", "h", "q", "kv"), shape, strict=True))
    }
