"""Check which numbers kernels read at run time, and that such kernels are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import flex_attention, masks, mods
from attnkit.jit.kernel import Source, requested_sources
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.prepare import prepare
from attnkit.splice import BackwardInputs, ForwardInputs, backward, run_time_numbers
from attnkit.splice.forward_call import ForwardCall
from tests.sampling import sampled

Pair = tuple[Any, Any]  # score_mod and mask
Sources = tuple[Source, ...]
LENGTH = 100
TABLE = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without kernels, as if none were on disk."""
    attnkit.clear_caches()
    monkeypatch.setattr(run_time_numbers, "is_compiled", lambda source: False)
    yield
    attnkit.clear_caches()


def draw(seed: int = 0, length: int = LENGTH) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 64, generator=random).bfloat16() for _ in range(3)]


def sources(
    pair: Pair, backend: str = "emulate", length: int = LENGTH, **options: Any
) -> tuple[Source, Sources]:
    """Prepare a call and its backward; return their kernels, without compiling any."""
    qkv = draw(length=length)
    call = AttentionCall(*qkv, *pair, backend=backend, **options)
    found = prepare(call).call
    assert isinstance(found.attention, ForwardCall)
    captured = prepare(call).bound.captured
    out, lse = torch.zeros_like(qkv[0]), torch.zeros(qkv[0].shape[:3])
    needs = [False for _ in captured.scores]
    inputs = BackwardInputs.of(ForwardInputs(*qkv, captured, 0.125), (out, lse), (out, None), needs)
    made = backward.prepare(found.kernel_call, inputs)
    return found.attention.source, (
        made.preprocess,
        made.main,
        *(p.source for p in made.postprocess),
    )


def compiled(pairs: Sequence[Pair], **options: Any) -> tuple[int, int]:
    """Return the numbers of different forward kernels, and of different backwards, for calls."""
    found = [sources(pair, **options) for pair in pairs]
    return len({f for f, _ in found}), len({b for _, b in found})


model = SimpleNamespace(temperature=1.0)


def annealed(value: float) -> Pair:
    model.temperature = value
    return lambda s, b, h, q, kv: s * model.temperature, None


TEN: dict[str, Callable[[int], Pair]] = {
    "softcap": lambda i: (mods.softcap(20.0 + i), None),
    "temperature": lambda i: annealed(1.45 - 0.1 * i),
    "window": lambda i: (None, masks.sliding_window(10 + 3 * i)),
    "window and causal": lambda i: (None, masks.causal() & masks.sliding_window(10 + 3 * i)),
    "int shift": lambda i: (mods.alibi(2).shift(q=i), masks.sliding_window(9).shift(q=i)),
    "negative shift": lambda i: (mods.alibi(2).shift(q=-2 - i), None),
    "entry of a table": lambda i: (lambda s, b, h, q, kv: s + TABLE[i % 8, h], None),
    "length": lambda i: (None, lambda b, h, q, kv: kv < 100 + i),
    "no interval": lambda i: (None, lambda b, h, q, kv: (q * 7 + kv * 3) % 11 < 2 + i % 7),
    "several": lambda i: (mods.softcap(30.0 + i / 8), masks.sliding_window(10 + 3 * i)),
    "threshold": lambda i: (lambda s, b, h, q, kv: torch.where(q - kv < 3 * i, s, s - i), None),
}
SMALLEST = {"int shift": 1, "threshold": 1}  # q + 0 is another graph


@pytest.mark.parametrize("backend", ["emulate", "emulate:sm_100a"])
@pytest.mark.parametrize("name", TEN)
def test_ten_values_need_three_kernels(name: str, backend: str) -> None:
    first = SMALLEST.get(name, 0)
    pairs = (TEN[name](first + i) for i in range(10))
    forwards, backwards = compiled(pairs, backend=backend)  # type: ignore[arg-type]
    assert forwards <= 3
    assert backwards <= 3


def test_a_value_with_another_graph_needs_one_more() -> None:
    """A shift by 0 is none. In step 9 the window begins at column 0, in both directions."""
    pairs = [(mods.alibi(2).shift(q=i), masks.sliding_window(9).shift(q=i)) for i in range(12)]
    forwards, backwards = compiled(pairs)
    assert forwards <= 4
    assert backwards <= 4


def test_only_numbers_that_change_are_read() -> None:
    made = [sources((mods.softcap(20.0), masks.sliding_window(10 + i))) for i in range(4)]
    (first, _), _, (third, _), (fourth, _) = made
    assert third == fourth
    cap = (20.0 * 1.4426950408889634).hex()
    assert cap in first.key
    assert cap in third.key
    changed, _ = sources((mods.softcap(21.0), masks.sliding_window(10)))
    assert changed not in (first, third)
    assert cap not in changed.key
    later, _ = sources((mods.softcap(22.0), masks.sliding_window(13)))
    assert later == changed
    again, _ = sources((mods.softcap(20.0), masks.sliding_window(13)))
    assert again == third


def test_a_value_keeps_its_kernel() -> None:
    pairs = [(mods.softcap(20.0 + i), None) for i in range(4)]
    assert [sources(p) for p in pairs] == [sources(p) for p in pairs]
    longer = [sources(p, length=300)[0] for p in pairs]
    assert longer == [sources(p)[0] for p in pairs]
    before = sources(pairs[3])
    attnkit.clear_caches()
    assert sources(pairs[3]) != before


def test_kernels_that_were_compiled_ahead_of_time_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(mods.softcap(20.0 + i), None) for i in range(6)]
    assert compiled(pairs[:4]) == (3, 3)
    monkeypatch.setattr(run_time_numbers, "is_compiled", lambda source: True)
    assert compiled(pairs) == (5, 5)  # values 2 and 3 keep the kernel that reads them


def test_proofs_of_the_number_are_kept() -> None:
    """A cap that needs no row maximum, and a positive factor, still take the faster kernels."""
    found = {}
    for cap in (20.0, 21.0, 22.0, 60.0, 61.0, 62.0):
        found[cap], _ = sources((mods.softcap(cap), None))
    assert found[22.0] != found[62.0]
    assert ["no-max" in found[cap].key for cap in (22.0, 62.0)] == [True, False]
    for factor in (2.0, 3.0, 4.0, 5.0, -2.0, -3.0, -4.0, -5.0):
        found[factor], _ = sources(annealed(factor))
    assert found[4.0] == found[5.0]
    assert found[-4.0] == found[-5.0]
    assert found[4.0] != found[-4.0]


def test_a_constant_that_picks_the_code_stays() -> None:
    pairs = [(lambda s, b, h, q, kv, n=n: s + (q // n) * 0.1, None) for n in range(2, 7)]
    assert compiled(pairs) == (5, 5)


def test_the_log_names_the_numbers() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("attnkit")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        for cap in (20.0, 21.0, 22.5, 23.0):
            sources((mods.softcap(cap), None))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert len(lines) == 2  # forward and backward
    for line in lines:
        assert "at run time" in line
        assert "22.5" in line


# --- results


@pytest.fixture
def without_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first kernel already read its numbers at run time, all of them."""
    monkeypatch.setattr(run_time_numbers, "MOST_CONSTANTS", 0)


def attend(
    pair: Pair,
    tensors: Sequence[Tensor],
    backend: str,
    sinks: Sequence[float] = (),
    also: Sequence[Tensor] = (),
    **options: Any,
) -> list[Tensor]:
    """Return the outputs and gradients: of query, key, value, a sink with these numbers, `also`."""
    learned = [t.detach().requires_grad_() for t in tensors]
    if sinks:
        wide = tensors[0].dtype == torch.float64
        options["sink"] = torch.tensor(sinks, dtype=torch.float64 if wide else torch.float32)
        learned.append(options["sink"].requires_grad_())
    found = flex_attention(*learned[:3], *pair, backend=backend, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        weight = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view_as(out)
        loss = loss + (out.double() * weight).sum()
    return [*(out.detach() for out in outputs), *torch.autograd.grad(loss, [*learned, *also])]


def check(pair: Pair, tensors: Sequence[Tensor], backend: str, **options: Any) -> list[Tensor]:
    """Check for at most twice the error of dense attention and a rounding; return the results."""
    own = attend(pair, tensors, backend, **options)
    exact = attend(pair, [t.double() for t in tensors], "eager", **options)
    dense = attend(pair, tensors, "eager", **options)
    for ours, true, theirs in zip(own, exact, dense, strict=True):
        finite = true.isfinite()  # the LSE of a fully masked row is not
        assert torch.equal(ours.isfinite(), finite)
        ours, true, theirs = (t[finite] for t in (ours, true, theirs))
        allowed = 2 * (theirs.double() - true).abs().amax() + true.abs().amax() * 2**-8
        assert (ours.double() - true).abs().amax() <= allowed
    return own


def everything(cap: float, slope: float, window: int, entry: int, shift: int) -> Pair:
    """Return functions that read numbers in each place that a kernel treats in its own way."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        bent = cap * torch.tanh((score + TABLE[entry, h]) / (cap + 0.5))
        return torch.where(q - kv < window // 2, bent, bent * slope) + slope * (kv - q - shift)

    return score_mod, masks.sliding_window(window).shift(kv=shift)


# caps and divisors of 1 make other graphs
CAPS, SLOPES, WINDOWS = st.floats(2.0, 60.0), st.floats(0.01, 0.5), st.integers(7, 120)


@pytest.mark.usefixtures("without_constants")
@pytest.mark.parametrize("backend", sampled([("emulate",), ("emulate:sm_100a",)], 2))
def test_one_kernel_is_exact_for_all_values(backend: str) -> None:
    with requested_sources() as requested:

        @given(CAPS, SLOPES, WINDOWS, st.integers(0, 7), st.integers(1, 60), st.integers(0, 99))
        @settings(max_examples=3, deadline=None)
        def each(cap: float, slope: float, window: int, entry: int, shift: int, seed: int) -> None:
            check(everything(cap, slope, window, entry, shift), draw(seed), backend)

        each()
        pair = everything(7.5, 0.1, 30, 5, 20)
        for seed in range(3):  # the last call is a relaunch
            check(pair, draw(seed), backend)
    assert [s.name.split()[0] for s in requested].count("forward") == 1
    assert [s.name.split()[0] for s in requested].count("backward") == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_constants")
@pytest.mark.parametrize(
    "options",
    [{"sinks": (0.5, -1.0)}, {"normalization": "sigmoid"}, {"return_lse": True}],
    ids=["sink", "sigmoid", "lse"],
)
@pytest.mark.parametrize("backend", ["emulate", "emulate:sm_100a"])
def test_numbers_beside_other_arguments(backend: str, options: dict[str, Any]) -> None:
    for i in (1, 2):
        pair = everything(2.0 + i, 0.1 * i, 30 * i, i, 5 * i)
        check(pair, draw(), backend, **options)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_constants")
def test_temperatures_scale_and_bias() -> None:
    """A factor of the score alone, of either sign, and terms of rows, columns and distances."""
    learned = torch.linspace(-1.0, 1.0, 2 * LENGTH + 9).requires_grad_()

    def terms(x: float, n: int) -> Pair:
        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score * x - q * x / 70 + kv * 0.01 * x + learned[kv - q + n] * x + x

        return score_mod, lambda b, h, q, kv: (q + kv * n) % 7 < n % 6

    for x, n in ((1.5, 100), (-0.7, 101), (0.3, 102)):
        check(annealed(x), draw(), "emulate")
        check(terms(x, n), draw(), "emulate", also=[learned])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_constants")
def test_a_deterministic_backward_repeats_its_bits() -> None:
    pair = everything(7.5, 0.1, 30, 5, 20)
    first, second = (check(pair, draw(), "emulate", deterministic=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
