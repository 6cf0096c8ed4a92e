"""Check interval rules: sound for every operation, exact where the classifier relies on it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.affine import Side, Sides
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, SIGNATURES, Node, load
from attnkit.graph.simplify import build
from attnkit.sparsity.classify import classify
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.mask_rewrites import equate, regroup
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_blocks import At, compile_blocks, is_exact
from attnkit.sparsity.ranges.eval_interval import INT_HIGH, INT_LOW, Interval, transfer
from attnkit.sparsity.ranges.tables import (
    Domain,
    Key,
    Tables,
    key_of,
    sliding,
    value_range,
)
from tests.sparsity.mask_graphs import Case, cases, dense, dense_nodes, states_of

# leaves whose values a test chooses freely, by type
FREE = {
    I32: [ir.arg("q"), ir.arg("kv")],
    F32: [ir.arg("score"), ir.arg("grad"), ir.arg("scale")],
    BOOL: [load(0, BOOL, []), load(1, BOOL, []), load(2, BOOL, [])],
}


def operations() -> list[Node]:
    """Return a node for each operation and combination of argument types."""
    found = []
    for op, (letters, _) in SIGNATURES.items():
        choices = {"n": (I32, F32), "w": (I32, BOOL), "T": (I32, F32, BOOL)}
        letter = next((x for x in letters if x in choices), None)
        for type_ in choices.get(letter or "", (None,)):
            fixed = {"i": I32, "f": F32, "b": BOOL}
            types = [fixed.get(x, type_) for x in letters]
            leaves = {t: iter(FREE[t]) for t in FREE}
            args = [next(leaves[t]) for t in types if t is not None]
            if op == "cast":
                found += [ir.node(op, *args, to=to) for to in FREE if to != args[0].type]
            elif op == "round":
                found += [ir.node(op, *args, attr=to) for to in ("float16", "bfloat16")]
            else:
                found.append(ir.node(op, *args))
    return found


def values_of(draw: st.DrawFn, type_: str) -> Tensor:
    """Draw a small set of values of a type, as a tensor."""
    if type_ == BOOL:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=1, max_size=2)))
    if type_ == F32:
        special = st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"),
                                   2.0**31, -(2.0**31), 1e-40, 3e38, 88.8])  # fmt: skip
        plain = st.floats(-100, 100, width=32)
        found = draw(st.lists(st.one_of(plain, plain, special), min_size=1, max_size=6))
        return torch.tensor(found, dtype=torch.float32)
    base = draw(st.sampled_from([0, 0, 0, 1, -1, 64, 1000, -1000, 2**20, INT_LOW, INT_HIGH]))
    spread = draw(st.sampled_from([0, 9, 9, 3000, 2**31]))
    near = draw(st.lists(st.integers(-spread, spread), min_size=1, max_size=6))
    return torch.tensor([min(max(base + x, INT_LOW), INT_HIGH) for x in near], dtype=torch.int32)


def arguments(draw: st.DrawFn, n: Node) -> list[Tensor]:
    """Draw values for each argument of an operation, with valid shift counts and divisors."""
    args = [values_of(draw, a.type) for a in n.args]
    if n.op in ("shl", "shr"):
        counts = draw(st.lists(st.integers(0, 31), min_size=1, max_size=4))
        args[1] = torch.tensor(counts, dtype=torch.int32)
    if n.op in ("fdiv", "tdiv", "mod") and n.type == I32:
        args[1] = torch.where(args[1] == 0, 1, args[1])
    return args


def hull(values: Tensor) -> Interval:
    """Return the smallest interval that contains all values."""
    if values.dtype == torch.bool:
        return values.all(), values.any()
    if values.dtype == torch.int32:
        return values.amin().to(torch.int64), values.amax().to(torch.int64)
    return values.amin(), values.amax()


def exact(n: Node, args: list[Tensor]) -> Tensor:
    """Return the results for all combinations of argument values, computed in int64."""
    axes = range(len(args))
    grid = [a.view([-1 if i == axis else 1 for i in axes]) for axis, a in enumerate(args)]
    wraps = n.op.startswith("wrap_")
    if n.type == I32 and all(a.type == I32 for a in n.args) and not wraps:
        wide = [g.to(torch.int64) for g in grid]
        memo = dict(zip(n.args, wide, strict=True))
    else:
        memo = dict(zip(n.args, grid, strict=True))
    return evaluate([n], {}, [], memo=memo)[0]


def holds(interval: Interval, values: Tensor) -> bool:
    """Return whether the interval contains every value."""
    low, high = interval
    if values.dtype == torch.bool:
        return bool(((~low | values) & (high | ~values)).all())
    if values.dtype.is_floating_point:
        anything = low.isnan() & high.isnan()
        assert bool((low.isnan() == high.isnan()).all())
        return bool((anything | ((low <= values) & (values <= high))).all())
    return bool(((low <= values) & (values <= high)).all())


OPERATIONS = operations()


def test_every_operation_is_tried() -> None:
    assert {n.op for n in OPERATIONS} == set(SIGNATURES)


# one test per operation: each takes a share of the examples
FEWER = settings(max_examples=max(10, settings.default.max_examples // 4))


@pytest.mark.parametrize("n", OPERATIONS, ids=lambda n: f"{n.op}-{n.args[-1].type}-{n.type}")
@FEWER
@given(data=st.data())
def test_rule_is_sound(n: Node, data: st.DataObject) -> None:
    args = arguments(data.draw, n)
    result = exact(n, args)
    if n.type == I32 and n.args[0].type == F32:
        # out of range the cast is the machine's choice; the interval must then be everything
        inside = (args[0] > INT_LOW) & (args[0] < 2.0**31)
        result = result[inside]
    assert holds(transfer(n, [hull(a) for a in args]), result)


SINGLE = [n for n in OPERATIONS if n.type != F32 and all(a.type != F32 for a in n.args)]


@pytest.mark.parametrize("n", SINGLE, ids=lambda n: f"{n.op}-{n.args[-1].type}-{n.type}")
@FEWER
@given(data=st.data())
def test_single_values_give_single_values(n: Node, data: st.DataObject) -> None:
    """Rules give the exact value for intervals of a single value.

    The evaluation of one-sided operations in int64 relies on this.
    """
    args = [a[:1] for a in arguments(data.draw, n)]
    low, high = transfer(n, [hull(a) for a in args])
    result = exact(n, args).flatten()
    assert torch.equal(low.flatten().to(result.dtype), result)
    assert torch.equal(high.flatten().to(result.dtype), result)


# operations whose bounds are exact for whole intervals; those of the others are only sound
TIGHT = {"add", "sub", "neg", "abs", "min", "max", "mul", "lt", "le", "eq", "fdiv", "tdiv", "shl"}
INTEGER = [n for n in OPERATIONS if all(a.type == I32 for a in n.args) and n.op != "cast"]


def small_intervals(op: str, place: int) -> list[tuple[int, int]]:
    """Return all valid intervals of small integers for argument number `place` of an operation."""
    values = range(-5, 6)
    if place and op in ("shl", "shr"):
        values = range(0, 5)
    pairs = list(itertools.combinations_with_replacement(values, 2))
    if place and op in ("fdiv", "tdiv", "mod"):
        return [(low, high) for low, high in pairs if low > 0 or high < 0]
    return pairs


@pytest.mark.parametrize("n", INTEGER, ids=lambda n: n.op)
def test_integer_rules_on_all_small_intervals(n: Node) -> None:
    places = [small_intervals(n.op, i) for i in range(len(n.args))]
    cases = list(itertools.product(*places))
    ends = torch.tensor(cases).unbind(1)  # for each argument [cases, 2]
    low, high = transfer(n, [(e[:, 0], e[:, 1]) for e in ends])
    for i, intervals in enumerate(cases):
        sets = [torch.arange(first, last + 1, dtype=torch.int32) for first, last in intervals]
        least, most = hull(result := exact(n, sets))
        assert holds((low[i], high[i]), result), intervals
        if n.op in TIGHT:
            assert (low[i], high[i]) == (least, most), intervals


@pytest.mark.parametrize("low", range(-9, 10, 3))
@pytest.mark.parametrize("divisor", [-5, -1, 1, 4, 7])
def test_mod_by_a_constant_is_tight_within_a_period(low: int, divisor: int) -> None:
    n = ir.node("mod", *FREE[I32])
    for high in range(low, low + 9):
        values = torch.arange(low, high + 1)
        first, last = (
            torch.div(v, divisor, rounding_mode="floor") for v in (values[0], values[-1])
        )
        found = transfer(n, [hull(values.int()), hull(torch.tensor([divisor]).int())])
        if first == last:
            assert [int(x) for x in found] == [int(x) for x in hull((values % divisor).int())]


@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_bitwise_rules_at_every_width(op: str) -> None:
    (n,) = [n for n in INTEGER if n.op == op]
    for top, first in itertools.product([1 << power for power in range(31)], (0, 1, -1, -9)):
        values = torch.tensor([first, 0, 1, top - 1, top], dtype=torch.int32)
        values = values[values >= first]
        for other in (values, values[-1:], values[:1]):
            found = transfer(n, [hull(values), hull(other)])
            assert holds(found, exact(n, [values, other]))


SPECIAL = [-float("inf"), -1.0, -0.0, 0.0, 0.5, 1.0, 3e38, float("inf"), float("nan")]
REAL = [n for n in OPERATIONS if n.args[0].type == F32 and n.op not in ("cast", "where")]


@pytest.mark.parametrize("n", REAL, ids=lambda n: f"{n.op}-{n.attr}")
def test_float_rules_on_all_special_intervals(n: Node) -> None:
    """Float rules are sound for intervals whose ends are special values.

    NaN may arise inside an interval although its ends do not show it, as in inf - inf and 0 * inf.
    """
    intervals = list(itertools.combinations_with_replacement(SPECIAL, 2))
    every = 11 if len(n.args) == 3 else 1  # of 91,125; no divisor of the 45 intervals
    chosen_ones = itertools.product(intervals, repeat=len(n.args))
    for chosen in itertools.islice(chosen_ones, 0, None, every):
        # everything of the special values that lies between, ends in any order
        sets = [torch.tensor([x for x in SPECIAL if min(i) <= x <= max(i)] or list(i))
                for i in chosen]  # fmt: skip
        assert holds(transfer(n, [hull(s) for s in sets]), exact(n, sets)), chosen


@pytest.mark.parametrize("op", ["exp", "lgamma", "hypot", "atan2", "sqrt", "div", "tanh", "log"])
def test_float_rules_are_near_the_values_of_positive_intervals(op: str) -> None:
    n = next(n for n in OPERATIONS if n.op == op)
    limits = [0.25, 0.75, 1.25, 2.0, 5.0]
    intervals = list(itertools.combinations(limits, 2))
    for chosen in itertools.product(intervals, repeat=len(n.args)):
        sets = [torch.linspace(low, high, 33) for low, high in chosen]
        low, high = transfer(n, [hull(s) for s in sets])
        values = exact(n, sets)
        assert holds((low, high), values), chosen
        assert low > values.amin() - 0.02, chosen
        assert high < values.amax() + 0.02, chosen


# --- whole expressions on tiles


def domain_of(case: Case, sides: Sides) -> Domain:
    b = torch.arange(case.batch, dtype=torch.int32)
    h = torch.arange(case.heads, dtype=torch.int32)
    return Domain(case.tensors, case.q_len, case.kv_len, b, h, torch.float32, sides)


def assume_safe(case: Case) -> None:
    try:
        check_bounds([case.root], case.tensors, **case.sizes())
    except BoundsError:
        assume(False)


def tiled(values: Tensor, block: tuple[int, int]) -> list[list[Tensor]]:
    return [list(rows.split(block[1], 3)) for rows in values.split(block[0], 2)]


SIZES = st.one_of(st.integers(1, 30), st.sampled_from([64, 500]))


@given(case=cases(max_len=90), block=st.tuples(SIZES, SIZES))
def test_every_step_on_tiles_is_sound(case: Case, block: tuple[int, int]) -> None:
    """The interval of each node on each tile contains all values in that tile."""
    assume_safe(case)
    sides = Sides()
    blocks = compile_blocks(regroup(case.root, sides), sides)
    domain = domain_of(case, sides)
    tables = Tables(domain, block)
    tables.build(blocks.keys)
    rows, columns = -(-case.q_len // block[0]), -(-case.kv_len // block[1])
    tiles = At(torch.arange(rows)[:, None], torch.arange(columns)[None])
    found: dict[Node, Interval] = {}
    boxes = Boxes(domain)
    values = dense_nodes([n for n, _ in blocks.steps], case.tensors, case)
    shape = (case.batch, case.heads, rows, columns)
    for n, recipe in blocks.steps:
        found[n] = blocks._step(n, recipe, found, tables, boxes, tiles)
        low, high = (x.expand(shape) for x in found[n])
        for (i, row), j in itertools.product(enumerate(tiled(values[n], block)), range(columns)):
            at = (slice(None), slice(None), slice(i, i + 1), slice(j, j + 1))
            assert holds((low[at], high[at]), row[j]), n


@given(case=cases(max_len=60), block=st.tuples(SIZES, SIZES))
def test_exact_claims_are_exact(case: Case, block: tuple[int, int]) -> None:
    assume_safe(case)
    sides = Sides()
    root = regroup(case.root, sides)
    assume(is_exact(root, sides))
    blocks = compile_blocks(root, sides)
    tables = Tables(domain_of(case, sides), block)
    tables.build(blocks.keys)
    rows, columns = -(-case.q_len // block[0]), -(-case.kv_len // block[1])
    at = At(torch.arange(rows)[:, None], torch.arange(columns)[None])
    must, may = blocks.run(tables, Boxes(tables.domain), at)
    for i, row in enumerate(tiled(dense(case.root, case.tensors, case), block)):
        for j, tile in enumerate(row):
            shape = (case.batch, case.heads, rows, columns)
            assert torch.equal(must.expand(shape)[:, :, i, j], tile.all(3).all(2))
            assert torch.equal(may.expand(shape)[:, :, i, j], tile.any(3).any(2))


@pytest.mark.parametrize("op", ["lt", "le"])
def test_a_comparison_with_a_diagonal_is_not_claimed_to_be_exact(op: str) -> None:
    """Bounds of a comparison between a q - kv table and q are not treated as exact.

    The table holds q - kv itself, so kv alone decides the comparison, which the bounds of both
    sides do not show.
    """
    q, kv = ir.arg("q"), ir.arg("kv")
    length, limit = 24, 5
    table = torch.arange(-length, length, dtype=torch.int32).roll(length)  # d -> d, as d wraps
    lag = load(0, ir.I32, [build("sub", q, kv)])
    root = build(op, build("add", lag, ir.const(limit)), q)
    case = Case(root, (table,), length, length, 1, 1)
    mask = dense(root, case.tensors, case)
    assert torch.equal(mask[0, 0, 0], torch.arange(length) > limit - (op == "le"))
    assert not is_exact(root, Sides())
    runs = classify(root, case.tensors, block=(4, 4), device=torch.device("cpu"), **case.sizes())
    assert torch.equal(runs.states().expand(1, 1, 6, 6), states_of(mask, (4, 4)))


@given(case=cases(max_len=60))
def test_rewrites_keep_the_mask(case: Case) -> None:
    assume_safe(case)
    sides = Sides()
    expected = dense(case.root, case.tensors, case)
    assert torch.equal(dense(regroup(case.root, sides), case.tensors, case), expected)
    better = equate(case.root, sides)
    try:
        check_bounds([better], case.tensors, **case.sizes())
    except BoundsError:
        return  # the classifier does not use it either
    assert torch.equal(dense(better, case.tensors, case), expected)


@given(case=cases(I32, max_len=60))
def test_one_sided_forms_keep_the_value(case: Case) -> None:
    """The table of each one-sided subexpression equals its value at every position."""
    assume_safe(case)
    sides = Sides()
    domain = domain_of(case, sides)
    for n, value in dense_nodes([case.root], case.tensors, case).items():
        side = sides.side(n)
        if side is Side.MIXED:
            continue
        table = domain.all_values(key_of(n, side))
        q, kv = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
        index = {Side.Q: q, Side.KV: kv, Side.DIAGONAL: q - kv + case.kv_len - 1}.get(side, q * 0)
        assert torch.equal(torch.nan_to_num(table[..., index + 0 * (q + kv)].double()).expand(
            value.shape), torch.nan_to_num(value.double()))  # fmt: skip


@given(length=st.integers(1, 40), block=st.integers(1, 50), other=st.integers(1, 40))
def test_tables_reduce_every_block(length: int, block: int, other: int) -> None:
    tensor = torch.randn(length)
    tensor[torch.rand(length) < 0.1] = float("nan")
    n = load(0, F32, [ir.arg("q")])
    empty = torch.zeros(1, dtype=torch.int32)
    tables = Tables(Domain((tensor,), length, other, empty, empty), (block, 7))
    tables.build([key_of(n, Side.Q)])
    low, high = tables.ranges[key_of(n, Side.Q)]
    expected = [(p.amin(), p.amax()) for p in tensor.split(block)]
    assert torch.equal(
        low.flatten().nan_to_num(9), torch.stack([e[0] for e in expected]).nan_to_num(9)
    )
    assert torch.equal(
        high.flatten().nan_to_num(9), torch.stack([e[1] for e in expected]).nan_to_num(9)
    )


def test_tables_of_constants_live_with_the_tiles() -> None:
    """Tables of constants and captured numbers are on the device of the tiles."""
    there = torch.zeros(1, dtype=torch.int32, device="meta")
    domain = Domain((torch.tensor(3),), 60, 50, there, there)
    number = ir.const(2)
    nodes = [number, load(0, I32, []), ir.node("lt", number, load(0, I32, []))]
    tables = Tables(domain, (16, 16))
    keys = [key_of(n, Side.CONST) for n in nodes]
    tables.build(keys)
    for key in keys:
        assert all(end.device == there.device for end in tables.ranges[key])
        found = tables.look_up(
            key, torch.zeros(4, 1, dtype=torch.int64, device="meta"), there.long()
        )
        assert all(end.device == there.device for end in found)


@pytest.mark.parametrize("size", [9, 5, 4, 2])
def test_the_range_of_a_tensor_is_found_in_chunks(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("attnkit.sparsity.ranges.tables.chunk_size", lambda *_: size)
    for values in ([3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 2, 3, 4, 5, 6, 7, 8, -1]):
        found = value_range(torch.tensor(values), load(0, I32, [ir.arg("q")]), torch.float32)
        assert [int(end) for end in found] == [min(values), max(values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ends_of_the_range_of_a_tensor_have_the_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0.25, 2.0], dtype=torch.float16)
    ends = value_range(values, load(0, F32, [ir.arg("q")]), dtype)
    assert [end.dtype for end in ends] == [dtype, dtype]
    whole = value_range(values > 1, load(0, I32, [ir.arg("q")]), dtype)
    assert [end.dtype for end in whole] == [torch.int64, torch.int64]


def test_the_bits_of_a_nonnegative_number_stay() -> None:
    ends = (torch.tensor([5]), torch.tensor([5])), (torch.tensor([0]), torch.tensor([9]))
    n = build("or", *(ir.arg(name) for name in ("q", "kv")))
    for pair in (ends, ends[::-1]):
        assert int(transfer(n, list(pair))[0]) == 5


def test_tables_built_in_blocks_equal_tables_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randint(-50, 50, (1000,), generator=torch.Generator().manual_seed(1))
    q = ir.arg("q")
    key = Key(Side.Q, ((load(0, I32, [q]), 2), (q, -3)))
    empty = torch.zeros(1, dtype=torch.int32)
    found = []
    for size in (1 << 24, 5000, 700, 1):  # the whole side, many blocks, one block, one point
        monkeypatch.setattr("attnkit.sparsity.ranges.tables._PASS_BYTES", size)
        tables = Tables(Domain((tensor,), 1000, 10, empty, empty), (96, 8))
        tables.build([key])
        found.append(torch.stack(tables.ranges[key]))
    assert all(torch.equal(f, found[0]) for f in found)
    blocks = (tensor * 2 - 3 * torch.arange(1000)).split(96)
    assert found[0][0].flatten().tolist() == [int(p.min()) for p in blocks]


@given(values=st.lists(st.integers(-9, 9), min_size=1, max_size=40), data=st.data())
def test_sliding_windows(values: list[int], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values)
    found = sliding(tensor, width, torch.minimum)
    assert found.shape == tensor.shape
    expected = tensor.unfold(0, width, 1).amin(1)
    assert torch.equal(found[: len(values) - width + 1], expected)


@given(data=st.data())
def test_boxes_are_exact(data: st.DataObject) -> None:
    """Range queries over boxes of a tensor are exact, also for negative indices."""
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    tensor = torch.randint(-50, 50, shape)
    n = load(0, I32, [ir.arg("q")] * len(shape))
    empty = torch.zeros(1, dtype=torch.int32)
    boxes = Boxes(Domain((tensor,), 1, 1, empty, empty))
    index, cuts = [], []
    for size in shape:
        ends = sorted(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2)))
        shift = data.draw(st.sampled_from([0, -size]))
        cuts.append(slice(ends[0], ends[1] + 1))
        index.append((torch.tensor([ends[0] + shift]), torch.tensor([ends[1] + shift])))
    low, high = boxes.load(n, index)
    assert (int(low), int(high)) == (int(tensor[tuple(cuts)].min()), int(tensor[tuple(cuts)].max()))


def test_boxes_that_need_too_much_memory_give_the_whole_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Boxes of several widths need a copy of the tensor for each; the limit leaves room for one."""
    tensor = torch.tensor([3, 1, 2, 9, 0, 4, 7, 5])
    empty = torch.zeros(1, dtype=torch.int32)
    for type_, low, high in ((I32, 0, 9), (BOOL, False, True)):
        boxes = Boxes(Domain((tensor,), 1, 1, empty, empty))
        n = load(0, type_, [ir.arg("q")])
        widths = (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 5]))
        exact_low, exact_high = boxes.load(n, [widths])
        assert exact_low.tolist() == [[3, 1, 0], [True, True, False]][type_ == BOOL]
        assert exact_high.tolist() == [[3, 2, 9], [True, True, True]][type_ == BOOL]
        monkeypatch.setattr("attnkit.sparsity.ranges.boxes._MAX_BYTES", 130)
        found = boxes.load(n, [widths])
        assert [bool((end == value).all()) for end, value in zip(found, (low, high), strict=True)]
        assert [end.tolist() for end in found] == [low, high]
        monkeypatch.undo()


def test_whole_ranges_of_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.ranges.boxes._MAX_BYTES", 0)
    first, second = torch.tensor([3, 1, 2]), torch.tensor([30, 10, 0])
    empty = torch.zeros(1, dtype=torch.int32)
    boxes = Boxes(Domain((first, second), 1, 1, empty, empty))
    box = [(torch.tensor([0]), torch.tensor([1]))]
    loads = [load(0, I32, [ir.arg("q")]), load(1, I32, [ir.arg("q")]), load(1, BOOL, [ir.arg("q")])]
    found = [[end.item() for end in boxes.load(n, box)] for n in loads]
    assert found == [[1, 3], [0, 30], [False, True]]


def test_boxes_outside_the_tensor_give_its_whole_range() -> None:
    tensor = torch.tensor([3, 1, 2, 9, 0])
    n = load(0, I32, [ir.arg("q")])
    empty = torch.zeros(1, dtype=torch.int32)
    boxes = Boxes(Domain((tensor,), 1, 1, empty, empty))
    first, last = torch.tensor([-1, 2, 0, -4]), torch.tensor([0, 5, 0, -3])
    low, high = boxes.load(n, [(first, last)])
    assert low.tolist() == [0, 0, 3, 1]  # -1 to 0 wraps around, 2 to 5 leaves, -4 to -3 is 1, 2
    assert high.tolist() == [9, 9, 3, 2]


def test_operations_without_bounds_are_known() -> None:
    """The operations without interval rules are exactly those listed here.

    Masks with these operations are evaluated at every position. A new operation needs a rule or an
    entry.
    """
    near = torch.tensor(0.5), torch.tensor(0.6)
    far = torch.tensor(1.5), torch.tensor(1.6)
    floats = [n for n in operations() if {n.type, *(a.type for a in n.args)} == {F32}]
    unbounded = {n.op for n in floats if transfer(n, [near, far, far][: len(n.args)])[0].isnan()}
    assert unbounded == {"pow", "mod", "fdiv", "sin", "cos", "rsqrt", "digamma"}


def rule(op: str, *intervals: tuple[float, float]) -> tuple[float, float]:
    """Return the bounds of an operation of all i32 or all f32 arguments."""
    n = next(n for n in OPERATIONS if n.op == op and n.args[0].type in (I32, F32))
    dtype = torch.float32 if n.args[0].type == F32 else torch.int64
    low, high = transfer(n, [(torch.tensor(a, dtype=dtype), torch.tensor(z, dtype=dtype))
                             for a, z in intervals])  # fmt: skip
    return low.item(), high.item()


def test_remainders_of_smaller_numbers_are_the_numbers() -> None:
    integers = next(n for n in OPERATIONS if n.op == "mod" and n.args[0].type == I32)
    for low, high, divisor in ((0, 3, (4, 9)), (0, 0, (1, 3)), (2, 3, (4, 4)), (0, 6, (7, 20))):
        ends = [torch.tensor(x) for x in (low, high, *divisor)]
        found = transfer(integers, [(ends[0], ends[1]), (ends[2], ends[3])])
        assert [int(x) for x in found] == [low, high]
    for low, high, divisor in ((0, 4, (4, 9)), (-1, 3, (4, 9)), (3, 9, (2, 5))):
        ends = [torch.tensor(x) for x in (low, high, *divisor)]
        found = transfer(integers, [(ends[0], ends[1]), (ends[2], ends[3])])
        assert [int(x) for x in found] == [0, divisor[1] - 1]


def test_angles_are_near_in_each_half_plane() -> None:
    """An angle is monotone where x > 0, y > 0 or y < 0, at any distance from the axes."""
    half_turn = math.pi
    for y in ((0.01, 0.3), (0.5, 4.0), (-0.3, -0.01), (-4.0, -0.5)):
        for x in ((-3.0, -1.0), (-2.0, 2.0), (0.1, 0.2)):
            angles = [math.atan2(a, b) for a in y for b in x]
            low, high = rule("atan2", y, x)
            assert min(angles) - 1e-3 < low <= min(angles)
            assert max(angles) <= high < max(angles) + 1e-3
    for y in ((-0.3, 0.3), (0.0, 0.5), (-0.5, 0.0)):
        low, high = rule("atan2", y, (0.01, 2.0))
        assert -half_turn / 2 < low < high < half_turn / 2
        low, high = rule("atan2", y, (-1.0, 1.0))
        assert low <= -half_turn
        assert half_turn <= high < 3.2


def test_lengths_of_a_side() -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    domain = Domain((), 5, 9, empty, empty)
    assert domain.span(Side.Q) == (0, 5)
    assert domain.span(Side.KV) == (0, 9)
    assert domain.span(Side.CONST) == (0, 1)
    assert domain.span(Side.DIAGONAL) == (-8, 13)


@given(
    length=st.integers(1, 90),
    block=st.integers(1, 30),
    points=st.integers(1, 50),
    heads=st.integers(1, 4),
)
def test_pieces_of_a_side_are_of_bounded_size(
    length: int, block: int, points: int, heads: int
) -> None:
    """Pieces follow each other, and hold whole blocks, or a part of one if a block is too long."""
    nodes = [ir.arg("q"), build("add", ir.arg("q"), ir.arg("h"))]
    b, h = torch.zeros(1, dtype=torch.int32), torch.arange(heads, dtype=torch.int32)
    domain = Domain((), length, 7, b, h)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnkit.sparsity.ranges.tables._PASS_BYTES", 8 * 3 * heads * points)
        pieces = list(domain.pieces(nodes, Side.Q, block))
        # heads are not counted where nothing reads them
        alone = list(domain.pieces([nodes[0]], Side.Q, 1))
    assert [i for piece in pieces for i in range(*piece)] == list(range(length))
    assert all(stop - start <= points for start, stop in pieces)
    whole = points // block * block
    if whole:
        assert [start for start, _ in pieces] == list(range(0, length, whole))
    else:
        assert all(start // block == (stop - 1) // block for start, stop in pieces)
        assert {start for start, _ in pieces} >= set(range(0, length, block))
    assert alone[0] == (0, min(length, 3 * heads * points))
