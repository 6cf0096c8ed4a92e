"""Check a term of each kv column in the products of the Hopper forward, see `columns_in_mma`.

The terms come from a warp of their own, once for each kv block. Here are the cases that this adds:
heads and blocks that change, terms of any size, and the kernels that add the term to the scores.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit.kernel import kernel as compiled_kernel
from attnkit.jit.kernel import requested_sources
from attnkit.templates.sm90.config import SMEM_BYTES, ForwardConfig
from tests.sampling import diagonal, first_of, sampled
from tests.templates.test_sm90_forward import BF16, FP16, check, close, draw, listed

CAUSAL = masks.causal()
Q_LEN, KV_LEN = 200, 260
TERMS, BY_BATCH = torch.randn(6, KV_LEN), torch.randn(2, 2, KV_LEN)
SUMS = -torch.rand(6, KV_LEN).cumsum(-1)
CLASSES = torch.randint(0, 6, (KV_LEN,))
LENGTHS = torch.tensor([130, 260])

MODS: dict[str, Any] = {
    "gate": lambda s, b, h, q, kv: s + SUMS[h, q] - SUMS[h, kv],
    "by batch element": lambda s, b, h, q, kv: s - BY_BATCH[b, h % 2, kv],
    "by class": lambda s, b, h, q, kv: s + TERMS[h, CLASSES[kv]],
    "two terms": lambda s, b, h, q, kv: 2.0 * s + 0.3 * TERMS[h, kv] + TERMS[0, q] - 0.01 * h,
    "of the tensors' dtype": lambda s, b, h, q, kv: s + TERMS.to(BF16)[h, kv],
    "no tensor": lambda s, b, h, q, kv: s + torch.where(kv % 3 == 0, 0.5, -0.5) * h,
    "padding": lambda s, b, h, q, kv: s + torch.where(kv < LENGTHS[b], 0.0, -math.inf),
}


def with_terms(terms: Tensor) -> Any:
    """Return a score_mod that adds `terms[h, kv]`."""
    return lambda s, b, h, q, kv: s + terms[h, kv]


def terms_with(value: float, columns: slice = slice(40, 60)) -> Any:
    """Return a score_mod whose terms are `value` in some columns, and in all those of head 1."""
    terms = TERMS.clone()
    terms[:, columns] = value
    terms[1] = value
    return with_terms(terms)


def source_of(mod: Any, head_dim: int = 128, mask: Any = CAUSAL, **options: Any) -> Any:
    """Return the source of the forward kernel of a call."""
    inputs = (torch.zeros(2, 2, n, head_dim, dtype=BF16) for n in (Q_LEN, KV_LEN, KV_LEN))
    with emulation.session(execute=False), requested_sources() as sources:
        flex_attention(*inputs, mod, mask, backend="emulate", **options)
    (source,) = (s for s in sources if s.name.startswith("forward"))
    return source


def in_products(*arguments: Any, **options: Any) -> bool:
    """Return whether the kernel of a call adds the terms in its products."""
    return "('columns_in_mma', True)" in source_of(*arguments, **options).key


# -------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(("dim", "dtype"), diagonal([128, 64, 96], [BF16, FP16]))
def test_heads_that_change_between_work_tiles(dim: int, dtype: torch.dtype) -> None:
    """One CTA computes work tiles of heads with different terms, one after the other."""
    qkv = draw(Q_LEN, KV_LEN, dims=(dim, dim), heads=(4, 2), dtype=dtype)
    check(qkv, MODS["gate"], CAUSAL, ctas=1)


@pytest.mark.parametrize("name", sampled([(n,) for n in reversed(MODS)], 7))
def test_mods(name: str) -> None:
    assert in_products(MODS[name])
    check(draw(Q_LEN, KV_LEN, batch=(2, 1)), MODS[name], CAUSAL, ctas=2)


@pytest.mark.parametrize(
    "mask",
    sampled(
        [
            (lambda b, h, q, kv: (q + kv) % 3 > 0,),  # evaluated for each score
            (None,),
            (masks.document(torch.arange(KV_LEN) // 90) & CAUSAL,),
            (lambda b, h, q, kv: (q >= kv) & ((q < 128) | (h == 1)),),  # some tiles have no block
        ],
        4,
    ),
)
def test_masks(mask: Any) -> None:
    check(draw(Q_LEN, KV_LEN), MODS["gate"], mask, ctas=2)


@pytest.mark.parametrize(
    "lengths", sampled([((1, 1),), ((193, 128),), ((129, 7),), ((1, 260),)], 4)
)
def test_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths), MODS["gate"])


def test_block_lists_that_override_the_mask() -> None:
    """The number of a FULL block is then stored as its complement."""
    mask = lambda b, h, q, kv: (q + kv) % 3 != 0
    blocks = listed([[2, 0, 2], [1, 2, 1]], (400, KV_LEN), mask)
    check(draw(400, KV_LEN), with_terms(TERMS), blocks)


def test_split_rows() -> None:
    """Rows that are split along kv, whose parts begin with other blocks."""
    terms = torch.randn(2, 1400)
    result = check(
        draw(75, 1400, heads=(2, 1)), with_terms(terms), lambda b, h, q, kv: kv >= q * 18, ctas=8
    )
    assert result.kernels == 2


@pytest.mark.parametrize("scale", first_of([(2.0**-149,), (4.0,), (1e-6,), (0.0,), (-0.5,)]))
def test_scale(scale: float) -> None:
    """The terms are divided by the scale. For 0 and below, they are added to the scores."""
    check(draw(Q_LEN, KV_LEN), with_terms(TERMS), CAUSAL, scale=scale, mode="eager")


# --------------------------------------------------------------------------------- terms of any size


def sums(start: float) -> Tensor:
    """Return terms near `start` that differ by less than 1 from column to column."""
    torch.manual_seed(3)
    return (start - torch.rand(2, KV_LEN).double().cumsum(-1)).float()


@pytest.mark.parametrize("start", first_of([(-5000.0,), (5000.0,), (-2e5,), (0.0,)]))
def test_sums_that_are_large(start: float) -> None:
    """Sums of log gates, with scores, and without, where nothing hides the rounding of the terms."""
    query, key, value = draw(Q_LEN, KV_LEN)
    check((query, key, value), with_terms(sums(start)), CAUSAL, mode="eager")
    check((torch.zeros_like(query), key, value), with_terms(sums(start)), CAUSAL, mode="eager")


@pytest.mark.parametrize(
    "value", sampled([(-1e30,), (math.inf,), (1e30,), (-math.inf,), (math.nan,), (-1e9,)], 3)
)
def test_terms_as_masks(value: float) -> None:
    """Terms beyond the range of the products, in some columns and in all columns of a head."""
    check(draw(Q_LEN, KV_LEN), terms_with(value), CAUSAL, ctas=1, top=True, mode="eager")


@pytest.mark.parametrize("value", sampled([(-math.inf,), (1e30,), (-1e30,)], 3))
def test_whole_blocks_of_masked_keys(value: float) -> None:
    """Padding at the left: the first rows that are causal keep no other key."""
    check(draw(384, KV_LEN), terms_with(value, slice(0, 128)), CAUSAL, ctas=1, mode="eager")
    check(draw(384, KV_LEN), terms_with(value, slice(128, 260)), None, ctas=1, mode="eager")


def test_terms_at_the_limit_of_the_products() -> None:
    """Terms of both signs on both sides of the limit, in one block and in neighbouring blocks."""
    torch.manual_seed(5)
    terms = torch.randn(2, KV_LEN)
    terms[0, ::7], terms[0, 1::7], terms[1, 3] = 7e5, -7e5, -7.3e5
    terms[1, 130:140] = 7.2e5
    check(draw(Q_LEN, KV_LEN), with_terms(terms), CAUSAL, top=True, mode="eager")


@pytest.mark.parametrize("dtype", first_of([(FP16,), (BF16,)]))
def test_scores_that_are_not_finite(dtype: torch.dtype) -> None:
    """Scores of NaN and infinity beside terms of -inf."""
    query, key, value = draw(Q_LEN, KV_LEN, dtype=dtype)
    query[0, 0, 3, 0], query[0, 1, 5, 0] = math.nan, math.inf
    check((query, key, value), terms_with(-math.inf), CAUSAL, mode="eager")


# ------------------------------------------------------------------------------ statistics and sinks


def attend(qkv: tuple[Tensor, ...], mod: Any, backend: str, **aux: bool) -> dict[str, Tensor]:
    """Return output and statistics of a causal call with sinks."""
    out, found = flex_attention(
        *(qkv[0], qkv[1], qkv[2], mod, CAUSAL),
        enable_gqa=True,
        backend=backend,
        return_aux=AuxRequest(lse=True, **aux),
        sink=torch.tensor([0.5, -2.0]),
    )
    return {"out": out, **{name: getattr(found, name) for name in ("lse", *aux)}}


@pytest.mark.parametrize(
    ("dim", "aux", "mod"),
    sampled(
        [
            (128, {"entropy": True}, MODS["gate"]),
            (64, {"entropy": True, "max_scores": True}, terms_with(-math.inf)),
            (64, {"max_scores": True}, MODS["gate"]),
            (128, {"entropy": True, "max_scores": True}, terms_with(-1e30)),
            (96, {"entropy": True}, terms_with(-math.inf)),
        ],
        3,
    ),
)
def test_statistics_and_sinks(dim: int, aux: dict[str, bool], mod: Any) -> None:
    torch.manual_seed(2)
    qkv = draw(Q_LEN, KV_LEN, dims=(dim, dim))
    with emulation.session(mode="check", seeds=1) as ran:
        found = attend(qkv, mod, "emulate", **aux)
    assert ran.ok, "\n".join(str(report) for _, report in ran.reports)
    assert ran.reports
    expected = attend(tuple(t.double() for t in qkv), mod, "eager", **aux)
    dense = attend(qkv, mod, "eager", **aux)
    for name in found:
        close(name, found[name], expected[name], dense[name])


# ------------------------------------------------------------------------------- which kernels do it

BIAS = torch.randn(2, Q_LEN, KV_LEN)
OWN: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "gate": (MODS["gate"], {}, True),
    "dropout": (MODS["gate"], {"dropout_p": 0.5}, True),
    "rows alone": (lambda s, b, h, q, kv: s + TERMS[h, q], {}, False),
    "slope": (lambda s, b, h, q, kv: s + TERMS[h, kv] + 0.1 * (kv - q), {}, False),
    "full bias": (lambda s, b, h, q, kv: s + TERMS[h, kv] + BIAS[h, q, kv], {}, False),
    "two tables": (lambda s, b, h, q, kv: s + TERMS[h, kv] * SUMS[0, kv], {}, False),
    "long": (lambda s, b, h, q, kv: s + torch.sin(TERMS[h, kv]), {}, False),
    "too wide": (MODS["gate"], {"head_dim": 192}, False),
    "negative factor": (lambda s, b, h, q, kv: TERMS[h, kv] - s, {}, False),
    "sigmoid": (MODS["gate"], {"normalization": "sigmoid"}, False),
}


@pytest.mark.parametrize("name", sampled([(n,) for n in OWN], 4))
def test_which_kernels_add_the_terms_in_products(name: str) -> None:
    mod, options, expected = OWN[name]
    assert in_products(mod, **options) is expected


def test_the_terms_fit_in_shared_memory() -> None:
    """At head dim 128 they take most of the last bytes."""
    own = ForwardConfig(columns_in_mma=True)
    assert own.smem_bytes <= SMEM_BYTES
    assert 4 * own.stage_words % 16 == 0  # a unit of addresses in matrix descriptors


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropies": {"return_aux": AuxRequest(entropy=True)},
    "maxima": {"return_aux": AuxRequest(max_scores=True)},
    "both": {"return_aux": AuxRequest(max_scores=True, entropy=True)},
    "dropout": {"dropout_p": 0.5},
    "no intervals": {"mask": lambda b, h, q, kv: (q >= kv) & ((q + kv) % 3 > 0)},
    "no mask": {"mask": None},
}


COMPILED = [(name, dim, "plain") for name in MODS for dim in (128, 64)]
COMPILED += [("gate", (128, 64)[i % 2], name) for i, name in enumerate(SETTINGS) if name != "plain"]


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize(("name", "dim", "settings"), COMPILED)
def test_no_spills_and_no_serialised_products(name: str, dim: int, settings: str) -> None:
    found = compiled_kernel(source_of(MODS[name], dim, **SETTINGS[settings]))
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]
