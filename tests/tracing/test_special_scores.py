"""Check torch's values and derivatives of traced functions at kinks, zeros and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attnkit import mods
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.tracing.tracer import trace

_POSITIVE = [0.0, 1e-20, 1e-3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0, 20.0, 21.0, 30.0, 45.0]
SCORES = [-x for x in reversed(_POSITIVE)] + _POSITIVE

# Their values and derivatives at infinity differ between torch's own implementations.
_FINITE_ONLY = {"gelu", "gelu tanh", "mish", "sinh", "cosh", "tan", "sin", "cos"}
# Its derivative is a power -3/2 in torch, which differs from that of rsqrt at -0.0 and at -inf.
_VALUE_ONLY = {"power -1/2"}

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "exp exp2 expm1 tanh sigmoid sin cos erf ceil trunc abs neg square reciprocal sign "
            "relu round frac sinh cosh tan atan asin acos erfinv lgamma atanh sgn log log2 log1p log10 sqrt rsqrt"
        ).split()
    },
    **{
        name: getattr(F, name)
        for name in (
            "gelu silu softplus elu leaky_relu logsigmoid mish relu6 hardtanh softsign selu "
            "softshrink hardshrink tanhshrink".split()
        )
    },
    "gelu tanh": lambda s: F.gelu(s, approximate="tanh"),
    "elu, alpha": lambda s: F.elu(s, alpha=0.5),
    "softplus, beta": lambda s: F.softplus(s, beta=2, threshold=5),
    "hardtanh, bounds": lambda s: F.hardtanh(s, -2, 0.5),
    "atan2": lambda s: torch.atan2(s, torch.ones_like(s)),
    "atan2 of x": lambda s: torch.atan2(torch.full_like(s, -2.0), s),
    "atan2 behind": lambda s: torch.atan2(s, torch.full_like(s, -0.5)),
    "hypot": lambda s: torch.hypot(s, torch.full_like(s, 0.5)),
    "hypot of large numbers": lambda s: torch.hypot(s * 1e30, torch.full_like(s, 1e30)) / 1e30,
    "hypot of small numbers": lambda s: torch.hypot(s * 1e-30, torch.full_like(s, 1e-30)) * 1e30,
    "hypot with NaN": lambda s: torch.hypot(s, torch.full_like(s, math.nan)),
    "nan_to_num": lambda s: torch.nan_to_num(s.log(), nan=3.0, neginf=-2.0, posinf=7.0),
    "addcmul": lambda s: torch.addcmul(s, s, torch.sin(s), value=0.7),
    "addcdiv": lambda s: torch.addcdiv(s, torch.sin(s), s.abs() + 1, value=-0.7),
    "deg2rad": lambda s: torch.deg2rad(s) + torch.rad2deg(s),
    "softshrink, bound": lambda s: F.softshrink(s, 1.5),
    "hardshrink, bound": lambda s: F.hardshrink(s, 1.0),
    "threshold": lambda s: F.threshold(s, 0.5, -3.0),
    "logaddexp2": lambda s: torch.logaddexp2(s, torch.ones_like(s)),
    "fmax": lambda s: torch.fmax(s, torch.ones_like(s)),
    "fmin": lambda s: torch.fmin(torch.ones_like(s), s),
    "fmax of NaN": lambda s: (
        torch.fmax(torch.full_like(s, math.nan), s)
        + torch.fmin(s, torch.full_like(s, math.nan)) ** 2
    ),
    "power 1/2": lambda s: s**0.5,
    "power -1/2": lambda s: s**-0.5,
    "power 2": lambda s: s**2,
    "power 3": lambda s: s**3,
    "power 0": lambda s: s**0,
    "power of 2": lambda s: 2**s,
    "power of 1/2": lambda s: 0.5**s,
    "fmod": lambda s: torch.fmod(s, 1.5),
    "fmod, negative": lambda s: torch.fmod(s, -0.7),
    "remainder": lambda s: s % 1.5,
    "remainder, negative": lambda s: s % -0.7,
    "truncated division": lambda s: torch.div(s, 0.7, rounding_mode="trunc"),
    "clamp": lambda s: s.clamp(-1, 2),
    "clamp, one bound": lambda s: s.clamp(min=0),
    "clamp, crossed bounds": lambda s: s.clamp(2, -1),
    "maximum": lambda s: torch.maximum(s, torch.zeros_like(s)),
    "minimum": lambda s: torch.minimum(s, torch.ones_like(s)),
    "lerp": lambda s: torch.lerp(s, s * 2, 0.7),
    "logaddexp": lambda s: torch.logaddexp(s, torch.ones_like(s)),
    "where": lambda s: torch.where(s > 0, s, 0.0),
    "masked_fill": lambda s: s.masked_fill(s > 1, 2.0),
    "mods.log_sigmoid": lambda s: mods.log_sigmoid()(s, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_scores_have_torchs_value_and_derivative(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    numbers = SCORES if name in _FINITE_ONLY else [-math.inf, *SCORES, math.inf]
    scores = torch.tensor(numbers, dtype=dtype).requires_grad_()
    values = torch.vmap(function)(scores)
    grad = torch.linspace(1, 2, len(numbers), dtype=dtype)
    expected = torch.zeros_like(scores)
    if values.requires_grad:
        (expected,) = torch.autograd.grad(values, scores, grad)
    traced = trace(lambda s, b, h, q, kv: function(s), "score")
    env = {"score": scores.detach(), "grad": grad}
    value, derivative = evaluate([traced.root, adjoint(traced.root).dscore], env, [], dtype)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-13, 1e-14)
    same = {"rtol": rtol, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(value.expand_as(scores), values.detach(), **same)
    if name in _VALUE_ONLY:
        return
    torch.testing.assert_close(derivative.expand_as(scores), expected, **same)
