"""Compare the Hopper forward kernel, executed on the CPU, with the dense float64 oracle.

Each kernel runs in program order, in adversarial orders and under the race detector, all from the
same inputs; in tests of what numbers do in a kernel, it runs in program order alone. Outputs hold
NaN before it runs, and reading them is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnkit import AuxRequest, create_block_mask, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit.kernel import requested_sources
from tests.sampling import crossed, diagonal, first_of, sampled

BF16, FP16 = torch.bfloat16, torch.float16
LN2 = math.log(2.0)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill newly allocated tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    q_len: int,
    kv_len: int | None = None,
    *,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (2, 1),
    batch: tuple[int, int] = (1, 1),
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query, key and value; `heads` and `batch` are (of query, of key and value)."""
    kv_len = kv_len or q_len
    shapes = (
        (batch[0], heads[0], q_len, dims[0]),
        (batch[1], heads[1], kv_len, dims[0]),
        (batch[1], heads[1], kv_len, dims[1]),
    )
    query, key, value = (torch.randn(s).to(dtype) for s in shapes)
    return query, key, value


@dataclass
class Result:
    """Hold out, LSE, the row maxima (if requested) and the number of kernels that ran."""

    out: Tensor
    lse: Tensor
    top: Tensor | None = None
    kernels: int = 0


def attend(
    qkv: tuple[Tensor, Tensor, Tensor], *variant: Any, backend: str, top: bool, scale: float | None
) -> Result:
    out, aux = flex_attention(
        *qkv,
        *variant,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=top),
        backend=backend,
    )
    return Result(out, aux.lse, aux.max_scores)


def close(name: str, actual: Tensor, expected: Tensor, dense: Tensor) -> None:
    """Check equality at non-finite values, elsewhere at most twice the error of dense attention."""
    actual, dense = actual.double(), dense.double()
    assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: NaN"
    ends = expected.isinf()
    assert torch.equal(actual[ends], expected[ends]), f"{name}: infinities"
    finite = expected.isfinite()
    assert bool(actual[finite].isfinite().all()), f"{name}: not finite"
    comparable = finite & dense.isfinite()
    own = (dense - expected)[comparable].abs()
    error = (actual - expected)[finite].abs()
    # dense attention may be exact by chance; then a few float32 roundings are allowed
    rounding = 4 * torch.finfo(torch.float32).eps
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    allowed = max(2 * float(own.max()) if own.numel() else 0.0, rounding * largest)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"


def check(
    qkv: tuple[Tensor, Tensor, Tensor],
    score: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    top: bool = False,
    ctas: int | None = None,
    mode: str = "check",
) -> Result:
    """Run the kernel, by default in all orders, and compare it with the oracle; return results."""
    with emulation.session(mode=mode, seeds=1, ctas=ctas) as ran:
        result = attend(qkv, score, mask, backend="emulate", top=top, scale=scale)
    assert ran.reports
    assert ran.ok, "\n".join(str(report) for _, report in ran.reports)
    wide = (qkv[0].double(), qkv[1].double(), qkv[2].double())
    expected = attend(wide, score, mask, backend="eager", top=top, scale=scale)
    dense = attend(qkv, score, mask, backend="eager", top=top, scale=scale)
    assert result.out.dtype == qkv[0].dtype
    assert result.lse.dtype == torch.float32
    close("out", result.out, expected.out, dense.out)
    close("lse", result.lse, expected.lse, dense.lse)
    if top:
        assert result.top is not None
        assert expected.top is not None
        assert dense.top is not None
        close("max scores", result.top, expected.top, dense.top)
    result.kernels = len(ran.reports)
    return result


# ------------------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        pytest.param((64, 64), BF16, marks=pytest.mark.exhaustive),  # as in most tests below
        pytest.param((64, 64), FP16, marks=pytest.mark.exhaustive),
        pytest.param((16, 8), BF16, marks=pytest.mark.exhaustive),
        ((72, 72), FP16),
        pytest.param((96, 96), BF16, marks=pytest.mark.exhaustive),  # 72 is padded to it
        pytest.param((128, 128), BF16, marks=pytest.mark.exhaustive),
        pytest.param((128, 128), FP16, marks=pytest.mark.exhaustive),
        pytest.param((192, 192), BF16, marks=pytest.mark.exhaustive),
        ((256, 256), BF16),
        ((192, 128), FP16),
        pytest.param((64, 128), BF16, marks=pytest.mark.exhaustive),
        pytest.param((128, 192), BF16, marks=pytest.mark.exhaustive),
        ((64, 256), FP16),
    ],
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(200, dims=dims, dtype=dtype), None, masks.causal())


LENGTHS = [(1, 1), (1, 300), (7, 129), (129, 7), (193, 128), (300, 300)]


@pytest.mark.parametrize(("lengths", "kind"), crossed(LENGTHS, ["plain", "causal"]))
def test_lengths(lengths: tuple[int, int], kind: str) -> None:
    check(draw(*lengths), None, masks.causal() if kind == "causal" else None)


def test_grouped_heads_and_a_shared_batch() -> None:
    check(draw(130, heads=(4, 2), batch=(2, 1)))


@pytest.mark.parametrize("scale", sampled([(-0.3,), (1.0,), (0.0,)], 2))
def test_scale(scale: float) -> None:
    check(draw(150), None, masks.causal(), scale=scale, mode="eager")


# ------------------------------------------------------------------------------------------- masks

IDS = torch.tensor([0] * 100 + [1] * 150 + [2] * 150)
MASKS: dict[str, Callable[[], Any]] = {
    "window": lambda: masks.sliding_window(50),
    "documents": lambda: lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "two intervals": lambda: lambda b, h, q, kv: (q >= kv) & ((kv < 20) | (q - kv < 40)),
    "no intervals": lambda: lambda b, h, q, kv: ((q + kv) % 3 != 0) & (q >= kv),
    "by head and batch": lambda: lambda b, h, q, kv: (kv + b * 70 + h * 30) % 200 < 90,
    "fully masked": lambda: lambda b, h, q, kv: q < kv - 1000,
    "kv length": lambda: lambda b, h, q, kv: kv < 140,
}


@pytest.mark.parametrize("name", sampled([(n,) for n in MASKS], 5))
def test_masks(name: str) -> None:
    batch = (2, 2) if name == "by head and batch" else (1, 1)
    check(draw(300, 310, batch=batch), None, MASKS[name]())


@pytest.mark.parametrize(
    ("score", "top"), first_of([("plain", True), ("softcap", False), ("alibi", False)])
)
def test_warps_that_keep_the_left_part_of_a_block(score: str, top: bool) -> None:
    """Each warp of 16 rows has another longest row, from no key to the whole block and beyond.

    No row keeps a single key: dense attention would be exact there.
    """
    longest = torch.tensor([0, 2, 63, 64, 65, 100, 128, 129, 192, 193, 240, 2])
    kept = (longest.repeat_interleave(16) - 2 * (torch.arange(192) % 16)).clamp(min=0)
    mod = None if score == "plain" else MODS[score]()
    check(draw(192, 240), mod, lambda b, h, q, kv: kv < kept[q], top=top)


@pytest.mark.parametrize(
    ("score", "top"), first_of([("plain", True), ("softcap", False), ("alibi", False)])
)
def test_fully_masked_rows_give_zero_and_minus_infinity(score: str, top: bool) -> None:
    mod = None if score == "plain" else MODS[score]()
    result = check(draw(300), mod, lambda b, h, q, kv: (q >= kv + 130) | (q == 3), top=top)
    masked = torch.arange(300) < 130
    masked[3] = False
    assert bool((result.out[:, :, masked] == 0).all())
    assert bool((result.lse[:, :, masked] == -math.inf).all())
    assert bool(result.lse[:, :, ~masked].isfinite().all())
    if result.top is not None:
        assert bool((result.top[:, :, masked] == -math.inf).all())


# -------------------------------------------------------------------------------------------- mods

SPAN = 310
BIAS = torch.linspace(-2.0, 2.0, 2 * SPAN * 2).view(2, -1).sin() * 3
COLUMN = torch.linspace(-3.0, 3.0, SPAN)
MODS: dict[str, Callable[[], Any]] = {
    "softcap": lambda: mods.softcap(5.0),
    "alibi": lambda: mods.alibi(2),
    "relative bias": lambda: lambda s, b, h, q, kv: s + BIAS[h, q - kv + SPAN],
    "negative index": lambda: lambda s, b, h, q, kv: s + BIAS[h, q - kv],
    "head scale": lambda: mods.head_scale(torch.tensor([0.5, -1.5])),
    "column": lambda: lambda s, b, h, q, kv: s * 2.0 + COLUMN[kv],
    "blocks": lambda: lambda s, b, h, q, kv: s + BIAS[h, 3 * (q // 32) - kv // 48 + 8],
    "no score": lambda: lambda s, b, h, q, kv: COLUMN[kv] - (q % 3) * 0.5,
    "all parts": lambda: (
        lambda s, b, h, q, kv: (
            s * (h + 1) + q * 0.1 - kv * 0.02 + BIAS[h, kv] + (q - kv).abs() * 0.01
        )
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "dim"),
    [
        *sampled([(name, BF16, 64) for name in MODS], 3),
        *sampled([("softcap", FP16, 128), ("softcap", FP16, 64), ("softcap", BF16, 128)], 3),
        pytest.param("relative bias", BF16, 128, marks=pytest.mark.exhaustive),
        pytest.param("alibi", BF16, 128, marks=pytest.mark.exhaustive),
    ],
)
def test_mods(name: str, dtype: torch.dtype, dim: int) -> None:
    check(draw(260, 300, dims=(dim, dim), dtype=dtype), MODS[name](), masks.causal())


@pytest.mark.parametrize(
    "score", first_of((case,) for case in [mods.softcap(5.0), lambda s, b, h, q, kv: (q % 7) / 3.0])
)
def test_equal_scores_have_an_exact_lse(score: Any) -> None:
    """Powers that the FMA units compute are exact where all scores of a row are equal."""
    query, key, value = draw(280)
    result = check((torch.zeros_like(query), key, value), score, mode="eager")
    rows = torch.zeros(280) if score.__class__ is mods.ScoreMod else torch.arange(280) % 7 / 3.0
    assert (result.lse - rows - math.log(280)).abs().max() < 4e-7 * math.log(280)


def test_mod_and_mask_without_intervals() -> None:
    """A score_mod and a mask without intervals may both capture tensors."""
    keep = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.7
    check(
        draw(200, 300),
        lambda s, b, h, q, kv: s + BIAS[h, q - kv + SPAN] + COLUMN[kv],
        lambda b, h, q, kv: keep[kv] & ((q ^ kv) % 5 != 0),
    )


def causal_over_blocks(q_len: int, kv_len: int) -> BlockMask:
    """Return block lists that keep some blocks whole, also at the ragged end of kv."""
    return listed([[2, 1, 2], [1, 0, 2]], (q_len, kv_len), lambda b, h, q, kv: q >= kv)


LONG_MOD_MASKS: dict[str, Callable[[int, int], Any]] = {
    "documents": lambda q_len, kv_len: MASKS["documents"](),
    "none": lambda q_len, kv_len: None,
    "no intervals": lambda q_len, kv_len: MASKS["no intervals"](),
    "block lists": causal_over_blocks,
}


@pytest.mark.parametrize(
    ("name", "dims"), first_of([(n, d) for n in LONG_MOD_MASKS for d in ((64, 64), (256, 256))])
)
def test_a_mod_of_many_instructions(name: str, dims: tuple[int, int]) -> None:
    """Blocks with and without a mask share one loop; the mod loads from a tensor of its length."""
    mod = lambda s, b, h, q, kv: torch.nn.functional.logsigmoid(s) + COLUMN[:300][kv]
    check(draw(400, 300, dims=dims), mod, LONG_MOD_MASKS[name](400, 300))


@pytest.mark.parametrize("lists", first_of([(False,), (True,)]))
def test_a_mod_that_loads_its_index_without_a_mask(lists: bool) -> None:
    """At most a work tile's first block is masked, but block lists may name any block PARTIAL."""
    places = torch.arange(300) * 7 % 300

    def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= 0

    mask = listed([[1, 1, 2], [1, 2, 1]], (400, 300), everything) if lists else None
    with requested_sources() as sources:
        check(draw(400, 300), lambda s, b, h, q, kv: s + COLUMN[places[kv]], mask)
    assert [("'edge_only', True" in source.key) for source in sources] == [not lists]


def test_captured_tensors_of_any_dtype_and_layout() -> None:
    random = torch.Generator().manual_seed(2)
    wide = torch.randn(300, 2, generator=random, dtype=torch.float64).T
    narrow = torch.randn(300, generator=random).to(BF16)[::2]
    order = torch.randperm(300, generator=random)
    factor, keep = torch.tensor(0.5), torch.rand(2, 300, generator=random) < 0.8
    check(
        draw(150, 300),
        lambda s, b, h, q, kv: s * factor + wide[h, order[kv]] + narrow[q] * narrow[kv // 2],
        lambda b, h, q, kv: keep[h, kv] & (order[kv] > 10),
        mode="eager",
    )


# ------------------------------------------------------------------------ infinities, NaN, extremes


def row_term(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Add a term that depends on the row alone, which the kernel leaves out of the scores."""
    return s + ROWS[q]


ROWS = torch.zeros(200)
ROWS[3], ROWS[70], ROWS[71], ROWS[150] = -math.inf, math.inf, math.nan, 3e4


def test_row_terms_that_are_not_finite() -> None:
    result = check(draw(200), row_term, lambda b, h, q, kv: q >= kv, top=True, mode="eager")
    assert bool((result.out[:, :, 3] == 0).all())
    assert bool((result.lse[:, :, 3] == -math.inf).all())
    assert bool(result.out[:, :, 70:72].isnan().all())
    assert bool(result.out[:, :, [2, 72, 150]].isfinite().all())


def test_a_term_that_is_not_finite_in_a_fully_masked_row() -> None:
    result = check(
        draw(200),
        row_term,
        lambda b, h, q, kv: (q >= kv) & (q != 70) & (q != 71),
        top=True,
        mode="eager",
    )
    assert bool((result.out[:, :, 70:72] == 0).all())


@pytest.mark.parametrize(
    ("dim", "score"),
    sampled([(64, "plain"), (128, "plain"), (64, "softcap"), (128, "alibi")], 3),
)
def test_inputs_that_are_not_finite(dim: int, score: str) -> None:
    query, key, value = draw(300, dims=(dim, dim))
    query[:, :, 5, 0] = math.nan
    query[:, :, 6, 0] = math.inf
    key[:, :, 250:254, 1] = math.nan  # reaches the rows that keep it, and no other
    mod = None if score == "plain" else MODS[score]()
    result = check(
        (query, key, value), mod, lambda b, h, q, kv: q >= kv, top=score == "plain", mode="eager"
    )
    assert bool(result.out[:, :, 5].isnan().all())
    assert bool(result.out[:, :, 250:].isnan().all())
    assert bool(result.out[:, :, 7:250].isfinite().all())


@pytest.mark.parametrize("score", first_of([("plain",), ("alibi",), ("not finite",)]))
def test_rows_that_are_split_along_kv(score: str) -> None:
    """Rows split along kv are exact; the combine kernel merges the partial results of CTAs."""
    mod = {"plain": None, "alibi": mods.alibi(1), "not finite": row_term}[score]
    result = check(
        draw(75, 1400, heads=(1, 1)),
        mod,
        lambda b, h, q, kv: (
            (kv >= q * 18) & (q != 5)
        ),  # late rows are fully masked in the first part
    )
    assert result.kernels == 2
    assert bool((result.out[:, :, 5] == 0).all())
    assert bool((result.lse[:, :, 5] == -math.inf).all())


def stairs(
    step: float, dims: tuple[int, int], blocks: int, rising: bool, below: float = 0.0
) -> tuple[Tensor, ...]:
    """Return inputs whose scores rise or fall from block to block, exact in 16 bits."""
    query, key, value = draw(130, 128 * blocks, dims=dims)
    level = torch.arange(128 * blocks) // 64
    level = (level.flip(0) if rising else level) * step  # it begins with the last block
    query.zero_(), key.zero_()
    query[..., 0] = 1.0
    key[..., 0] = level + torch.randint(0, 4, level.shape) - below
    return query, key, value


STAIRS = [(2.0, True), (16.0, True), (16.0, False)]


@pytest.mark.parametrize(
    ("stair", "kind"),
    sampled(
        list(product(STAIRS, [(64, "plain"), (128, "alibi"), (128, "plain"), (64, "alibi")])), 5
    ),
)
def test_maxima_that_move_from_block_to_block(
    stair: tuple[float, bool], kind: tuple[int, str]
) -> None:
    """Results are exact for row maxima that move from block to block.

    Exponentials relative to an old maximum would overflow, so they are recomputed.
    """
    (step, rising), (dim, score) = stair, kind
    query, key, value = stairs(step, (dim, dim), 3, rising)
    check((query, key, value), mods.alibi(2) if score == "alibi" else None, scale=1.0, top=False)


@pytest.mark.parametrize(("dim", "score"), diagonal([64, 128], ["plain", "alibi"]))
def test_maxima_that_move_below_zero(dim: int, score: str) -> None:
    """Results are exact for negative row maxima that move from block to block.

    The bits of negative floats, read as integers, are in reverse order.
    """
    query, key, value = stairs(8.0, (dim, dim), 3, True, below=200.0)
    check((query, key, value), mods.alibi(2) if score == "alibi" else None, scale=1.0, mode="eager")


@pytest.mark.parametrize(("dim", "slope"), diagonal([64, 128], [2.0, -2.0]))
def test_a_slope_whose_terms_exceed_the_range_of_exponentials(slope: float, dim: int) -> None:
    """Results are right where a block's term, which a maximum includes, is beyond 2**128."""
    check(
        draw(200, 300, dims=(dim, dim)), lambda s, b, h, q, kv: s + slope * (kv - q), mode="eager"
    )


def test_fully_masked_tiles() -> None:
    """Fully masked tiles give output 0, LSE -inf and maximum -inf, for any strides.

    Separate warps write these tiles.
    """
    query, key, value = draw(450, heads=(2, 2))
    swapped = query.transpose(1, 2).contiguous().transpose(1, 2)
    result = check(
        (swapped, key, value), None, lambda b, h, q, kv: (q >= 192) & (q < 380), top=True
    )
    assert result.top is not None
    for masked in (slice(0, 192), slice(380, 450)):
        assert bool((result.out[:, :, masked] == 0).all())
        assert bool((result.lse[:, :, masked] == -math.inf).all())
        assert bool((result.top[:, :, masked] == -math.inf).all())


# ------------------------------------------------------------------------------ layouts and options


def test_strides() -> None:
    query, key, value = draw(150, heads=(2, 2), batch=(2, 2))
    mask = masks.causal()
    plain = check((query, key, value), None, mask)
    swapped = query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(*value.shape[:3], 65, dtype=BF16)
    wide[..., 1:] = value
    folded = key.transpose(2, 3).contiguous().transpose(2, 3)
    result = check((swapped, folded, wide[..., 1:]), None, mask)
    assert torch.equal(result.out, plain.out)
    assert torch.equal(result.lse, plain.lse)
    assert result.out.stride() == swapped.stride()
    row = key[:1, :1, :1].expand(2, 2, 150, 64)
    check((query, row, value[:1].expand(2, 2, 150, 64)), None, mask)


@pytest.mark.parametrize(
    "score", first_of((case,) for case in ["plain", "alibi", "softcap", "column"])
)
def test_max_scores(score: str) -> None:
    check(draw(260), None if score == "plain" else MODS[score](), masks.causal(), top=True)


# ----------------------------------------------------------------------------- PyTorch's BlockMask


def listed(states: list[list[int]], lengths: tuple[int, int], mask_mod: Any) -> BlockMask:
    """Return a FlexAttention BlockMask with the given states (0 EMPTY, 1 PARTIAL, 2 FULL)."""
    grid = torch.tensor(states)[None, None]

    def lists(kind: int) -> tuple[Tensor, Tensor]:
        present = (grid == kind).int()
        order = present.argsort(dim=-1, descending=True, stable=True).int()
        return present.sum(-1).int(), order

    return BlockMask.from_kv_blocks(
        *lists(1),
        *lists(2),
        BLOCK_SIZE=(384, 128),
        mask_mod=mask_mod,
        seq_lengths=lengths,
    )


@pytest.mark.parametrize("intervals", first_of((case,) for case in [True, False]))
def test_block_lists_overrule_the_mask(intervals: bool) -> None:
    """Block lists override the mask: FULL blocks are kept, also at a ragged end, EMPTY skipped."""

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def checked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q + kv) % 3 != 0

    grid = [[2, 0, 2], [1, 2, 1]]
    check(draw(400, 300), None, listed(grid, (400, 300), causal if intervals else checked))
    check(draw(400, 300), None, listed([[0, 0, 2], [0, 1, 0]], (400, 300), checked))


def test_block_masks() -> None:
    """An attnkit BlockMask gives the same bits as its mask.

    The kernel uses the tile sizes of the BlockMask if it supports them.
    """
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300, device="cpu")
    qkv = draw(300)
    result = check(qkv, None, mask)
    assert torch.equal(result.out, check(qkv, None, masks.causal()).out)
