"""Check classification by nodes, boxes and equal values against brute force."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

from attnkit import Mask, masks
from attnkit.errors import BoundsError
from attnkit.graph.eval_torch import evaluate
from attnkit.masks import Example
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.sparsity.classify import _chunks, classify
from attnkit.sparsity.hierarchical import Statistics
from attnkit.sparsity.ranges.equality_sets import Bits, BlockValues, Pairs, find_matches
from attnkit.tracing.tracer import Traced, trace
from tests.sparsity.mask_graphs import Case, cases, dense, states_of

CPU = torch.device("cpu")
NAMES = sorted(masks.examples())


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def by_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that forces classification by nodes with a given side."""

    def use(side: int) -> None:
        monkeypatch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
        monkeypatch.setattr("attnkit.sparsity.classify._NODE", side)
        monkeypatch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)

    return use


def dense_states(traced: Traced, example: Example, block: tuple[int, int]) -> Tensor:
    """Compute tile states by brute force, one tile row at a time."""
    sizes = {"b": example.batch, "h": example.heads, "kv": example.kv_len}
    env = {
        name: torch.arange(size, dtype=torch.int32).view(-1, *(1,) * after)
        for (name, size), after in zip(sizes.items(), (3, 2, 0), strict=True)
    }
    bands = []
    for rows in torch.arange(example.q_len, dtype=torch.int32).split(block[0]):
        (keep,) = evaluate([traced.root], {**env, "q": rows[:, None]}, traced.tensors)
        shape = (example.batch, example.heads, len(rows), example.kv_len)
        bands.append(states_of(keep.expand(shape), block))
    return torch.cat(bands, 2)


def check(runs: BlockRuns, expected: Tensor) -> None:
    """Check that runs equal the tile states by row and by column, and are maximal."""
    again = BlockRuns.from_states(
        expected[: runs.batch, : runs.heads], runs.q_len, runs.kv_len, runs.block
    )
    assert torch.equal(runs.states().expand(expected.shape), expected)
    for name in ("full", "partial", "full_t", "partial_t"):
        got, fresh = getattr(runs, name), getattr(again, name)
        for part in ("row_ptr", "start", "length"):
            assert torch.equal(getattr(got, part), getattr(fresh, part)), (name, part)
            assert getattr(got, part).dtype == torch.int32


def classified(traced: Traced, example: Example, block: tuple[int, int]) -> BlockRuns:
    return classify(traced.root, traced.tensors, names=traced.names, q_len=example.q_len,
                    kv_len=example.kv_len, block=block, batch=example.batch,
                    heads=example.heads, device=CPU)  # fmt: skip


# --- the library


@functools.cache
def library(length: int) -> dict[str, Example]:
    return masks.examples(length)


@pytest.mark.parametrize("name", NAMES)
def test_library_in_every_block_size(name: str, by_nodes: Callable[[int], None]) -> None:
    """Library masks are exact for blocks that do not divide the length, in every node size."""
    for length, block, side in ((131, (16, 12), 0), (263, (24, 7), 3), (777, (13, 40), 5),
                                (777, (192, 112), 2), (1100, (128, 80), 4)):  # fmt: skip
        example = library(length)[name]
        if side:
            by_nodes(side)
        traced = trace(example.mask, "mask")
        check(classified(traced, example, block), dense_states(traced, example, block))


@pytest.mark.parametrize("name", NAMES)
def test_library_at_4096(name: str, by_nodes: Callable[[int], None]) -> None:
    example = library(4096)[name]
    by_nodes(8)
    traced = trace(example.mask, "mask")
    check(classified(traced, example, (128, 128)), dense_states(traced, example, (128, 128)))


@st.composite
def compositions(draw: st.DrawFn) -> Example:
    """Draw a combination of three library masks by random operators."""
    made = library(draw(st.sampled_from([36, 64, 99, 144, 256, 400])))  # squares fit the grids
    first = made[draw(st.sampled_from(NAMES))]
    lengths = first.q_len, first.kv_len
    fitting = [e for e in made.values() if (e.q_len, e.kv_len) == lengths]
    parts = [first, *(draw(st.sampled_from(fitting)) for _ in range(2))]
    joined = first.mask
    for part in parts[1:]:
        other = ~part.mask if draw(st.booleans()) else part.mask
        op = draw(st.sampled_from("&&||^"))
        joined = joined & other if op == "&" else joined | other if op == "|" else joined ^ other
    batch, heads = max(p.batch for p in parts), max(p.heads for p in parts)
    return Example(joined, *lengths, batch, heads)


SIZE = st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 64, 80, 112, 128, 192]))


@given(example=compositions(), block=st.tuples(SIZE, SIZE), side=st.integers(1, 9))
def test_compositions_of_three(example: Example, block: tuple[int, int], side: int) -> None:
    traced = trace(example.mask, "mask")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0 if side > 1 else 1 << 40)
            patch.setattr("attnkit.sparsity.classify._NODE", side)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
            runs = classified(traced, example, block)
    except BoundsError:
        reject()
    check(runs, dense_states(traced, example, block))


@given(case=cases(), block=st.tuples(SIZE, SIZE), side=st.integers(1, 70))
def test_random_expressions(case: Case, block: tuple[int, int], side: int) -> None:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
            patch.setattr("attnkit.sparsity.classify._NODE", side)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
            runs = classify(case.root, case.tensors, block=block, device=CPU, **case.sizes())
    except BoundsError:
        reject()
    check(runs, states_of(dense(case.root, case.tensors, case), block))


@given(case=cases(max_len=150), block=st.tuples(SIZE, SIZE))
def test_small_passes_change_nothing(case: Case, block: tuple[int, int]) -> None:
    """Tiles are correct if all memory limits are so small that every loop iterates."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
            patch.setattr("attnkit.sparsity.classify._NODE", 3)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
            patch.setattr("attnkit.sparsity.hierarchical._PASS_BYTES", 4000)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_TILES", 30)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_OPEN", 5)
            patch.setattr("attnkit.sparsity.hierarchical._MAX_SEGMENTS", 2)
            patch.setattr("attnkit.sparsity.classify._MAX_NODES", 4)
            patch.setattr("attnkit.sparsity.subdivide._PASS_BYTES", 4000)
            patch.setattr("attnkit.sparsity.subdivide._MAX_BOXES", 100)
            patch.setattr("attnkit.sparsity.subdivide._SMALL", 2)
            patch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_BITS", 3)
            patch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_DENSE", 0)
            patch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_PAIRS", 500)
            runs = classify(case.root, case.tensors, block=block, device=CPU, **case.sizes())
    except BoundsError:
        reject()
    check(runs, states_of(dense(case.root, case.tensors, case), block))


# --- a million by a million


MILLION = 1 << 20


def counted(mask: Mask) -> tuple[BlockRuns, Statistics]:
    traced, statistics = trace(mask, "mask"), Statistics()
    runs = classify(traced.root, traced.tensors, q_len=MILLION, kv_len=MILLION, block=(128, 128),
                    batch=1, heads=1, device=CPU, statistics=statistics)  # fmt: skip
    return runs, statistics


def stored_bytes(runs: BlockRuns) -> int:
    kinds = (runs.full, runs.partial, runs.full_t, runs.partial_t)
    return sum(4 * t.numel() for r in kinds for t in (r.row_ptr, r.start, r.length))


def test_causal_million() -> None:
    runs, statistics = counted(masks.causal())
    assert runs.counts()[1:] == (8192, 8192 * 8191 // 2)
    assert torch.equal(runs.partial.start, torch.arange(8192, dtype=torch.int32))
    assert torch.equal(runs.full.length, torch.arange(1, 8192, dtype=torch.int32))
    assert torch.equal(runs.full_t.start, torch.arange(1, 8192, dtype=torch.int32))
    assert torch.equal(runs.full_t.length, torch.arange(8191, 0, -1, dtype=torch.int32))
    assert statistics.nodes == 8192 // 16  # the diagonal ones alone
    assert stored_bytes(runs) < 1 << 20


def test_documents_million() -> None:
    """The tiles of 1500 documents over a million positions match the document boundaries."""
    cuts = torch.randint(0, MILLION, (1499,), generator=random(0)).sort().values
    ids = torch.searchsorted(cuts, torch.arange(MILLION), right=True)
    runs, statistics = counted(masks.document(ids))
    first, last = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    starts, stops = first.view(-1, 128), last.view(-1, 128)
    # ids are in order, so the rows of a block keep one stretch of kv together
    low, high = starts[:, 0] // 128, (stops[:, -1] + 127) // 128
    begin, end = (starts[:, -1] + 127) // 128, stops[:, 0] // 128
    full = (end - begin).clamp(min=0)
    assert torch.equal(runs.full.row_ptr.diff(), (full > 0).to(torch.int32))
    assert torch.equal(runs.full.length, full[full > 0].to(torch.int32))
    assert torch.equal(runs.full.start, begin[full > 0].to(torch.int32))
    assert runs.counts()[1] == int((high - low - full).sum())
    assert statistics.nodes < 4 * 8192 // 16
    assert stored_bytes(runs) < 1 << 20


def test_global_tokens_and_window_million() -> None:
    runs, statistics = counted(masks.longformer(2048, 64))
    q = torch.arange(8192)
    low, high = (q - 16).clamp(min=0), (q + 17).clamp(max=8192)
    kept = high - low + (low > 0)  # block 0 holds the global tokens
    kept[0] = 8192
    _, partial, full = runs.counts()
    assert partial + full == int(kept.sum())
    assert statistics.nodes < 6 * 8192 // 16
    assert stored_bytes(runs) < 1 << 20


def test_a_grid_that_is_open_everywhere_goes_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
    ids = torch.randint(0, 3, (900,), generator=random(0))
    for mask, nodes in ((masks.document(ids), 0), (masks.causal(), 4)):
        traced, statistics = trace(mask, "mask"), Statistics()
        runs = classify(traced.root, traced.tensors, q_len=900, kv_len=900, block=(16, 16),
                        batch=1, heads=1, device=CPU, statistics=statistics)  # fmt: skip
        assert statistics.nodes == nodes
        check(runs, dense_states(traced, Example(mask, 900, 900), (16, 16)))


@pytest.mark.parametrize("side", [0, 3, 8])
def test_undecided_tiles_are_counted(
    monkeypatch: pytest.MonkeyPatch, by_nodes: Callable[[int], None], side: int
) -> None:
    """Each way to classify counts the same undecided tiles, in passes of any size."""
    ids = torch.arange(200) // 50
    mask = Mask(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv >= 10) & (q - kv <= 14))
    monkeypatch.setattr("attnkit.sparsity.witness._PASS_BYTES", 45)  # no room for a search
    if side:
        by_nodes(side)
    found = []
    for size in (1 << 18, 5):
        monkeypatch.setattr("attnkit.sparsity.witness._MAX_TILES", size)
        monkeypatch.setattr("attnkit.sparsity.witness.chunk_size", lambda *_, n=size: n)
        traced, statistics = trace(mask, "mask"), Statistics()
        runs = classify(traced.root, traced.tensors, q_len=200, kv_len=200, block=(31, 33), batch=1,
                        heads=1, device=CPU, statistics=statistics)  # fmt: skip
        check(runs, dense_states(traced, Example(mask, 200, 200), (31, 33)))
        found.append((statistics.tiles, statistics.open, statistics.dense))

    assert found[0] == found[1]
    assert found[0] == (49, 12, 7)


def test_tiles_of_all_heads_are_counted(
    monkeypatch: pytest.MonkeyPatch, by_nodes: Callable[[int], None]
) -> None:
    windows = torch.tensor([3, 40, 17])
    mask = Mask(lambda b, h, q, kv: (q - kv).abs() <= windows[h])
    by_nodes(4)
    monkeypatch.setattr("attnkit.sparsity.classify._MAX_TILES", 1)  # one head at a time
    traced, statistics = trace(mask, "mask"), Statistics()
    runs = classify(traced.root, traced.tensors, q_len=90, kv_len=90, block=(10, 10), batch=1,
                    heads=3, device=CPU, statistics=statistics)  # fmt: skip
    check(runs, dense_states(traced, Example(mask, 90, 90, heads=3), (10, 10)))
    assert statistics.tiles == 3 * 81


# --- equal values


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """Draw int64 [b, h, n], sorted or not, with few or many distinct values."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 120))
    kinds = draw(st.sampled_from([1, 3, 40, 90, 1000, 1 << 33]))
    found = torch.randint(-kinds, kinds, shape, generator=random(draw(st.integers(0, 999))))
    if draw(st.booleans()):
        found = found.sort(-1).values
    return found.repeat_interleave(draw(st.integers(1, 5)), -1)


def block_values(values: Tensor, block: int, piece: int = 1 << 40) -> BlockValues:
    length = values.shape[-1]
    pieces = ((i, values[..., i : i + piece]) for i in range(0, length, piece))
    return BlockValues.of(pieces, length, block)


def equal_tiles(q: Tensor, kv: Tensor, block: tuple[int, int]) -> Tensor:
    same = q[..., :, None] == kv[..., None, :]
    return states_of(same, block) > 0


@given(q=values(), kv=values(), block=st.tuples(st.integers(1, 50), st.integers(1, 50)),
       bits=st.sampled_from([0, 5, 62]), factor=st.integers(1, 5),
       pieces=st.tuples(st.integers(1, 70), st.integers(1, 70)))  # fmt: skip
def test_tiles_with_equal_values(
    q: Tensor,
    kv: Tensor,
    block: tuple[int, int],
    bits: int,
    factor: int,
    pieces: tuple[int, int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_BITS", bits)
        if bits == 5:
            patch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_DENSE", 0)
        found = find_matches(
            block_values(q, block[0], pieces[0]), block_values(kv, block[1], pieces[1]), block
        )
        assert found is not None
        levels = ((found, block), (found.coarser(factor), (block[0] * factor, block[1] * factor)))
        for level, size in levels:
            expected = equal_tiles(q, kv, size)
            rows = torch.arange(expected.shape[2])[:, None]
            columns = torch.arange(expected.shape[3])[None]
            may = torch.rand(expected.shape, generator=random(bits)) < 0.8
            every = level.among(may, rows, columns, None)
            assert torch.equal(every, expected & may)
            b, h, i, j = torch.ones_like(expected).nonzero().unbind(1)
            each = level.among(may.flatten(), i, j, (b, h))
            assert torch.equal(each, (expected & may).flatten())
            if isinstance(level, Pairs):
                at_q, at_kv, there = level.witnesses(i, j, (b, h))
                assert torch.equal(there, expected.flatten())
                b, h, i, j, at_q, at_kv = (x[there] for x in (b, h, i, j, at_q, at_kv))
                own = (x.expand(*expected.shape[:2], -1) for x in (q, kv))
                q_value, kv_value = (x[b, h, at] for x, at in zip(own, (at_q, at_kv), strict=True))
                assert torch.equal(q_value, kv_value)
                assert torch.equal(at_q // size[0], i)
                assert torch.equal(at_kv // size[1], j)


def test_too_many_pairs_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_PAIRS", 10)
    q = torch.arange(100).view(1, 1, -1) * 7
    assert find_matches(block_values(q, 4), block_values(q.flip(-1), 4), (4, 4)) is None
    assert isinstance(
        find_matches(block_values(q, 4), block_values(q + 1, 4), (4, 4)), Bits
    )  # none in common


def test_of_too_many_pairs_some_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_PAIRS", 1 << 13)
    ids = torch.randint(0, 100, (1, 1, 2048), generator=random(0))
    found = find_matches(block_values(ids, 64), block_values(ids, 64), (64, 64))
    assert isinstance(found, Pairs)
    assert not found.whole
    assert torch.equal(ids[0, 0, found.q], ids[0, 0, found.kv])
    assert torch.equal(found.tile, found.q // 64 * 32 + found.kv // 64)
    assert found.tile.unique().numel() == found.tile.numel() > 0.99 * 32 * 32


def test_ids_in_any_order_with_too_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Document ids in random order give exact tiles, with fewer than 20 dense evaluations."""
    monkeypatch.setattr("attnkit.sparsity.ranges.equality_sets._MAX_PAIRS", 1 << 14)
    ids = torch.randint(0, 100, (2048,), generator=random(1))
    for mask in (masks.document(ids), masks.document(ids) & masks.sliding_window(300)):
        traced, statistics = trace(mask, "mask"), Statistics()
        runs = classify(traced.root, traced.tensors, q_len=2048, kv_len=2048, block=(64, 64),
                        batch=1, heads=1, device=CPU, statistics=statistics)  # fmt: skip
        at = torch.arange(2048)
        kept = torch.as_tensor(mask(torch.tensor(0), torch.tensor(0), at[:, None], at[None]))
        check(runs, states_of(kept[None, None], (64, 64)))
        assert statistics.dense < 20


@given(v=values(), block=st.integers(1, 50), piece=st.integers(1, 70))
def test_solid_blocks_miss_no_integer(v: Tensor, block: int, piece: int) -> None:
    assert torch.equal(block_values(v, block, piece).solid, block_values(v, block).solid)
    if block_values(v, block).solid:
        for part in v.split(block, -1):
            for row in part.flatten(0, 1):
                assert len(row.unique()) == int(row.max()) - int(row.min()) + 1


@given(q=values(), kv=values(), block=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_solid_ranges_overlap_where_values_are_equal(
    q: Tensor, kv: Tensor, block: tuple[int, int]
) -> None:
    q, kv = q[:1, :1].cumsum(-1).sign().cumsum(-1), kv[:1, :1].sign().cumsum(-1)  # steps of one
    assert block_values(q, block[0]).solid
    assert block_values(kv, block[1]).solid
    (q_low, q_high), (kv_low, kv_high) = (
        tuple(torch.stack([getattr(p[0, 0], end)() for p in x.split(size, -1)])
              for end in ("min", "max"))
        for x, size in ((q, block[0]), (kv, block[1]))
    )  # fmt: skip
    overlap = (q_low[:, None] <= kv_high) & (kv_low <= q_high[:, None])
    assert torch.equal(overlap, equal_tiles(q, kv, block)[0, 0])


# --- masks that are decided without evaluating positions


def open_tiles(mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> int:
    statistics = Statistics()
    traced = trace(mod, "mask")
    runs = classify(traced.root, traced.tensors, q_len=300, kv_len=270, block=(32, 24), batch=2,
                    heads=1, device=CPU, statistics=statistics)  # fmt: skip
    check(runs, dense_states(traced, Example(Mask(mod), 300, 270, 2, 1), (32, 24)))
    return statistics.open


def test_conditions_on_one_side_are_joined_to_comparisons() -> None:
    valid = torch.rand(270, generator=random(1)) < 0.1
    whole = torch.rand(2, 300, generator=random(2)) < 0.3
    place = torch.randperm(270, generator=random(3))
    ids, kv_ids = (torch.randint(0, 900, (n,), generator=random(n)) for n in (300, 270))
    for mod in (
        lambda b, h, q, kv: valid[kv] & (place[kv] <= q),
        lambda b, h, q, kv: (place[kv] < q) & whole[b, q] & valid[kv],
        lambda b, h, q, kv: whole[b, q] | (place[kv] <= q - 5) | valid[kv],
        lambda b, h, q, kv: (kv < 9) | (kv <= q),
        lambda b, h, q, kv: ~(valid[kv] & (b == 1) & (place[kv] <= q)),
        lambda b, h, q, kv: ids[q] == kv_ids[kv],
        lambda b, h, q, kv: (ids[q] == kv_ids[kv]) & valid[kv] & whole[b, q],
    ):
        assert open_tiles(mod) == 0


def test_bands_need_no_table_and_no_search() -> None:
    for mod in (
        lambda b, h, q, kv: (kv <= q) & (q - kv < 100),
        lambda b, h, q, kv: (kv < q + 7) & (q - 31 <= kv) & (kv - q <= 2),
        lambda b, h, q, kv: (q - kv >= 40) & (q - kv <= 40),
        lambda b, h, q, kv: (q - kv >= 40) & (q - kv < 40),
        lambda b, h, q, kv: ~((kv <= q) & (q - kv < 100)),
        lambda b, h, q, kv: (q - kv < 10) | (q - kv > 12),
        lambda b, h, q, kv: (2 * q - 2 * kv > 13) & (2 * q - 2 * kv < 15),
    ):
        assert open_tiles(mod) == 0


def test_penalties_of_nested_conditions_do_not_cancel() -> None:
    valid = torch.rand(270, generator=random(1)) < 0.5
    first = torch.rand(300, generator=random(2)) < 0.2
    place = torch.randperm(270, generator=random(3))
    open_tiles(lambda b, h, q, kv: first[q] | (valid[kv] & (place[kv] <= q)))
    open_tiles(lambda b, h, q, kv: first[q] & (valid[kv] | (place[kv] <= q)))


# --- joining


@given(seed=st.integers(0, 999), rows=st.integers(1, 6), blocks=st.integers(1, 30))
def test_segments_in_any_order_are_joined(seed: int, rows: int, blocks: int) -> None:
    kept = torch.rand(rows, blocks, generator=random(seed)) < 0.6
    place = kept.flatten().nonzero().squeeze(1)
    place = place[torch.randperm(len(place), generator=random(seed))]
    first = place + place // blocks  # one spare place after each row
    runs = Runs.from_segments(first, first + 1, rows, blocks)
    assert torch.equal(runs.expanded(blocks), kept)
    assert torch.equal(runs.row_ptr[1:].long(), runs.row_ptr.long()[:-1] + runs.row_ptr.diff())
    ends = (runs.start + runs.length).tolist()
    for row in range(rows):
        mine = range(int(runs.row_ptr[row]), int(runs.row_ptr[row + 1]))
        assert all(ends[i] < int(runs.start[i + 1]) for i in mine[:-1])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_shared_values_are_repeated_for_each_batch_entry_and_head(shape: tuple[int, int]) -> None:
    own = torch.randint(0, 5, (*shape, 20), generator=random(1))
    shared = block_values(own, 8)
    repeated = shared.expand(2, 3)
    expected = block_values(own.expand(2, 3, -1).contiguous(), 8)
    assert repeated.shape == expected.shape == (2, 3, 20)
    order = repeated.place.argsort()
    assert torch.equal(repeated.place[order], expected.place)
    assert torch.equal(repeated.value[order], expected.value)
    assert torch.equal(repeated.solid, expected.solid)
    inside = expected.within(1, 3)
    assert inside.value.tolist() == [v for v in expected.value.tolist() if 1 <= v <= 3]
    assert bool((own.expand(2, 3, -1).flatten()[inside.place] == inside.value).all())


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    block=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    most=st.tuples(st.integers(1, 200), st.integers(1, 40)),
)
def test_heads_are_classified_together_within_limits(
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    block: tuple[int, int],
    most: tuple[int, int],
) -> None:
    """All pairs of batch entry and head come once, in order, as many at once as may be."""
    points, tiles = most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnkit.sparsity.classify._MAX_POINTS", points)
        patch.setattr("attnkit.sparsity.classify._MAX_TILES", tiles)
        chunks = list(_chunks(*sizes, *lengths, block, CPU))
    pairs = [[(i, j) for i in b.tolist() for j in h.tolist()] for b, h in chunks]
    assert [p for chunk in pairs for p in chunk] == [
        (i, j) for i in range(sizes[0]) for j in range(sizes[1])
    ]
    each = -(-lengths[0] // block[0]) * -(-lengths[1] // block[1])
    limit = max(1, min(points // sum(lengths), tiles // each))
    assert all(len(chunk) <= limit for chunk in pairs)
    heads = {h.numel() for _, h in chunks}
    assert max(heads) == min(limit, sizes[1])
    if limit >= sizes[1]:
        assert max(b.numel() for b, _ in chunks) == min(limit // sizes[1], sizes[0])
    assert {x.dtype for pair in chunks for x in pair} == {torch.int32}
