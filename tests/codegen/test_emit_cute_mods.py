"""Compare the DSL emitter with torch on realistic mods, masks and gradients, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.tracing.tracer import trace

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.codegen.cute_host import run_on_cpu

W = 7
random = torch.Generator().manual_seed(0)
SLOPES = torch.rand(2, generator=random)
BUCKETS = torch.randn(2, 16, generator=random)
RELATIVE = torch.randn(2, 64, generator=random)
DOCUMENT = torch.tensor([0] * 9 + [1] * 14 + [4] * 9)
PREFIX = torch.tensor([5, 11], dtype=torch.int32)
GLOBAL = torch.rand(32, generator=random) < 0.2
SCALE = torch.tensor(1.25, dtype=torch.bfloat16)
HALF = torch.randn(2, 32, generator=random).half()


def t5(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    distance = torch.clamp(q - kv, min=0)
    far = 8 + (torch.log((distance + 1) / 8) / math.log(16) * 8).to(torch.int32)
    bucket = torch.where(distance < 8, distance, torch.clamp(far, 0, 15))
    return s + BUCKETS[h, bucket]


def natten(b: Any, h: Any, q: Any, kv: Any) -> Any:
    row, column = (q - 3) // W, (q - 3) % W
    middle_row, middle_column = torch.clamp(row, 1, 2), torch.clamp(column, 2, W - 3)
    near_row = torch.abs(middle_row - kv // W) <= 1
    return near_row & (torch.abs(middle_column - kv % W) <= 2)


SCORES: dict[str, Callable[..., Any]] = {
    "alibi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "softcap": lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
    "t5": t5,
    "relative": lambda s, b, h, q, kv: s + RELATIVE[h, q - kv],
    "half_table": lambda s, b, h, q, kv: s * SCALE + HALF[b, -1 - kv],
    "sigmoid": lambda s, b, h, q, kv: torch.sigmoid(s - 2.0),
    "silu": lambda s, b, h, q, kv: functional.silu(s),
    "gelu": lambda s, b, h, q, kv: functional.gelu(s),
    "gelu_tanh": lambda s, b, h, q, kv: functional.gelu(s, approximate="tanh"),
    "softplus": lambda s, b, h, q, kv: functional.softplus(s),
    "relu_squared": lambda s, b, h, q, kv: torch.relu(s) ** 2,
    "leaky": lambda s, b, h, q, kv: functional.leaky_relu(s, 0.1),
    "elu": lambda s, b, h, q, kv: functional.elu(s),
    "clamp": lambda s, b, h, q, kv: torch.clamp(s, -1.5).clamp(max=SLOPES[h]),
    "powers": lambda s, b, h, q, kv: torch.abs(s) ** 1.5 - (1 + s * s) ** -0.5,
    "truncated": lambda s, b, h, q, kv: s + torch.div(q - kv, 4, rounding_mode="trunc"),
    "remainder": lambda s, b, h, q, kv: torch.remainder(s, -0.7) + s // 0.3,
    "rotary": lambda s, b, h, q, kv: s * torch.cos((q - kv) * 0.37) + torch.sin(s),
    "global": lambda s, b, h, q, kv: torch.where(GLOBAL[q] | GLOBAL[kv], s, s * 0.5),
    "masking": lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf),
}
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "document": lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv),
    "prefix": lambda b, h, q, kv: (kv < PREFIX[b]) | (q >= kv),
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 5 + h),
    "natten": natten,
    "dilated": lambda b, h, q, kv: ((q - kv) % 3 == 0) & ((kv - q) // 4 > -3),
    "bits": lambda b, h, q, kv: ((q ^ kv) & 5 == 0) | ((q >> 2) == (kv >> 2)),
    "either": lambda b, h, q, kv: GLOBAL[q] ^ GLOBAL[kv] | ~(q > kv),
}


def places() -> dict[str, Tensor]:
    """Return arguments for two batch elements, two heads, 32 queries and 32 keys, by name."""
    sizes = {"b": 2, "h": 2, "q": 32, "kv": 32}
    env = {
        name: torch.arange(size).int().view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(sizes.items())
    }
    for name in ("score", "grad"):
        env[name] = torch.randn(tuple(sizes.values())) * 3
    return env


@pytest.mark.parametrize("name", MASKS)
def test_masks_agree_with_torch(name: str) -> None:
    env = places()
    traced = trace(MASKS[name], "mask")
    (ours,) = run_on_cpu([traced.root], env, traced.tensors)
    direct = MASKS[name](*(env[a].long() for a in ("b", "h", "q", "kv")))
    assert torch.equal(ours, direct.broadcast_to(ours.shape))
    assert 0 < ours.float().mean() < 1


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_their_gradients_are_as_accurate_as_torchs(name: str) -> None:
    env = places()
    traced = trace(SCORES[name], "score")
    gradients = adjoint(traced.root)
    roots = [traced.root, gradients.dscore, *(c for _, c in gradients.loads)]
    double = {k: v.double() if v.is_floating_point() else v for k, v in env.items()}
    exact = evaluate(roots, double, traced.tensors, torch.float64)
    single = evaluate(roots, env, traced.tensors)
    for n, ours, theirs, reference in zip(
        roots, run_on_cpu(roots, env, traced.tensors), single, exact, strict=True
    ):
        theirs, reference = theirs.broadcast_to(ours.shape), reference.broadcast_to(ours.shape)
        known = reference.isfinite()
        assert torch.equal(ours[~known].isnan(), reference[~known].isnan()), n
        assert torch.equal(ours.nan_to_num(0.0)[~known], theirs.nan_to_num(0.0)[~known]), n
        bound = 2 * (theirs - reference)[known].abs().max()
        unit = torch.finfo(torch.float32).eps * reference[known].abs().max()
        assert (ours - reference)[known].abs().max() <= bound + unit, n
