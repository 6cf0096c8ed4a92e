"""Provide hypothesis strategies for lengths, memory layouts, dtypes and whole `Case`s."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from attnkit.errors import OptionError
from attnkit.runtime.normalization import check_normalization
from attnkit.testing.case import LAYOUTS, Case
from attnkit.testing.limits import ANY_SIZE, Limits, check_limits
from attnkit.util.arguments import check_size

#: Tile sizes (query, kv), some unequal and some not powers of two.
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (64, 32), (7, 24), (1, 128))

WIDTHS = (8, 16, 1, 5, 64)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Draw float32, float16, bfloat16 or float64; shrink to float32."""
    return st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


def layouts() -> st.SearchStrategy[tuple[str, str, str]]:
    """Draw memory layouts of query, key and value; shrink to contiguous."""
    one = st.sampled_from(LAYOUTS)
    return st.one_of(st.just(("contiguous",) * 3), st.tuples(one, one, one))


def lengths(low: int = 1, high: int = 200) -> st.SearchStrategy[int]:
    """Draw lengths from `low` to `high`, often within 1 of a multiple of 16; shrink to `low`.

    Raises:
        OptionError: `low` or `high` is not a positive int, or `low` is above `high`.
    """
    if check_size("low", low) > check_size("high", high):
        raise OptionError(f"low must be at most high, got low={low} and high={high}")
    edges = [m + d for m in range(16, high + 1, 16) for d in (-1, 0, 1)]
    special = [n for n in edges if low <= n <= high]
    return st.integers(low, high) | st.sampled_from(special) if special else st.integers(low, high)


@st.composite
def cases(
    draw: st.DrawFn,
    limits: Limits = ANY_SIZE,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    sinks: bool = True,
    normalization: str | None = "softmax",
    statistics: bool = True,
) -> Case:
    """Draw attention calls, including unequal lengths, GQA, a shared kv batch and value_dim.

    Args:
        limits: smallest and largest sizes.
        dtype: one dtype, or several to draw from; None draws from all four.
        sinks: whether some of the calls have an attention sink, the normalization softmax1, or
            dropout.
        normalization: that of all calls, see `flex_attention`. "softmax" draws softmax1 too if
            `sinks`; None draws from all.
        statistics: whether entropies and column sums of some calls are compared.

    Raises:
        OptionError: `normalization` is unknown.
    """
    check_limits(limits)
    if normalization is not None:
        check_normalization(normalization)
    choices = [dtype] if isinstance(dtype, torch.dtype) else list(dtype or [])
    q_len = draw(lengths(*limits.q_len))
    kv_len = (
        draw(st.just(q_len) | lengths(*limits.kv_len))
        if _fits(q_len, limits.kv_len)
        else draw(lengths(*limits.kv_len))
    )
    batch = draw(st.integers(*limits.batch))
    kind = draw(st.sampled_from(["softmax", "sigmoid", "none"])) if normalization is None else ""
    kind = kind or str(normalization)
    denominator = "plain"
    if sinks and kind == "softmax":
        denominator = draw(st.sampled_from(["plain"] * 3 + ["sink", "softmax1"]))
    heads = draw(st.integers(*limits.heads))
    head_dim = draw(st.sampled_from(WIDTHS))
    return Case(
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(heads, 0, -1) if heads % n == 0])),
        kv_batch=draw(st.sampled_from(sorted({batch, 1}, reverse=True))),
        head_dim=head_dim,
        value_dim=draw(st.just(head_dim) | st.sampled_from(WIDTHS)),
        dtype=draw(st.sampled_from(choices) if choices else dtypes()),
        layouts=draw(layouts()),
        block=draw(st.sampled_from(BLOCKS)),
        scale=draw(st.sampled_from([None, None, 0.5, -1.0])),
        spread=draw(st.sampled_from([1.0, 0.1, 3.0])),
        seed=draw(st.integers(0, 999)),
        sink=denominator == "sink",
        normalization="softmax1" if denominator == "softmax1" else kind,
        dropout_p=draw(st.sampled_from([0.0] * 4 + [0.1, 0.6])) if sinks else 0.0,
        statistics=statistics and draw(st.sampled_from([False] * 3 + [True])),
    )


def _fits(length: int, limits: tuple[int, int]) -> bool:
    return limits[0] <= length <= limits[1]
