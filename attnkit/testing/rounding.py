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
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node
from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.plain import HALVES
from attnkit.testing.quantities import THROUGH, DenseCall, Quantities
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
    formulas = _softmax_formulas if case.kind == "softmax" else _weight_formulas
    found = formulas(call, modified, inner)
    weights, survivors = found.weights, call.survivors
    survivors = torch.ones_like(weights) if survivors is None else survivors
    used = outer(weights * survivors, (weights * survivors).abs())
    out = product(used, v)
    out = outer(out, out.abs())
    everything = {"out": out, "column_sums": found.column_sums, **found.rows}
    quantities = {name: everything[name] for name in case.results}
    for result in case.results:
        if result not in THROUGH:
            continue
        through, grad = THROUGH[result], case.cotangent(result, call.device).to(torch.float64)
        dvalue = torch.zeros_like(v)
        if result == "out":
            dvalue = product(used.mT, grad)
            # the noise is relative to the two operands, because their difference may be 0
            sizes = survivors * (grad.abs() @ v.abs().mT)
            cotangent, dsink = found.through_out(survivors * (grad @ v.mT), sizes, grad * out)
        else:
            cotangent, dsink = found.through[result](grad)
        cotangent = inner(cotangent, cotangent.abs())
        draw, *others = _pulled_back(modified, (raw, *captured.tensors), cotangent)
        draw = outer(draw, draw.abs())
        quantities["dquery" + through] = scale * product(draw, k)
        quantities["dkey" + through] = _shared(scale * product(draw.mT, q), case)
        quantities["dvalue" + through] = _shared(dvalue, case)
        for name, gradient in zip(captured.names, others, strict=True):
            quantities[f"d{name}{through}"] = gradient
        if dsink is not None and call.sink is not None and call.sink.requires_grad:
            quantities["dsink" + through] = inner(dsink, dsink.abs()).sum((0, 2, 3))
    return quantities


# The gradients of the modified scores and of the sinks [B, Hq, Sq, 1] (or None), from the gradient
# of a result.
Through = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class _Formulas:
    """Holds what a normalization makes of the modified scores, with noise at each step.

    Attributes:
        weights: [B, Hq, Sq, Skv].
        column_sums: [B, Hq, Skv].
        rows: LSE, row maxima and entropies, [B, Hq, Sq], by name.
        through_out: `Through` from the gradient of the weights, the sizes of its terms, and the
            gradient of the output times the output.
        through: `Through` for the other results, by name.
    """

    weights: Tensor
    column_sums: Tensor
    rows: dict[str, Tensor]
    through_out: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    through: dict[str, Through]


def _weight_formulas(call: DenseCall, modified: Tensor, inner: Noise) -> _Formulas:
    """Return the formulas without a softmax: the modified scores are the weights."""
    weights = modified.detach()
    weights = inner(weights, weights.abs())
    sums = inner(weights.sum(2), weights.abs().sum(2))
    return _Formulas(
        weights,
        sums,
        {},
        lambda dweights, sizes, _: (inner(dweights, sizes), None),
        {"column_sums": lambda g: (g[:, :, None].expand(weights.shape), None)},
    )


def _softmax_formulas(call: DenseCall, modified: Tensor, inner: Noise) -> _Formulas:
    """Return the formulas of a softmax, in which a sink is one more score of each row."""
    logit = p_sink = None
    if call.sink is not None:
        logit = call.sink.detach().double()[:, None, None].expand(*modified.shape[:3], 1)
        logit = inner(logit, logit.abs())
    m, lse, p = _softmax(modified.detach(), inner, logit)
    if logit is not None:
        p_sink = torch.exp(inner(logit - lse, (logit - lse).abs()))
        p_sink = p_sink.masked_fill(lse == -math.inf, 0)
    safe = m.masked_fill(m == -math.inf, 0)
    logs = (safe - lse.masked_fill(lse == -math.inf, 0)).masked_fill(p == 0, 0)
    sizes = logs.abs() + (p > 0) * (safe.abs() + lse.masked_fill(~lse.isfinite(), 0).abs())
    entropy, scale = -(p * logs).sum(-1, keepdim=True), (p * (1 + sizes)).sum(-1, keepdim=True)
    if p_sink is not None and logit is not None:
        log_sink = (logit - lse).masked_fill(p_sink == 0, 0)
        entropy, scale = entropy - p_sink * log_sink, scale + p_sink * (1 + log_sink.abs())
    entropy = inner(entropy, scale).masked_fill((p == 0).all(-1, keepdim=True), 0)

    def out(dp: Tensor, size: Tensor, terms: Tensor) -> tuple[Tensor, Tensor | None]:
        delta, total = terms.sum(-1, keepdim=True), terms.abs().sum(-1, keepdim=True)
        dsink = None if p_sink is None else p_sink * inner(-delta, total)
        return p * inner(dp - delta, total + size), dsink

    def from_lse(g: Tensor) -> tuple[Tensor, Tensor | None]:
        return p * g[..., None], None if p_sink is None else p_sink * g[..., None]

    def from_entropy(g: Tensor) -> tuple[Tensor, Tensor | None]:
        g = g[..., None]
        dm = -g * p * inner(logs + entropy, sizes + scale)
        if p_sink is None or logit is None:
            return dm, None
        return dm, -g * p_sink * inner(log_sink + entropy, log_sink.abs() + scale)

    def from_sums(g: Tensor) -> tuple[Tensor, Tensor | None]:
        g = g[:, :, None]
        mean = (p * g).sum(-1, keepdim=True)
        size = (p * g.abs()).sum(-1, keepdim=True)
        dsink = None if p_sink is None else -p_sink * inner(mean, size)
        return p * inner(g - mean, g.abs() + size), dsink

    rows = {"lse": lse.squeeze(-1), "max_scores": m.amax(-1), "entropy": entropy.squeeze(-1)}
    through: dict[str, Through] = {
        "lse": from_lse,
        "entropy": from_entropy,
        "column_sums": from_sums,
    }
    return _Formulas(p, inner(p.sum(2), p.sum(2)), rows, out, through)


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
    """Apply the score_mod, the sigmoid of a normalization and the mask of `call` to raw scores."""
    modified = raw if call.score_mod is None else plain.modified(call.score_mod, raw)
    # 0 * raw keeps raw in the autograd graph even if score_mod ignores it
    modified = modified + 0 * raw
    if call.case.kind == "sigmoid":
        modified = torch.sigmoid(modified)
    masked = -math.inf if call.case.kind == "softmax" else 0.0
    return modified if call.kept is None else torch.where(call.kept, modified, masked)


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
