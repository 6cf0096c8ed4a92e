"""Check that the graph of a traced function equals its eager evaluation in PyTorch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import TraceError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.tracing.ops.shape import MAX_UNROLL
from attnkit.tracing.tracer import Traced, trace

B, H, Q, K = 2, 3, 7, 9
HEADS = torch.linspace(-1.5, 2.0, H)
TABLE = torch.linspace(-3.0, 4.0, H * 40).view(H, 40)
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 5, 5, 3])
FLAGS = torch.tensor([True, False, True, True, False, False, True, True, False])
DEEP = torch.arange(B * H * 9 * 4, dtype=torch.float32).view(B, H, 9, 4).sin()
SPANS = torch.tensor([[0, 3], [2, 6], [5, 9]])
GAIN = torch.tensor(1.25)
EDGES = torch.tensor([-2, 0, 1, 1, 4])
BYTES = torch.tensor([0, 3, 100, 130, 200, 255, 17, 40, 1], dtype=torch.uint8)
SIGNED = torch.tensor([0, 3, 100, -128, -70, 127, 17, -40, 1], dtype=torch.int8)
SHORTS = torch.linspace(-32768, 32767, 9).to(torch.int16)
GRID = torch.linspace(-2.0, 2.0, 9)
SHIFT = torch.tensor(2)
PLANE = torch.linspace(-2.0, 3.0, 24).view(6, 4)
HALF = torch.linspace(-1.0, 1.0, 36).view(9, 4).cos().to(torch.bfloat16)
HALF3 = HALF[:, 1:].clone()
FOLDED = torch.linspace(-1.0, 1.0, 72).view(3, 6, 4).sin()


def positions() -> dict[str, Tensor]:
    sizes = {"b": B, "h": H, "q": Q, "kv": K}
    return {
        name: torch.arange(n, dtype=torch.int32).view([n if i == axis else 1 for i in range(4)])
        for axis, (name, n) in enumerate(sizes.items())
    }


SCORES = torch.randn(B, H, Q, K, generator=torch.Generator().manual_seed(1)) * 3


def of_graph(traced: Traced) -> Tensor:
    env = {**positions(), "score": SCORES}
    (value,) = evaluate([traced.root], env, traced.tensors)
    return value.expand(B, H, Q, K)


def of_eager(function: Callable[..., Any], kind: str, scores: Tensor = SCORES) -> Tensor:
    rows = []
    for b, h, q, kv in itertools.product(range(B), range(H), range(Q), range(K)):
        index = [torch.tensor(i, dtype=torch.int32) for i in (b, h, q, kv)]
        arguments = [scores[b, h, q, kv].clone(), *index] if kind == "score" else index
        rows.append(torch.as_tensor(function(*arguments)))
    return torch.stack(rows).view(B, H, Q, K)


def assert_same(function: Callable[..., Any], kind: Any) -> None:
    found, expected = of_graph(trace(function, kind)), of_eager(function, kind)
    if kind == "mask":
        assert found.dtype == expected.dtype == torch.bool
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=2e-6, equal_nan=True)


class Callable_:
    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= self.window


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(H, 20))

    def forward(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.bias[h, q - kv + 9]


def _with_default(b: Any, h: Any, q: Any, kv: Any, window: int = 3) -> Any:
    return q - kv < window


MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 3),
    "callable class": Callable_(2),
    "partial": functools.partial(_with_default, window=1),
    "default": _with_default,
    "python bool": lambda b, h, q, kv: True,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "int64 table, negative": lambda b, h, q, kv: IDS[-1 - q] >= IDS[kv - 9],
    "bool table": lambda b, h, q, kv: FLAGS[kv] | FLAGS[q],
    "0-d tensor": lambda b, h, q, kv: q + SHIFT > kv,
    "numpy scalar": lambda b, h, q, kv: np.int64(2) * q >= kv * np.int32(1),
    "floor division of negatives": lambda b, h, q, kv: (q - kv) // 3 == -1,
    "negative divisor": lambda b, h, q, kv: (kv - q) // -2 <= (q - kv) % -3,
    "modulo of negatives": lambda b, h, q, kv: (q - kv) % 4 == 1,
    "reflected": lambda b, h, q, kv: (17 // (q + 1)) % 2 + (5 - kv) % 3 == (7 % (kv + 1)),
    "truncated division": lambda b, h, q, kv: torch.div(q - kv, 3, rounding_mode="trunc") == -1,
    "fmod of ints": lambda b, h, q, kv: torch.fmod(q - kv, 3) == -2,
    "bits": lambda b, h, q, kv: ((q ^ kv) & 3) | (q >> 1) == (kv << 1) - ~q,
    "shifts of negatives": lambda b, h, q, kv: (q - kv) >> 1 == -2,
    "bool algebra": lambda b, h, q, kv: (~(q > kv)) ^ (FLAGS[q] & torch.logical_not(kv > 4)),
    "logical": lambda b, h, q, kv: torch.logical_or(q % 2, torch.logical_and(kv % 3, h)),
    "where of bools": lambda b, h, q, kv: torch.where(q > 3, kv > 2, FLAGS[kv]),
    "where of ints": lambda b, h, q, kv: torch.where(q > 3, q, -kv) + h > 1,
    "abs min max": lambda b, h, q, kv: torch.minimum(q, kv).abs() * 2 <= torch.maximum(q - 3, h),
    "clamp": lambda b, h, q, kv: (q - kv).clamp(-2, 3) == torch.clamp(kv, max=3) - 3,
    "clamp by tensors": lambda b, h, q, kv: q.clamp(min=kv, max=h + 4) > 3,
    "any over spans": lambda b, h, q, kv: ((kv >= SPANS[:, 0]) & (kv < SPANS[:, 1])).any(),
    "any(-1) of a row": lambda b, h, q, kv: (SPANS[q % 3] == kv).any(-1),
    "all, keepdim": lambda b, h, q, kv: (SPANS[h] <= kv).all(-1, keepdim=True)[0],
    "sum of bools": lambda b, h, q, kv: (kv > SPANS).sum() % 2 == 0,
    "amax of ints": lambda b, h, q, kv: SPANS[q % 3].amax() > kv,
    "int(...).to": lambda b, h, q, kv: (q.float() * 1.7 - 4.3).to(torch.int32) >= kv.to(q.dtype),
    "bool()": lambda b, h, q, kv: (q % 3).bool() & kv.to(torch.bool),
    "new_ones": lambda b, h, q, kv: q.new_ones((), dtype=torch.bool) & (q > kv),
    "int power": lambda b, h, q, kv: q**2 + 2**h > kv * 4,
    "float compare": lambda b, h, q, kv: torch.sqrt(q.float()) > kv / 3,
    "vector index": lambda b, h, q, kv: (IDS[torch.tensor([0, 3, 5]) + q % 3] == kv).any(),
    "mixed vector index": lambda b, h, q, kv: (SPANS[q % 3, torch.tensor([1, 0])] <= kv).all(),
    "view of a table": lambda b, h, q, kv: IDS[1:][q] == IDS[kv],
    "a part from behind": lambda b, h, q, kv: IDS[5:][q % 4 - kv % 4] == IDS[kv - 9],
    "separated vector indices": lambda b, h, q, kv: (
        (FOLDED[torch.tensor([[0], [1]]) + h % 2, :, torch.tensor([0, 3, 1])] > 0.1)[0, 2, q % 6]
        & (FOLDED[torch.tensor([2, 0]), :, h][1, kv % 6] > -0.5)
    ),
    "a part by its own index": lambda b, h, q, kv: IDS[3:][IDS[q] % 3 - 2] == IDS[kv],
    "an inner part": lambda b, h, q, kv: IDS[2:8][q % 6 - 3] >= IDS[1:-1][kv % 7],
    "every second": lambda b, h, q, kv: IDS[::2][kv % 5 - 5] > IDS[1::3][q % 3],
    "a part of a part": lambda b, h, q, kv: IDS[2:][3:][q % 5 - 4] >= IDS[kv],
    "a part of a row": lambda b, h, q, kv: SPANS[:, 1:][q % 3 - 3, 0] >= kv,
    "a part of a row, in steps": lambda b, h, q, kv: SPANS[:, 1:][q % 3][-1 - kv % 1] >= kv,
    "spans between cuts": lambda b, h, q, kv: ((kv >= IDS[:-1]) & (kv < IDS[1:])).any(),
    "eager on captured": lambda b, h, q, kv: IDS.cumsum(0)[q] > IDS.flip(0)[kv] * 2,
    "ellipsis and None": lambda b, h, q, kv: SPANS[None, ..., 0][0, q % 3] == kv,
    "product of bools": lambda b, h, q, kv: (q >= kv) * (kv > 2),
    "sum of two bools": lambda b, h, q, kv: (q > kv + 3) + (kv == 2),
    "extremes of bools": lambda b, h, q, kv: torch.maximum(q > 3, torch.min(kv > 2, FLAGS[q])),
    "bytes wrap": lambda b, h, q, kv: (BYTES[q] - BYTES[kv] > 100) ^ (BYTES[kv] * 2 + 30 < 60),
    "bytes among themselves": lambda b, h, q, kv: (
        (-BYTES[q] == ~BYTES[kv] + 1) | (BYTES[q] ** 2 + BYTES[kv] == BYTES[kv])
    ),
    "wider than bytes": lambda b, h, q, kv: BYTES[q].int() - BYTES[kv] > BYTES[q] - q - 3,
    "signed bytes": lambda b, h, q, kv: (SIGNED[q] * SIGNED[kv] > 0) | (SIGNED[q] << 2 == 4),
    "shorts": lambda b, h, q, kv: SHORTS[q] - SHORTS[kv] > SIGNED[kv] + BYTES[q],
    "bytes that were chosen": lambda b, h, q, kv: (
        torch.where(q > 3, BYTES[q], 7) - BYTES[kv].clamp(max=50) - BYTES[q] // 3
        > BYTES[kv] % 9 - (SIGNED[q] >> 1)
    ),
    "dtypes of bytes": lambda b, h, q, kv: torch.tensor(
        (BYTES[q].dtype, (SIGNED[q] + 1).dtype) == (torch.uint8, torch.int8)
    ),
    "a byte's minimum": lambda b, h, q, kv: torch.minimum(BYTES[q], BYTES[kv]) - BYTES[3] > q,
    "bytes in a row": lambda b, h, q, kv: ((BYTES[1:4] + BYTES[q]) > BYTES[kv]).any(),
    "isin": lambda b, h, q, kv: torch.isin(kv, SPANS) | torch.isin(q, IDS, invert=True),
    "isin a number": lambda b, h, q, kv: torch.isin(kv, 3),
    "bucketize": lambda b, h, q, kv: (
        torch.bucketize(q - kv, EDGES) >= torch.bucketize(kv, EDGES, right=True)
    ),
    "searchsorted": lambda b, h, q, kv: (
        torch.searchsorted(EDGES, q, side="right") % 2 == torch.searchsorted(EDGES, kv)
    ),
    "rounded": lambda b, h, q, kv: torch.round(q / 2) >= torch.round((kv - 5) / 2),
    "angles": lambda b, h, q, kv: (
        (torch.atan2(q - 3, kv - 4) > 0.7) ^ (torch.acos((q - kv) / 10) < torch.hypot(q / 3, h / 2))
    ),
    "fmin and fmax of ints": lambda b, h, q, kv: torch.fmax(q, kv) - torch.fmin(q, SHIFT) > h + 2,
    "infinite": lambda b, h, q, kv: (
        torch.isposinf((q - 3) / (kv - kv)) ^ torch.isneginf((kv - 4) / (q - q)) ^ torch.isposinf(q)
    ),
    "signs": lambda b, h, q, kv: torch.sgn(q - kv) + torch.sgn((q - 3) / 2) > 0,
    "threshold of ints": lambda b, h, q, kv: F.threshold(q, 3, -1) < F.threshold(kv, 2, 1),
    "nan_to_num of halves": lambda b, h, q, kv: (HALF[q, h] / 0).nan_to_num() > HALF[kv, h],
    "addcmul of bytes": lambda b, h, q, kv: (
        torch.addcmul(BYTES[q], BYTES[kv], BYTES[q], value=-3) > 100
    ),
    "stack": lambda b, h, q, kv: torch.stack([q > 2, kv > 4, h > 0]).any(),
    "index_select": lambda b, h, q, kv: (
        torch.index_select(SPANS, 0, q % 3)[0, 1] + IDS.index_select(-1, kv)[0] > q + kv
    ),
    "index_select by a row": lambda b, h, q, kv: (
        torch.index_select(IDS, 0, SPANS[q % 3] // 2 + kv % 5) == 1
    ).any(),
    "take": lambda b, h, q, kv: torch.take(SPANS, (q - 6).long()) >= torch.take(IDS, kv.long()),
    "take a row": lambda b, h, q, kv: (torch.take(SPANS, SPANS[h] // 2 - kv % 5) == q).any(),
    "take_along_dim": lambda b, h, q, kv: (
        torch.take_along_dim(SPANS, SPANS[:, :1] % 2 * (kv % 2), 1).sum() >= q
    ),
    "take_along_dim, broadcast": lambda b, h, q, kv: (
        torch.take_along_dim(SPANS, (q % 3).long().view(1, 1), 0)[0, 1]
        + torch.take_along_dim(SPANS, (kv % 6).long().view(1))[0]
        > 8
    ),
    "gather": lambda b, h, q, kv: (
        torch.gather(SPANS[:2], 0, SPANS[:, :1] % 2 * (q % 2))[1, 0]
        == SPANS[h].gather(0, (kv % 2).long().view(1))[0]
    ),
    "gather from a part": lambda b, h, q, kv: (
        torch.gather(IDS[4:], 0, (kv % 5).long().view(1))[0]
        >= IDS[2:7].gather(0, IDS[q].view(1) % 5)[0]
    ),
    "select": lambda b, h, q, kv: SPANS[h % 3 - q % 2].select(-1, 1) > kv,
    "embedding of ids": lambda b, h, q, kv: (
        F.embedding(IDS[kv], PLANE)[1] + F.embedding(SPANS[h, :1] % 4, PLANE)[0, 2] > q / 3
    ),
    "products of ints": lambda b, h, q, kv: (
        SPANS[q % 3] @ SPANS[kv % 3] > torch.mv(SPANS, SPANS[h])[1]
    ),
    "products of bytes": lambda b, h, q, kv: (
        torch.dot(BYTES[:3] + kv.to(torch.uint8), BYTES[3:6]) > BYTES[q]
    ),
    "products of halves": lambda b, h, q, kv: (
        (F.linear(HALF[q, :3], HALF3, HALF[0, 0]) * 3)[kv % 9] > (HALF @ HALF[kv])[h]
    ),
    "products of matrices": lambda b, h, q, kv: (SPANS @ SPANS.T[:, :2])[q % 3, kv % 2] > 9 * h,
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_equals_eager(name: str) -> None:
    assert_same(MASKS[name], "mask")


UNARY = (
    "exp exp2 expm1 tanh sigmoid sin cos erf floor ceil trunc abs neg square reciprocal "
    "sign relu positive round frac sinh cosh tan atan asin acos"
).split()
POSITIVE = "log log2 log1p log10 sqrt rsqrt".split()

MODS: dict[str, Callable[..., Any]] = {
    **{n: (lambda s, b, h, q, kv, n=n: getattr(torch, n)(s) + kv) for n in UNARY},
    **{n: (lambda s, b, h, q, kv, n=n: getattr(torch, n)(s.abs() + 0.1)) for n in POSITIVE},
    "gelu": lambda s, b, h, q, kv: F.gelu(s),
    "gelu tanh": lambda s, b, h, q, kv: F.gelu(s, approximate="tanh"),
    "silu": lambda s, b, h, q, kv: F.silu(s),
    "softplus": lambda s, b, h, q, kv: F.softplus(s * 20, beta=2, threshold=5),
    "elu": lambda s, b, h, q, kv: F.elu(s, alpha=0.5),
    "leaky_relu": lambda s, b, h, q, kv: F.leaky_relu(s, 0.2),
    "logsigmoid": lambda s, b, h, q, kv: F.logsigmoid(s * 10),
    "mish": lambda s, b, h, q, kv: F.mish(s * 10),
    "relu6": lambda s, b, h, q, kv: F.relu6(s * 4) + F.relu6(q),
    "logaddexp": lambda s, b, h, q, kv: torch.logaddexp(s * 20, TABLE[h, q]),
    "logaddexp of infinities": lambda s, b, h, q, kv: torch.logaddexp(
        torch.where(q > 2, s, -math.inf), torch.where(kv > 2, s, -math.inf)
    ),
    "halves to even": lambda s, b, h, q, kv: torch.round((q - kv) / 2) + torch.round(s / 0.0),
    "bucketize NaN": lambda s, b, h, q, kv: s + torch.bucketize(s / 0 * 0, GRID),
    "bucketize": lambda s, b, h, q, kv: TABLE[h, torch.bucketize(s, GRID)],
    "atan2": lambda s, b, h, q, kv: torch.atan2(s, TABLE[h, q]) + torch.atan2(q - 3, kv - 4),
    "erfinv": lambda s, b, h, q, kv: torch.erfinv(torch.tanh(s) * 0.8) + torch.erfinv(q - 1),
    "lgamma": lambda s, b, h, q, kv: torch.lgamma(s * 3) + torch.lgamma(q - kv),
    "hypot": lambda s, b, h, q, kv: torch.hypot(s, TABLE[h, q]) + torch.hypot(q / 2, kv),
    "nan_to_num": lambda s, b, h, q, kv: torch.nan_to_num(s / (q - kv).clamp(min=0) * 0, 2.5),
    "nan_to_num of ints": lambda s, b, h, q, kv: s + torch.nan_to_num(q, 1.0),
    "addcmul": lambda s, b, h, q, kv: torch.addcmul(s, TABLE[h, q], kv, value=0.5),
    "addcmul of ints": lambda s, b, h, q, kv: s + torch.addcmul(q, kv, h, value=2.5),
    "addcdiv": lambda s, b, h, q, kv: torch.addcdiv(s, TABLE[h, q], kv + 1.0, value=-2),
    "softsign": lambda s, b, h, q, kv: F.softsign(s),
    "hardtanh": lambda s, b, h, q, kv: F.hardtanh(s),
    "clamp": lambda s, b, h, q, kv: s.clamp(-1, GAIN),
    "alibi": lambda s, b, h, q, kv: s + HEADS[h] * (kv - q),
    "softcap": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "where -inf": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "relative": lambda s, b, h, q, kv: s + TABLE[h, q - kv + 20],
    "wrapping index": lambda s, b, h, q, kv: s + TABLE[h - 1, kv - q],
    "four dimensions": lambda s, b, h, q, kv: s * DEEP[b, h, q, kv % 4],
    "partial index then dot": lambda s, b, h, q, kv: s + torch.dot(DEEP[b, h, q], DEEP[b, h, kv]),
    "matmul": lambda s, b, h, q, kv: s + DEEP[b, h, q] @ DEEP[b, h, kv],
    "sum of products": lambda s, b, h, q, kv: s + (DEEP[0, h, q] * DEEP[1, 0, kv]).sum(-1),
    "mean": lambda s, b, h, q, kv: s + DEEP[b, h, q].mean(),
    "module": Module(),
    "0-d gain": lambda s, b, h, q, kv: s * GAIN + SHIFT,
    "constant inside": lambda s, b, h, q, kv: s * torch.tensor(0.25),
    "table inside": lambda s, b, h, q, kv: s * torch.arange(10)[kv],
    "int result": lambda s, b, h, q, kv: q - kv,
    "captured result": lambda s, b, h, q, kv: TABLE[h, q],
    "pow half": lambda s, b, h, q, kv: s.abs() ** 0.5 + s**3 - 2 ** (-s) + 1.5**s,
    "float power": lambda s, b, h, q, kv: s + torch.float_power(s.abs() + 0.5, q % 3).float(),
    "negative power": lambda s, b, h, q, kv: (s.abs() + 1) ** -1 + (q + 1.0) ** -0.5,
    "float floor division": lambda s, b, h, q, kv: s // 0.7 + s % 0.7 - (-s) % 1.3,
    "float fmod": lambda s, b, h, q, kv: torch.fmod(s, 0.7) + torch.fmod(s, -1.3),
    "rounded": lambda s, b, h, q, kv: s.to(torch.bfloat16).float() + s.half().to(s.dtype),
    "nan, inf": lambda s, b, h, q, kv: torch.where(torch.isnan(s / 0 * 0), 1.0, torch.isinf(s / 0)),
    "minimum": lambda s, b, h, q, kv: torch.minimum(s, kv / 2) + torch.maximum(s, TABLE[h, q]),
    "max of two": lambda s, b, h, q, kv: torch.max(s, s * 2) + torch.min(s, GAIN),
    "masked_fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, -5),
    "lerp": lambda s, b, h, q, kv: torch.lerp(s, TABLE[h, q], 0.3),
    "addition with alpha": lambda s, b, h, q, kv: (
        torch.add(s, kv, alpha=2) - torch.sub(s, q, alpha=3)
    ),
    "reflected": lambda s, b, h, q, kv: 2 - s + 3 / (s.abs() + 1) - (1 - q),
    "like": lambda s, b, h, q, kv: s + torch.full_like(s, 2) * torch.ones_like(q) + s.new_zeros(()),
    "new row": lambda s, b, h, q, kv: s + q.new_ones((3,), dtype=torch.float32).sum() * kv,
    "in place on a name": lambda s, b, h, q, kv: operator.iadd(s, kv),
    "math of a constant": lambda s, b, h, q, kv: s * math.log2(math.e),
    "embedding": lambda s, b, h, q, kv: s * F.embedding(IDS[q] + kv % 2, DEEP[0, 0])[2],
    "linear": lambda s, b, h, q, kv: s * F.linear(DEEP[b, h, q], PLANE, PLANE[:, 1])[kv % 6],
    "linear to one": lambda s, b, h, q, kv: F.linear(torch.stack([s, s * s, s, s]), PLANE[h], GAIN),
    "linear layers": lambda s, b, h, q, kv: F.linear(
        F.silu(F.linear(torch.stack([s, q / 4, kv / 4, s]), PLANE)), PLANE.T, DEEP[b, h, q]
    )[kv % 4],
    "matrix and vector": lambda s, b, h, q, kv: (
        (PLANE @ DEEP[b, h, q])[kv % 6] + s * (DEEP[b, h, kv] @ PLANE.T)[h]
    ),
    "mv, mm, inner": lambda s, b, h, q, kv: (
        s * torch.mv(PLANE, DEEP[b, h, kv])[0]
        + torch.mm(DEEP[b, h], PLANE.T)[kv, q % 6]
        + torch.inner(DEEP[b, h, q], DEEP[b, h, kv])
    ),
    "unsqueeze": lambda s, b, h, q, kv: (s.unsqueeze(0) + DEEP[b, h, q, :2]).sum(),
}


@pytest.mark.parametrize("name", MODS)
def test_mod_equals_eager(name: str) -> None:
    assert_same(MODS[name], "score")


OTHER_GRADIENTS = {
    "float floor division",  # torch has no derivative of floor_divide
    "halves to even",  # torch's zero gradient of round meets 1 / 0: NaN, here 0
    "rounded",  # torch rounds the gradient too
}


@pytest.mark.parametrize("name", [name for name in MODS if name not in OTHER_GRADIENTS])
def test_derivative_by_the_score_equals_autograd(name: str) -> None:
    scores = SCORES.clone().requires_grad_()
    values = of_eager(MODS[name], "score", scores).float()
    grad = torch.linspace(1, 2, values.numel()).view(values.shape)
    expected = torch.zeros_like(scores)
    if values.requires_grad:
        (found,) = torch.autograd.grad(values, scores, grad, allow_unused=True)
        expected = expected if found is None else found
    traced = trace(MODS[name], "score")
    env = {**positions(), "score": SCORES, "grad": grad}
    (ours,) = evaluate([adjoint(traced.root).dscore], env, traced.tensors)
    ours = ours.float().expand(B, H, Q, K)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


# --- random expressions ---------------------------------------------------------------------
INTS: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * 3 - y,
    lambda x, y: x // 3 + y,
    lambda x, y: x % 5 - y % -4,
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.where(x > y, x, -y),
    lambda x, y: (x ^ y) & 7,
    lambda x, y: IDS[x % 9] + IDS[(-y) % 9],
    lambda x, y: (x - y).abs(),
    lambda x, y: torch.div(x, 2, rounding_mode="trunc") + (y >> 1),
]
FLOATS: list[Callable[..., Any]] = [
    lambda x, y: x + 0.5 * y,
    lambda x, y: x - y,
    lambda x, y: torch.tanh(x) * y,
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x > y, x, -y),
    lambda x, y: F.relu(x) - F.silu(y),
    lambda x, y: torch.exp(-x.abs()) + y,
    lambda x, y: x.clamp(-2, 2) + y.abs(),
    lambda x, y: torch.sigmoid(x) * torch.sin(y),
]


@st.composite
def expressions(draw: st.DrawFn) -> Callable[..., Any]:
    """Draw a random function of (score, b, h, q, kv) that computes on int and float stacks."""
    steps = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100)),
            min_size=1,
            max_size=8,
        )
    )

    def function(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        ints, floats = [b, h, q, kv, kv - q], [score, HEADS[h], TABLE[h, q + kv]]
        for is_int, op, x, y in steps:
            table, stack = (INTS, ints) if is_int else (FLOATS, floats)
            stack.append(table[op % len(table)](stack[x % len(stack)], stack[y % len(stack)]))
        return floats[-1] + 0.01 * ints[-1]

    return function


@given(expressions())
def test_random_mod_equals_eager(function: Callable[..., Any]) -> None:
    traced = trace(function, "score")
    expected = of_eager(function, "score")
    torch.testing.assert_close(of_graph(traced), expected.float(), rtol=1e-5, atol=1e-5)


@given(expressions(), st.integers(-3, 3))
def test_random_mask_equals_eager(function: Callable[..., Any], threshold: int) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        zero = torch.zeros_like(q, dtype=torch.float32)
        return function(zero, b, h, q, kv) > threshold + 0.37

    found, expected = of_graph(trace(mask, "mask")), of_eager(mask, "mask")
    # a float compare may fall either way within rounding of the threshold
    assert (found != expected).float().mean() < 0.01


# --- what a trace holds ---------------------------------------------------------------------
def test_captured_tensors_and_names() -> None:
    local = torch.ones(9)
    traced = trace(lambda s, b, h, q, kv: s + HEADS[h] * local[kv] + HEADS[h], "score")
    assert [t is x for t, x in zip(traced.tensors, (HEADS, local), strict=True)] == [True, True]
    assert traced.names == ("HEADS", "local")
    assert not traced.derived


def test_a_tensor_that_is_not_used_is_not_captured() -> None:
    traced = trace(lambda s, b, h, q, kv: (TABLE[h, q], s + HEADS[h])[1], "score")
    assert traced.tensors == (HEADS,)
    assert ir.slots(traced.root) == (0,)


@pytest.mark.parametrize(
    ("index", "whole"),
    [
        (lambda q: q, True),
        (lambda q: q + q * 2, True),
        (lambda q: torch.minimum(q, q * 2), True),
        (lambda q: torch.clamp(q - 3, min=0), True),
        (lambda q: torch.maximum(q, q - 3), True),
        (lambda q: q // 2, True),
        (lambda q: q % 5, True),
        (lambda q: q - 3, False),
        (lambda q: q * -1, False),
        (lambda q: torch.minimum(q, q - 3), False),
        (lambda q: torch.maximum(q - 2, q - 3), False),
        (lambda q: q // -2, False),
        (lambda q: q % -5, False),
    ],
)
def test_a_part_at_the_end_is_read_from_the_whole(index: Any, whole: bool) -> None:
    """An index that is never negative means the same in the whole tensor, which is captured."""
    traced = trace(lambda b, h, q, kv: IDS[3:][index(q)] == kv, "mask")
    assert (traced.tensors[0] is IDS) == whole


def test_the_longest_reduction_that_is_unrolled() -> None:
    row = torch.ones(B, MAX_UNROLL + 1)
    traced = trace(lambda s, b, h, q, kv: s + row[b, 1:].sum(), "score")
    assert len({n for n in ir.topo(traced.root) if n.op == "load"}) == MAX_UNROLL
    with pytest.raises(TraceError, match=f"at most {MAX_UNROLL} are unrolled"):
        trace(lambda s, b, h, q, kv: s + row[b].sum(), "score")


def test_same_function_gives_the_same_node() -> None:
    mod = MODS["gelu"]
    assert trace(mod, "score").root is trace(mod, "score").root


def test_reading_data_of_a_captured_tensor_is_noted() -> None:
    assert trace(lambda s, b, h, q, kv: s * GAIN.item(), "score").derived
    assert trace(lambda s, b, h, q, kv: s * (2 if GAIN > 1 else 3), "score").derived
    assert trace(lambda b, h, q, kv: IDS.cumsum(0)[q] > kv, "mask").derived
    assert not trace(lambda s, b, h, q, kv: s * len(IDS) * TABLE.shape[1], "score").derived


def test_printing() -> None:
    traced = trace(lambda s, b, h, q, kv: torch.where(q >= kv, s * HEADS[h], -1.0), "score")
    assert str(traced) == ("score(score, b, h, q, kv) = where(kv <= q, score * HEADS[h], -1.0)")


def test_names_are_found_inside_masks_and_objects() -> None:
    from attnkit.tracing.mask import Mask

    def inner(ids: Tensor) -> Mask:
        return Mask(lambda b, h, q, kv: ids[q] == ids[kv])

    mask = inner(IDS) & Mask(lambda b, h, q, kv: FLAGS[kv])
    assert trace(mask, "mask").names == ("ids", "FLAGS")
    assert trace(Module(), "score").names == ("bias",)


# --- how a traced value looks to the user's code --------------------------------------------
def test_a_traced_value_is_a_tensor() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        row = TABLE[h, :3]
        same = all(isinstance(x, Tensor) and torch.is_tensor(x) for x in (q, q - kv, row + q))
        plain = not isinstance(q, int | float | np.ndarray | torch.nn.Parameter)
        return q >= kv if same and plain else q < kv

    assert_same(mask, "mask")


def test_a_traced_value_that_is_kept_can_be_computed_with() -> None:
    kept = []
    trace(lambda s, b, h, q, kv: (kept.append(s), s)[1], "score")
    assert str(torch.exp(kept[0]) + 1) == "Value(exp(score) + 1.0)"


def test_questions_about_a_traced_value_are_answered() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        row = SPANS[q % 3]
        facts = [
            (q.dim(), q.ndim, q.numel(), q.nelement(), q.size()) == (0, 0, 1, 1, torch.Size([])),
            (row.dim(), row.numel(), row.size(0), row.size()) == (1, 2, 2, torch.Size([2])),
            not q.is_floating_point() and torch.is_floating_point(q / 2),
            not torch.is_complex(q) and q.is_signed() and not BYTES[q].is_signed(),
            torch.numel(row) == 2,
        ]
        return (q >= kv) & torch.tensor(all(facts))

    assert_same(mask, "mask")


@pytest.mark.parametrize("count", [-33, -1, 0, 1, 30, 31, 32, 40])
def test_shifts_by_a_number(count: int) -> None:
    """Bits that a shift by a number moves out of 32 are lost, as in torch."""
    assert_same(lambda b, h, q, kv: (q - kv) << count == (q - 4) << count, "mask")
    assert_same(lambda b, h, q, kv: (q - kv) >> count == (h - 1) >> count, "mask")


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 31, 32])
def test_integer_powers(exponent: int) -> None:
    assert_same(lambda b, h, q, kv: (q - 3) ** exponent <= kv - 4, "mask")
    assert_same(lambda b, h, q, kv: 2 ** (h + 1) <= kv, "mask")
    for refused in (33, -1):
        with pytest.raises(TraceError, match=f"integer power q .. {refused}; convert to float"):
            trace(lambda b, h, q, kv, n=refused: q**n > kv, "mask")


def test_vectors_that_index_a_part() -> None:
    """An index tensor into a slice may hold negative numbers, which count from its end."""
    assert_same(lambda b, h, q, kv: (IDS[3:][torch.tensor([0, -1, 2]) - q % 2] == kv).any(), "mask")
    assert_same(lambda b, h, q, kv: (IDS[:5][torch.tensor([4, -5])] >= kv - q).all(), "mask")


def test_products_of_matrices_that_are_not_square() -> None:
    assert_same(lambda s, b, h, q, kv: s * (PLANE[:, h] @ FOLDED[h])[kv % 4], "score")
    assert_same(lambda s, b, h, q, kv: s + (FOLDED[h] @ DEEP[b, h, kv])[q % 6], "score")


def test_functions_of_captured_slices_run_at_once() -> None:
    """A function that attnkit has no handler for may take slices of captured tensors, by name too."""
    assert_same(
        lambda s, b, h, q, kv: s + torch.flip(input=PLANE[1:], dims=[0])[q % 5, kv % 4], "score"
    )
    assert_same(
        lambda s, b, h, q, kv: s + torch.kron(PLANE[:2], other=PLANE[2:, :1])[q, kv % 4], "score"
    )
    assert_same(
        lambda s, b, h, q, kv: s + torch.block_diag(*[PLANE[:2], PLANE[4:]])[q % 4, kv % 8], "score"
    )


def test_products_of_scores_with_matrices_that_are_not_square() -> None:
    def of_scores(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        row = torch.stack([s, s * 2, q / 4, kv / 4, s - 1, s * s])
        return (row @ FOLDED[h])[kv % 4] + (FOLDED[h] @ row[:4])[q % 6]

    assert_same(of_scores, "score")
    for dim in (-2, -1, 0, 1):
        assert_same(
            lambda s, b, h, q, kv, dim=dim: (
                s + FOLDED[h].sum(dim, keepdim=True)[(q % 6, 0) if dim in (-1, 1) else (0, kv % 4)]
            ),
            "score",
        )


def test_tensors_of_an_object_have_the_names_of_its_attributes() -> None:
    class Near:
        def __init__(self) -> None:
            self.limits = torch.arange(9)

        def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return self.limits[q] > kv

    assert trace(Near(), "mask").names == ("limits",)
