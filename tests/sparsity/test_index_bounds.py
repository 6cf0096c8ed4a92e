"""Check index bounds: unsafe masks are refused with a helpful message, ordinary ones are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit import create_block_mask
from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import F32, I32, Node, arg, const, load
from attnkit.graph.simplify import build, cast
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.tracing.tracer import trace
from tests.sparsity.mask_graphs import Case, cases, positions

Q, KV = arg("q"), arg("kv")
LOW, HIGH = -(2**31), 2**31 - 1


# --- the definition: every node computed at every position in int64


def first_fault(case: Case) -> tuple[str, Node] | None:
    """Return (fault, node) of the first unsafe node, found by evaluating every position."""
    values: dict[Node, Tensor] = {}
    env = positions(case)
    for n in ir.topo(case.root):
        args = [values[a] for a in n.args]
        fault = fault_of(n, args, case)
        if fault:
            return fault, n
        evaluate([n], env, case.tensors, memo=values)
    return None


def fault_of(n: Node, args: list[Tensor], case: Case) -> str | None:
    wide = [a.to(torch.int64) if a.dtype == torch.int32 else a for a in args]
    if n.op == "load":
        sizes = case.tensors[int(n.attr or 0)].shape
        bad = any(bool(((a < -s) | (a >= s)).any()) for a, s in zip(wide, sizes, strict=True))
        return "index" if bad else None
    if n.type != I32:
        return None
    if n.op in ("fdiv", "mod", "tdiv") and bool((wide[1] == 0).any()):
        return "zero"
    if n.op in ("shl", "shr") and bool(((wide[1] < 0) | (wide[1] > 31)).any()):
        return "shift"
    if n.op in ("add", "sub", "mul", "neg", "abs", "shl", "tdiv", "fdiv"):
        exact = WIDE[n.op](*wide)
        if bool(((exact < LOW) | (exact > HIGH)).any()):
            return "overflow"
    return None


WIDE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "shl": torch.bitwise_left_shift,
    "tdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fdiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}


@st.composite
def risky(draw: st.DrawFn) -> Case:
    """Draw a case as `cases` does, plus a step that may overflow or leave its valid range."""
    case = draw(cases(I32, max_len=60, max_depth=3))
    root = case.root
    step = draw(st.sampled_from(["none", "scale", "shift", "divide", "index", "square"]))
    if step == "scale":
        root = build("mul", root, const(draw(st.integers(-(2**31), 2**31 - 1))))
    elif step == "shift":
        root = build("shl", const(draw(st.integers(-9, 9))), root)
    elif step == "divide":
        root = build("mod", const(7), root)
    elif step == "square":
        root = build("mul", root, root)
        root = build("mul", root, root)
    elif step == "index":
        size = draw(st.integers(1, 80))
        table = torch.arange(size, dtype=torch.int32)
        root = load(len(case.tensors), I32, [root])
        return Case(root, (*case.tensors, table), *case.sizes().values())
    return Case(root, case.tensors, *case.sizes().values())


@given(case=risky())
def test_nothing_unsafe_passes(case: Case) -> None:
    fault = first_fault(case)
    unproven, refusal = outcome(case)
    if refusal is None:
        assert fault is None or (fault[0] == "index" and fault[1] in unproven)
    else:  # a fault that really happens, or a lack of proof that says so
        assert fault is not None or "cannot be proven" in refusal


def outcome(case: Case) -> tuple[frozenset[Node], str | None]:
    """Return (loads without a proof, None), or (empty set, error message)."""
    try:
        return check_bounds([case.root], case.tensors, **case.sizes()), None
    except BoundsError as error:
        return frozenset(), str(error)


@given(case=cases(I32, max_len=40))
def test_loads_of_one_side_are_always_decided(case: Case) -> None:
    """A load whose index depends on one side is proven or refused, never left for run time."""
    for side in (Q, KV):
        other = KV if side is Q else Q
        one_sided = ir.substitute(case.root, {other: const(0)})
        table = torch.zeros(5, dtype=torch.int32)
        root = load(len(case.tensors), I32, [one_sided])
        narrowed = Case(root, (*case.tensors, table), *case.sizes().values())
        unproven, _ = outcome(narrowed)
        assert root not in unproven or not is_whole(one_sided)


def is_whole(n: Node) -> bool:
    """Return whether an expression has no float node, whose rounding may differ elsewhere."""
    return all(m.type != "f32" for m in ir.topo(n))


# --- ordinary code


def proven(mod: Callable[..., Tensor], kind: str = "mask", **sizes: int) -> frozenset[Node]:
    traced = trace(mod, kind)  # type: ignore[arg-type]
    given_sizes = {"q_len": 1000, "kv_len": 1000, "batch": 2, "heads": 4, **sizes}
    return check_bounds([traced.root], traced.tensors, traced.names, **given_sizes)


def t5_bucket(distance: Tensor) -> Tensor:
    exact = distance.float() / 16
    large = 16 + (torch.log(exact) / 2.0794415 * 16).to(torch.int32)
    return torch.where(distance < 16, distance, torch.minimum(large, torch.tensor(31)))


def part1by1(x: Tensor) -> Tensor:
    x = x & 0x0000FFFF
    x = (x ^ (x << 8)) & 0x00FF00FF
    x = (x ^ (x << 4)) & 0x0F0F0F0F
    x = (x ^ (x << 2)) & 0x33333333
    return (x ^ (x << 1)) & 0x55555555


DOCUMENT = torch.arange(1000) // 70
STARTS = torch.arange(0, 1000, 70)
DISTANCE = torch.randn(2000)
BUCKETS = torch.randn(4, 32)
PLACE = torch.randint(0, 1024, (1000, 2), generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(1000, 1000)


ORDINARY_MASKS: dict[str, Callable[..., Tensor]] = {
    "block": lambda b, h, q, kv: q // 64 == kv // 64,
    "dilated": lambda b, h, q, kv: (q - kv).abs() % 4 == 0,
    "document": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
    "starts": lambda b, h, q, kv: q - STARTS[DOCUMENT[q]] >= kv - STARTS[DOCUMENT[kv]],
    "morton": lambda b, h, q, kv: part1by1(q) >= part1by1(kv),
    "placed morton": lambda b, h, q, kv: (
        (part1by1(PLACE[q, 0]) << 1 | part1by1(PLACE[q, 1])) // 64
        == (part1by1(PLACE[kv, 0]) << 1 | part1by1(PLACE[kv, 1])) // 64
    ),
    "pixel": lambda b, h, q, kv: ((q % 32 - kv % 32) ** 2 + (q // 32 - kv // 32) ** 2) <= 25,
    "head": lambda b, h, q, kv: (h + 1) * (q - kv) < 100,
    "wrapping": lambda b, h, q, kv: DOCUMENT[q - 1000] == DOCUMENT[kv],
}
ORDINARY_SCORES: dict[str, Callable[..., Tensor]] = {
    "alibi": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1.0)),
    "relative": lambda s, b, h, q, kv: s + DISTANCE[q - kv + 999],
    "clamped": lambda s, b, h, q, kv: s + DISTANCE[torch.clamp(q - kv, -16, 16) + 16],
    "wrapping distance": lambda s, b, h, q, kv: s + DISTANCE[kv - q],
    "t5": lambda s, b, h, q, kv: s + BUCKETS[h, t5_bucket((q - kv).abs())],
    "t5 causal": lambda s, b, h, q, kv: s + BUCKETS[h, t5_bucket((q - kv).clamp(min=0))],
    "t5 by document": lambda s, b, h, q, kv: s + BUCKETS[
        h, torch.clamp(t5_bucket((DOCUMENT[q] - DOCUMENT[kv]).abs()), 0, 31)
    ],
    "chosen": lambda s, b, h, q, kv: s + DISTANCE[torch.where(q >= kv, q - kv, 0)],
    "dense": lambda s, b, h, q, kv: s + WEIGHT[q, kv],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY_MASKS)
def test_ordinary_masks_are_proven(name: str) -> None:
    assert proven(ORDINARY_MASKS[name]) == frozenset()


@pytest.mark.parametrize("name", ORDINARY_SCORES)
def test_ordinary_scores_are_proven(name: str) -> None:
    assert proven(ORDINARY_SCORES[name], "score") == frozenset()


def test_a_mixed_index_that_intervals_cannot_follow_is_left_for_run_time() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = DOCUMENT[q] == DOCUMENT[kv]
        return s + DISTANCE[torch.where(same, q - kv, 0) * 3]

    (unproven,) = proven(mod, "score")
    assert unproven.op == "load"
    assert unproven.type == "f32"


# --- refusals


def message(mod: Callable[..., Tensor], kind: str = "mask", **sizes: int) -> str:
    with pytest.raises(BoundsError) as caught:
        proven(mod, kind, **sizes)
    return str(caught.value)


def test_message_of_an_index() -> None:
    table = torch.randn(512)
    text = message(lambda s, b, h, q, kv: s + table[q - kv + 256], "score", q_len=4096, kv_len=4096)
    assert text == (
        "captured tensor 'table' has 512 entries but index `q - kv + 256` reaches 4351 at "
        "q_len=4096, kv_len=4096 (it ranges from -3839 to 4351; expected -512 to 511). Enlarge "
        "the tensor or clamp the index; torch.where does not protect it, both branches are "
        "evaluated"
    )


def test_message_of_an_index_into_one_dimension() -> None:
    table = torch.zeros(3, 100, dtype=torch.bool)
    text = message(lambda b, h, q, kv: table[h, q], heads=4, q_len=100)
    assert "captured tensor 'table' has 3 entries in dimension 0 but index `h` reaches 3" in text
    assert "at heads=4 " in text


def test_an_index_that_is_too_negative_is_named() -> None:
    table = torch.zeros(100, dtype=torch.bool)
    assert "index `q - kv` reaches -149" in message(
        lambda b, h, q, kv: table[q - kv], q_len=100, kv_len=150
    )


def test_an_index_that_is_read_is_named() -> None:
    table, starts = torch.zeros(1500), torch.arange(64) - 2000
    text = message(lambda b, h, q, kv: table[starts[q]] > 0, q_len=64)
    assert text.startswith(
        "captured tensor 'table' has 1500 entries but index `starts[q]` reaches -2000 at q_len=64 "
        "(it ranges from -2000 to -1937; expected -1500 to 1499)"
    )


def test_where_does_not_protect_an_index() -> None:
    table = torch.zeros(100, dtype=torch.bool)
    text = message(lambda b, h, q, kv: torch.where(q < 100, table[q], False), q_len=101)
    assert "index `q` reaches 100" in text


def test_any_index_into_an_empty_tensor_is_refused() -> None:
    table = torch.zeros(0, dtype=torch.bool)
    assert "has 0 entries" in message(lambda b, h, q, kv: table[q])


def test_a_product_of_positions_is_refused_from_the_length_at_which_it_overflows() -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q * kv % 7]

    table = torch.zeros(7, dtype=torch.bool)
    assert proven(mod, q_len=46341, kv_len=46341) == frozenset()  # 46340 ** 2 < 2 ** 31
    text = message(mod, q_len=46342, kv_len=46342)
    assert text == (
        "`q * kv` does not stay in int32 (-2147483648 to 2147483647): it ranges "
        "from 0 to 2147488281 at q_len=46342, kv_len=46342. Divide before multiplying, or compute "
        "it with floats"
    )


def test_overflow_of_one_side_is_certain() -> None:
    table = torch.zeros(8, dtype=torch.bool)
    text = message(lambda b, h, q, kv: table[(q << 22) % 8], q_len=1000)
    assert text.startswith("`q * 4194304` does not stay in int32")
    assert proven(lambda b, h, q, kv: table[(q << 22) % 8], q_len=512) == frozenset()


def test_arithmetic_that_indexes_nothing_wraps() -> None:
    assert proven(lambda b, h, q, kv: q * kv % 7 == 0, q_len=46342, kv_len=46342) == frozenset()
    assert proven(lambda b, h, q, kv: (q << 22) > kv, q_len=1000) == frozenset()


def test_sums_that_cancel_are_safe() -> None:
    big = torch.full((1000,), 2**31 - 1000)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (big[q] - q) + q - big[q] == kv

    assert proven(mod) == frozenset()


def test_integers_that_do_not_fit_are_refused_by_name() -> None:
    ids = torch.tensor([1, 2, 2**40])
    text = message(lambda b, h, q, kv: ids[q] == ids[kv], q_len=3, kv_len=3)
    assert text.startswith("captured tensor 'ids' holds integers from 1 to 1099511627776")


def test_a_divisor_that_may_be_zero_is_refused() -> None:
    lengths = torch.tensor([3, 0, 5])
    text = message(lambda b, h, q, kv: kv // lengths[q] == 0, q_len=3)
    assert text.startswith("`kv // lengths[q]` does not divide by other than zero")
    assert proven(lambda b, h, q, kv: kv // (lengths[q] + 1) == 0, q_len=3) == frozenset()
    odd = torch.tensor([3, -1, 5])
    assert proven(lambda b, h, q, kv: kv // odd[q] == 0, q_len=3) == frozenset()


def test_a_shift_count_outside_is_refused() -> None:
    assert "shift by 0 to 31" in message(lambda b, h, q, kv: (kv >> q) == 0, q_len=33)
    assert proven(lambda b, h, q, kv: (kv >> q) == 0, q_len=32) == frozenset()


def test_a_constant_outside_int32_is_refused() -> None:
    with pytest.raises(BoundsError, match="constant 4294967296 does not fit int32"):
        check_bounds([build("lt", Q, const(2**32))], [], q_len=4, kv_len=4, batch=1, heads=1)


def test_a_proof_is_not_used_for_other_data() -> None:
    """An edit of captured data invalidates the proof of its indices.

    This holds for a proof from ranges and for a proof from all positions.
    """
    table, ids, start = torch.zeros(3), torch.tensor([0, 9, 5]), torch.tensor([0, 8, 4])
    one = lambda b, h, q, kv: table[ids[q] - start[q]] > 0
    two = lambda b, h, q, kv: table[(ids[q] > 4).int() + start[q] // 8] > 0
    for mask in (one, two):
        create_block_mask(mask, None, None, 3, 3).runs.counts()
    start.copy_(torch.tensor([0, 8, 0]))  # of the same range: 5 - 0 leaves the table
    with pytest.raises(BoundsError):
        create_block_mask(one, None, None, 3, 3).runs.counts()
    create_block_mask(two, None, None, 3, 3).runs.counts()
    start.copy_(torch.tensor([0, 16, 0]))
    with pytest.raises(BoundsError):
        create_block_mask(two, None, None, 3, 3).runs.counts()


@pytest.mark.parametrize("place", [-7, 7])
def test_a_proof_needs_both_ends_of_the_data(place: int) -> None:
    table, ids = torch.zeros(5), torch.tensor([-4, 0, 4])
    mask = lambda b, h, q, kv: table[ids[q]] > 0
    create_block_mask(mask, None, None, 3, 3).runs.counts()
    ids[1] = place
    with pytest.raises(BoundsError, match=f"reaches {place}"):
        create_block_mask(mask, None, None, 3, 3).runs.counts()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ranges_of_data_do_not_wrap(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max  # its square is 1 in this dtype
    ids, table = torch.full((4,), most, dtype=dtype), torch.zeros(5)
    root = load(1, F32, [build("mul", load(0, I32, [Q]), load(0, I32, [KV]))])
    with pytest.raises(BoundsError, match=str(most**2)):
        check_bounds([root], [ids, table], q_len=4, kv_len=4, batch=1, heads=1)


def test_ranges_are_those_of_one_head() -> None:
    """An index that each head keeps in range is not refused because heads differ."""
    places = torch.tensor([[0, 1, 2, 3], [100, 101, 102, 103]], dtype=torch.int32)
    table = torch.zeros(7)
    mod = trace(lambda s, b, h, q, kv: s + table[places[h, q] - places[h, kv] + 3], "score")
    for far in (0, 1):
        places[1, 0] = 100 - far
        outside = {"q_len": 4, "kv_len": 4, "batch": 1, "heads": 2}
        if far:
            with pytest.raises(BoundsError, match="has 7 entries"):
                check_bounds([mod.root], mod.tensors, mod.names, **outside)
        else:
            check_bounds([mod.root], mod.tensors, mod.names, **outside)


# At kv = 0 an exp is 1, but its bounds are a little below and above: as an integer, 0 or 1.
ABOUT_ONE = cast(build("exp", cast(KV, F32)), I32)


def test_bounds_that_may_not_occur_refuse_nothing() -> None:
    """An index whose range is wider than its values is left for run time, unless all are outside."""

    def outcome_of(index: Node, size: int) -> tuple[frozenset[Node], str | None]:
        root = load(0, I32, [index])
        return outcome(Case(root, (torch.zeros(size, dtype=torch.int32),), 5, 1, 1, 1))

    product = build("mul", Q, ABOUT_ONE)
    for index, size in ((product, 4), (build("sub", const(3), ABOUT_ONE), 3), (ABOUT_ONE, 1)):
        unproven, refusal = outcome_of(index, size)
        assert refusal is None
        assert len(unproven) == 1
        assert outcome_of(index, size + 1) == (frozenset(), None)
    above, below = build("add", ABOUT_ONE, const(7)), build("sub", const(-9), ABOUT_ONE)
    for index, first, last in ((above, 7, 8), (below, -10, -9)):
        refusal = outcome_of(index, 6)[1]
        assert refusal is not None
        assert f"(it ranges from {first} to {last}; expected -6 to 5)" in refusal


def test_a_divisor_whose_bounds_hold_zero_is_refused_without_a_proof() -> None:
    for divisor, message in (
        (ABOUT_ONE, "cannot be proven to divide by other than zero"),
        (build("sub", Q, const(2)), "does not divide by other than zero"),
        (build("mul", build("sub", Q, KV), build("add", Q, KV)), "cannot be proven to divide"),
    ):
        refusal = outcome(Case(build("mod", const(7), divisor), (), 5, 1, 1, 1))[1]
        assert refusal is not None
        assert message in refusal
    for divisor in (
        build("add", ABOUT_ONE, const(1)),
        build("add", build("mul", Q, const(2)), const(-5)),
    ):
        assert outcome(Case(build("mod", const(7), divisor), (), 5, 1, 1, 1))[1] is None
