"""Check masks that read the data of tensors while they are built, inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attnkit
from attnkit import Axes, Mask, create_block_mask, flex_attention, masks

Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(q_len: int, kv_len: int | None = None, batch: int = 1) -> list[Tensor]:
    lengths = q_len, kv_len or q_len, kv_len or q_len
    return [torch.randn(batch, 2, n, 16, requires_grad=True) for n in lengths]


def ends(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def check(call: Call, examples: list[tuple[Any, ...]], backend: str = "aot_eager") -> None:
    """Check results and gradients of `call(query, key, value, *others)`, and that one graph does."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for made, *others in examples:
        results = [f(*made, *others) for f in (compiled, call)]
        grads = [torch.autograd.grad(out.sin().sum(), made) for out in results]
        for ours, expected in zip([results[0], *grads[0]], [results[1], *grads[1]], strict=True):
            assert torch.equal(ours, expected)
    assert counter.frame_count == 1


LENGTHS = [torch.tensor(x) for x in ([20, 24, 20], [1, 3, 60], [30, 7, 40], [5, 5], [2, 9, 1, 8])]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_documents_by_lengths(backend: str) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        mask = masks.document_from_lengths(lengths) & masks.causal()
        out: Tensor = flex_attention(query, key, value, None, mask)
        return out

    check(call, [(inputs(int(n.sum())), n) for n in LENGTHS], backend)


def test_documents_by_offsets() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, kv_ends: Tensor) -> Tensor:
        same = masks.document_from_cu_seqlens(q_ends, total=query.shape[2])
        first = flex_attention(query, query, query, None, masks.sliding_window(9) & same)
        inner = masks.causal()
        mask = masks.document_from_cu_seqlens(q_ends, kv_ends, within=inner, align="bottom-right")
        out: Tensor = flex_attention(first, key, value, None, mask)
        return out

    examples = []
    for lengths in LENGTHS:
        more = lengths + torch.arange(len(lengths))
        made = inputs(int(lengths.sum()), int(more.sum()))
        examples.append((made, ends(lengths), ends(more)))
    check(call, examples)


def test_trees() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, parents: Tensor, cached: Tensor) -> Tensor:
        first = flex_attention(query, key, value, None, masks.tree(parents[0], context=10))
        mask = masks.tree(parents, context=cached)
        out: Tensor = flex_attention(first, key, value, None, mask)
        return out

    trees = [[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4], [-1, -1, 0, 1, 2, 3]]
    examples = [
        (inputs(6, 16, batch=2), torch.tensor([tree, trees[0]]), torch.tensor([3, 10 - i]))
        for i, tree in enumerate(trees)
    ]
    check(call, examples)


def test_shared_prefixes() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, suffixes: Tensor) -> Tensor:
        groups = masks.shared_prefix(suffixes[:, 0], suffixes[:, 1:])
        first = flex_attention(query, key, value, None, groups)
        one = masks.shared_prefix(3, torch.cat([suffixes.flatten()[:-1], suffixes[1, 2:] - 3]))
        out: Tensor = flex_attention(first, key, value, None, one)
        return out

    tables = [torch.tensor(x) for x in ([[4, 10, 6], [6, 7, 9]], [[1, 2, 3], [9, 4, 5]])]
    check(call, [(inputs(int(t.sum())), t) for t in tables])


def test_pages() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor, cached: Tensor) -> Tensor:
        pages = key.shape[2] // 8
        mask = masks.paged(masks.causal(), table, page_size=8, pages=pages, lengths=cached)
        out: Tensor = flex_attention(query, key, value, None, mask)
        return out

    tables = [[[2, 0, -1], [1, 3, 5]], [[5, 4, 3], [0, 1, -1]]]
    check(
        call,
        [
            (inputs(20, 48 + 8 * i, batch=2), torch.tensor(table), torch.tensor([5, 9 + i]))
            for i, table in enumerate(tables)
        ],
    )


def test_padding_chunks_and_images() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, given: Tensor, types: Tensor) -> Tensor:
        padding = masks.padding_from_mask(given, rows=True)
        mask = masks.image_spans(types, size=9) & padding
        first = flex_attention(query, key, value, None, mask)
        chunks = masks.chunked(16, start=(given == 0).sum(-1))
        out: Tensor = flex_attention(first, key, value, None, chunks & padding)
        return out

    examples = []
    for length, padded in ((40, 3), (50, 0), (64, 17)):
        given = (torch.arange(length) >= torch.tensor([[0], [padded]])).long()
        types = (torch.arange(length) // 5 % 2).expand(2, -1)
        examples.append((inputs(length, batch=2), given, types))
    check(call, examples)


def test_a_block_mask_of_documents() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        mask = masks.document_from_lengths(lengths)
        block_mask = create_block_mask(mask, None, None, query.shape[2], key.shape[2])
        out: Tensor = flex_attention(query, key, value, block_mask=block_mask)
        return out

    check(call, [(inputs(int(n.sum())), n) for n in LENGTHS])


def test_mistakes_are_reported_when_the_compiled_call_runs() -> None:
    made = inputs(10)

    def outcome(build: Callable[[Tensor], Any], good: Any, bad: Any) -> str:
        torch._dynamo.reset()
        call = torch.compile(
            lambda q, k, v, t: flex_attention(q, k, v, None, build(t)), fullgraph=True
        )
        call(*made, torch.tensor(good))
        with pytest.raises((attnkit.OptionError, attnkit.ShapeError)) as caught:
            call(*made, torch.tensor(bad))
        return str(caught.value)

    lengths, offsets = masks.document_from_lengths, masks.document_from_cu_seqlens
    assert "built for query length 11, got 10" in outcome(lengths, [4, 6], [4, 7])
    assert "built for query length 9, got 10" in outcome(lengths, [4, 6], [4, 5])
    assert "lengths must be at least 0 everywhere, got -1" in outcome(lengths, [4, 6], [11, -1])
    assert "got zeros only" in outcome(lengths, [4, 6], [0, 0])
    total = lambda t: lengths(t, total=10)
    assert "lengths must sum to total = 10, got 11" in outcome(total, [4, 6], [4, 7])
    assert "cu_seqlens must begin with 0, got 1" in outcome(offsets, [0, 4, 10], [1, 4, 10])
    assert "entry 2 is 3 after 4" in outcome(offsets, [0, 4, 10], [0, 4, 3])
    mistake = outcome(masks.tree, [-1, *range(9)], [-1, 5, *range(8)])
    assert "parents[1] must be -1 or stand before its child (1), got 5" in mistake
    pages = lambda t: masks.paged(masks.causal(), t, page_size=5, pages=2)
    assert "distinct pages in each row" in outcome(pages, [[0, 1]], [[1, 1]])


def test_both_lengths_are_compared() -> None:
    call = torch.compile(
        lambda q, k, v, a, b: flex_attention(q, k, v, None, masks.document_from_lengths(a, b)),
        fullgraph=True,
        backend="aot_eager",
    )
    made, ours = inputs(10, 12), torch.tensor([4, 6])
    call(*made, ours, torch.tensor([7, 5]))
    with pytest.raises(attnkit.ShapeError, match="built for kv length 13, got 12"):
        call(*made, ours, torch.tensor([7, 6]))


def test_operators_are_what_they_claim() -> None:
    names = torch.ops.attnkit
    checks = ("test_schema", "test_faketensor")
    for total in (None, 9):
        arguments = (torch.tensor([4, 5]), total, "lengths", "sum to")
        torch.library.opcheck(names.document_ids.default, arguments, test_utils=checks)
    torch.library.opcheck(names.document_lengths.default, (torch.tensor([0, 4]), "cu_seqlens"))
    torch.library.opcheck(names.tree_walks.default, (torch.tensor([[-1, 0], [-1, -1]]),))
    torch.library.opcheck(names.logical_pages.default, (torch.tensor([[1, -1], [2, 0]]), 4))


def test_lengths_that_a_table_requires() -> None:
    """`=q` and `=kv` require one length, also outside of torch.compile, and not after a shift."""
    mask = Mask(lambda b, h, q, kv: q >= kv, axes=[Axes("t", 10, "=q"), Axes("u", (12,), "=kv")])
    flex_attention(*inputs(10, 12), block_mask=mask)
    for made, text in ((inputs(9, 12), "t was built for query length 10, got 9"),
                       (inputs(10, 13), "u was built for kv length 12, got 13")):  # fmt: skip
        with pytest.raises(attnkit.ShapeError, match=text):
            flex_attention(*made, block_mask=mask)
    flex_attention(*inputs(7, 12), block_mask=mask.shift(q=2))
