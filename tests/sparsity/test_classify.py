"""Check that classification equals brute force and rarely evaluates ordinary masks densely."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import BoundsError, DTypeError, OptionError, ShapeError
from attnkit.graph.ir import BOOL, arg, const, load
from attnkit.graph.simplify import build
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.classify import Statistics, classify
from attnkit.tracing.tracer import Traced, trace
from tests.sparsity.mask_graphs import Case, cases, dense, states_of

CPU = torch.device("cpu")


def blocks() -> st.SearchStrategy[tuple[int, int]]:
    size = st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64, 128, 400, 1 << 30]))
    return st.tuples(size, size)


@given(case=cases(), block=blocks())
def test_equals_states_of(case: Case, block: tuple[int, int]) -> None:
    statistics = Statistics()
    try:
        runs = classify(case.root, case.tensors, block=block, device=CPU,
                        statistics=statistics, **case.sizes())  # fmt: skip
    except BoundsError:
        reject()
    expected = states_of(dense(case.root, case.tensors, case), block)
    states = runs.states()
    assert statistics.tiles == states.numel()
    assert torch.equal(states.expand(expected.shape), expected)


@given(case=cases(max_len=150), block=blocks())
def test_small_passes_change_nothing(case: Case, block: tuple[int, int]) -> None:
    """Tiles are correct if all memory limits are so small that every loop iterates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnkit.sparsity.ranges.tables._PASS_BYTES", 2000)
        patch.setattr("attnkit.sparsity.witness._PASS_BYTES", 4000)
        patch.setattr("attnkit.sparsity.hierarchical._PASS_BYTES", 4000)
        patch.setattr("attnkit.sparsity.classify._MAX_POINTS", 300)
        try:
            runs = classify(case.root, case.tensors, block=block, device=CPU, **case.sizes())
        except BoundsError:
            reject()
    expected = states_of(dense(case.root, case.tensors, case), block)
    assert torch.equal(runs.states().expand(expected.shape), expected)


def test_tiles_larger_than_a_pass_are_left_once_they_are_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles that exceed the memory of one pass are evaluated correctly, strip by strip.

    The memory limit leaves no room for a search, and the tile corners do not decide.
    """
    monkeypatch.setattr("attnkit.sparsity.witness._PASS_BYTES", 45)
    traced = trace(
        lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q - kv >= 10) & (q - kv <= 20), "mask"
    )
    record = Statistics()
    states = classified(traced, 90, 70, (61, 67), record).states()
    assert record.dense > 0  # the limit leaves no room for a search, and the corners do not decide
    expected = classified(traced, 90, 70, (1, 1), Statistics()).states()
    assert torch.equal(states, states_of(expected == 2, (61, 67)))


# --- masks in use


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def documents(length: int, mean: int, seed: int = 0) -> Tensor:
    """Return the document id of each position; documents have `mean` positions on average."""
    sizes = torch.randint(1, 2 * mean, (length,), generator=random(seed))
    return torch.searchsorted(sizes.cumsum(0), torch.arange(length), right=True)


N = 1024
DOCUMENT = documents(N, 90)
START = torch.searchsorted(DOCUMENT, torch.arange(int(DOCUMENT.max()) + 1))
PREFIX_LENGTH = torch.tensor([100, 333])
WINDOW = torch.tensor([64, 200, 17])


def tree_of(nodes: int) -> Tensor:
    """Return the ancestor matrix of a random tree; node i attends to itself and its ancestors."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        sees[i] |= sees[int(torch.randint(max(0, i - 9), i, (1,), generator=random(i)))]
    return sees


TREE = tree_of(300)


def part1by1(x: Tensor) -> Tensor:
    x = (x ^ (x << 8)) & 0x00FF00FF
    x = (x ^ (x << 4)) & 0x0F0F0F0F
    x = (x ^ (x << 2)) & 0x33333333
    return (x ^ (x << 1)) & 0x55555555


def natten(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    width, window = 32, 7
    row = (q // width).clamp(window // 2, 31 - window // 2)
    column = (q % width).clamp(window // 2, 31 - window // 2)
    return ((row - kv // width).abs() <= window // 2) & ((column - kv % width).abs() <= window // 2)


def sliding_tile(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask a 32 x 32 image in 8 x 8 tiles; a tile attends to the 3 x 3 tiles around it."""
    q_tile, kv_tile = q // 64, kv // 64
    x, y = (q_tile % 4).clamp(1, 2), (q_tile // 4).clamp(1, 2)
    return ((x - kv_tile % 4).abs() <= 1) & ((y - kv_tile // 4).abs() <= 1)


def block_diffusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    half, size = N // 2, 32
    clean_q, clean_kv = q >= half, kv >= half
    block_q = torch.where(clean_q, q - half, q) // size
    block_kv = torch.where(clean_kv, kv - half, kv) // size
    return (
        ((block_q == block_kv) & (clean_q == clean_kv))
        | ((block_q > block_kv) & clean_kv & ~clean_q)
        | ((block_q >= block_kv) & clean_kv & clean_q)
    )


def shared_prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask a prompt of 150 tokens and answers of 100, which attend to the prompt and themselves."""
    same = (q - 150) // 100 == (kv - 150) // 100
    return (q >= kv) & ((kv < 150) | same)


def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask speculative decoding: a causal context, then a tree of draft tokens."""
    context = N - 300
    seen = TREE[(q - context).clamp(0, 299), (kv - context).clamp(0, 299)]
    return torch.where(kv < context, q >= kv, (q >= context) & seen)


def document_prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask documents with 16 tokens visible to the whole document; the rest is causal."""
    start = START[DOCUMENT[kv]]
    return (DOCUMENT[q] == DOCUMENT[kv]) & ((q >= kv) | (kv - start < 16))


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda b, h, q, kv: q >= 0,
    "causal": lambda b, h, q, kv: q >= kv,
    "strictly causal": lambda b, h, q, kv: kv < q,
    "offset causal": lambda b, h, q, kv: q + 100 >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 200),
    "thin window": lambda b, h, q, kv: (q - kv >= 10) & (q - kv <= 20),
    "both ways": lambda b, h, q, kv: (q - kv).abs() <= 77,
    "window by head": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW[h]),
    "prefix": lambda b, h, q, kv: (kv < 200) | (q >= kv),
    "prefix by batch": lambda b, h, q, kv: (kv < PREFIX_LENGTH[b]) | (q >= kv),
    "padding": lambda b, h, q, kv: (q < PREFIX_LENGTH[b]) & (kv < PREFIX_LENGTH[b]),
    "document": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
    "causal document": lambda b, h, q, kv: (q >= kv) & (DOCUMENT[q] == DOCUMENT[kv]),
    "document window": lambda b, h, q, kv: (
        (DOCUMENT[q] == DOCUMENT[kv])
        & (q - START[DOCUMENT[q]] >= kv - START[DOCUMENT[kv]])
        & (q - START[DOCUMENT[q]] - (kv - START[DOCUMENT[kv]]) < 50)
    ),
    "document prefix": document_prefix,
    "dilated": lambda b, h, q, kv: (q >= kv) & (q - kv < 400) & ((q - kv) % 5 == 0),
    "dilated document": lambda b, h, q, kv: (
        (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv) & ((q - kv) % 3 == 0)
    ),
    "strided": lambda b, h, q, kv: (q >= kv) & ((q - kv < 64) | (kv % 64 >= 56)),
    "block local": lambda b, h, q, kv: (q // 100 == kv // 100) & (q >= kv),
    "global and window": lambda b, h, q, kv: (
        (kv < 4) | (q < 4) | ((q - kv).abs() < 64)
    ),
    "natten": natten,
    "sliding tile": sliding_tile,
    "block diffusion": block_diffusion,
    "shared prefix": shared_prefix,
    "tree": tree,
    "morton": lambda b, h, q, kv: part1by1(q % 32) // 16 == part1by1(kv % 32) // 16,
    "morton order": lambda b, h, q, kv: part1by1(q) >= part1by1(kv),
    "butterfly": lambda b, h, q, kv: (q ^ kv) < 128,
    "by head": lambda b, h, q, kv: torch.where(h == 0, q >= kv, (q - kv).abs() < 99),
}  # fmt: skip
# lengths up to N, blocks from small to larger than the length
SHAPES = [(N, N, (128, 128)), (N, N, (64, 96)), (1000, 700, (128, 64)), (333, N, (100, 512))]


# EMPTY tiles that straddle the mask's own blocks; ranges alone cannot relate q and kv there.
UNDECIDED = {("sliding tile", (64, 96)), ("butterfly", (64, 96))}


def classified(
    traced: Traced, q_len: int, kv_len: int, block: tuple[int, int], statistics: Statistics
) -> BlockRuns:
    return classify(traced.root, traced.tensors, names=traced.names, q_len=q_len, kv_len=kv_len,
                    block=block, batch=2, heads=3, device=CPU, statistics=statistics)  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_use(name: str) -> None:
    traced = trace(MASKS[name], "mask")
    everywhere = dense(traced.root, traced.tensors, Case(traced.root, traced.tensors, N, N, 2, 3))
    for q_len, kv_len, block in SHAPES:
        statistics = Statistics()
        states = classified(traced, q_len, kv_len, block, statistics).states()
        expected = states_of(everywhere[:, :, :q_len, :kv_len], block)
        assert torch.equal(states.expand(expected.shape), expected)
        assert statistics.dense == 0 or (name, block) in UNDECIDED


def test_no_mask_needs_its_dense_form() -> None:
    """One tile larger than the lengths and a million tiles of one position are both exact."""
    root = trace(MASKS["causal document"], "mask")
    whole = classified(root, N, N, (1 << 30, 1 << 30), Statistics())
    assert whole.counts() == (0, 1, 0)
    each = classified(root, N, N, (1, 1), Statistics())
    keep = dense(root.root, root.tensors, Case(root.root, root.tensors, N, N, 1, 1))
    assert torch.equal(each.states() == 2, keep)
    assert each.counts()[1] == 0


def test_equalities_that_skip_values() -> None:
    """Tiles are EMPTY if an equality holds at no position although bounds include the value."""
    for mod in (
        lambda b, h, q, kv: 2 * q == 2 * kv + 1,
        lambda b, h, q, kv: 3 * q == 200,
        lambda b, h, q, kv: 2 * kv - 4 * q == 31,
    ):
        runs = classified(trace(mod, "mask"), 100, 100, (32, 32), Statistics())
        assert runs.counts() == (16, 0, 0)


def test_diagonals_that_decide_a_tile_are_tried() -> None:
    """No tile is evaluated at every position to find the few diagonals that differ."""
    rare = torch.zeros(199, dtype=torch.bool)
    rare[5::37] = True
    for keep in (rare, ~rare, rare.flip(0), ~rare.flip(0)):
        mod = lambda b, h, q, kv, keep=keep: keep[q - kv + 99] & (kv % 2 >= 0)
        found = Statistics()
        traced = trace(mod, "mask")
        with torch.device("meta"):  # on which nothing can be computed by mistake
            classified(traced, 100, 100, (8, 16), found)
        assert found.open > 0
        assert found.dense == 0


@pytest.mark.parametrize(("total", "dense_tiles"), [(5, 0), (25, 1), (30, 1), (39, 1)])
def test_the_nearest_diagonals_that_differ_are_tried(total: int, dense_tiles: int) -> None:
    """The position that decides a tile is on its first or on its last diagonal that differs."""
    keep = torch.zeros(63, dtype=torch.bool)
    keep[[26, 38, 51]] = True  # q - kv = -5, 7, 20
    drop = ~keep
    for mod in (
        lambda b, h, q, kv: keep[q - kv + 31] & (q + kv == total),
        lambda b, h, q, kv: drop[q - kv + 31] | (q + kv != total),
    ):
        traced, found = trace(mod, "mask"), Statistics()
        with torch.device("meta"):
            classified(traced, 32, 32, (16, 16), found)
        assert found.dense == dense_tiles


def test_heads_and_batches_are_shared_where_the_mask_does_not_read_them() -> None:
    sizes = {
        name: (runs.batch, runs.heads)
        for name in ("causal", "window by head", "prefix by batch")
        for runs in [classified(trace(MASKS[name], "mask"), 300, 300, (64, 64), Statistics())]
    }
    assert sizes == {"causal": (1, 1), "window by head": (1, 3), "prefix by batch": (2, 1)}


def test_floats_classify_exactly() -> None:
    """Float masks with NaN, infinities and sums are exact in float32 and float64."""
    score = torch.randn(400, generator=random(3))
    score[7], score[200], score[390] = float("nan"), float("inf"), -float("inf")

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (score[q] + score[kv] * 2 > 0.5) | (torch.tanh((q - kv) / 40.0) > 0.9)

    traced = trace(mod, "mask")
    for dtype in (torch.float32, torch.float64):
        runs = classify(traced.root, traced.tensors, q_len=400, kv_len=400, block=(32, 48), batch=1,
                        heads=1, device=CPU, dtype=dtype)  # fmt: skip
        keep = dense(traced.root, traced.tensors, Case(traced.root, traced.tensors, 400, 400, 1, 1),
                     dtype)  # fmt: skip
        assert torch.equal(runs.states(), states_of(keep, (32, 48)))


def test_an_equality_is_not_used_where_it_would_leave_a_tensor() -> None:
    """Substituting equal indices never produces an index outside a tensor.

    start[doc[kv]] may not become start[doc[q]] when doc[q] has more values than `start`.
    """
    doc_q, doc_kv = torch.arange(100) // 10, torch.arange(60) // 10
    start = torch.arange(0, 60, 10)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (doc_q[q] == doc_kv[kv]) & (q - kv >= start[doc_kv[kv]] - 20)

    traced = trace(mod, "mask")
    runs = classify(traced.root, traced.tensors, q_len=100, kv_len=60, block=(16, 16), batch=1,
                    heads=1, device=CPU)  # fmt: skip
    keep = dense(traced.root, traced.tensors, Case(traced.root, traced.tensors, 100, 60, 1, 1))
    assert torch.equal(runs.states(), states_of(keep, (16, 16)))


def test_loads_that_cannot_be_proven_are_checked_when_evaluated() -> None:
    table = torch.arange(100) % 2 == 0

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[torch.where(kv % 7 == 3, q * kv, 0)]

    traced = trace(mod, "mask")
    with pytest.raises(BoundsError, match="into dimension 0 of captured tensor 'table'"):
        classified(traced, 90, 90, (32, 32), Statistics())
    classified(traced, 90, 3, (32, 32), Statistics())  # kv % 7 is never 3


# --- refusals

SIZES = {"q_len": 8, "kv_len": 8, "block": (4, 4), "batch": 1, "heads": 1, "device": CPU}


def test_wrong_arguments_are_refused() -> None:
    causal = build("le", arg("kv"), arg("q"))
    with pytest.raises(DTypeError, match="a mask must be bool, got i32: q"):
        classify(arg("q"), (), **SIZES)  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"block must be two positive sizes \(q, kv\), got \(4, 0\)"
    ):
        classify(causal, (), **{**SIZES, "block": (4, 0)})  # type: ignore[arg-type]
    for name in ("q_len", "kv_len", "batch", "heads"):
        with pytest.raises(ShapeError, match=f"{name} must be at least 1, got 0"):
            classify(causal, (), **{**SIZES, name: 0})  # type: ignore[arg-type]


def test_a_mask_that_leaves_its_tensor_is_refused_by_name() -> None:
    root = load(0, BOOL, [build("add", arg("q"), const(1))])
    with pytest.raises(BoundsError, match="captured tensor 'keep' has 8 entries"):
        classify(root, [torch.ones(8, dtype=torch.bool)], names=["keep"], **SIZES)  # type: ignore[arg-type]
