"""The Hopper backward kernels, executed on the CPU, against autograd of the float64 oracle.

Gradients may be off by twice the error of the dense oracle in the same dtype. Results hold NaN
before a kernel runs, and reading them is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import emulation
from attnkit.sparse import BlockRuns
from attnkit.splice import sm90_backward

BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = masks.causal()

Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody has written holds NaN; but sums need no fixed order for that."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(
    backend: str,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    captured: Sequence[Tensor],
    mod: Callable[..., Mod] | None,
    mask: Any,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of the weighted sums of output and LSE by query, key, value and captured tensors."""
    qkv = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    learned = [t.detach().to(dtype or t.dtype).requires_grad_() for t in captured]
    out, lse = flex_attention(
        *qkv,
        score_mod=mod(*learned) if mod else None,
        block_mask=mask,
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
    """Query, key and value; weights of output and LSE. Pairs: the query's, and the rest's."""
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
) -> list[Tensor]:
    """Causal gradients by plain operators, everything rounded to the inputs' dtype."""
    dtype = inputs[0].dtype
    query, key, value = (t.detach().requires_grad_() for t in inputs)
    learned = [t.detach().to(dtype).requires_grad_() for t in captured]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    b, h, q, kv = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = mod(*learned)(scores, b, h, q, kv).to(dtype).masked_fill(q < kv, -torch.inf)
    out = torch.softmax(scores, -1) @ value
    total = (out * weights[0]).sum() + (scores.float().logsumexp(-1) * weights[1]).sum()
    return list(torch.autograd.grad(total, [query, key, value, *learned]))


def check(
    drawn: tuple[list[Tensor], list[Tensor]],
    mod: Callable[..., Mod] | None = None,
    mask: Any = None,
    captured: Sequence[Tensor] = (),
    mode: str = "eager",
) -> None:
    """Compare the kernels with the oracle; they must have run, and without findings."""
    arguments = (*drawn, captured, mod, mask)
    exact = gradients("eager", *arguments, torch.float64)
    # sums over whole heads see that the kernel takes rowsum(dO O) from a rounded O
    learned = mod is not None and len(captured) > 0
    dense = rounded(*drawn, captured, mod) if learned else gradients("eager", *arguments, None)
    # sums in any order differ between runs
    with emulation.session(mode=mode, seeds=1, deterministic=False) as session:
        found = gradients("emulate", *arguments, None)
    assert session.ok, [str(report) for _, report in session.reports]
    assert any(name.startswith("backward") for name, _ in session.reports)
    for own, other, true in zip(found, dense, exact, strict=True):
        error, allowed = (own.double() - true).abs().max(), (other.double() - true).abs().max()
        assert error <= 2 * allowed, (error, allowed)


@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL & masks.sliding_window(90)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_masks_in_all_orders(mask: Any, dims: tuple[int, int]) -> None:
    check(draw(330, dims=dims, heads=(1, 1)), mask=mask, mode="check")


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (96, 96), (40, 72)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(150, dims=dims, heads=(1, 1), dtype=dtype), mask=CAUSAL)


@pytest.mark.parametrize("lengths", [(1, 1), (17, 200), (200, 17), (257, 129)])
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths))


def test_shared_heads_and_batches() -> None:
    check(draw(200, heads=(4, 2), batch=(2, 2)), mask=CAUSAL)
    check(draw(200, heads=(2, 1), batch=(2, 1)))


def test_dead_rows_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (q >= 70) & (kv <= q)
    mask = create_block_mask(keep, None, None, 200, 200, device="cpu")
    inputs, weights = draw(200)
    check((inputs, weights), mask=mask)
    found = gradients("emulate", inputs, weights, (), None, mask, None)
    assert not found[0][:, :, :70].any()


def test_scores_far_below_zero() -> None:
    inputs, weights = draw(150, 140)
    inputs[0], inputs[1] = inputs[0].abs() * 8, -inputs[1].abs() * 8
    check((inputs, weights))


MODS: dict[str, tuple[Callable[..., Mod], Callable[[], list[Tensor]]]] = {
    "none": (lambda: lambda s, b, h, q, kv: 5 * torch.tanh(s / 5), lambda: []),
    "head": (lambda w: lambda s, b, h, q, kv: s * w[h] + w[h] * (kv - q), lambda: [torch.rand(2)]),
    "number": (lambda w: lambda s, b, h, q, kv: s * w, lambda: [torch.rand(())]),
    "column": (lambda w: lambda s, b, h, q, kv: s + w[b, kv], lambda: [torch.randn(1, 200)]),
    "row": (lambda w: lambda s, b, h, q, kv: s * w[h, q], lambda: [torch.randn(2, 200)]),
    "relative": (lambda w: lambda s, b, h, q, kv: s + w[h, q - kv], lambda: [torch.randn(2, 400)]),
    "two": (
        lambda v, w: lambda s, b, h, q, kv: torch.tanh(s * v[h]) + w[kv // 8] * w[q // 8],
        lambda: [torch.rand(2), torch.randn(25)],
    ),
}


@pytest.mark.parametrize("name", MODS)
def test_gradients_of_captured_tensors(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200), mod, CAUSAL, captured())


def _deterministic(turns: str, ctas: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """dQ, dK and dV of a fixed problem, sums formed in a fixed order."""
    torch.manual_seed(0)
    inputs, weights = draw(400, heads=(2, 1))
    plain = sm90_backward.backward

    def fixed(*args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "deterministic": True})

    monkeypatch.setattr(sm90_backward, "backward", fixed)
    monkeypatch.setattr(sm90_backward, "_SMS_EMULATED", ctas)
    sm90_backward._lists.clear()
    with emulation.session(mode=turns, seeds=ctas) as session:
        found = gradients("emulate", inputs, weights, (), None, CAUSAL, None)
    assert session.ok
    monkeypatch.undo()
    return found


def test_the_option_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = sm90_backward.backward

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(options["deterministic"])
        return plain(*args, **options)

    monkeypatch.setattr(sm90_backward, "backward", recorded)
    for setting in (False, True):
        q, k, v = (torch.randn(1, 1, 140, 64, dtype=BF16, requires_grad=True) for _ in range(3))
        flex_attention(q, k, v, backend="emulate", deterministic=setting).sum().backward()
    assert seen == [False, True]


def test_deterministic_bits_do_not_depend_on_workers_or_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = _deterministic("eager", 2, monkeypatch)
    for mode, ctas in (("eager", 3), ("adversarial", 2)):
        for a, b in zip(first, _deterministic(mode, ctas, monkeypatch), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("block", [(128, 128), (192, 112), (128, 64), (80, 48)])
def test_tiles_are_fitted(block: tuple[int, int]) -> None:
    lengths = (410, 333)
    size = (-(-lengths[0] // block[0]), -(-lengths[1] // block[1]))
    states = torch.randint(0, 3, (1, 2, *size), dtype=torch.int8)
    runs = BlockRuns.from_states(states, *lengths, block)
    found = sm90_backward.fitted(runs, (64, 128)).states()
    dense = states.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    dense = dense[:, :, : lengths[0], : lengths[1]]
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            part = dense[:, :, 64 * i : 64 * i + 64, 128 * j : 128 * j + 128].flatten(2)
            whole, none = (part == 2).all(2), (part == 0).all(2)
            assert torch.equal(found[:, :, i, j] == 2, whole)
            assert torch.equal(found[:, :, i, j] == 0, none)
