"""Check decoding: one query against a KV cache, with shifted masks and score_mods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attnkit
from attnkit import flex_attention, masks, mods
from attnkit.jit.kernel import requested_sources
from attnkit.runtime import api
from attnkit.runtime import prepare as preparation
from attnkit.tracing import guards

pytestmark = pytest.mark.filterwarnings("error")

BATCH, HEADS, LENGTH = 2, 4, 24
MODS = mods.examples(LENGTH, HEADS, BATCH, dtype=torch.float64, requires_grad=True)
MASKS = masks.examples(40)
STEPS = range(5, 9)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(*lengths: int, batch: int = BATCH, heads: int = HEADS) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, n, 8, dtype=torch.float64, generator=random) for n in lengths]


def offsets(kind: str, batch: int) -> Callable[[int], Any]:
    """Return a function of a step that gives its offset: an int, or one tensor with a new value."""
    held = torch.zeros((batch,) if kind == "[B]" else (), dtype=torch.int32)
    return (lambda step: step) if kind == "int" else held.fill_


@pytest.mark.parametrize("kind", ["int", "[]", "[B]"])
@pytest.mark.parametrize("name", MODS)
def test_a_shifted_mod_is_a_row_of_the_mod(name: str, kind: str) -> None:
    mod, q_len, kv_len, *_ = MODS[name]
    query, key, value = inputs(q_len, kv_len, kv_len)
    whole = flex_attention(query, key, value, mod, masks.causal())
    offset = offsets(kind, BATCH)
    for step in STEPS:
        by, here = offset(step), query[:, :, step : step + 1]
        in_cache = flex_attention(here, key, value, mod.shift(q=by), masks.causal().shift(q=by))
        torch.testing.assert_close(in_cache, whole[:, :, step : step + 1])
        growing = key[:, :, : step + 1], value[:, :, : step + 1]
        torch.testing.assert_close(flex_attention(here, *growing, mod.shift(q=by)), in_cache)


@pytest.mark.parametrize("kind", ["int", "[]", "[B]"])
@pytest.mark.parametrize("name", MASKS)
def test_a_shifted_mask_is_a_row_of_the_mask(name: str, kind: str) -> None:
    mask, q_len, kv_len, batch, heads = MASKS[name]
    query, key, value = inputs(q_len, kv_len, kv_len, batch=batch, heads=heads)
    whole = flex_attention(query, key, value, block_mask=mask)
    offset = offsets(kind, batch)
    for step in STEPS:
        here = query[:, :, step : step + 1]
        own = flex_attention(here, key, value, block_mask=mask.shift(q=offset(step)))
        torch.testing.assert_close(own, whole[:, :, step : step + 1])


@pytest.mark.parametrize("name", [n for n in MODS if n != "bias_2d"])  # images have no padding
def test_padding_on_the_left_moves_positions(name: str) -> None:
    mod, *_, learned = MODS[name]
    start = torch.tensor([3, 0])
    padding = {"side": "left", "q_len": LENGTH, "kv_len": LENGTH}
    lengths = LENGTH - start
    mask = masks.causal() & masks.padding(lengths, lengths, **padding)
    plain = inputs(LENGTH, LENGTH, LENGTH)

    def moved(t: Tensor) -> Tensor:
        rows = zip(t, start.tolist(), strict=True)
        return torch.stack([torch.nn.functional.pad(r, (0, 0, n, 0))[:, :LENGTH] for r, n in rows])

    def attend(tensors: list[Tensor], shifted: bool) -> list[Tensor]:
        tensors = [t.requires_grad_() for t in tensors]
        if shifted:
            out = flex_attention(*tensors, mod.shift(q=-start, kv=-start), mask)
        else:
            kept = masks.causal() & masks.padding(lengths, lengths)
            out = flex_attention(*tensors, mod, kept)
        return [out, *torch.autograd.grad(out.sin().sum(), [*tensors, *learned])]

    own, expected = attend([moved(t) for t in plain], True), attend(plain, False)
    for ours, true in zip(own[:4], expected[:4], strict=True):
        torch.testing.assert_close(ours, moved(true))
    for ours, true in zip(own[4:], expected[4:], strict=True):
        torch.testing.assert_close(ours, true)


def layers(steps: range, build: Callable[[int], tuple[Any, Any]]) -> None:
    """Decode with three layers that share a cache's shape, and compare with the whole sequence."""
    query, key, value = inputs(LENGTH, LENGTH, LENGTH)
    whole = flex_attention(query, key, value, mods.alibi(HEADS), masks.causal())
    for step in steps:
        mod, mask = build(step)
        for _ in range(3):
            here = query[:, :, step : step + 1].clone()
            out = flex_attention(here, key.clone(), value.clone(), mod, mask)
            torch.testing.assert_close(out, whole[:, :, step : step + 1])


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of the functions that trace, prepare and classify."""
    found: Counter[str] = Counter()
    for module, name in ((guards, "trace"), (api, "prepare"), (preparation, "classify")):
        function = getattr(module, name)

        def counted(*args: Any, call: Any = function, key: str = name, **options: Any) -> Any:
            found[key] += 1
            return call(*args, **options)

        monkeypatch.setattr(module, name, counted)
    return found


@pytest.mark.parametrize("kind", ["[]", "[B]"])
def test_steps_are_traced_once_and_classified_once_for_all_layers(
    kind: str, counts: Counter[str]
) -> None:
    offset = offsets(kind, BATCH)
    held = offset(0)
    mod, mask = mods.alibi(HEADS).shift(q=held), masks.causal().shift(q=held)

    def build(step: int) -> tuple[Any, Any]:
        offset(step)
        return mod, mask

    layers(range(4, 5), build)
    counts.clear()
    layers(range(5, 15), build)
    assert counts == {"prepare": 10, "classify": 10}


def test_masks_made_in_each_step_share_a_trace(counts: Counter[str]) -> None:
    def build(step: int) -> tuple[Any, Any]:
        lengths = torch.tensor([step + 1, step + 1])
        mask = masks.causal("bottom-right", q_len=1, kv_len=lengths)
        return mods.alibi(HEADS).shift(q=torch.tensor(step)), mask

    layers(range(4, 5), build)
    counts.clear()
    layers(range(5, 15), build)
    assert counts == {"prepare": 10, "classify": 10}


@pytest.mark.parametrize("growing", [False, True])
def test_compiled_steps_are_one_graph(growing: bool) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, step: Tensor) -> Tensor:
        mod, mask = mods.alibi(HEADS).shift(q=step), masks.sliding_window(5).shift(q=step)
        out: Tensor = flex_attention(query, key, value, mod, mask)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=growing)
    query, key, value = inputs(LENGTH, LENGTH, LENGTH)
    whole = flex_attention(query, key, value, mods.alibi(HEADS), masks.sliding_window(5))
    for step in range(6, 16):
        keys = slice(step + 1 if growing else None)
        here = query[:, :, step : step + 1]
        out = compiled(here, key[:, :, keys], value[:, :, keys], torch.tensor(step))
        torch.testing.assert_close(out, whole[:, :, step : step + 1])
    assert counter.frame_count == 1


def test_one_kernel_serves_all_steps() -> None:
    pytest.importorskip("cutlass")
    attnkit.clear_caches()
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 64, generator=random).half() for _ in range(3))
    mod, mask = mods.alibi(2), masks.sliding_window(20)
    whole = flex_attention(query.double(), key.double(), value.double(), mod, mask)
    offset = torch.tensor(0)
    shifted = mod.shift(q=offset), mask.shift(q=offset)
    with requested_sources() as sources:
        for step in (30, 31, 50):
            offset.fill_(step)
            here = query[:, :, step : step + 1]
            for keys in (slice(None), slice(step + 1)):
                cache = key[:, :, keys], value[:, :, keys]
                true = whole[:, :, step : step + 1]
                dense, own = (
                    flex_attention(here, *cache, *shifted, backend=backend).double()
                    for backend in ("eager", "emulate")
                )
                assert (own - true).abs().max() <= 2 * (dense - true).abs().max()
    assert len(sources) == 1
