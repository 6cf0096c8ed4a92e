"""Emit the operations of a graph as CuTe DSL values while a kernel is traced.

`emit` is plain Python that runs while a kernel is traced. It may be called from inside a kernel, or
from an object that a kernel takes as a Constexpr. This module imports the DSL; import it only where
a kernel is built.

The semantics are those of torch, as in `graph.eval_torch`: floor division and modulo of negative
numbers, negative indices, NaN propagation through min and max. With `fast=False` every operation
compiles for the GPU and for the host. Operations that torch computes exactly or correctly rounded
give the same bits as torch; the others are within 3 ulp of float32 (on the host and on an H200).
With `fast=True` the approximate instructions of the GPU are used, and the result runs on a GPU
only. The relative errors on an H200 are: tanh 1.1e-5, exp 4e-6 (at 60), div and sqrt 1.5e-7,
sigmoid 4e-6; the absolute error of log and log2 is 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith, nvvm

from attnkit.codegen import emit_cute_gamma, emit_cute_math
from attnkit.codegen.emit_cute_math import constant, number, select
from attnkit.codegen.load_indices import LoadIndices, reads_data
from attnkit.graph.ir import BOOL, F32, I32, Node, Type

Value: TypeAlias = Any  # an Int32, Float32 or Boolean of the DSL
Emit: TypeAlias = Callable[..., Value]  # (node, argument values) -> value

LOAD_INDICES = LoadIndices()  # every load wraps, none is clamped
KINDS: dict[Type, Any] = {I32: Int32, F32: Float32, BOOL: Boolean}


def emit(
    roots: Sequence[Node],
    env: Mapping[str, Value],
    tensors: Sequence[Value],
    *,
    fast: bool = False,
    flush: bool = False,
    indices: LoadIndices = LOAD_INDICES,
    memo: dict[Node, Value] | None = None,
) -> list[Value]:
    """Emit the operations of `roots` at the current point of the kernel; return their values.

    Args:
        roots: the expressions.
        env: argument name -> scalar value: Float32 for score and grad, Int32 for positions, or a
            Python number. Only the arguments that the roots read are needed.
        tensors: captured tensors by slot, as `cute.Tensor` of any number type; a 0-d tensor has
            shape (1,).
        fast: whether to use the approximate instructions of the GPU, see the module docstring.
        flush: whether sigmoids below 2^-126 may become 0, which is faster; needs `fast`.
        indices: which loads wrap negative indices, and which are clamped. Other index checks are
            not emitted.
        memo: node -> value that is already emitted, such as a value of the row. The arguments of
            such nodes are not emitted. All emitted values are added to `memo`, so it must not be
            used outside the region of the kernel (loop or branch body) where it is filled.

    Returns:
        One Int32, Float32 or Boolean for each root.
    """
    values = {} if memo is None else memo
    table = (_FLUSHING if flush else _FAST) if fast else _EXACT
    for n in _order(roots, values):
        args = [values[a] for a in n.args]
        if n.op == "arg":
            values[n] = _lift(n.type, env[str(n.attr)])
        elif n.op == "const":
            values[n] = _lift(n.type, n.attr)
        elif n.op == "load":
            wraps = indices.wraps(n)
            index = args if wraps else [_wide(i, values, env) for i in n.args]
            values[n] = _load(n, index, tensors, wraps, n in indices.clamp)
        else:
            values[n] = table[n.op](n, *args)
    return [values[r] for r in roots]


def _order(roots: Sequence[Node], values: Mapping[Node, Value]) -> list[Node]:
    """Return the nodes to emit, arguments before their users, without the nodes in `values`."""
    order: dict[Node, None] = {}
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        n, ready = stack.pop()
        if n in values or n in order:
            continue
        if ready:
            order[n] = None
        else:
            stack.append((n, True))
            stack.extend((a, False) for a in reversed(n.args))
    return list(order)


def _lift(type_: Type, value: Value) -> Value:
    """Convert `value` to a DSL value of the graph's type, a Python number to a kernel constant.

    Without the conversion the DSL would fold operations on Python numbers in double precision, and
    `select` would reject them.
    """
    return constant(KINDS[type_], value)


def _load(
    n: Node, index: Sequence[Value], tensors: Sequence[Value], wrap: bool, clamp: bool
) -> Value:
    tensor = tensors[int(str(n.attr))]
    if not index:
        return KINDS[n.type](tensor[0])
    at = _place(n.args, index, tensor.shape, wrap, clamp)
    return KINDS[n.type](tensor[tuple(at) if len(at) > 1 else at[0]])


def _place(
    nodes: Sequence[Node], index: Sequence[Value], shape: Sequence[Value], wrap: bool, clamp: bool
) -> list[Value]:
    at = []
    for node, value, size in zip(nodes, index, shape, strict=True):
        if wrap and not _nonnegative(node):
            value = select(value < constant(Int32, 0), value + constant(Int32, size), value)
        at.append(clamped(node, value, size) if clamp else value)
    return at


def load_place(
    n: Node, env: Mapping[str, Value], tensors: Sequence[Value], indices: LoadIndices, axes: slice
) -> list[Value]:
    """Emit the place at which a load reads its tensor, on some of the tensor's axes.

    Args:
        n: the load.
        env, tensors, indices: see `emit`.
        axes: the axes.
    """
    values = emit(n.args[axes], env, tensors, fast=True, indices=indices)
    shape = tensors[int(str(n.attr))].shape[axes]
    return _place(n.args[axes], values, shape, indices.wraps(n), n in indices.clamp)


def clamped(n: Node, value: Value, size: Value) -> Value:
    """Clamp an index to [0, size - 1] if it depends on captured data; else return it unchanged.

    Args:
        n: expression of the index.
        value: value of the index, after a negative one was wrapped.
        size: size of the axis.
    """
    if not reads_data(n):
        return value
    last = constant(Int32, size) - constant(Int32, 1)
    return cutlass.max(cutlass.min(value, last), constant(Int32, 0))


def _wide(n: Node, values: Mapping[Node, Value], env: Mapping[str, Value]) -> Value:
    """Emit an index in 64 bits if it is a sum of arguments and constants; else return its value.

    With 64 bits the compiler can prove that addresses of neighbouring elements differ by constants.
    It cannot prove this for a 32-bit sum, which might overflow. Arguments come from `env`, as `values`
    may hold a sum without its arguments.
    """
    if not _is_sum(n):
        return values[n]
    if n.op in ("arg", "const"):
        return Int64(_lift(n.type, env[str(n.attr)] if n.op == "arg" else n.attr))
    parts = [_wide(a, values, env) for a in n.args]
    return -parts[0] if n.op == "neg" else _EXACT[n.op](n, *parts)


def _is_sum(n: Node) -> bool:
    if n.op in ("add", "sub", "neg"):
        return all(_is_sum(a) for a in n.args)
    return n.op in ("arg", "const")


def _nonnegative(n: Node) -> bool:
    return n.op == "arg" or (n.op == "const" and int(str(n.attr)) >= 0)


def _positive(n: Node) -> bool:
    """Return whether an integer node is a constant above zero."""
    return n.op == "const" and int(str(n.attr)) > 0


def _power(n: Node) -> int | None:
    """Return k if an integer node is the constant 2**k, else None."""
    value = int(str(n.attr)) if n.op == "const" else 0
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else None


def _tdiv(n: Node, a: Value, b: Value) -> Value:
    return Int32(arith.divsi(a.ir_value(), b.ir_value()))


def _beyond(n: Node, remainder: Value, b: Value) -> Value:
    """Emit whether a truncated remainder is nonzero and has the opposite sign of the divisor."""
    zero = constant(Int32, 0)
    return (remainder != zero) & ((remainder ^ b) < zero)


def _fdiv(n: Node, a: Value, b: Value) -> Value:
    if n.type == F32:
        return emit_cute_math.floor_divide(a, b)
    power = _power(n.args[1])
    if power is not None:
        return a >> constant(Int32, power)  # an arithmetic shift rounds down
    if _positive(n.args[1]):
        return emit_cute_math.floor_quotient(a, int(str(n.args[1].attr)))
    quotient = _tdiv(n, a, b)
    return quotient - Int32(_beyond(n, a - quotient * b, b))


def _mod(n: Node, a: Value, b: Value) -> Value:
    if n.type == F32:
        return emit_cute_math.remainder(a, b)
    if _power(n.args[1]) is not None:
        return a & (b - constant(Int32, 1))
    if _positive(n.args[1]):
        return a - emit_cute_math.floor_quotient(a, int(str(n.args[1].attr))) * b
    remainder = a % b  # the DSL's % on integers is C's: the sign of the dividend
    return select(_beyond(n, remainder, b), remainder + b, remainder)


def _shl(n: Node, a: Value, b: Value) -> Value:
    if _shift_is_plain(n.args[1]):
        return a << b
    inside = (b >= constant(Int32, 0)) & (b < constant(Int32, 32))
    return select(inside, a << (b & constant(Int32, 31)), constant(Int32, 0))


def _shr(n: Node, a: Value, b: Value) -> Value:
    if _shift_is_plain(n.args[1]):
        return a >> b
    inside = (b >= constant(Int32, 0)) & (b < constant(Int32, 32))
    return a >> select(inside, b, constant(Int32, 31))


def _shift_is_plain(n: Node) -> bool:
    """Return whether a shift count is a constant from 0 to 31.

    For counts outside that range torch returns 0 for a left shift and the sign for a right shift,
    while the result of the hardware's shift is undefined.
    """
    return n.op == "const" and 0 <= int(str(n.attr)) < 32


def _min(n: Node, a: Value, b: Value) -> Value:
    return cutlass.min(a, b)  # passes NaN on, unlike cute.math.min


def _max(n: Node, a: Value, b: Value) -> Value:
    return cutlass.max(a, b)


def _lt(n: Node, a: Value, b: Value) -> Value:
    return ~a & b if n.args[0].type == BOOL else a < b


def _le(n: Node, a: Value, b: Value) -> Value:
    return ~a | b if n.args[0].type == BOOL else a <= b


def _eq(n: Node, a: Value, b: Value) -> Value:
    return ~(a ^ b) if n.args[0].type == BOOL else a == b


def _cast(n: Node, a: Value) -> Value:
    return KINDS[n.type](a)  # float to integer truncates, anything to Boolean is != 0


def _round(n: Node, a: Value) -> Value:
    if str(n.attr) in ("float32", "float64"):
        return a  # a mask that computes in float64 does not reach a kernel
    return Float32({"float16": Float16, "bfloat16": BFloat16}[str(n.attr)](a))


def _round_on_host(n: Node, a: Value) -> Value:
    """Round to bfloat16 in integers.

    On a processor without such an instruction, LLVM would call `__truncsfbf2`, which is not linked.
    """
    if str(n.attr) != "bfloat16":
        return _round(n, a)
    bits = Int32(arith.bitcast(Int32.mlir_type, a.ir_value()))
    even = bits + Int32(0x7FFF) + ((bits >> 16) & Int32(1))  # ties to even
    rounded = arith.bitcast(Float32.mlir_type, (even & Int32(-0x10000)).ir_value())
    return select(a == a, Float32(rounded), a)


def _above_zero(n: Node) -> bool:
    """Return whether a float node is a finite constant above zero."""
    return n.op == "const" and 0.0 < float(str(n.attr)) < math.inf


def _math(name: str, **options: bool) -> Emit:
    """Return an `Emit` that calls the function `name` of `cute.math` with `options`."""
    return lambda n, *args: getattr(cute.math, name)(*args, **options)


_EXACT: dict[str, Emit] = {
    "add": lambda n, a, b: a + b,
    "sub": lambda n, a, b: a - b,
    "mul": lambda n, a, b: a * b,
    "neg": lambda n, a: -a,
    "abs": lambda n, a: abs(a),
    "min": _min,
    "max": _max,
    "fdiv": _fdiv,
    "mod": _mod,
    "tdiv": _tdiv,
    # the DSL's integers wrap: it sets none of LLVM's flags that let the compiler assume otherwise
    "wrap_add": lambda n, a, b: a + b,
    "wrap_sub": lambda n, a, b: a - b,
    "wrap_mul": lambda n, a, b: a * b,
    "wrap_neg": lambda n, a: constant(Int32, 0) - a,
    "wrap_abs": lambda n, a: select(a < constant(Int32, 0), constant(Int32, 0) - a, a),
    "div": lambda n, a, b: a / b,
    "pow": _math("pow"),
    "exp": _math("exp"),
    "exp2": _math("exp2"),
    "expm1": lambda n, a: emit_cute_math.expm1(a),
    "log": _math("log"),
    "log2": _math("log2"),
    "log1p": lambda n, a: emit_cute_math.log1p(a),
    "sqrt": _math("sqrt"),
    "rsqrt": _math("rsqrt"),
    "tanh": _math("tanh"),
    "sigmoid": lambda n, a: emit_cute_math.sigmoid(a),
    "sin": _math("sin"),
    "cos": _math("cos"),
    "erf": lambda n, a: emit_cute_math.erf(a),
    "erfinv": lambda n, a: emit_cute_math.erfinv(a),
    "lgamma": lambda n, a: emit_cute_gamma.lgamma(a),
    "digamma": lambda n, a: emit_cute_gamma.digamma(a),
    "hypot": lambda n, a, b: emit_cute_math.hypot(a, b),
    "atan2": lambda n, a, b: emit_cute_math.atan2(a, b, positive=_above_zero(n.args[1])),
    "floor": _math("floor"),
    "with_slope": lambda n, value, x, slope: value,
    "round": _round_on_host,
    "and": lambda n, a, b: a & b,
    "or": lambda n, a, b: a | b,
    "xor": lambda n, a, b: a ^ b,
    "shl": _shl,
    "shr": _shr,
    "not": lambda n, a: ~a,
    "lt": _lt,
    "le": _le,
    "eq": _eq,
    "where": lambda n, c, a, b: select(c, a, b),
    "cast": _cast,
}


def _fast_min(n: Node, a: Value, b: Value) -> Value:
    if n.type != F32:
        return _min(n, a, b)
    return Float32(nvvm.fmin(a.ir_value(), b.ir_value(), nan=True))


def _fast_max(n: Node, a: Value, b: Value) -> Value:
    if n.type != F32:
        return _max(n, a, b)
    return Float32(nvvm.fmax(a.ir_value(), b.ir_value(), nan=True))


def _fast_div(n: Node, a: Value, b: Value) -> Value:
    divisor = n.args[1]
    if divisor.op == "const" and 2.0**-126 < abs(float(str(divisor.attr))) < 2.0**126:
        return a * number(1.0 / float(str(divisor.attr)))
    return cute.math.div(a, b, approx=True)


def _fast_pow(n: Node, a: Value, b: Value) -> Value:
    base = n.args[0]
    if base.op == "const" and 0.0 < float(str(base.attr)) < math.inf:
        power = b * number(math.log2(float(str(base.attr))))
        return cute.math.exp2(power, approx=True)
    return cute.math.pow(a, b)  # the approximate one takes no negative bases


# sin and cos stay exact: sin.approx is useless beyond a few turns, and positions go further. expm1,
# log1p and erf stay exact because people call them for accuracy near 0.
_FAST: dict[str, Emit] = {
    **_EXACT,
    "round": _round,
    "min": _fast_min,
    "max": _fast_max,
    "div": _fast_div,
    "pow": _fast_pow,
    "exp": lambda n, a: cute.math.exp2(a * number(math.log2(math.e)), approx=True),
    "exp2": _math("exp2", approx=True),
    "log": lambda n, a: cute.math.log2(a, approx=True) * number(math.log(2.0)),
    "log2": _math("log2", approx=True),
    "sqrt": _math("sqrt", approx=True),
    "rsqrt": _math("rsqrt", approx=True),
    "tanh": _math("tanh", approx=True),
    "sigmoid": lambda n, a: emit_cute_math.fast_sigmoid(a),
    "hypot": lambda n, a, b: emit_cute_math.hypot(a, b, approx=True),
    "atan2": lambda n, a, b: emit_cute_math.atan2(
        a, b, positive=_above_zero(n.args[1]), approx=True
    ),
}

_FLUSHING: dict[str, Emit] = {
    **_FAST,
    "sigmoid": lambda n, a: emit_cute_math.flushing_sigmoid(a),
}
