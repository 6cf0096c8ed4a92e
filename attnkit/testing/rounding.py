"""Sample the rounding error of a result: dense float64 attention with noise at each step.

The error of the dense reference is one sample of the errors that its dtype can cause. On small
inputs that error may be zero by chance. For example, with one key every weight is 1 and the
reference's gradient of the query is exactly 0, while a kernel computes dO V^T - rowsum(dO O), the
difference of two rounded numbers. This module therefore adds noise of one machine epsilon, relative
to the value, at each step of the attention formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node
from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.plain import HALVES
from attnkit.testing.quantities import DenseCall, Quantities
from attnkit.tracing.tracer import Traced

# Number of samples of each kind that are taken before a result counts as wrong. A long sum may be
# (nearly) exact by chance, in the reference too.
SAMPLES = 8

Noise = Callable[[Tensor, Tensor], Tensor]  # (value, magnitude of its terms) -> value with noise


def noise(dtype: torch.dtype, generator: torch.Generator) -> Noise:
    """Return a function (value, size) -> value plus or minus (at random) eps(`dtype`) * size."""
    unit = torch.finfo(dtype).eps

    def add(value: Tensor, size: Tensor) -> Tensor:
        signs = torch.rand(value.shape, generator=generator).sub_(0.5).sign_()
        return value + signs.to(value.device) * (unit * size)

    return add


def perturbed(call: DenseCall, sample: int) -> Quantities:
    """Compute attention and its gradients in float64 from their formulas, with noise at each step.

    Scores, row statistics and sums get noise of the compute dtype. The weights, the output and the
    gradients of the scores are operands of matrix products and get noise of the case's dtype.

    Args:
        call: the call to compute.
        sample: index of the sample, which seeds the noise.

    Returns:
        Results and gradients by name, as `quantities.run` returns them.
    """
    case, captured = call.case, call.captured
    generator = torch.Generator().manual_seed(1000 * sample + case.seed)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    inner, outer = noise(wide, generator), noise(case.dtype, generator)
    q, key, value = (t.detach().to(torch.float64) for t in case.inputs(call.device))
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (key, value))
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale

    def product(a: Tensor, b: Tensor) -> Tensor:
        return inner(a @ b, a.abs() @ b.abs())

    raw = (scale * product(q, k.mT)).requires_grad_()
    modified = _modified(call, raw)
    logit = None
    if call.sink is not None:
        logit = call.sink.detach().double()[:, None, None].expand(*raw.shape[:3], 1)
        logit = inner(logit, logit.abs())
    m, lse, exact = _softmax(modified.detach(), inner, logit)
    survivors = torch.ones_like(exact) if call.survivors is None else call.survivors
    weights = outer(exact * survivors, exact * survivors)
    out = product(weights, v)
    out = outer(out, out.abs())
    quantities = {"out": out, "lse": lse.squeeze(-1), "max_scores": m.amax(-1)}
    grad_out, grad_lse = (g.to(torch.float64) for g in case.cotangents(call.device))
    terms = grad_out * out
    # the noise is relative to the two operands, because their difference may be 0
    sizes = terms.abs().sum(-1, keepdim=True) + survivors * (grad_out.abs() @ v.abs().mT)
    difference = inner(survivors * (grad_out @ v.mT) - terms.sum(-1, keepdim=True), sizes)
    for through, cotangent, dvalue in (
        ("", exact * difference, product(weights.mT, grad_out)),
        (" through lse", exact * grad_lse[..., None], torch.zeros_like(v)),
    ):
        cotangent = inner(cotangent, cotangent.abs())
        draw, *others = _pulled_back(modified, (raw, *captured.tensors), cotangent)
        draw = outer(draw, draw.abs())
        quantities["dquery" + through] = scale * product(draw, k)
        quantities["dkey" + through] = _shared(scale * product(draw.mT, q), case)
        quantities["dvalue" + through] = _shared(dvalue, case)
        for name, gradient in zip(captured.names, others, strict=True):
            quantities[f"d{name}{through}"] = gradient
    if call.sink is not None and call.sink.requires_grad and logit is not None:
        p = torch.exp(inner(logit - lse, (logit - lse).abs()))
        minus_delta = inner(-terms.sum(-1, keepdim=True), terms.abs().sum(-1, keepdim=True))
        for through, row in (("", minus_delta), (" through lse", grad_lse[..., None])):
            quantities["dsink" + through] = inner(p * row, (p * row).abs()).sum((0, 2, 3))
    return quantities


def _softmax(modified: Tensor, inner: Noise, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, LSE and weights with noise; the weights are exp(score - LSE).

    The LSE includes the logit `sink` [B, Hq, Sq, 1], if there is one.
    """
    m = modified.masked_fill(~modified.isfinite(), -math.inf)
    m = inner(m, m.masked_fill(m == -math.inf, 0).abs())
    logits = m if sink is None else torch.cat([m, sink], -1)
    lse = logits.logsumexp(-1, keepdim=True)
    lse = inner(lse, lse.masked_fill(lse == -math.inf, 0).abs())
    exponent = m - lse.masked_fill(lse == -math.inf, math.inf)
    size = exponent.masked_fill(exponent == -math.inf, 0).abs()
    return m, lse, torch.exp(inner(exponent, size))


def _pulled_back(modified: Tensor, targets: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Return the gradients of the modified scores for `targets`; zeros for unused targets."""
    grads = torch.autograd.grad(modified, targets, cotangent, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(targets, grads, strict=True)]


def _modified(call: DenseCall, raw: Tensor) -> Tensor:
    """Apply the score_mod and the mask of `call` to the raw scores."""
    modified = raw if call.score_mod is None else plain.modified(call.score_mod, raw)
    # 0 * raw keeps raw in the autograd graph even if score_mod ignores it
    modified = modified + 0 * raw
    return modified if call.kept is None else torch.where(call.kept, modified, -math.inf)


def _shared(gradient: Tensor, case: Case) -> Tensor:
    """Sum key or value gradients [B, Hq, Skv, n] to [kv batch, kv heads, Skv, n]."""
    gradient = gradient.unflatten(1, (case.kv_heads, -1)).sum(2)
    return gradient.sum(0, keepdim=True) if case.kv_batch != case.batch else gradient


def noisy_values(
    wide: Traced, captured: Sequence[Tensor], env: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    """Evaluate a traced score_mod in float64, with noise of float32 at each graph node.

    Args:
        wide: the traced score_mod with captured tensors in float64.
        captured: the captured tensors in their own dtype. Nodes that depend on 16-bit tensors get
            noise of that dtype.
        env: arguments by name: float64 score and int32 positions.
        generator: random generator of the noise.
    """
    memo: dict[Node, Tensor] = {}
    coarse: dict[Node, torch.dtype] = {}
    for n in ir.topo(wide.root):
        dtype = captured[int(n.attr or 0)].dtype if n.op == "load" else torch.float32
        units = [dtype] if dtype in HALVES else [torch.float32]
        units += [coarse[a] for a in n.args]
        coarse[n] = max(units, key=lambda d: torch.finfo(d).eps)
        (value,) = evaluate([n], env, wide.tensors, torch.float64, memo=memo)
        if n.type == ir.F32 and n.op not in ("arg", "const", "load"):
            memo[n] = noise(coarse[n], generator)(value, value.abs())
    return memo[wide.root]
