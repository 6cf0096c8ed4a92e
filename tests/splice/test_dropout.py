"""Compare dropout in emulated kernels with dense float64 attention that draws the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import AuxRequest, flex_attention
from attnkit.jit import emulation
from attnkit.masks import causal
from attnkit.mods import alibi
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.splice import distance_calls
from attnkit.testing.dropped import survivor_factors
from tests.sampling import sampled

INF = float("inf")


def draw(
    seed: int, rows: int, head_dims: tuple[int, int] = (64, 64), keys: int = 0, heads: int = 2
) -> list[Tensor]:
    """Return query [1, heads, rows, D], key and value [1, 1, keys, D or Dv], bfloat16."""
    random = torch.Generator().manual_seed(seed)
    wide, deep = head_dims
    shapes = [(1, heads, rows, wide), (1, 1, keys or rows, wide), (1, 1, keys or rows, deep)]
    return [torch.randn(s, generator=random).bfloat16() for s in shapes]


def check_close(found: Any, exact: Any, dense: Any) -> None:
    """Check for at most twice the error of dense attention; small sums may be exact by chance."""
    for ours, true, theirs in zip(found, exact, dense, strict=True):
        finite = true.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        if finite.any():
            ours, true, theirs = (t[finite].double() for t in (ours, true, theirs))
            allowed = 2 * (theirs - true).abs().amax() + true.abs().amax() * 2**-8
            assert (ours - true).abs().amax() <= allowed


def weight(like: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    return torch.randn(like.shape, generator=random, dtype=torch.float64)


def check(
    tensors: list[Tensor],
    mod: Any = None,
    mask: Any = None,
    learned: tuple[Tensor, ...] = (),
    *,
    p: float = 0.2,
    seed: int = 0,
    mode: str = "eager",
    backward: bool = True,
    kernel: str = "emulate",
    **options: Any,
) -> list[str]:
    """Compare output, LSE and all gradients with the dense reference; return the kernels' names."""
    results, names = [], []
    for backend, double in ((kernel, False), ("eager", True), ("eager", False)):
        leaves = [t.detach().double() if double else t.detach() for t in tensors]
        if backward:
            leaves = [t.requires_grad_() for t in leaves]
        torch.manual_seed(seed)
        with emulation.session(mode=mode, seeds=1) as session:
            out, lse = flex_attention(
                *leaves, mod, mask, enable_gqa=True, return_lse=True, backend=backend,
                dropout_p=p, **options,
            )  # fmt: skip
            found = [out, lse]
            if backward:
                loss = (out.double() * weight(out, seed)).sum()
                loss = loss + (lse.double() * weight(lse, seed)).masked_fill(lse == -INF, 0).sum()
                found += torch.autograd.grad(loss, [*leaves, *learned])
        assert session.ok, [str(report) for _, report in session.reports]
        names += [name.split()[0] for name, _ in session.reports]
        results.append(found)
    check_close(*results)
    return names


@pytest.mark.parametrize(
    ("head_dims", "p"),
    sampled(
        [
            ((64, 64), 0.1),
            ((128, 128), 0.7),
            ((64, 128), 0.5),
            ((192, 128), 0.2),
            ((264, 512), 0.3),
        ],
        5,
    ),
)
def test_the_kernels_draw_the_published_bits(head_dims: tuple[int, int], p: float) -> None:
    """Ragged lengths, grouped heads, and thresholds on both sides of 128."""
    mode = "check" if head_dims in ((128, 128), (192, 128)) else "eager"
    check(draw(0, 150 if mode == "eager" else 90, head_dims), mask=causal(), p=p, mode=mode)


def test_calls_that_are_relaunched_have_new_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    attnkit.clear_caches()
    taken: list[bool] = []
    whole = BackwardReuse.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    for step in range(4):  # one kernel serves all probabilities
        check(draw(step, 70), p=(0.1, 0.1, 0.1, 0.8)[step], seed=step)
    assert taken == [False, False, True, True]


BY_ELEMENT = lambda b, h, q, kv: ((q + h * kv) % 3 > 0) & (kv < q - 9)


def softcap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 20 * torch.tanh(s / 20)


def kept(p: float, seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Return which elements the published definition keeps, bool [B, H, Sq, Skv]."""
    return survivor_factors(p, seed, shape, torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("width", "first", "p", "heads"),
    sampled([(128, 20, 0.4, 1), (64, 90, 0.7, 3), (64, 0, 0.3, 2)], 3),
    ids=["pairs of CTAs", "one CTA", "a window from the first row"],
)
def test_the_blackwell_backward_draws_the_published_bits(
    width: int, first: int, p: float, heads: int
) -> None:
    """Every bit of a window of rows is read off dV, and again off dK.

    All scores are 0, and all values 1. In the window the rows of Q and dO are those of the unit
    matrix, so that dV is P D there, and dK a multiple of P (D - delta).
    """
    rows, keys = first + width, 135
    window = torch.zeros(1, heads, rows, width)
    window[:, :, first:] = torch.eye(width)
    query = window.bfloat16().requires_grad_()
    key = torch.zeros(1, heads, keys, width).bfloat16().requires_grad_()
    value = torch.ones(1, heads, keys, width).bfloat16().requires_grad_()
    torch.manual_seed(5)
    with emulation.session(mode="check", seeds=1) as session:
        out = flex_attention(query, key, value, dropout_p=p, backend="emulate:sm_100a")
        dk, dv = torch.autograd.grad(out, [key, value], window.bfloat16())
    assert session.ok, [str(report) for _, report in session.reports]
    assert "backward" in [name.split()[0] for name, _ in session.reports]
    expected = kept(p, 5, (1, heads, rows, keys))[:, :, first:].mT
    assert torch.equal(dv > 0.5 / keys, expected)
    assert torch.equal(dk > 0, expected)


@pytest.mark.parametrize(
    ("head_dims", "rows", "mask", "mod", "p"),
    sampled(
        [
            ((64, 64), 140, causal(), None, 0.3),
            ((64, 128), 140, BY_ELEMENT, softcap, 0.7),
            ((192, 128), 140, causal(), None, 0.1),
            ((128, 128), 300, None, None, 0.3),  # pairs of CTAs
            ((128, 128), 300, causal(), softcap, 0.6),
            ((128, 128), 140, BY_ELEMENT, None, 0.5),
            ((256, 256), 140, BY_ELEMENT, softcap, 0.5),
        ],
        7,
    ),
)
def test_blackwell(head_dims: tuple[int, int], rows: int, mask: Any, mod: Any, p: float) -> None:
    """Ragged lengths, grouped heads, one CTA and pairs of CTAs."""
    tensors = draw(0, rows, head_dims)
    mode = "check" if mod is None else "eager"
    names = check(tensors, mod, mask, p=p, kernel="emulate:sm_100a", mode=mode)
    assert "backward" in names


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_gradients_of_captured_tensors_on_blackwell(head_dims: tuple[int, int]) -> None:
    """A value for each key, for each distance and for each row; a sink; and a fixed order.

    The gradient of a sink has a sharper test in `test_statistics.test_gradients_on_blackwell`.
    """
    random = torch.Generator().manual_seed(1)
    sizes = 100, 199, 100
    bias, near, term = (torch.randn(2, n, generator=random).requires_grad_() for n in sizes)
    sink = torch.tensor([0.5, -1.0])

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, kv] + near[h, q - kv + 99] + term[h, q]

    learned, kernel = (bias, near, term), "emulate:sm_100a"
    tensors = draw(0, 100, head_dims)
    names = check(tensors, mod, causal(), learned, sink=sink, kernel=kernel)
    assert "backward" in names
    if head_dims in ((64, 64), (256, 256)):
        check(tensors, None, causal(), deterministic=True, kernel=kernel)


@pytest.mark.exhaustive
def test_blackwell_split_rows() -> None:
    tensors = draw(0, 16, keys=1100, heads=1)
    names = check(tensors, backward=False, kernel="emulate:sm_100a")
    assert names == ["forward", "combine"]


@pytest.mark.exhaustive
def test_rows_without_keys_and_masks_by_element() -> None:
    """P of a mask without intervals; heads differ in their mask and in their bits."""
    check(draw(0, 140, heads=3), mask=lambda b, h, q, kv: ((q + h * kv) % 3 > 0) & (kv < q - 9))


@pytest.mark.exhaustive
def test_split_rows_and_a_sink() -> None:
    """Parts of a row are dropped and scaled before they are combined."""
    sink = torch.tensor([0.5])
    tensors = draw(0, 16, keys=1100, heads=1)
    assert check(tensors, backward=False, sink=sink) == ["forward", "combine"]
    learned = sink.clone().requires_grad_()
    check(tensors, learned=(learned,), sink=learned)


@pytest.mark.exhaustive
def test_a_deterministic_backward() -> None:
    check(draw(0, 140), mask=causal(), deterministic=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", sampled([(64,), (128,), (256,), (512,)], 4))
def test_gradients_of_captured_tensors(head_dim: int) -> None:
    """A value for each key, and one for each distance, whose gradients the main kernel sums."""
    random = torch.Generator().manual_seed(1)
    bias, near = (torch.randn(2, n, generator=random).requires_grad_() for n in (100, 199))

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, kv] + near[h, q - kv + 99]

    check(draw(0, 100, (head_dim, head_dim)), mod, causal(), (bias, near))


@pytest.mark.exhaustive
def test_a_term_and_a_factor_of_each_row() -> None:
    """The preprocess sums the gradient of the one, the postprocess that of the other."""
    random = torch.Generator().manual_seed(1)
    term, factor = (torch.randn(2, 100, generator=random).requires_grad_() for _ in range(2))

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * factor[h, q] + term[h, q]

    check(draw(0, 100), mod, causal(), (term, factor))


@pytest.mark.exhaustive
def test_alibi_and_softcap() -> None:
    check(draw(0, 140), alibi(2), causal())
    check(draw(0, 140), lambda s, b, h, q, kv: 20 * torch.tanh(s / 20))


@pytest.mark.exhaustive
def test_tables_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state and the sink follow the tables, in new and in relaunched calls."""
    monkeypatch.setattr(distance_calls, "LEAST_SCORES", 0)
    attnkit.clear_caches()
    table = torch.randn(2, 12, generator=torch.Generator().manual_seed(2)).requires_grad_()
    sink = torch.tensor([0.5, -1.0]).requires_grad_()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).abs().float()
        return score + table[h, torch.log1p(distance).to(torch.int32)]

    for step in range(3):
        check(draw(step, 80), mod, causal(), (table, sink), seed=step, sink=sink)


@pytest.mark.exhaustive
def test_statistics_do_not_change() -> None:
    query, key, value = draw(0, 140)
    aux = AuxRequest(lse=True, max_scores=True, entropy=True)
    options = {"enable_gqa": True, "backend": "emulate", "return_aux": aux}
    _, plain = flex_attention(query, key, value, None, causal(), **options)
    _, found = flex_attention(query, key, value, None, causal(), dropout_p=0.4, **options)
    for ours, true in zip(found, plain, strict=True):
        assert ours is true or torch.equal(ours, true)


def test_the_gradient_of_entropies_takes_torch_operators() -> None:
    """With dropout, no Hopper kernel adds it."""
    results = []
    for backend, dtype in (("emulate", torch.bfloat16), ("eager", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in draw(0, 60)]
        torch.manual_seed(0)
        with emulation.session() as session:
            out, aux = flex_attention(
                *leaves, None, causal(), enable_gqa=True, dropout_p=0.4, backend=backend,
                return_aux=AuxRequest(entropy=True),
            )  # fmt: skip
            loss = out.double().square().sum() + aux.entropy.double().sum()
            results.append(torch.autograd.grad(loss, leaves))
        assert len(session.reports) == (backend == "emulate")  # a forward alone
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=0.05, atol=0.05)
