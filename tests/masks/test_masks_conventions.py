"""Compare masks with written-out conventions of FlashAttention and Hugging Face."""

from __future__ import annotations

import pytest
import torch

from attnkit import Mask, OptionError, create_mask, flex_attention, masks

Q = torch.tensor([0, 3, 4])
KV = torch.tensor([0, 5, 6])


def flash_window(q_len, kv_len, left, right):
    """Return FlashAttention's window: keys q + Skv - Sq - left to q + Skv - Sq + right."""
    at = torch.arange(q_len)[:, None] + kv_len - q_len
    kv = torch.arange(kv_len)
    return (kv >= at - (left if left >= 0 else kv_len)) & (
        kv <= at + (right if right >= 0 else kv_len)
    )


@pytest.mark.parametrize("window", [(2, 0), (2, 1), (0, 0), (-1, 1), (3, -1)])
@pytest.mark.parametrize("sizes", [(6, 6), (3, 7)])
def test_windows_are_those_of_flash_attention(window, sizes):
    left, right = (None if n < 0 else n for n in window)
    mask = masks.sliding_window(left, right, align="bottom-right", q_len=sizes[0], kv_len=sizes[1])
    assert torch.equal(create_mask(mask, None, None, *sizes)[0, 0], flash_window(*sizes, *window))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_size_counts_keys_as_hugging_face(size):
    q, kv = torch.arange(8)[:, None], torch.arange(8)
    expected = (kv <= q) & (kv > q - size)  # transformers' sliding_window_overlay
    for mask in (masks.sliding_window(size=size), masks.streaming_llm(sinks=0, size=size)):
        assert torch.equal(create_mask(mask, None, None, 8, 8)[0, 0], expected)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (1, 1)])
def test_documents_are_aligned_as_in_flash_attentions_varlen_functions(window):
    left, right = (None if n < 0 else n for n in window)
    within = masks.sliding_window(left, right)
    mask = masks.document_from_cu_seqlens(Q, KV, within=within, align="bottom-right")
    blocks = [
        flash_window(int(q), int(kv), *window) for q, kv in zip(Q.diff(), KV.diff(), strict=True)
    ]
    expected = torch.block_diag(*(b.int() for b in blocks)).bool()
    assert torch.equal(create_mask(mask, None, None, 4, 6)[0, 0], expected)


@pytest.mark.parametrize("size", [1, 3, 40])
def test_chunks_are_those_of_hugging_face(size):
    padded = torch.tensor([0, 2, 5])
    q, kv, own = torch.arange(8)[:, None], torch.arange(8), padded[:, None, None]
    # transformers' chunked_overlay, with the causal mask and the padding that it is used with
    expected = ((kv - own) // size == (q - own) // size) & (kv <= q) & (kv >= own)
    mask = masks.chunked(size, start=padded)
    assert torch.equal(create_mask(mask, 3, None, 8, 8)[:, 0], expected & (q >= own))
    assert torch.equal(create_mask(masks.chunked(size), None, None, 8, 8)[0, 0], expected[0])
    # decoding: one query at the end of a cache
    last = {"align": "bottom-right", "q_len": 1, "kv_len": 8}
    mask = masks.chunked(size, start=padded, **last)
    assert torch.equal(create_mask(mask, 3, None, 1, 8)[:, 0], expected[:, -1:])


@pytest.mark.parametrize("window", [None, 2, 5])
def test_image_spans_are_those_of_hugging_face(window):
    types = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 1, 0, 1]])
    # as Gemma 3 computes the ids of images, and transformers' blockwise_overlay
    image = types == 1
    new = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
    groups = torch.where(image, new.int().cumsum(-1) - 1, -1)
    same = (groups[:, :, None] == groups[:, None]) & (groups >= 0)[:, :, None]
    q, kv = torch.arange(8)[:, None], torch.arange(8)
    near = (kv <= q) & (kv > q - (8 if window is None else window))
    for mask in (
        masks.image_spans(types, size=window),
        masks.image_spans(image, size=window),
        masks.image_spans(groups, text=-1, size=window),
    ):
        assert torch.equal(create_mask(mask, 2, None, 8, 8)[:, 0], near | same)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_that_of_lengths(side):
    lengths = torch.tensor([2, 5, 4])
    given = torch.arange(5) < lengths[:, None]
    given = given.flip(-1) if side == "left" else given
    own = {"side": side, "kv_len": 5} if side == "left" else {}
    rows = {"q_lengths": lengths} | ({"q_len": 5} if side == "left" else {})
    for from_mask, from_lengths in (
        (masks.padding_from_mask(given), masks.padding(lengths, **own)),
        (masks.padding_from_mask(given, rows=True), masks.padding(lengths, **rows, **own)),
    ):
        dense = [create_mask(m, 3, None, 5, 5) for m in (from_mask, from_lengths)]
        assert torch.equal(*dense)


def test_an_edited_attention_mask_counts():
    given = torch.tensor([[1, 1, 0, 0]])
    mask = masks.padding_from_mask(given)
    query = torch.randn(1, 1, 4, 8)
    first = flex_attention(query, query, query, block_mask=mask)
    given[0, 2] = 1
    second = flex_attention(query, query, query, block_mask=mask)
    for keys, out in ((2, first), (3, second)):
        expected = flex_attention(query, query[:, :, :keys], query[:, :, :keys])
        torch.testing.assert_close(out, expected)


COMPARING = {
    "causal": masks.causal(),
    "bottom-right": masks.causal("bottom-right", q_len=4, kv_len=6),
    "window": masks.sliding_window(2),
    "prefix_lm": masks.prefix_lm(2),
    "chunked": masks.chunked(2),
    "image_spans": masks.image_spans(torch.tensor([0, 1, 1, 0])),
    "joined": ~masks.causal() | masks.prefix(1),
    "labelled": Mask(masks.causal(), "mine()"),
}


@pytest.mark.parametrize("name", COMPARING)
def test_positions_of_documents_that_start_apart_are_not_compared(name):
    documents = masks.document_from_cu_seqlens(Q, KV)
    message = (
        "packs them at different offsets, so the combination is ambiguous; pass the mask as within"
    )
    for join in (lambda a, b: a & b, lambda a, b: b | a, lambda a, b: masks_per_head([a, b])):
        with pytest.raises(OptionError, match=message):
            join(COMPARING[name], documents)


def masks_per_head(several):
    from attnkit import per_head

    return per_head(several)


def test_positions_may_be_compared_where_it_is_clear():
    same = masks.document_from_cu_seqlens(Q, Q.clone())
    longer = masks.document_from_cu_seqlens(torch.tensor([0, 3]), torch.tensor([0, 5]))
    apart = masks.document_from_cu_seqlens(Q, KV)
    causal = masks.causal()
    for mask in (causal & same, causal & longer, causal.shift(q=2) & apart):
        assert "causal" in repr(mask)
    assert apart & masks.prefix(3) & (lambda b, h, q, kv: kv <= q) is not None
    # with one packing, a mask inside of each document is that of the whole sequence
    inside = masks.document_from_cu_seqlens(Q, within=causal)
    whole = create_mask(causal & masks.document_from_cu_seqlens(Q), None, None, 4, 4)
    assert torch.equal(create_mask(inside, None, None, 4, 4), whole)
