"""Help tests of the backward kernels compare emulated gradients with the float64 oracle.

A gradient may have twice the error of the dense oracle in the same dtype. Results hold NaN before a
kernel runs, and reading them is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks
from attnkit.jit import emulation
from attnkit.runtime import reuse
from attnkit.schedule.targets import ORDERED
from attnkit.splice import (
    BackwardInputs,
    ForwardInputs,
    KernelCall,
    backward_prepare,
    backward_work,
    dispatch,
    forward,
    runs_cache,
    workers,
)
from attnkit.splice import backward as splice_backward
from attnkit.splice.backward_work import BackwardWork

BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = masks.causal()

Mod = Callable[..., Any]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill newly allocated tensors with NaN without requesting deterministic sums."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    yield
    torch.use_deterministic_algorithms(False)


def observed(monkeypatch: pytest.MonkeyPatch, ctas: int) -> list[BackwardWork]:
    """Return a list that collects the tables of all later backwards, rebuilt for `ctas` CTAs."""
    found: list[BackwardWork] = []
    plain = backward_work.build_tables

    def kept(*args: Any) -> BackwardWork:
        found.append(plain(*args))
        return found[-1]

    monkeypatch.setattr(backward_work, "build_tables", kept)
    monkeypatch.setattr(workers, "EMULATED_SMS", ctas)
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the caches of tables and calls, so that the next backward rebuilds its tables."""
    monkeypatch.setattr(runs_cache, "_derived", type(runs_cache._derived)())
    entries = type(backward_prepare._calls._entries)()
    monkeypatch.setattr(backward_prepare._calls, "_entries", entries)


@contextmanager
def torch_forward() -> Iterator[None]:
    """Compute the forwards of emulated calls in torch operators, which are faster to execute.

    The backward kernels read only the output and the LSE; the forward kernels have tests of their
    own. Calls are not kept, because a later test may expect the forward kernel.
    """

    def prepare(call: KernelCall, inputs: ForwardInputs) -> Any:
        return dispatch.prepare_forward(replace(call, template="cpu"), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "prepare", prepare)
        patch.setattr(reuse, "key_of", lambda call: None)
        yield


def gradients(
    backend: str,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    captured: Sequence[Tensor],
    mod: Callable[..., Mod] | None,
    mask: Any,
    dtype: torch.dtype | None,
    scale: float | None = None,
    *,
    whole: bool = False,
) -> list[Tensor]:
    """Return the gradients of weighted sums of out and LSE, for Q, K, V and captured tensors.

    An emulated backend executes the backward kernels only, see `torch_forward`; if `whole`, it
    executes the forward kernel too and keeps the call, so that a later call repeats it.
    """
    qkv = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    learned = [t.detach().to(dtype or t.dtype).requires_grad_() for t in captured]
    with nullcontext() if whole else torch_forward():
        out, lse = flex_attention(
            *qkv,
            score_mod=mod(*learned) if mod else None,
            block_mask=mask,
            scale=scale,
            enable_gqa=True,
            return_lse=True,
            backend=backend,
        )
    kept = torch.where(lse.isinf(), 0.0, lse)
    total = (out * weights[0].to(out.dtype)).sum()
    total = total + (kept * weights[1].to(lse.dtype)).sum()
    return list(torch.autograd.grad(total, [*qkv, *learned]))


def draw(
    q_len: int,
    kv_len: int | None = None,
    *,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (2, 2),
    batch: tuple[int, int] = (1, 1),
    dtype: torch.dtype = BF16,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random [query, key, value] and random weights [for out, for LSE].

    `heads` and `batch` are (of the query, of key and value); `dims` is (head_dim, head_dim_v).
    """
    kv_len = kv_len or q_len
    inputs = [
        torch.randn(batch[0], heads[0], q_len, dims[0]),
        torch.randn(batch[1], heads[1], kv_len, dims[0]),
        torch.randn(batch[1], heads[1], kv_len, dims[1]),
    ]
    weights = [torch.randn(batch[0], heads[0], q_len, dims[1]), torch.randn(*inputs[0].shape[:3])]
    return [t.to(dtype) for t in inputs], [weights[0].to(dtype), weights[1]]


def rounded(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    captured: Sequence[Tensor],
    mod: Callable[..., Mod],
    scale: float | None = None,
) -> list[Tensor]:
    """Return causal gradients from plain torch operators, rounded to the inputs' dtype."""
    dtype = inputs[0].dtype
    query, key, value = (t.detach().requires_grad_() for t in inputs)
    learned = [t.detach().to(dtype).requires_grad_() for t in captured]
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = mod(*learned)(scores, b, h, q, kv).to(dtype).masked_fill(q < kv, -torch.inf)
    out = torch.softmax(scores, -1) @ values
    total = (out * weights[0]).sum() + (scores.float().logsumexp(-1) * weights[1]).sum()
    return list(torch.autograd.grad(total, [query, key, value, *learned]))


def check(
    drawn: tuple[list[Tensor], list[Tensor]],
    mod: Callable[..., Mod] | None = None,
    mask: Any = None,
    captured: Sequence[Tensor] = (),
    mode: str = "eager",
    *,
    backend: str = "emulate",
    seeds: int = 1,
    scale: float | None = None,
    whole: bool = False,
) -> None:
    """Check gradients of the kernels against the oracle.

    The backward kernels must have run, and the emulator must not have reported anything.
    `whole` is as for `gradients`.
    """
    arguments = (*drawn, captured, mod, mask)
    exact = gradients("eager", *arguments, torch.float64, scale)
    # the kernel computes rowsum(dO O) from a rounded O, which is visible in sums over whole heads
    if mod is not None and len(captured) > 0:
        dense = rounded(*drawn, captured, mod, scale)
    else:
        dense = gradients("eager", *arguments, None, scale)
    # sums in any order differ between runs
    with emulation.session(mode=mode, seeds=seeds, deterministic=False) as session:
        found = gradients(backend, *arguments, None, scale, whole=whole)
    assert session.ok, [str(report) for _, report in session.reports]
    assert any(name.startswith("backward") for name, _ in session.reports)
    for own, other, true in zip(found, dense, exact, strict=True):
        error, allowed = (own.double() - true).abs().max(), (other.double() - true).abs().max()
        assert error <= 2 * allowed, (error, allowed)


MODS: dict[str, tuple[Callable[..., Mod], Callable[[], list[Tensor]]]] = {
    "none": (lambda: lambda s, b, h, q, kv: 5 * torch.tanh(s / 5), lambda: []),
    "head": (lambda w: lambda s, b, h, q, kv: s * w[h] + w[h] * (kv - q), lambda: [torch.rand(2)]),
    "number": (lambda w: lambda s, b, h, q, kv: s * w, lambda: [torch.rand(())]),
    "column": (lambda w: lambda s, b, h, q, kv: s + w[b, kv], lambda: [torch.randn(1, 200)]),
    "row": (lambda w: lambda s, b, h, q, kv: s * w[h, q], lambda: [torch.randn(2, 200)]),
    "relative": (lambda w: lambda s, b, h, q, kv: s + w[h, q - kv], lambda: [torch.randn(2, 400)]),
    "bias": (
        lambda t, c, z: lambda s, b, h, q, kv: s + t[h, q - kv + 199] + c[b, kv] + z[h],
        lambda: [torch.randn(2, 400), torch.randn(1, 200), torch.randn(2)],
    ),
    "two": (
        lambda v, w: lambda s, b, h, q, kv: torch.tanh(s * v[h]) + w[kv // 8] * w[q // 8],
        lambda: [torch.rand(2), torch.randn(25)],
    ),
}


def every_other(q_len: int, kv_len: int) -> Any:
    """Return a block mask in which every other kv block is empty."""
    keep = lambda b, h, q, kv: (kv // 128) % 2 == 1
    return create_block_mask(keep, None, None, q_len, kv_len, device="cpu")


def ordered(
    backend: str,
    mode: str,
    ctas: int,
    dims: tuple[int, int] = (64, 64),
    mask: Any = CAUSAL,
    name: str | None = None,
    heads: tuple[int, int] = (2, 1),
) -> list[Tensor]:
    """Return dQ, dK and dV of a fixed problem, with sums in a fixed order.

    With a `name` in `MODS`, the gradients of that mod's captured tensors are returned too. `heads` is
    as for `draw`.
    """
    torch.manual_seed(0)
    inputs, weights = draw(200 if name else 400, heads=heads, dims=dims)
    mod, captured = MODS[name] if name else (None, list)
    plain = splice_backward.prepare

    def fixed(call: KernelCall, inputs: BackwardInputs) -> Any:
        return plain(replace(call, template=call.template + ORDERED), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice_backward, "prepare", fixed)
        patch.setattr(workers, "EMULATED_SMS", ctas)
        with emulation.session(mode=mode, seeds=ctas) as session:
            found = gradients(backend, inputs, weights, captured(), mod, mask, None)
    assert session.ok, [str(r) for _, r in session.reports if not r.ok]
    return found


def check_same_bits(dims: tuple[int, int], mask: Any) -> None:
    """Check that sums in a fixed order have the same bits with any number of CTAs, in any order."""
    first, *others = (
        ordered("emulate", mode, ctas, dims, mask, heads=(1, 1))
        for mode, ctas in (("eager", 1), ("check", 2), ("adversarial", 3))
    )
    for other in others:
        assert all(map(torch.equal, first, other))
