"""Check dQ in the order of arrival of the Hopper backward, executed on the CPU in adversarial orders.

The sums hold NaN before the kernel runs, so that a part which is added before the first one is
stored, or a sum which is read before it is complete, gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnkit import AuxRequest, flex_attention, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.schedule import arrivals
from attnkit.splice.backward_work import BackwardWork
from tests.templates.backward_kit import (
    FP16,
    check,
    draw,
    forget,
    gradients,
    observed,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[1, 3])
def works(monkeypatch: pytest.MonkeyPatch, request: Any) -> list[BackwardWork]:
    """Return a list of the tables of backwards on one CTA, or on three."""
    return observed(monkeypatch, request.param)


def blocks(
    share: float, count: int = 4, rows: int = 128, heads: int = 2, seed: int = 0
) -> Callable[..., Any]:
    """Return a mask that keeps blocks of `rows` x 128 at random; the second q block has none."""
    random = torch.Generator().manual_seed(seed)
    kept = torch.rand(heads, count * 128 // rows, count, generator=random) < share
    kept[:, 1] = False
    return lambda b, h, q, kv: kept[h, q // rows, kv // 128]


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 40)], ids=str)
def test_random_blocks(works: list[BackwardWork], dims: tuple[int, int]) -> None:
    mask = blocks(0.4)
    check(draw(500, dims=dims, heads=(2, 2)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].visits is not None


@pytest.mark.parametrize("seed", range(3))
def test_work_tiles_of_few_q_blocks_in_check_mode(works: list[BackwardWork], seed: int) -> None:
    mask = blocks(0.3, rows=64, seed=seed)
    check(draw(512, dims=(128, 128), heads=(2, 2)), mask=mask, mode="check")
    assert works[-1].visits is not None


def test_all_kv_blocks_at_the_same_q_blocks(works: list[BackwardWork]) -> None:
    mask = lambda b, h, q, kv: q % 256 >= 128
    check(draw(512, dims=(128, 128), heads=(1, 1)), mask=mask, mode="check", seeds=4)
    assert works[-1].visits is not None
    assert works[-1].visits.tolist() == [0, 0, 4, 4] * 2


def test_kv_blocks_that_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    works = observed(monkeypatch, 8)
    kept = torch.rand(16, 16, generator=torch.Generator().manual_seed(5)) < 0.05
    kept[:, 3] = kept[:, 7] = True
    mask = lambda b, h, q, kv: kept[q // 64, kv // 128]
    check(draw(1024, 2048, heads=(1, 1), dims=(128, 128)), mask=mask, mode="adversarial")
    assert works[-1].visits is not None
    assert works[-1].counters > 1  # work tiles that share a kv block


def test_partial_blocks_softcap_and_a_mask_of_a_batch_element(works: list[BackwardWork]) -> None:
    kept = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(3)) < 0.4
    mask = lambda b, h, q, kv: kept[b, q // 128, kv // 128] & ((q ^ kv) & 3 != 0)
    drawn = draw(450, dims=(128, 128), batch=(2, 2), dtype=FP16)
    check(drawn, lambda: mods.softcap(5.0), mask, mode="adversarial")
    assert works[-1].visits is not None


def test_rows_that_no_block_visits_have_zero_gradients(works: list[BackwardWork]) -> None:
    inputs, weights = draw(500, dims=(128, 128), heads=(2, 2))
    grad_query = gradients("emulate", inputs, weights, (), None, blocks(0.4), None)[0]
    assert works[-1].visits is not None
    assert not grad_query[:, :, 128:256].any()
    assert not grad_query.isnan().any()


OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.3},
    "entropy": {"return_aux": AuxRequest(entropy=True)},
    "sigmoid": {"normalization": "sigmoid"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_equal_a_backward_that_clears_sums(
    works: list[BackwardWork], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, weights = draw(500, dims=(128, 128))
    query, key, value = (t.requires_grad_() for t in inputs)
    found = []
    for most in (0, arrivals.MOST):
        monkeypatch.setattr(arrivals, "MOST", most)
        forget(monkeypatch)
        torch.manual_seed(5)  # of dropout
        with emulation.session(mode="adversarial", deterministic=False) as session:
            result: Any = flex_attention(
                query, key, value, None, blocks(0.4), backend="emulate", **OPTIONS[name]
            )
            out, total = result, 0.0
            if name == "entropy":
                out, total = result[0], result[1].entropy.nan_to_num().sum()
            total = total + (out * weights[0]).sum()
            found.append(torch.autograd.grad(total, (query, key, value)))
        assert session.ok
        assert (works[-1].visits is None) == (most == 0)
    for cleared, counted in zip(*found, strict=True):
        torch.testing.assert_close(counted, cleared)


def test_packed_heads(works: list[BackwardWork]) -> None:
    mask = lambda b, h, q, kv: ((5 * (q // 128) + 3 * (kv // 128)) % 7 < 3) & (q // 128 != 1)
    check(draw(700, heads=(4, 2), dims=(128, 128)), mask=mask, mode="adversarial")
    assert works[-1].visits is not None
    assert works[-1].visits.tolist() == [3, 3, 0, 0, 2, 2, 3, 3, 3, 3, 2] * 4  # heads


def test_heads_that_share_keys_do_not_count(works: list[BackwardWork]) -> None:
    check(draw(500, heads=(2, 1)), mask=blocks(0.4), mode="adversarial")
    assert works[-1].visits is None


def test_many_kv_blocks_do_not_count(works: list[BackwardWork]) -> None:
    check(draw(1100, heads=(1, 1)), mask=lambda b, h, q, kv: (q ^ kv) & 1 == 0)
    assert works[-1].visits is None


def test_a_call_again_counts_from_zero(works: list[BackwardWork]) -> None:
    inputs, weights = draw(500, heads=(2, 2))
    for _ in range(3):
        check((inputs, weights), mask=blocks(0.4))
    assert works[-1].visits is not None
