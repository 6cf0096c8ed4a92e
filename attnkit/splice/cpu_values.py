"""Evaluate score graphs with torch operators in memory that calls of a hook share.

An operator that allocates its result spends more time on the page faults of fresh memory than on
the arithmetic. Here a result overwrites an argument that nothing reads later, or a buffer of an
earlier call.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import apply, evaluate
from attnkit.graph.ir import F32, Node
from attnkit.splice.cpu_tanh import tanh
from attnkit.util import caches
from attnkit.util.shapes import broadcast

SMALL = 1 << 14  # results with fewer elements are allocated: the heap has room for them


def _cast(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


def _adds_product(sign: int) -> Callable[..., Tensor]:
    return functools.partial(torch.addcmul, value=sign)


# Operators that can write a float result to a given tensor, which may be one of their arguments.
_INTO: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "fdiv": functools.partial(torch.div, rounding_mode="floor"),
    "mod": torch.remainder,
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
    "tanh": tanh,
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
    "where": torch.where,
    "cast": _cast,
}


@functools.lru_cache(maxsize=1024)
def _products(roots: tuple[Node, ...]) -> dict[Node, Node]:
    """Find products that are computed together with the sum that adds them, by that sum.

    Nothing else reads such a product. A sum may be a difference that subtracts the product.
    """
    nodes = ir.topo(*roots)
    readers = Counter(argument for n in nodes for argument in n.args)
    found: dict[Node, Node] = {}
    for n in nodes:
        if n.type == F32 and n.op in ("add", "sub"):
            for argument in n.args[n.op == "sub" :]:
                if argument.op == "mul" and readers[argument] == 1 and argument not in roots:
                    found[n] = argument
    return found


caches.register(_products.cache_clear)


@functools.lru_cache(maxsize=1024)
def _last_readers(roots: tuple[Node, ...]) -> dict[Node, tuple[Node, ...]]:
    """Return, for each node, the values that it reads and no later node does, roots excepted.

    The factors of a product of `_products` are read by the node that computes it.
    """
    products = _products(roots)
    later = set(products.values())
    last: dict[Node, Node] = {}
    for n in ir.topo(*roots):
        if n in later:
            continue
        for argument in n.args:
            read = argument.args if argument is products.get(n) else (argument,)
            last.update(dict.fromkeys(read, n))
    found: dict[Node, list[Node]] = {}
    for argument, reader in last.items():
        if argument not in roots:
            found.setdefault(reader, []).append(argument)
    return {reader: tuple(arguments) for reader, arguments in found.items()}


caches.register(_last_readers.cache_clear)


@dataclass(frozen=True)
class _Factors:
    """Holds the factors of a product that is not computed yet."""

    values: Sequence[Tensor]


class Values:
    """Evaluates graphs; keeps the memory of the results for the next evaluation."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # flat; all memory that belongs to this object
        self._free: list[Tensor] = []  # those of `_buffers` that hold no value in use
        # by node: a value that the next operator may overwrite, and the buffer that it is a view of
        # (None: memory of the caller)
        self._own: dict[Node, tuple[Tensor, Tensor | None]] = {}

    def evaluate(
        self,
        roots: Sequence[Node],
        env: Mapping[str, Tensor],
        spent: Collection[str],
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        **checks: Any,
    ) -> list[Tensor]:
        """Evaluate `roots` as `eval_torch.evaluate` does.

        Args:
            roots: the expressions.
            env: argument name -> tensor.
            spent: names in `env` of tensors that may be overwritten.
            tensors: captured tensors by slot.
            dtype: dtype of the graph's f32.
            checks: further arguments of `eval_torch.evaluate`.

        Returns:
            One tensor per root, in its broadcast shape, valid until the next evaluation.
        """
        self._free = list(self._buffers)
        self._own = {ir.arg(name): (env[name], None) for name in spent}
        readers, products = _last_readers(tuple(roots)), _products(tuple(roots))
        later = set(products.values())

        def operation(n: Node, args: Sequence[Any], of: torch.dtype) -> Any:
            if n in later:
                return _Factors(args)
            read = readers.get(n, ())
            if n in products:
                value = self._apply_with_product(n, products[n], args, of, read)
            else:
                value = self._apply(n, args, of, read)
            for argument in read:
                known = self._own.pop(argument, None)
                if known is not None and known[1] is not None:
                    self._free.append(known[1])
            return value

        return evaluate(roots, env, tensors, dtype, operation=operation, **checks)

    def _apply(
        self, n: Node, args: Sequence[Tensor], dtype: torch.dtype, read: Sequence[Node]
    ) -> Tensor:
        """Apply the operation of `n`; `read` are the arguments that nothing reads later."""
        shape = broadcast(*(a.shape for a in args))
        if n.type != F32 or n.op not in _INTO or math.prod(shape) < SMALL:
            value = apply(n, args, dtype)
            for argument, given in zip(n.args, args, strict=True):
                if value is given:  # a conversion that changes nothing: two names of one memory
                    self._own.pop(argument, None)
            return value
        return self._write(n, n.args, args, dtype, read, _INTO[n.op])

    def _apply_with_product(
        self,
        n: Node,
        product: Node,
        args: Sequence[Any],
        dtype: torch.dtype,
        read: Sequence[Node],
    ) -> Tensor:
        """Apply the sum or difference `n`, whose argument `product` is still to be computed.

        One operator does both where the product is as large as the result: it reads and writes the
        scores once less.
        """
        at = n.args.index(product)
        a, b = args[at].values
        other = args[1 - at]
        shape = broadcast(other.shape, a.shape, b.shape)
        devices = {t.device for t in (other, a, b)}  # addcmul adds to no number of another device
        if math.prod(shape) < SMALL or broadcast(a.shape, b.shape) != shape or len(devices) > 1:
            args = list(args)
            args[at] = self._apply(product, (a, b), dtype, ())
            return self._apply(n, args, dtype, ())
        nodes, values = (n.args[1 - at], *product.args), (other, a, b)
        sign = -1 if n.op == "sub" else 1
        return self._write(n, nodes, values, dtype, read, _adds_product(sign))

    def _write(
        self,
        n: Node,
        nodes: Sequence[Node],
        args: Sequence[Tensor],
        dtype: torch.dtype,
        read: Sequence[Node],
        operator: Callable[..., Tensor],
    ) -> Tensor:
        """Write the result of `n` over an argument that nothing reads later, or into a buffer.

        Args:
            n: the node.
            nodes: the nodes of the operator's arguments.
            args: their values.
            dtype: dtype of the result.
            read: the nodes that nothing reads later.
            operator: computes `n` from `args` into `out`.
        """
        shape = broadcast(*(a.shape for a in args))
        for argument, given in zip(nodes, args, strict=True):
            fits = given.shape == shape and given.dtype == dtype
            if fits and argument in read and argument in self._own:
                self._own[n] = self._own.pop(argument)
                return operator(*args, out=given)
        like = next(a for a in args if a.ndim)
        buffer = self._take(math.prod(shape), like, dtype)
        value = operator(*args, out=buffer[: math.prod(shape)].view(shape))
        self._own[n] = value, buffer
        return value

    def _take(self, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        for at, buffer in enumerate(self._free):
            if buffer.numel() >= count and (buffer.dtype, buffer.device) == (dtype, like.device):
                return self._free.pop(at)
        # rounded up, so that slowly growing tiles do not each get a fresh buffer
        size = 1 << (count - 1).bit_length()
        buffer = torch.empty(size, dtype=dtype, device=like.device)
        self._buffers.append(buffer)
        return buffer
