"""Check that FlexAttention programs run after changing one import."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.experimental import _paged_attention as paged

import attnkit
from attnkit import create_block_mask, flex_attention

S, BLOCK = 128, 32


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def inputs(length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, length, 16, generator=random)
    key, value = (torch.randn(1, 4, S, 16, generator=random) for _ in range(2))
    return query, key, value


def test_names() -> None:
    assert [name for name in flex.__all__ if not hasattr(attnkit, name)] == []


@pytest.mark.parametrize(
    "name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks"]
)
def test_arguments_and_defaults(name: str) -> None:
    theirs = inspect.signature(getattr(flex, name)).parameters
    ours = inspect.signature(getattr(attnkit, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for argument, parameter in theirs.items():
        default = ours[argument].default
        assert (default[0] if argument == "BLOCK_SIZE" else default) == parameter.default
        assert ours[argument].kind == parameter.kind


def test_options_of_block_masks_change_nothing() -> None:
    plain = create_block_mask(causal, None, None, S, S, "cpu", BLOCK)
    tuned = create_block_mask(
        *(causal, None, None, S, S, "cpu", BLOCK),
        separate_full_blocks=False,
        compute_dq_write_order=True,
        dq_kv_order=False,
    )
    assert torch.equal(plain.to_dense(), tuned.to_dense())
    assert attnkit.create_mask(causal, None, None, 5, 5, None).device.type == "cpu"


def test_dense_masks_of_scores() -> None:
    mod = lambda s, b, h, q, kv: torch.where(q >= kv + h, s - kv, -torch.inf)
    theirs = flex.create_mask(mod, 1, 2, 30, 20, device="cpu")
    assert torch.equal(attnkit.create_mask(mod, 1, 2, 30, 20), theirs)
    assert torch.equal(attnkit.create_mask(mod, None, 2, 30, 20)[:, 0], theirs[:, 0])


def test_decoding_with_rows_of_a_block_mask() -> None:
    query, key, value = inputs()
    whole = create_block_mask(causal, None, None, S, S, BLOCK_SIZE=BLOCK)
    expected = flex_attention(query, key, value, block_mask=whole)
    for position in (0, 31, 32, 100, 127):
        row = whole[:, :, torch.tensor([position // BLOCK])]
        row.mask_mod = lambda b, h, q, kv, at=position: whole.mask_mod(b, h, q + at, kv)
        row.seq_lengths = (1, S)
        found = flex_attention(query[:, :, position : position + 1], key, value, block_mask=row)
        torch.testing.assert_close(found, expected[:, :, position : position + 1])


def test_a_block_mask_of_other_lengths() -> None:
    query, key, value = inputs(70)
    ours = create_block_mask(causal, None, None, S, S, BLOCK_SIZE=BLOCK)._adjust(70, S)
    theirs = flex.create_block_mask(causal, None, None, S, S, "cpu", BLOCK)._adjust(70, S)
    assert ours.shape == theirs.shape
    found = flex_attention(query, key, value, block_mask=ours)
    torch.testing.assert_close(found, flex_attention(query, key, value, block_mask=theirs))


def test_block_masks_of_lists() -> None:
    counts = torch.tensor([[[1, 2, 1, 2]]], dtype=torch.int32)
    lists = torch.tensor(
        [[[[0, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0], [0, 2, 0, 0]]]], dtype=torch.int32
    )
    made = attnkit.BlockMask.from_kv_blocks(counts, lists, None, None, BLOCK_SIZE=BLOCK)
    assert isinstance(made, flex.BlockMask)
    query, key, value = inputs()
    kept = made.to_dense().bool().repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    scores = (query @ key.mT / 4).masked_fill(~kept, -torch.inf)
    found = flex_attention(query, key, value, block_mask=made)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)


@pytest.mark.parametrize("name", ["kv_num_blocks", "kv_indices", "as_tuple", "to_string"])
def test_what_a_block_mask_lacks_is_said(name: str) -> None:
    mask = create_block_mask(causal, None, None, S, S)
    with pytest.raises(AttributeError, match=rf"no '{name}'.*to_flex\(\)"):
        getattr(mask, name)
    assert hasattr(mask.to_flex(), name)


def test_selections_of_a_mask_that_reads_neither_batch_nor_heads() -> None:
    whole = create_block_mask(causal, 4, 2, S, S, BLOCK_SIZE=BLOCK)
    theirs = flex.create_block_mask(causal, 4, 2, S, S, "cpu", BLOCK)
    for index in (1, -1, slice(1, 3), (3, 1), (slice(None), 1, torch.tensor([2]))):
        found, expected = whole[index], theirs[index]
        assert found.shape == expected.shape
        assert torch.equal(found.to_dense(), expected.to_dense())
    with pytest.raises(attnkit.BoundsError, match=r"index 4 is out of range for .* 4 entries"):
        whole[4]


def test_paged_attention_reads_each_batch_entrys_pages() -> None:
    batch, page = 3, BLOCK
    pages = paged.PagedAttention(16, page, batch, device="cpu")
    for b in range(batch):
        pages.reserve(torch.tensor(b), torch.tensor(S))
    query, key, value = (torch.randn(batch, 2, S, 16) for _ in range(3))
    pool = [torch.zeros(1, 2, 16 * page, 16) for _ in range(2)]
    rows = torch.arange(S).expand(batch, -1)
    pages.assign(torch.arange(batch), rows, key, value, *pool)
    mask = pages.convert_logical_block_mask(
        create_block_mask(causal, batch, 1, S, S, BLOCK_SIZE=page).to_flex()
    )
    found = flex_attention(query, *pool, block_mask=mask)
    torch.testing.assert_close(found, flex_attention(query, key, value, block_mask=causal))


def test_lengths_are_assigned() -> None:
    query, key, value = inputs(40)
    mask = create_block_mask(causal, None, None, S, S, BLOCK_SIZE=BLOCK)
    flex_attention(*inputs(), block_mask=mask)
    mask.seq_lengths = (40, S)
    assert mask.shape == (1, 1, 40, S)
    assert mask.seq_lengths == (40, S)
    found = flex_attention(query, key, value, block_mask=mask)
    assert torch.equal(found, flex_attention(query, key, value, block_mask=causal))
    for bad in (40, (40,), (0, S), "ab"):
        with pytest.raises(attnkit.OptionError, match="seq_lengths"):
            mask.seq_lengths = bad


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (attnkit.noop_mask, True),
        (attnkit.and_masks(), True),
        (attnkit.or_masks(), False),
        (attnkit.and_masks(causal, attnkit.noop_mask), None),
    ],
)
def test_masks_without_a_formula_in_pytorchs_functions(mask: Any, kept: bool | None) -> None:
    theirs = flex.create_mask(mask, None, None, 5, 7, device="cpu")
    assert torch.equal(theirs, attnkit.create_mask(mask, None, None, 5, 7).expand(theirs.shape))
    assert kept is None or bool((theirs == kept).all())
    zero = torch.zeros((), dtype=torch.int32)
    assert mask(zero, zero, zero, zero).dtype == torch.bool


MISTAKES: dict[str, Any] = {
    "rank": lambda m, x: m.flex_attention(x[0], x[0], x[0]),
    "heads": lambda m, x: m.flex_attention(x, x[:, :1], x[:, :1]),
    "head dim": lambda m, x: m.flex_attention(x, x[..., :4], x),
    "batch": lambda m, x: m.flex_attention(x, x.repeat(3, 1, 1, 1), x.repeat(3, 1, 1, 1)),
    "device": lambda m, x: m.flex_attention(x, x.to("meta"), x),
    "longer": lambda m, x: m.flex_attention(x, x, x, block_mask=blocks(m, 16)),
    "shorter": lambda m, x: m.flex_attention(x, x, x, block_mask=blocks(m, 4)),
    "lse twice": lambda m, x: m.flex_attention(
        x, x, x, return_lse=True, return_aux=m.AuxRequest(lse=True)
    ),
    "backend": lambda m, x: m.flex_attention(x, x, x, kernel_options={"BACKEND": "INVALID"}),
    "two backends": lambda m, x: m.flex_attention(
        x, x, x, kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}
    ),
    "and_masks": lambda m, x: m.and_masks(causal, 3),
    "or_masks": lambda m, x: m.or_masks(None),
    "arguments": lambda m, x: m.create_block_mask(lambda s, b, h, q, kv: s, 1, 1, 8, 8, "cpu"),
    "few arguments": lambda m, x: m.create_mask(lambda q, kv: q > kv, 1, 1, 8, 8, "cpu"),
}


def blocks(module: Any, length: int) -> Any:
    return module.create_block_mask(causal, None, None, length, length, device="cpu")


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_errors_are_caught_by_what_catches_pytorchs(mistake: Any) -> None:
    x = torch.zeros(2, 2, 8, 8)
    with pytest.raises(Exception, match=r"\w") as theirs:
        mistake(flex, x)
    for module in (attnkit, attnkit.flex):
        with pytest.raises(attnkit.AttnkitError) as ours:
            mistake(module, x)
        assert isinstance(ours.value, theirs.type)
