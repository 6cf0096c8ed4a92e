"""Check slope * (kv - q) in the products of the Hopper forward, see `slope_in_mma`.

`test_sm90_forward` checks ALiBi with masks and maxima. Here are the cases that the operand in
registers adds: heads that change, slopes and scales of any size, and the kernels that leave it out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit.kernel import kernel as compiled_kernel
from attnkit.jit.kernel import requested_sources
from attnkit.templates.common.lse_in_mma import split_bfloat16
from attnkit.templates.sm90.config import SMEM_BYTES, ForwardConfig
from attnkit.templates.sm90.slope_in_mma import MAX_COLUMNS
from tests.sampling import diagonal, first_of, sampled
from tests.templates.test_common_device import run
from tests.templates.test_sm90_forward import BF16, FP16, check, close, draw

CAUSAL = masks.causal()
COLUMN = torch.linspace(-3.0, 3.0, 300)


def steep(*slopes: float) -> Callable[..., Any]:
    """Return ALiBi with the given slope for each head."""
    table = torch.tensor(slopes)
    return lambda s, b, h, q, kv: s + table[h] * (kv - q)


# ------------------------------------------------------------------------------------ the operands


def parts(x: Tensor) -> Tensor:
    """Return the three numbers into which a kernel splits each slope, [slopes, 3]."""
    return run(lambda value: list(split_bfloat16(value)), x, torch.float32, 3)


def test_three_bfloat16_numbers_sum_to_a_slope() -> None:
    """The parts of a slope are exact in bfloat16 and sum to it; so are those of its products."""
    torch.manual_seed(0)
    x = torch.randn(1000) * 2.0 ** torch.randint(-90, 90, (1000,))
    found = parts(x)
    assert torch.equal(found.to(BF16).float(), found)
    assert torch.equal(found.double().sum(1), x.double())
    columns = torch.arange(MAX_COLUMNS + 1).double()
    assert torch.equal(columns.to(BF16).double(), columns)


def test_the_parts_of_a_slope_that_is_not_finite() -> None:
    found = parts(torch.tensor([math.inf, -math.inf, math.nan, 3.4e38]))
    assert bool(found.sum(1).isnan().all())  # the last one is beyond the range of bfloat16


# -------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(("dim", "dtype"), diagonal([64, 128, 96], [BF16, FP16]))
def test_heads_that_change_between_work_tiles(dim: int, dtype: torch.dtype) -> None:
    """One CTA computes work tiles of heads with different slopes, one after the other.

    Q K of a work tile is issued while the operand of the tile before was last in use.
    """
    qkv = draw(200, 260, dims=(dim, dim), heads=(4, 2), dtype=dtype)
    check(qkv, steep(0.5, -0.25, 0.0, 3.0, -1e-3, 0.7), CAUSAL, ctas=1)


def test_heads_of_batch_elements() -> None:
    """The slope may depend on the batch element too, and some tiles have no block at all."""
    table = torch.tensor([[0.5, -0.1], [0.0, 1.0]])
    check(
        draw(300, batch=(2, 1)),
        lambda s, b, h, q, kv: s + table[b, h] * (kv - q),
        lambda b, h, q, kv: (q >= kv) & ((q < 128) | (b == 1)),
        ctas=2,
    )


@pytest.mark.parametrize(("dim", "dtype"), diagonal([64, 128], [FP16, BF16]))
def test_steep_slopes(dim: int, dtype: torch.dtype) -> None:
    """Terms beyond the range of exponentials, in both directions."""
    check(draw(200, 300, dims=(dim, dim), dtype=dtype), steep(8.0, -8.0), top=True, mode="eager")


def test_the_terms_have_the_precision_of_float32() -> None:
    """Without its third part, a slope would change the LSE of equal scores by 1e-6 of the terms."""
    query, key, value = draw(130, 256)
    slopes = torch.tensor([0.7013, -0.7013])
    result = check((torch.zeros_like(query), key, value), steep(*slopes.tolist()), mode="eager")
    distance = (torch.arange(256) - torch.arange(130)[:, None]).double()
    exact = torch.logsumexp(slopes.double()[:, None, None] * distance, -1)
    assert float((result.lse[0] - exact).abs().max()) < 2.0**-24 * 256 * 8


@pytest.mark.parametrize("mask", first_of([("documents",), ("window",), (None,)]))
def test_masks_and_both_signs(mask: str | None) -> None:
    ids = torch.arange(300) // 130
    kept = {
        "documents": masks.document(ids) & CAUSAL,
        "window": masks.sliding_window(70),
        None: None,
    }[mask]
    check(draw(300, dims=(128, 128), heads=(3, 1)), steep(0.4, -0.4, 0.0), kept)


def test_split_rows_of_several_heads() -> None:
    """Rows that are split along kv, whose parts have their own origin."""
    mask = lambda b, h, q, kv: kv >= q * 18
    result = check(draw(75, 1400, heads=(2, 1)), steep(0.1, -0.02), mask, ctas=8)
    assert result.kernels == 2


@pytest.mark.parametrize("scale", first_of([(2.0**-149,), (1e-36,), (1e-6,), (3e4,)]))
def test_scales_of_any_size(scale: float) -> None:
    """The slope is divided by the scale: the quotient may exceed the range of float16.

    No scale above 0 makes it infinite.
    """
    torch.manual_seed(1)
    query, key, value = draw(150, dtype=FP16)
    unit = 2.0**-12 if scale > 1 else 1.0
    check((query * unit, key * unit, value), steep(0.3, -0.05), CAUSAL, scale=scale, mode="eager")


@pytest.mark.parametrize("scale", first_of([(0.0,), (-0.2,)]))
def test_scales_that_are_not_positive(scale: float) -> None:
    """The kernel for these adds the terms to the scores itself."""
    check(draw(150), steep(0.3, -0.05), CAUSAL, scale=scale, mode="eager")


@pytest.mark.parametrize("slope", first_of([(math.inf,), (-math.inf,), (math.nan,)]))
def test_slopes_that_are_not_finite(slope: float) -> None:
    """A slope that is not finite makes its own head's results NaN, as in dense attention."""
    result = check(draw(150), steep(slope, 0.1), CAUSAL, ctas=1, mode="eager")
    assert bool(result.out[:, 0].isnan().all())
    assert bool(result.out[:, 1].isfinite().all())


def attend(qkv: tuple[Tensor, ...], backend: str) -> tuple[Tensor, ...]:
    """Return output, LSE, entropies and maxima of a causal call with sinks and ALiBi."""
    out, aux = flex_attention(
        *(qkv[0], qkv[1], qkv[2], steep(0.5, -0.1), CAUSAL),
        enable_gqa=True,
        backend=backend,
        return_aux=AuxRequest(lse=True, max_scores=True, entropy=True),
        sink=torch.tensor([0.5, -2.0]),
    )
    assert aux.lse is not None
    assert aux.entropy is not None
    assert aux.max_scores is not None
    return out, aux.lse, aux.entropy, aux.max_scores


@pytest.mark.parametrize("dim", sampled([(128,), (64,), (96,)], 3))
def test_sinks_entropies_and_maxima(dim: int) -> None:
    torch.manual_seed(2)
    qkv = draw(260, dims=(dim, dim))
    with emulation.session(mode="check", seeds=1) as ran:
        found = attend(qkv, "emulate")
    assert ran.ok, "\n".join(str(report) for _, report in ran.reports)
    assert ran.reports
    expected = attend(tuple(t.double() for t in qkv), "eager")
    dense = attend(qkv, "eager")
    for name, *results in zip(
        ("out", "lse", "entropy", "max"), found, expected, dense, strict=True
    ):
        close(name, *results)


# ------------------------------------------------------------------------------- which kernels do it


def uses_mma(mod: Any, dim: int = 64, **options: Any) -> bool:
    """Return whether the kernel of a call adds the slope in its products."""
    query, key, value = draw(128, dims=(dim, dim))
    with emulation.session(execute=False), requested_sources() as sources:
        flex_attention(query, key, value, mod, backend="emulate", enable_gqa=True, **options)
    return "('slope_in_mma', True)" in sources[0].key


OWN: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "alibi": (mods.alibi(2), {}, True),
    "widest": (mods.alibi(2), {"dim": 128}, True),
    "two terms": (lambda s, b, h, q, kv: 2.0 * s + 0.3 * (kv - q) - 0.1 * kv + h, {}, True),
    "no slope": (None, {}, False),
    "too wide": (mods.alibi(2), {"dim": 192}, False),
    "bias": (lambda s, b, h, q, kv: s + 0.3 * (kv - q) + COLUMN[kv], {}, False),
    "softcap": (mods.compose(mods.softcap(20.0), mods.alibi(2)), {}, False),
    "negative factor": (lambda s, b, h, q, kv: 0.3 * (kv - q) - s, {}, False),
    "factor of the head": (lambda s, b, h, q, kv: s * (h + 1) + 0.3 * kv, {}, False),
    "sigmoid": (mods.alibi(2), {"normalization": "sigmoid"}, False),
}


@pytest.mark.parametrize("name", OWN)
def test_which_kernels_add_the_slope_in_products(name: str) -> None:
    mod, options, expected = OWN[name]
    assert uses_mma(mod, **options) is expected


def rows_of_a_tile(mod: Any, mask: Any = CAUSAL, length: int = 1536, **options: Any) -> int:
    """Return the query rows of a work tile of the kernel at head dim 64; no products serialise."""
    query, key, value = draw(length, dims=(64, 64))
    with emulation.session(execute=False), requested_sources() as sources:
        flex_attention(query, key, value, mod, mask, backend="emulate", enable_gqa=True, **options)
    assert compiled_kernel(sources[0]).artifact.problems == ()
    found = re.search(r"\('warpgroups', (\d)\)", sources[0].key)
    assert found is not None
    return 64 * int(found[1])


TALL: dict[str, tuple[Any, dict[str, Any], int]] = {
    "raw scores": (None, {}, 192),
    "alibi": (mods.alibi(2), {}, 192),
    "alibi, documents": (mods.alibi(2), {"mask": masks.document(torch.arange(1536) // 768)}, 192),
    "alibi, entropies": (mods.alibi(2), {"return_aux": AuxRequest(entropy=True)}, 128),
    "alibi, maxima": (mods.alibi(2), {"return_aux": AuxRequest(max_scores=True)}, 128),
    "alibi, dropout": (mods.alibi(2), {"dropout_p": 0.5}, 128),
    "alibi, no scale": (mods.alibi(2), {"scale": 0.0}, 128),
    "softcap and alibi": (mods.compose(mods.softcap(20.0), mods.alibi(2)), {}, 128),
}


@pytest.mark.parametrize("name", TALL)
def test_a_slope_takes_the_tiles_of_raw_scores(name: str) -> None:
    mod, options, expected = TALL[name]
    assert rows_of_a_tile(mod, **options) == expected


def test_the_columns_fit_in_shared_memory() -> None:
    """At head dim 128 they take the last bytes."""
    plain, own = ForwardConfig(), ForwardConfig(slope_in_mma=True)
    assert own.smem_bytes - plain.smem_bytes == 16 * own.block_kv
    assert own.smem_bytes <= SMEM_BYTES
