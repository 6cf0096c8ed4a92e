"""Compare attention sinks in emulated kernels with dense float64 attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import flex_attention
from attnkit.jit import emulation
from attnkit.runtime.reuse.backward import BackwardReuse
from tests.sampling import sampled

INF = float("inf")
LENGTH = 260


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first work tile, and few in the last."""
    return (q >= 200) & (kv <= q - 210)


def draw(seed: int, rows: int = LENGTH, keys: int = LENGTH, heads: int = 2) -> list[Tensor]:
    """Return query [1, heads, rows, 64], key and value [1, 1, keys, 64], and a sink [heads]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64)]
    qkv = [torch.randn(s, generator=random).bfloat16() for s in shapes]
    return [*qkv, 2 * torch.randn(heads, generator=random)]


def attend(tensors: list[Tensor], mask: Any = late, **options: Any) -> tuple[Tensor, Tensor]:
    *qkv, sink = tensors
    found: tuple[Tensor, Tensor] = flex_attention(
        *qkv, None, mask, enable_gqa=True, return_lse=True, sink=sink, **options
    )
    return found


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]


def check_close(found: Any, exact: Any, dense: Any) -> None:
    """Check for at most twice the error of dense attention; small sums may be exact by chance."""
    for ours, true, theirs in zip(found, exact, dense, strict=True):
        finite = true.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        if finite.any():
            ours, true, theirs = (t[finite].double() for t in (ours, true, theirs))
            allowed = 2 * (theirs - true).abs().amax() + true.abs().amax() * 2**-8
            assert (ours - true).abs().amax() <= allowed


@pytest.fixture
def relaunched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each backward appends whether it took the fast path."""
    taken: list[bool] = []
    whole = BackwardReuse.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    attnkit.clear_caches()
    return taken


def test_gradients_on_hopper(relaunched: list[bool]) -> None:
    """Repeated calls with new tensors are exact, relaunched ones too; rows may have no key."""
    for step in range(3):
        tensors = draw(step)
        results = []
        for backend, given in (
            ("emulate", tensors), ("eager", wide(tensors)), ("eager", tensors),
        ):  # fmt: skip
            learned = [t.detach().requires_grad_() for t in given]
            with emulation.session(mode="eager" if step else "check", seeds=1) as session:
                out, lse = attend(learned, backend=backend)
                loss = (out.double() * weight(out, step)).sum()
                loss = loss + (lse.double() * weight(lse, step)).sum()
                gradients = torch.autograd.grad(loss, learned)
            assert session.ok, [str(report) for _, report in session.reports]
            results.append((out, lse, *gradients))
        check_close(*results)
        assert torch.equal(results[0][1][0, :, 0], tensors[3])
    assert relaunched == [False, False, True]


def weight(like: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    return torch.randn(like.shape, generator=random, dtype=torch.float64)


def test_a_sink_without_a_gradient_needs_none(relaunched: list[bool]) -> None:
    *qkv, sink = draw(0)
    qkv = [t.requires_grad_() for t in qkv]
    found = []
    for _ in range(3):
        out, _ = attend([*qkv, sink], backend="emulate")
        found.append(torch.autograd.grad(out.float().sum(), qkv))
    out, _ = attend([*wide(qkv), sink.double()], backend="eager")
    exact = torch.autograd.grad(out.sum(), qkv)
    for gradients in found:
        for ours, true in zip(gradients, exact, strict=True):
            torch.testing.assert_close(ours, true, rtol=0.05, atol=0.02)
    assert relaunched == [False, False, True]


@pytest.mark.parametrize("backend", sampled([("emulate",), ("emulate:sm_100a",)], 2))
def test_sinks_far_from_the_scores(backend: str) -> None:
    """Neither kernel overflows, and -inf is no sink; NaN and inf spoil the rows with keys."""
    for step, numbers in enumerate([(300.0, -300.0), (-INF, 1e30), (INF, float("nan"))]):
        tensors = draw(step)
        tensors[3] = torch.tensor(numbers)
        with emulation.session(mode="check" if step == 0 else "eager", seeds=1) as session:
            found = attend(tensors, backend=backend)
        assert session.ok, [str(report) for _, report in session.reports]
        exact = attend(wide(tensors), backend="eager")
        check_close(found, exact, attend(tensors, backend="eager"))
        assert bool((found[0][:, :, :200] == 0).all())
        expected = tensors[3][:, None].expand(2, 200)
        torch.testing.assert_close(found[1][0, :, :200], expected, equal_nan=True)


def test_softmax1_is_a_sink_of_zero() -> None:
    *qkv, _ = draw(0)
    options = {"enable_gqa": True, "return_lse": True, "backend": "emulate"}
    expected = attend([*qkv, torch.zeros(2)], backend="emulate")
    for _ in range(3):
        found = flex_attention(*qkv, None, late, normalization="softmax1", **options)
        assert all(map(torch.equal, found, expected))


def test_rows_that_are_split_along_kv_have_one_sink() -> None:
    """The combine kernel adds the sink, and not the parts; relaunched calls pass the new sink."""
    for step in range(3):
        tensors = draw(step, 16, 1100, heads=1)
        if step == 2:
            tensors[3][0] = -INF
        with emulation.session(mode="eager") as session:
            found = attend(tensors, None, backend="emulate")
        assert [name.split()[0] for name, _ in session.reports] == ["forward", "combine"]
        exact = attend(wide(tensors), None, backend="eager")
        check_close(found, exact, attend(tensors, None, backend="eager"))


def check_with(mod: Any, learned: list[Tensor], mask: Any, step: int, sizes: Any = ()) -> None:
    """Compare output, LSE and all gradients of a score_mod beside a sink with dense attention."""
    tensors, results = draw(step, *sizes), []
    for backend, given in (("emulate", tensors), ("eager", wide(tensors)), ("eager", tensors)):
        leaves = [*(t.detach().requires_grad_() for t in given), *learned]
        out, lse = flex_attention(
            *leaves[:3], mod, mask, enable_gqa=True, return_lse=True, sink=leaves[3],
            backend=backend,
        )  # fmt: skip
        loss = (out.double() * weight(out, step)).sum()
        loss = loss + (lse.double() * weight(lse, step)).masked_fill(lse == -INF, 0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    check_close(*results)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "frozen", sampled([(False,), (True,)], 2), ids=["learned sink", "frozen sink"]
)
def test_terms_that_shift_rows_do_not_shift_the_sink(frozen: bool) -> None:
    table = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + table[h, q]

    for step in range(3):
        if not frozen:
            check_with(mod, [table], late, step)
            continue
        found = []
        for chosen in ("emulate", "eager"):
            tensors = draw(step) if chosen == "emulate" else wide(draw(step))
            out = flex_attention(
                *tensors[:3], mod, late, enable_gqa=True, sink=tensors[3], backend=chosen
            )
            found.append(torch.autograd.grad((out.double() * weight(out, step)).sum(), table)[0])
        torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.exhaustive
def test_documents_that_are_split_along_kv_have_one_sink() -> None:
    """The table of captured data that the kernel compares is not taken for the sink."""
    ids = torch.zeros(1, 1100, dtype=torch.int32)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ids[b, kv] == 0

    for step in range(3):
        check_with(None, [], mask, step, (16, 1100, 1))
