"""Compare the statistics of emulated kernels with dense float64 attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import AuxRequest, flex_attention, mods
from attnkit.jit import emulation
from tests.sampling import first_of, sampled

INF = float("inf")
ROWS, KEYS = 200, 300
ROW_TERM = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
WILD = torch.zeros(ROWS)
WILD[150], WILD[160], WILD[170] = -INF, INF, math.nan
GAPS = torch.zeros(ROWS, KEYS)
GAPS[:, ::3] = -INF
GAPS[120] = -INF


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows, and few in the last."""
    return (q >= 100) & (kv <= q - 60)


BY_ELEMENT = lambda b, h, q, kv: ((q + h * kv) % 3 > 0) & (kv < q + 9)

MODS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "no maximum": mods.softcap(5.0),
    "columns": lambda s, b, h, q, kv: s + 0.05 * kv * (h + 1),
    "row term": lambda s, b, h, q, kv: s + ROW_TERM[h, q],
    "row term that wipes": lambda s, b, h, q, kv: s + WILD[q],
    "holes": lambda s, b, h, q, kv: s * 3 + GAPS[q, kv],
    "peaks": lambda s, b, h, q, kv: s * 40,
}


def draw(
    seed: int, rows: int = ROWS, keys: int = KEYS, width: int = 64, dtype: Any = torch.bfloat16
) -> list[Tensor]:
    """Return query [1, 2, rows, width], key and value [1, 1, keys, width]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(1, 2, rows, width), (1, 1, keys, width), (1, 1, keys, width)]
    return [torch.randn(s, generator=random).to(dtype) for s in shapes]


def attend(tensors: list[Tensor], mod: Any, mask: Any, **options: Any) -> Any:
    asked = {"enable_gqa": True, "return_aux": AuxRequest(True, True, True, True)}
    return flex_attention(*tensors, mod, mask, **(asked | options))


def check(ours: Tensor, exact: Tensor, dense: Tensor) -> None:
    """Check for at most twice the error of dense attention, and the same NaN and infinity."""
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours.isnan(), exact.isnan())
    ours, exact, dense = (t[finite].double() for t in (ours, exact, dense))
    allowed = 2 * (dense - exact).abs().amax() + exact.abs().amax() * 2**-16
    assert (ours - exact).abs().amax() <= allowed


@pytest.mark.parametrize(
    ("kind", "with_sink"),
    sampled(
        [*((k, False) for k in MODS), ("none", True), ("no maximum", True), ("row term", True)], 4
    ),
)
def test_statistics_on_hopper(kind: str, with_sink: bool) -> None:
    """Repeated calls, relaunched ones too, agree with dense attention."""
    attnkit.clear_caches()
    for step in range(3):
        tensors = draw(step)
        sink = torch.tensor([1.0, -INF if step == 2 else 3.0]) if with_sink else None
        results = []
        for backend, given in (
            ("emulate", tensors), ("eager", [t.double() for t in tensors]), ("eager", tensors),
        ):  # fmt: skip
            with emulation.session(mode="eager" if step else "check", seeds=1) as session:
                out, aux = attend(given, MODS[kind], late, sink=sink, backend=backend)
            assert session.ok, [str(report) for _, report in session.reports]
            results.append((aux.entropy, aux.lse, aux.max_scores, out))
        found = results[0]
        assert torch.equal(found[0][:, :, :100], torch.zeros(1, 2, 100))
        assert bool((found[0] >= 0)[~found[0].isnan()].all())
        for ours, exact, dense in zip(*results, strict=True):
            if not (kind == "row term that wipes" and ours is found[2]):  # NaN there or a number
                check(ours, exact, dense)


@pytest.mark.parametrize(
    ("kind", "with_sink"),
    sampled([("row term", True), *((k, False) for k in MODS if k != "columns")], 4),
)
def test_statistics_on_blackwell(kind: str, with_sink: bool) -> None:
    tensors, results = draw(0), []
    sink = torch.tensor([1.0, 3.0]) if with_sink else None
    for backend, given in (
        ("emulate:sm_100a", tensors), ("eager", [t.double() for t in tensors]), ("eager", tensors),
    ):  # fmt: skip
        checked = kind == "none" or with_sink
        with emulation.session(mode="check" if checked else "eager", seeds=1) as session:
            out, aux = attend(given, MODS[kind], late, sink=sink, backend=backend)
        assert session.ok, [str(report) for _, report in session.reports]
        results.append((aux.entropy, aux.lse, aux.max_scores, out))
    assert torch.equal(results[0][0][:, :, :100], torch.zeros(1, 2, 100))
    for i, (ours, exact, dense) in enumerate(zip(*results, strict=True)):
        if kind != "row term that wipes" or i != 2:  # NaN there or a number
            check(ours, exact, dense)


@pytest.mark.parametrize("width", sampled([(128,), (256,)], 2))
def test_head_dims_on_blackwell(width: int) -> None:
    tensors = draw(0, 300, 140, width)
    (_, ours), (_, exact), (_, dense) = (
        attend(t, None, None, backend=backend, return_aux=AuxRequest(entropy=True))
        for backend, t in (
            ("emulate:sm_100a", tensors),
            ("eager", [t.double() for t in tensors]),
            ("eager", tensors),
        )
    )
    check(ours.entropy, exact.entropy, dense.entropy)


@pytest.mark.parametrize(
    ("width", "dtype"),
    first_of([(128, torch.bfloat16), (192, torch.float16), (256, torch.bfloat16)]),
)
def test_head_dims(width: int, dtype: torch.dtype) -> None:
    tensors = draw(0, 70, 200, width, dtype)
    mod = mods.alibi(2)
    (_, ours), (_, exact), (_, dense) = (
        attend(t, mod, None, backend=backend, return_aux=AuxRequest(entropy=True))
        for backend, t in (
            ("emulate", tensors), ("eager", [t.double() for t in tensors]), ("eager", tensors),
        )
    )  # fmt: skip
    assert ours.max_scores is None
    check(ours.entropy, exact.entropy, dense.entropy)


def test_scores_of_minus_infinity_without_a_mask() -> None:
    """The sum of P log2(P) is NaN at first, and is computed again."""
    tensors = draw(8)
    ours, exact, dense = (
        attend(t, MODS["holes"], None, backend=backend, return_aux=AuxRequest(entropy=True))[1]
        for backend, t in (
            ("emulate", tensors), ("eager", [t.double() for t in tensors]), ("eager", tensors),
        )
    )  # fmt: skip
    check(ours.entropy, exact.entropy, dense.entropy)


def test_calls_with_entropies_are_not_split_along_kv() -> None:
    tensors = draw(0, 16, 1100)
    with emulation.session() as session:
        _, aux = attend(tensors, None, None, backend="emulate")
    assert [name.split()[0] for name, _ in session.reports] == ["forward"]
    _, exact = attend([t.double() for t in tensors], None, None, backend="eager")
    _, dense = attend(tensors, None, None, backend="eager")
    check(aux.entropy, exact.entropy, dense.entropy)


GRADIENTS: list[tuple[str, int, torch.dtype, bool]] = [
    ("none", 64, torch.bfloat16, False),
    ("no maximum", 64, torch.bfloat16, True),
    ("row term", 128, torch.float16, False),
    ("holes", 64, torch.bfloat16, True),
    ("peaks", 64, torch.bfloat16, False),
]


@pytest.mark.parametrize(("kind", "width", "dtype", "with_sink"), first_of(GRADIENTS))
def test_gradients_on_hopper(kind: str, width: int, dtype: torch.dtype, with_sink: bool) -> None:
    """The kernels add the gradients of output, LSE and entropy; repeated calls are exact too."""
    attnkit.clear_caches()
    for step in range(2):
        results = []
        for backend, wide in (("emulate", False), ("eager", True), ("eager", False)):
            tensors = [t.double() if wide else t for t in draw(step, width=width, dtype=dtype)]
            sink = torch.tensor([0.5, 2.0]).requires_grad_() if with_sink else None
            learned = [*(t.requires_grad_() for t in tensors), *([] if sink is None else [sink])]
            checked = step == 0 and kind in ("none", "no maximum")
            with emulation.session(mode="check" if checked else "eager", seeds=1) as session:
                out, aux = attend(tensors, MODS[kind], late, sink=sink, backend=backend)
                loss = sum(
                    (t.double() * weight(t, step)).masked_fill(t == -INF, 0).sum()
                    for t in (out, aux.lse, aux.entropy)
                )
                gradients = torch.autograd.grad(loss, learned)
            assert session.ok, [str(report) for _, report in session.reports]
            names = [name.split()[0] for name, _ in session.reports]
            assert backend != "emulate" or "backward" in names
            results.append(gradients)
        for ours, exact, dense in zip(*results, strict=True):
            check_gradient(ours, exact, dense)


def check_gradient(ours: Tensor, exact: Tensor, dense: Tensor) -> None:
    """Check for at most twice the error of dense attention, where its gradients are numbers."""
    finite = exact.isfinite()
    ours, exact, dense = (t[finite].double() for t in (ours, exact, dense))
    allowed = 2 * (dense - exact).abs().amax() + exact.abs().amax() * 2**-8
    assert (ours - exact).abs().amax() <= allowed


def row_term(term: Tensor, bias: Tensor) -> Any:
    """Return a mod whose gradients the preprocess and the main kernel sum."""
    return lambda s, b, h, q, kv: s + term[h, q] + bias[h, kv]


@pytest.mark.parametrize(
    ("kind", "width", "with_sink", "dropout_p"),
    sampled(
        [
            ("learned", 64, True, 0.3),
            ("none", 128, True, 0.0),  # pairs of CTAs
            ("no maximum", 64, False, 0.3),
            ("row term", 64, True, 0.0),
            ("holes", 64, True, 0.0),
            ("peaks", 64, False, 0.0),
            ("by element", 128, False, 0.3),
            ("learned", 256, True, 0.3),
        ],
        8,
    ),
)
def test_gradients_on_blackwell(kind: str, width: int, with_sink: bool, dropout_p: float) -> None:
    """The kernels add the gradients of output, LSE and entropy, also to those of captured tensors."""
    rows, keys = 140, 150 if width == 128 else 100
    random = torch.Generator().manual_seed(2)
    learned = [torch.randn(2, n, generator=random).requires_grad_() for n in (rows, keys)]
    learned = learned if kind == "learned" else []
    mod = row_term(*learned) if learned else MODS.get(kind)
    mask = None if width == 128 else lambda b, h, q, kv: (q >= 70) & (kv <= q - 30)
    mask = BY_ELEMENT if kind == "by element" else mask
    results = []
    for backend, wide in (("emulate:sm_100a", False), ("eager", True), ("eager", False)):
        tensors = [t.double() if wide else t for t in draw(0, rows, keys, width)]
        sink = torch.tensor([0.5, 2.0]).requires_grad_() if with_sink else None
        inputs = [*(t.requires_grad_() for t in tensors), *([sink] if with_sink else []), *learned]
        torch.manual_seed(3)
        with emulation.session(mode="check" if with_sink else "eager", seeds=1) as session:
            out, aux = attend(tensors, mod, mask, sink=sink, backend=backend, dropout_p=dropout_p)
            loss = sum(
                (t.double() * weight(t, 0)).masked_fill(t == -INF, 0).sum()
                for t in (out, aux.lse, aux.entropy)
            )
            results.append(list(torch.autograd.grad(loss, inputs)))
        assert session.ok, [str(report) for _, report in session.reports]
        if backend != "eager":
            assert "backward" in [name.split()[0] for name, _ in session.reports]
            expected = sink_gradient(out, aux, sink) if with_sink else None
    if expected is not None:  # two numbers, each a sum over all rows: too few for a largest error
        torch.testing.assert_close(results[0].pop(3).double(), expected, rtol=1e-4, atol=1e-4)
        results = [results[0], *([*grads[:3], *grads[4:]] for grads in results[1:])]
    for ours, exact, dense in zip(*results, strict=True):
        check_gradient(ours, exact, dense)


def sink_gradient(out: Tensor, aux: Any, sink: Tensor) -> Tensor:
    """Return the sink's gradient in float64, from the results of a kernel with their roundings."""
    out, lse, entropy = (t.detach().double() for t in (out, aux.lse, aux.entropy))
    grad_out, grad_lse, grad_entropy = (weight(t, 0) for t in (out, lse, entropy))
    p = torch.exp(sink.detach().double()[:, None] - lse)
    delta = (grad_out.bfloat16().double() * out).sum(-1)
    by_row = p * (grad_lse - grad_entropy * entropy - delta) - grad_entropy * torch.xlogy(p, p)
    return by_row.sum((0, 2))


@pytest.mark.parametrize("case", first_of((case,) for case in ["captured tensor", "wide heads"]))
def test_gradients_that_torch_operators_compute(case: str) -> None:
    """Hopper's kernels refuse them, and the sink is not forgotten."""
    table = torch.randn(2, KEYS, generator=torch.Generator().manual_seed(2))
    table.requires_grad_(case == "captured tensor")
    mod = lambda s, b, h, q, kv: s * 2 + table[h, kv]
    results = []
    for backend, wide in (("emulate", False), ("eager", True), ("eager", False)):
        width = 192 if case == "wide heads" else 64
        tensors = [t.double() if wide else t for t in draw(0, width=width)]
        sink = torch.tensor([0.5, 2.0]).requires_grad_()
        learned = [*(t.requires_grad_() for t in tensors), sink]
        learned += [table] if table.requires_grad else []
        with emulation.session() as session:
            out, aux = attend(tensors, mod, late, sink=sink, backend=backend)
            loss = sum((t.double() * weight(t, 0)).sum() for t in (out, aux.lse, aux.entropy))
            results.append(torch.autograd.grad(loss, learned))
        names = [name.split()[0] for name, _ in session.reports]
        assert names == (["forward"] if backend == "emulate" else [])
    for ours, exact, dense in zip(*results, strict=True):
        check_gradient(ours, exact, dense)


def test_deterministic_gradients() -> None:
    """They have the same bits at every run, and are those of any order of the sums."""
    found = []
    for deterministic in (True, True, False):
        tensors = [t.requires_grad_() for t in draw(0)]
        out, aux = attend(tensors, None, late, backend="emulate", deterministic=deterministic)
        loss = out.float().square().sum() + aux.entropy.square().sum()
        found.append(torch.autograd.grad(loss, tensors))
    assert all(map(torch.equal, *found[:2]))
    for some, others in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(some, others, rtol=0.02, atol=0.02)


def weight(like: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    return torch.randn(like.shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("arch", first_of((case,) for case in ["", ":sm_100a"]))
def test_column_sums_follow_the_forward_of_a_kernel(arch: str) -> None:
    """Torch operators sum weights in the tiles of the kernel, from its LSE."""
    tensors, sink = draw(3, 130, 150), torch.tensor([1.0, -1.0])
    for t in tensors:
        t.requires_grad_()
    mask = lambda b, h, q, kv: (q >= 100) & (kv <= q - 60)

    def run(tensors: list[Tensor], backend: str) -> list[Tensor]:
        options = {"enable_gqa": True, "return_aux": AuxRequest(column_sums=True)}
        _, aux = flex_attention(
            *tensors, MODS["columns"], mask, sink=sink, backend=backend, **options
        )
        weight = torch.randn(aux.column_sums.shape, generator=torch.Generator().manual_seed(0))
        own = weight.to(aux.column_sums.dtype)
        return [aux.column_sums, *torch.autograd.grad(aux.column_sums, tensors[:2], own)]

    wide = [t.detach().double().requires_grad_() for t in tensors]
    results = run(tensors, f"emulate{arch}"), run(wide, "eager"), run(tensors, "eager")
    for ours, exact, dense in zip(*results, strict=True):
        check(ours, exact, dense)
