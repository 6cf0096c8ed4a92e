"""Check the Hopper backward of biases whose gradient is stored, because each score has its own.

New memory holds NaN in these tests, so that an element that no kernel writes shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.schedule.scheduler import Shape, schedule_backward
from attnkit.schedule.work_list import full_runs
from attnkit.splice import backward_work
from attnkit.splice.backward_work import batch_ascends
from tests.sampling import first_of, sampled
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    check,
    draw,
    forget,
    gradients,
    observed,
    poisoned,  # noqa: F401
)

LENGTH = 150  # three q blocks, of which the last one is incomplete
HEADS = 2
CLEAR = "clear gradient"

Mod = Callable[..., Any]
BY_HEAD: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[h, q, kv]
BY_BOTH: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[b, h, q, kv]
BY_BATCH: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[b, q, kv]
HEAD_FIRST: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[h, b, q, kv]
OF_LAYER: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[1, h, q, kv]
ALONE: Callable[[Tensor], Mod] = lambda w: lambda s, b, h, q, kv: s + w[q, kv]


def by_blocks(keep: Callable[..., Any], q_len: int, kv_len: int, batch: int | None = None) -> Any:
    return create_block_mask(keep, batch, None, q_len, kv_len, device="cpu")


EMPTY_COLUMNS = by_blocks(lambda b, h, q, kv: kv // 128 == 1, 200, 300)
EMPTY_ROWS = by_blocks(lambda b, h, q, kv: (q // 64 == 1) & (kv <= q), 200, 300)
PER_SCORE = by_blocks(lambda b, h, q, kv: ((q * 7 + kv * 3) % 5 < 2) & (kv < 200), 200, 300)
BY_ELEMENT = by_blocks(lambda b, h, q, kv: torch.where(b == 0, q >= kv, kv >= 128), 150, 150, 2)

# name -> (mod, shape of the bias, arguments of `draw`, mask)
STORED: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...], dict[str, Any], Any]] = {
    "by head": (BY_HEAD, (2, 150, 150), {}, CAUSAL),
    "without a mask": (BY_HEAD, (2, 150, 150), {}, None),
    "by batch element and head": (BY_BOTH, (2, 2, 150, 150), {"batch": (2, 2)}, CAUSAL),
    "head first": (HEAD_FIRST, (2, 2, 150, 150), {"batch": (2, 2)}, CAUSAL),
    "by batch element": (BY_BATCH, (2, 150, 150), {"batch": (2, 2), "heads": (1, 1)}, CAUSAL),
    "one head": (ALONE, (150, 150), {"heads": (1, 1)}, CAUSAL),
    "of a layer": (OF_LAYER, (3, 2, 150, 150), {}, None),
    "grouped heads": (BY_HEAD, (4, 150, 150), {"heads": (4, 2)}, CAUSAL),
    "one key and value": (BY_BOTH, (2, 2, 150, 150), {"batch": (2, 1)}, CAUSAL),
    "larger bias": (BY_HEAD, (3, 200, 444), {}, CAUSAL),
    "larger bias, whole rows": (BY_HEAD, (2, 256, 152), {}, None),
    "odd rows": (BY_HEAD, (2, 151, 157), {}, CAUSAL),
    "wide": (BY_HEAD, (2, 200, 300), {"dims": (128, 128), "kv_len": 300}, EMPTY_COLUMNS),
    "empty columns": (BY_HEAD, (2, 200, 300), {"kv_len": 300}, EMPTY_COLUMNS),
    "empty rows": (BY_HEAD, (2, 200, 300), {"kv_len": 300}, EMPTY_ROWS),
    "mask of scores": (BY_HEAD, (2, 200, 300), {"kv_len": 300}, PER_SCORE),
    "window": (BY_HEAD, (2, 150, 150), {"dtype": FP16}, masks.sliding_window(20)),
    "mask by batch element": (BY_BOTH, (2, 2, 150, 150), {"batch": (2, 2)}, BY_ELEMENT),
}
DIAGONAL = by_blocks(lambda b, h, q, kv: (q // 64 == kv // 64) & (q != 70), 150, 150)
# as above; batch element 0 stores the gradient, and the others add theirs
LED: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...], dict[str, Any], Any]] = {
    "causal": (BY_HEAD, (2, 150, 150), {"batch": (2, 2)}, CAUSAL),
    "three elements": (BY_HEAD, (1, 150, 150), {"batch": (3, 3), "heads": (1, 1)}, CAUSAL),
    "without a mask": (BY_HEAD, (2, 200, 300), {"batch": (2, 2), "kv_len": 300}, None),
    "wide": (BY_HEAD, (2, 150, 150), {"batch": (2, 2), "dims": (128, 128)}, CAUSAL),
    "grouped heads": (BY_HEAD, (4, 150, 150), {"batch": (2, 2), "heads": (4, 2)}, CAUSAL),
    "one key and value": (BY_HEAD, (2, 150, 150), {"batch": (2, 1)}, CAUSAL),
    "one head": (ALONE, (150, 150), {"batch": (2, 2), "heads": (1, 1)}, CAUSAL),
    "larger bias": (BY_HEAD, (3, 200, 444), {"batch": (2, 2)}, CAUSAL),
    "empty columns": (BY_HEAD, (2, 200, 300), {"batch": (2, 2), "kv_len": 300}, EMPTY_COLUMNS),
    "one q block at each kv block": (BY_HEAD, (2, 150, 150), {"batch": (2, 2)}, DIAGONAL),
}
# as above; the gradient is added
ADDED: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...], dict[str, Any], Any]] = {
    "mask by batch element": (BY_HEAD, (2, 150, 150), {"batch": (2, 2)}, BY_ELEMENT),
    "shared by heads": (ALONE, (150, 150), {}, CAUSAL),
    "shifted": (
        lambda w: lambda s, b, h, q, kv: s + w[h, q + 3, kv], (2, 153, 150), {}, CAUSAL,
    ),
    "twice": (
        lambda w: lambda s, b, h, q, kv: s + w[h, q, kv] + w[h, q, 0], (2, 150, 150), {}, CAUSAL,
    ),
    "minus": (lambda w: lambda s, b, h, q, kv: s - w[h, q, kv], (2, 150, 150), {}, CAUSAL),
    "factor": (lambda w: lambda s, b, h, q, kv: s * w[h, q, kv], (2, 150, 150), {}, CAUSAL),
    "diagonal": (lambda w: lambda s, b, h, q, kv: s + w[h, h, q, kv], (2, 2, 150, 150), {}, CAUSAL),
}  # fmt: skip


def drawn(sizes: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    return draw(200 if "kv_len" in sizes else LENGTH, **sizes)


def sources(
    mod: Mod, sizes: dict[str, Any], mask: Any, *, dims: tuple[int, int] = (64, 64), **options: Any
) -> list[Any]:
    """Return the sources of the kernels of a call's forward and backward."""
    (query, key, value), _ = drawn({"dims": dims} | sizes)
    inputs = (t.requires_grad_() for t in (query, key, value))
    with emulation.session(execute=False), kernel.requested_sources() as found:
        out = flex_attention(
            *inputs, mod, mask, backend="emulate",
            enable_gqa=query.shape[1] != key.shape[1], **options,
        )  # fmt: skip
        out.float().sum().backward()
    return list(found)


def stores(found: list[Any]) -> bool:
    (main,) = (s for s in found if s.name.startswith("backward"))
    return "\nstored (" in main.key


def leads(found: list[Any]) -> bool:
    (main,) = (s for s in found if s.name.startswith("backward"))
    return "('leaders', True)" in main.key


def names(found: list[Any]) -> list[str]:
    return [s.name for s in found]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", sampled([(n,) for n in STORED], 9))
def test_stored(name: str) -> None:
    mod, shape, sizes, mask = STORED[name]
    assert stores(sources(mod(torch.randn(shape, requires_grad=True)), sizes, mask))
    check(drawn(sizes), mod, mask, [torch.randn(shape)])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", first_of([(n,) for n in LED]))
def test_led(name: str) -> None:
    mod, shape, sizes, mask = LED[name]
    assert leads(sources(mod(torch.randn(shape, requires_grad=True)), sizes, mask))
    mode = "check" if name in ("causal", "wide") else "eager"
    check(drawn(sizes), mod, mask, [torch.randn(shape)], mode)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ctas", sampled([(3,), (1,), (2,), (8,)], 2))
@pytest.mark.parametrize("name", sampled([("causal",), ("one q block at each kv block",)], 2))
def test_led_by_few_ctas(name: str, ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA computes leaders and followers one after the other, in different orders."""
    works = observed(monkeypatch, ctas)
    mod, shape, sizes, mask = LED[name]
    check(drawn(sizes), mod, mask, [torch.randn(shape)], "adversarial", seeds=2)
    assert works[-1].leaders


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", first_of([(n,) for n in ADDED]))
def test_added(name: str) -> None:
    mod, shape, sizes, mask = ADDED[name]
    assert not stores(sources(mod(torch.randn(shape, requires_grad=True)), sizes, mask))
    check(drawn(sizes), mod, mask, [torch.randn(shape)])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", sampled([("wide",), ("by batch element and head",)], 2))
def test_in_all_orders(name: str) -> None:
    mod, shape, sizes, mask = STORED[name]
    check(drawn(sizes), mod, mask, [torch.randn(shape)], "check")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_split_kv_blocks(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = observed(monkeypatch, ctas)
    mod, shape = BY_HEAD, (1, 700, 150)
    check(draw(700, heads=(1, 1), kv_len=150), mod, None, [torch.randn(shape)])
    assert ctas < 7 or tables[0].counters > 1


def test_without_a_mask_nothing_is_cleared() -> None:
    bias = torch.randn(2, LENGTH, LENGTH, requires_grad=True)
    assert CLEAR not in names(sources(BY_HEAD(bias), {}, None))
    assert CLEAR in names(sources(BY_HEAD(bias), {}, CAUSAL))


@pytest.mark.usefixtures("poisoned")
def test_two_biases() -> None:
    """One is stored in all batch elements; the other, which they share, in the first."""
    mod = lambda v, w: lambda s, b, h, q, kv: s + v[b, h, q, kv] + w[h, q, kv]
    captured = [torch.randn(2, 2, LENGTH, LENGTH), torch.randn(2, LENGTH, LENGTH)]
    learned = [t.requires_grad_() for t in captured]
    found = sources(mod(*learned), {"batch": (2, 2)}, CAUSAL)
    assert stores(found)
    assert leads(found)
    check(draw(LENGTH, batch=(2, 2)), mod, CAUSAL, captured)


@pytest.mark.usefixtures("poisoned")
def test_beside_other_learned_tensors() -> None:
    """A relative bias and a number of each head are summed, and a frozen bias has no gradient."""
    frozen = torch.randn(2, LENGTH, LENGTH)
    mod = lambda w, r, z: (
        lambda s, b, h, q, kv: (
            s + w[h, q, kv] + frozen[h, q, kv] + r[h, q - kv + LENGTH] + z[h] * kv
        )
    )
    shapes = [(2, LENGTH, LENGTH), (2, 2 * LENGTH), (2,)]
    check(draw(LENGTH), mod, CAUSAL, [torch.randn(n) * 0.1 for n in shapes])


def test_low_precision() -> None:
    """The gradient of a bfloat16 bias is stored in float32, and rounded then."""
    bias = torch.randn(2, LENGTH, LENGTH, dtype=BF16, requires_grad=True)
    assert stores(sources(BY_HEAD(bias), {}, CAUSAL))


def test_frozen_and_deterministic() -> None:
    bias = torch.randn(2, LENGTH, LENGTH)
    assert not stores(sources(BY_HEAD(bias), {}, CAUSAL))
    bias.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        assert not stores(sources(BY_HEAD(bias), {}, CAUSAL))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("batch", [1, 2])
def test_repeated_calls(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call replays all kernels, on memory that is not zero."""
    made = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]

    def filled(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        t: Tensor = made(shape, strides, dtype)
        return t.fill_(torch.nan) if dtype.is_floating_point else t

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", filled)
    inputs, weights = draw(LENGTH, batch=(batch, batch))
    bias = torch.randn(2, LENGTH, LENGTH)
    exact = gradients("eager", inputs, weights, [bias], BY_HEAD, CAUSAL, torch.float64)
    results = []
    for _ in range(4):
        with emulation.session(deterministic=False) as session:
            found = gradients("emulate", inputs, weights, [bias], BY_HEAD, CAUSAL, None, whole=True)
        assert session.ok
        results.append(found[3])
    assert (results[0] - exact[3]).abs().max() < 0.1  # of sums of numbers up to 2, in bfloat16
    for again in results[1:]:
        torch.testing.assert_close(again, results[0], rtol=1e-5, atol=1e-5)
    ran = [name for name, _ in session.reports]
    assert CLEAR in ran


def test_followers_come_after_their_leader() -> None:
    runs = full_runs(256, 512, (64, 128), torch.device("cpu"))
    shape = Shape(2, 2, 1 << 16, batch_together=True)
    schedule = schedule_backward(runs, shape, workers=4)
    assert batch_ascends(schedule)
    b, h, tile = (t.flip(0) for t in (schedule.b, schedule.h, schedule.tile))
    assert not batch_ascends(schedule._replace(b=b, h=h, tile=tile))


def test_the_gradient_is_added_if_a_leader_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(backward_work, "batch_ascends", lambda schedule: False)
    bias = torch.randn(2, LENGTH, LENGTH, requires_grad=True)
    assert not stores(sources(BY_HEAD(bias), {"batch": (2, 2)}, CAUSAL))


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize(
    ("batch", "dims"),
    [
        (1, (64, 64)),
        (2, (128, 128)),
        (1, (128, 64)),
        (2, (64, 128)),
        (1, (128, 128)),
        (2, (64, 64)),
    ],
)
def test_without_spills(batch: int, dims: tuple[int, int]) -> None:
    bias = torch.zeros(2, LENGTH, LENGTH, requires_grad=True)
    found = sources(BY_HEAD(bias), {"batch": (batch, batch)}, CAUSAL, dims=dims)
    assert stores(found)
    for source in found:
        if not source.name.startswith("forward"):  # those of a frozen bias
            code = kernel.kernel(source)
            assert code.artifact.problems == ()
            assert [s.stack for s in code.stats] == [0]
