"""Provide values that no argument of attnkit expects, by kind.

Each entry is a function that builds a new value. An error raised in this file counts as raised by a
function of the user, which may pass through attnkit.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import math
import operator
import types
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex

import attnkit

Pool: TypeAlias = dict[str, Callable[[], Any]]


class Raising:
    """Object that raises an error from most Python protocols."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("called")

    def __bool__(self) -> bool:
        raise ValueError("no truth value")

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")

    def __hash__(self) -> int:
        raise TypeError("cannot be hashed")

    def __len__(self) -> int:
        raise OverflowError("no length")

    def __iter__(self) -> Any:
        raise OSError("cannot be iterated over")


class PlainSubclass(Tensor):
    """Tensor subclass without methods of its own."""


class RaisingSubclass(Tensor):
    """Tensor subclass for which every torch function raises an error."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a subclass that supports nothing")


def _no_module(f: Any) -> Any:
    f.__module__ = None
    return f


def _executed(text: str, scope: dict[str, Any] | None = None) -> Any:
    """Return the function `f` that `text` defines, executed in a scope without a module name."""
    scope = {} if scope is None else scope
    exec(text, scope)
    return scope["f"]


def _mutual() -> Any:
    def even(x: Any, depth: int = 4) -> Any:
        return x if depth == 0 else odd(x, depth - 1)

    def odd(x: Any, depth: int) -> Any:
        return even(x, depth - 1)

    return lambda *a: even(a[0]) * 0 >= 0 if len(a) == 4 else even(a[0])


def _endless(*arguments: Any) -> Any:
    return _endless(*arguments)


async def _coroutine(*arguments: Any) -> Any:
    return arguments[0]


def _generator(*arguments: Any) -> Any:
    yield arguments[0]


def _wrapper_loop() -> Any:
    def f(*a: Any) -> Any:
        return a[0]

    f.__wrapped__ = f  # type: ignore[attr-defined]
    return f


def _bad_signature() -> Any:
    def f(*a: Any) -> Any:
        return a[0]

    f.__signature__ = "no signature"  # type: ignore[attr-defined]
    return f


def _empty_cell() -> Any:
    def outer() -> Any:
        def f(*a: Any) -> Any:
            return later + a[0]

        return f
        later = 1

    return outer()


def _swapped_code() -> Any:
    def f(*a: Any) -> Any:
        return a[0]

    f.__code__ = (lambda: None).__code__
    return f


def _reads(table: Callable[[], Any], how: Callable[[Any, Any, Any], Any]) -> Callable[[], Any]:
    """Return a builder of a mask and score_mod function that applies `how` to a table."""

    def build() -> Any:
        t = table()

        def f(*a: Any) -> Any:
            value = how(t, a[-2], a[-1])
            return a[0] + value if len(a) == 5 else value > 0

        return f

    return build


def _raises(error: Callable[[], BaseException]) -> Callable[[], Any]:
    def f(*_: Any) -> Any:
        raise error()

    return lambda: f


def _returns(value: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        def f(*_: Any) -> Any:
            return value()

        return f

    return build


def _module_of(parameter: bool) -> Any:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8)) if parameter else torch.randn(8)

        def forward(self, *a: Any) -> Any:
            return a[0] + self.table[a[-1] % 8]

    return Bias()


def _fake(*shape: int) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape)


def _inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.zeros(*shape)


def _quantized(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(torch.zeros(*shape), 0.1, 0, torch.quint8)


def _strided(*shape: int) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(shape[1:]), torch.zeros(shape[1:])])


def _jagged(*shape: int) -> Tensor:
    parts = [torch.zeros(2, shape[-1]), torch.zeros(3, shape[-1])]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


NUMBERS: Pool = {
    repr(x): functools.partial(lambda x: x, x)
    for x in (
        *(0, 1, -1, 3, 5, 7, 127, 2**31, 2**31 + 1, -(2**31) - 1, 2**32, 2**63, 2**64, 10**30),
        *(True, False, 0.0, -0.0, 1.0, 2.5, -1.5, 1e308, math.nan, math.inf, -math.inf, 1j),
        *(np.int64(4), np.int32(-4), np.float32(2), np.float64("nan"), np.bool_(True)),
        *(fractions.Fraction(1, 3), decimal.Decimal(4), 1e-320),
    )
}

TEXTS: Pool = {
    repr(x): functools.partial(lambda x: x, x)
    for x in (
        *("", " ", "x", "none", "auto", "cpu", "cpu:7", "cuda", "cuda:-1", "meta", "mps", "xla:99"),
        *("float32", "bfloat16", "sm_90a", "sm_120a", "sm_", "emulate:", "emulate:sm_75", "cute"),
        *("masks:", "masks:causal(", "mods:alibi", "a.py:b", "masks:nothing(3)", ":", "masks:_"),
        *("\0", "é" * 40, "x" * 3000, "/nowhere/x.svg", b"bytes", "BLOCK_M", "top-left"),
    )
}

OBJECTS: Pool = {
    "None": lambda: None,
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set()": set,
    "[1]": lambda: [1],
    "[None]": lambda: [None],
    "(16, 16)": lambda: (16, 16),
    "(0, 16)": lambda: (0, 16),
    "(16, -1)": lambda: (16, -1),
    "('a', 'b')": lambda: ("a", "b"),
    "(5, 2)": lambda: (5, 2),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "(None, None)": lambda: (None, None),
    "nested list": lambda: [[[1]], [2, [3]]],
    "options": lambda: {"BLOCK_M": 64, "BLOCK_N": "x"},
    "options of ints": lambda: {1: 2},
    "options none": lambda: {"BLOCK_M": None},
    "range": lambda: range(3),
    "iterator": lambda: iter([1, 2]),
    "torch.Size": lambda: torch.Size([2, 3]),
    "object": object,
    "class": lambda: int,
    "Tensor class": lambda: Tensor,
    "module": lambda: torch,
    "exception": lambda: ValueError("x"),
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "slice": lambda: slice(0, 3),
    "Raising": Raising,
    "Mock": mock.Mock,
    "MagicMock": mock.MagicMock,
    "namespace": lambda: types.SimpleNamespace(lse=3, max_scores="x"),
    "Variant": lambda: attnkit.Variant(),
    "AuxRequest": lambda: attnkit.AuxRequest(True, True),
    "AuxRequest of column sums": lambda: attnkit.AuxRequest(column_sums=True),
    "AuxRequest of garbage": lambda: attnkit.AuxRequest("x", math.nan),  # type: ignore[arg-type]
    "device": lambda: torch.device("cpu", 7),
    "cuda": lambda: torch.device("cuda"),
    "meta": lambda: torch.device("meta"),
    "layout": lambda: torch.sparse_coo,
    "generator": lambda: torch.Generator(),
    "Case": lambda: attnkit.testing.Case(5, 5),
    **{str(d): functools.partial(lambda d: d, d) for d in (torch.float32, torch.complex64)},
    **{str(d): functools.partial(lambda d: d, d) for d in (torch.uint16, torch.quint8)},
    **{str(d): functools.partial(lambda d: d, d) for d in (torch.float8_e4m3fn, torch.bool)},
}

_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_SHAPES = ((2, 2, 16, 8), (2, 2, 16), (8,), (), (0,), (2, 2, 0, 8), (16, 16), (1, 1, 1, 1, 1))


def _of_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape).to(dtype)


TENSORS: Pool = {
    **{
        f"{dtype} {list(shape)}": functools.partial(_of_dtype, dtype, shape)
        for dtype in _DTYPES
        for shape in _SHAPES
    },
    **{
        f"{name} {list(shape)}": functools.partial(make, *shape)
        for name, make in {
            "meta": lambda *s: torch.zeros(*s, device="meta"),
            "fake": _fake,
            "inference": _inference,
            "quantized": _quantized,
            "strided nested": _strided,
            "jagged": _jagged,
            "sparse": lambda *s: torch.zeros(*s).to_sparse(),
            "parameter": lambda *s: nn.Parameter(torch.zeros(*s)),
            "plain subclass": lambda *s: torch.zeros(*s).as_subclass(PlainSubclass),
            "raising subclass": lambda *s: torch.zeros(*s).as_subclass(RaisingSubclass),
            "view of a leaf": lambda *s: torch.zeros(*s, requires_grad=True)[..., :1],
            "nan": lambda *s: torch.full(s, math.nan),
            "huge ints": lambda *s: torch.full(s, 2**62),
            "negative ints": lambda *s: torch.full(s, -(2**31)),
            "conjugate": lambda *s: torch.zeros(*s, dtype=torch.complex64).conj(),
            "negated": lambda *s: torch.zeros(*s, dtype=torch.complex64).conj().imag,
            "numpy": lambda *s: np.zeros(s),
            "long": lambda *s: torch.zeros(1, 1, 1, s[-1]).expand(1, 1, 2**31, s[-1]),
            "mkldnn": lambda *s: torch.zeros(*s).to_mkldnn(),
        }.items()
        for shape in ((2, 2, 16, 8), (2, 8), (2, 16))
    },
    "sparse csr": lambda: torch.zeros(8, 8).to_sparse_csr(),
    "sparse bsr": lambda: torch.zeros(8, 8).to_sparse_bsr((2, 2)),
}

_TABLES = (
    *("torch.uint16 [8]", "torch.uint32 [8]", "torch.uint64 [8]", "torch.bool [8]"),
    *("torch.int8 [8]", "torch.complex64 [8]", "torch.complex32 [8]", "torch.float8_e5m2 [8]"),
    *("torch.float16 []", "torch.float32 [0]", "torch.float64 [8]", "torch.int64 [16, 16]"),
    *("meta [2, 8]", "fake [2, 8]", "inference [2, 8]", "quantized [2, 8]", "jagged [2, 8]"),
    *("strided nested [2, 8]", "sparse [2, 8]", "sparse csr", "parameter [2, 8]", "nan [2, 8]"),
    *("plain subclass [2, 8]", "raising subclass [2, 8]", "huge ints [2, 8]", "numpy [2, 8]"),
    *("negative ints [2, 8]", "conjugate [2, 8]", "negated [2, 8]", "mkldnn [2, 8]"),
    *("view of a leaf [2, 8]", "torch.float8_e4m3fn [8]"),
)
_USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "t[0]": lambda t, q, kv: t[0] + kv * 0,
    "t[kv % 8]": lambda t, q, kv: t[kv % 8],
    "t[0, kv % 8]": lambda t, q, kv: t[0, kv % 8],
    "t[q]": lambda t, q, kv: t[q],
    "t[..., kv % 8]": lambda t, q, kv: t[..., kv % 8].sum(),
    "t[q % 8] == t[kv % 8]": lambda t, q, kv: (t[q % 8] == t[kv % 8]) * 1,
    "t.sum()": lambda t, q, kv: t.sum() + kv,
    "t": lambda t, q, kv: t + kv,
    "t[t[kv % 8]]": lambda t, q, kv: t[t[kv % 8]],
    "t.item()": lambda t, q, kv: kv + t.reshape(-1)[0].item(),
    "t.float()": lambda t, q, kv: t.float()[kv % 8],
    "t[int]": lambda t, q, kv: t.int()[kv % 8] // t.int()[q % 8],
    "q // t": lambda t, q, kv: q // t[0, kv % 8],
}

FUNCTIONS: Pool = {
    "no argument": lambda: lambda: None,
    "three arguments": lambda: lambda a, b, c: a,
    "six arguments": lambda: lambda a, b, c, d, e, f: a,
    "keywords": lambda: lambda *, b, h, q, kv: q >= kv,
    "anything": lambda: lambda *a, **k: a[0],
    "mutual": _mutual,
    "endless": lambda: _endless,
    "coroutine": lambda: _coroutine,
    "generator": lambda: _generator,
    "no module": lambda: _no_module(lambda *a: a[0]),
    "no module, read": lambda: (lambda g: lambda *a: g(a[0]))(_no_module(lambda x: x)),
    "executed": lambda: _executed("f = lambda *a: a[0]"),
    "no builtins": lambda: _executed("def f(*a): return abs(a[0])", {"__builtins__": {}}),
    "missing global": lambda: _executed("def f(*a): return nothing + a[0]"),
    "wrapper loop": _wrapper_loop,
    "bad signature": _bad_signature,
    "empty cell": _empty_cell,
    "swapped code": _swapped_code,
    "max": lambda: max,
    "print": lambda: print,
    "len": lambda: len,
    "int": lambda: int,
    "dict": lambda: dict,
    "torch.add": lambda: torch.add,
    "torch.where": lambda: torch.where,
    "itemgetter": lambda: operator.itemgetter(0),
    "partial of garbage": lambda: functools.partial(Raising()),
    "partial": lambda: functools.partial(lambda x, *a: a[0], 3),
    "partialmethod": lambda: functools.partialmethod(print, 3),
    "lru_cache": lambda: functools.lru_cache(lambda *a: a[0]),
    "singledispatch": lambda: functools.singledispatch(lambda *a: a[0]),
    "staticmethod": lambda: staticmethod(lambda *a: a[0]),
    "bound method": lambda: [].append,
    "method of a tensor": lambda: torch.zeros(3).add,
    "nn.Linear": lambda: nn.Linear(2, 2),
    "module": lambda: _module_of(True),
    "module without parameters": lambda: _module_of(False),
    "abstract module": nn.Module,
    "torch.compile": lambda: torch.compile(lambda *a: a[0]),
    "vmap": lambda: torch.vmap(lambda *a: a[0]),
    "Function.apply": lambda: torch.autograd.Function.apply,
    "torch.no_grad": lambda: torch.no_grad()(lambda *a: a[0]),
    "mask": lambda: attnkit.masks.causal(),
    "mod": lambda: attnkit.mods.alibi(torch.rand(2)),
    "mask for other lengths": lambda: attnkit.Mask(lambda b, h, q, kv: q > kv, lengths=(3, 5)),
    "mask of garbage": lambda: attnkit.Mask(Raising()) & attnkit.Mask(len),
    "type": lambda: type,
    "lambda of int": lambda: lambda *a: 3,
    "div by zero": lambda: lambda *a: a[-1] // (a[-2] - a[-2]),
    "mod by a position": lambda: lambda *a: a[-1] % a[-2] == 0,
    "overflow": lambda: lambda *a: a[-1] * 2**30 * 4 > 0,
    "shift": lambda: lambda *a: (a[-1] << (a[-2] * 100)) > 0,
    "unshift": lambda: lambda *a: (a[-1] >> (a[-2] - 5)) > 0,
    "deep": lambda: lambda *a: functools.reduce(lambda x, _: x + a[-1] * 0.5, range(2000), a[0]),
    "factory of masks": lambda: lambda *a: attnkit.masks.causal(),
    "uses attnkit": lambda: lambda *a: attnkit.flex_attention(a[0], a[0], a[0]),
    **{f"raises {e.__name__}": _raises(e) for e in (ValueError, MemoryError, StopIteration)},
    **{f"raises {e.__name__}": _raises(e) for e in (RecursionError, AssertionError, OSError)},
    **{f"returns {n}": _returns(b) for n, b in OBJECTS.items() if n not in ("iterator",)},
    **{f"returns {n}": _returns(NUMBERS[n]) for n in ("nan", "1j", "True", "2.5", "4294967296")},
    **{f"returns {n}": _returns(TENSORS[n]) for n in _TABLES},
    **{
        f"{use} of {table}": _reads(TENSORS[table], how)
        for table in _TABLES
        for use, how in _USES.items()
    },
}


def _flex_mask(q_len: int, kv_len: int) -> Any:
    return flex.create_block_mask(
        lambda b, h, q, kv: q >= kv, 1, 1, q_len, kv_len, device="cpu", BLOCK_SIZE=16
    )


def _broken_flex_mask() -> Any:
    broken = _flex_mask(16, 16)
    broken.kv_indices = torch.full_like(broken.kv_indices, 99)
    return broken


def _without_function() -> Any:
    mask = _flex_mask(16, 16)
    mask.mask_mod = None
    return mask


BLOCK_MASKS: Pool = {
    "other lengths": lambda: attnkit.create_block_mask(attnkit.masks.causal(), 1, 1, 32, 8),
    "other batch": lambda: attnkit.create_block_mask(lambda b, h, q, kv: q > b, 7, 1, 16, 16),
    "on meta": lambda: attnkit.create_block_mask(attnkit.masks.causal(), 1, 1, 16, 16, "meta"),
    "PyTorch's": lambda: _flex_mask(16, 16),
    "PyTorch's, other lengths": lambda: _flex_mask(48, 16),
    "PyTorch's, broken": _broken_flex_mask,
    "PyTorch's, no function": _without_function,
    "PyTorch's, on meta": lambda: _flex_mask(16, 16).to("meta"),
    "a class": lambda: attnkit.BlockMask,
    "dense": lambda: torch.ones(16, 16, dtype=torch.bool),
}

POOLS: dict[str, Pool] = {
    "number": NUMBERS,
    "text": TEXTS,
    "object": OBJECTS,
    "tensor": TENSORS,
    "function": FUNCTIONS,
    "block mask": BLOCK_MASKS,
}


def draw(random: Random, likely: tuple[str, ...]) -> tuple[str, Callable[[], Any]]:
    """Draw a value, with probability 2/3 of a kind in `likely`; return its name and its builder."""
    kind = random.choice(likely) if random.random() < 2 / 3 else random.choice(list(POOLS))
    name = random.choice(list(POOLS[kind]))
    return f"{kind} {name}" if kind in ("tensor", "function", "block mask") else name, (
        POOLS[kind][name]
    )
