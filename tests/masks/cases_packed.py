"""Draw cases of masks over packed, padded, draft and paged sequences (see `cases`)."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from attnkit import masks
from tests.masks.cases import LONGEST, Case, bools, case, ints, lengths


@case
def document(draw):
    q_len, kv_len = draw(lengths), draw(lengths)
    leading = draw(st.sampled_from([(), (2,)]))
    ids = ints(draw, -2, 2, *leading, q_len)
    kv_ids = ints(draw, -2, 2, *leading, kv_len) if draw(st.booleans()) else None
    in_order = draw(st.booleans())
    padding = draw(st.sampled_from([None, -1, 0, 7]))
    if in_order:
        ids = ids.sort().values
        kv_ids = None if kv_ids is None else kv_ids.sort().values
    mask = masks.document(ids, kv_ids, sorted_ids=in_order, padding=padding)
    kv_ids = ids if kv_ids is None else kv_ids
    rows, columns = (t.expand(2, t.shape[-1]).tolist() for t in (ids, kv_ids))
    keep = lambda b, h, q, kv: rows[b][q] == columns[b][kv] and rows[b][q] != padding
    return Case(mask, keep, q_len, len(columns[0]), 2 if leading else 1)


def owners(parts) -> list[int]:
    return [number for number, length in enumerate(parts) for _ in range(length)]


def two_packings(draw):
    count = draw(st.integers(1, 4))
    own = ints(draw, 0, 6, count)
    own[draw(st.integers(0, count - 1))] += 1
    other = ints(draw, 0, 6, count) + 1 if draw(st.booleans()) else None
    rows = owners(own)
    return own, other, rows, rows if other is None else owners(other)


def inside(draw, rows, columns):
    """Draw a mask within documents; return its arguments and the definition of the whole mask."""
    kind = draw(st.sampled_from(["none", "causal", "window"]))
    if kind == "none":
        return {}, lambda b, h, q, kv: rows[q] == columns[kv]
    align = draw(st.sampled_from([None, "top-left", "bottom-right"]))
    within = masks.causal() if kind == "causal" else masks.sliding_window(2, 1)

    def keep(b, h, q, kv):
        if rows[q] != columns[kv]:
            return False
        at, key = q - rows.index(rows[q]), kv - columns.index(columns[kv])
        if align == "bottom-right":
            at += columns.count(rows[q]) - rows.count(rows[q])
        return key <= at if kind == "causal" else at - 2 <= key <= at + 1

    return {"within": within, "align": align}, keep


@case
def document_from_lengths(draw):
    own, other, rows, columns = two_packings(draw)
    within, keep = inside(draw, rows, columns)
    mask = masks.document_from_lengths(own, other, total=len(rows), **within)
    return Case(mask, keep, len(rows), len(columns))


@case
def document_from_cu_seqlens(draw):
    own, other, rows, columns = two_packings(draw)
    ends = [
        None if t is None else torch.tensor([0, *itertools.accumulate(t.tolist())])
        for t in (own, other)
    ]
    within, keep = inside(draw, rows, columns)
    mask = masks.document_from_cu_seqlens(*ends, total=len(rows), **within)
    return Case(mask, keep, len(rows), len(columns))


@case
def padding(draw):
    keys, queries = ints(draw, 0, LONGEST, 3), ints(draw, 0, LONGEST, 3)
    if draw(st.booleans()):
        mask = masks.padding(keys)
        keep = lambda b, h, q, kv: kv in range(keys[b])
    else:
        mask = masks.padding(keys, queries)
        keep = lambda b, h, q, kv: kv in range(keys[b]) and q in range(queries[b])
    if draw(st.booleans()):
        return Case(mask, keep, draw(lengths), draw(lengths), 3)
    q_len, kv_len = LONGEST, LONGEST + 1
    both = draw(st.booleans())
    sizes = {"side": "left", "kv_len": kv_len, "q_len": q_len if both else None}
    mask = masks.padding(keys, queries if both else None, **sizes)

    def keep_last(b, h, q, kv):
        kept = kv in range(kv_len)[kv_len - keys[b] :]
        return kept and (not both or q in range(q_len)[q_len - queries[b] :])

    return Case(mask, keep_last, q_len, kv_len, 3)


@case
def shared_prefix(draw):
    groups, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    prefixes, suffixes = ints(draw, 0, 4, groups), ints(draw, 0, 3, groups, width)
    prefixes[0] += 1
    layout = []
    for g in range(groups):
        layout += [(g, "prefix")] * prefixes[g]
        for n in range(width):
            layout += [(g, n)] * suffixes[g, n]
    if groups == 1 and draw(st.booleans()):
        mask = masks.shared_prefix(int(prefixes[0]), suffixes[0])
    else:
        mask = masks.shared_prefix(prefixes, suffixes)

    def keep(b, h, q, kv):
        (group, part), (other, owner) = layout[q], layout[kv]
        return kv <= q and group == other and owner in ("prefix", part)

    return Case(mask, keep, len(layout), len(layout))


def drafted(draw, count):
    """Draw a context before the drafts: the mask's argument, and the length per batch entry."""
    if draw(st.booleans()):
        length = draw(st.integers(0, 6))
        return length, [length]
    context = ints(draw, 0, 6, 2)
    return context, context.tolist()


@case
def tree(draw):
    count = draw(st.integers(1, 10))
    trees = [[draw(st.integers(-1, i - 1)) for i in range(count)] for _ in range(2)]
    context, held = drafted(draw, count)
    parents = torch.tensor(trees)
    if draw(st.booleans()):
        parents, trees = parents[0], [trees[0], trees[0]]
    batch = max(len(held), parents.ndim)

    def keep(b, h, q, kv):
        seen, node = set(), q
        while node >= 0:
            seen.add(node)
            node = trees[b][node]
        own = held[b % len(held)]
        return kv in range(own) or kv - own in seen

    return Case(masks.tree(parents, context), keep, count, max(held) + count, batch)


@case
def tree_from_table(draw):
    count, drafts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    table = bools(draw, 2, count, drafts)
    context, held = drafted(draw, drafts)
    given, batch = (table, 2) if draw(st.booleans()) else (table[0], len(held))

    def keep(b, h, q, kv):
        own = held[b % len(held)]
        if kv < own:
            return True
        return kv < own + drafts and bool((given if given.ndim == 2 else given[b])[q, kv - own])

    return Case(masks.tree_from_table(given, context), keep, count, max(held) + drafts, batch)


@case
def paged(draw):
    size, held = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    pages = 2 * held + draw(st.integers(0, 2))
    table = [draw(st.permutations(range(pages)))[:held] for _ in range(2)]
    if held > 1 and draw(st.booleans()):
        table[1][-1] = -1
    ids = ints(draw, 0, 2, LONGEST)
    inner = draw(st.sampled_from(["mask", "function"]))
    mask = masks.causal() & masks.document(ids)
    own = ints(draw, 0, held * size, 2) if draw(st.booleans()) else None

    def keep(b, h, q, kv):
        for logical, physical in enumerate(table[b]):
            for offset in range(size):
                key = logical * size + offset
                if physical >= 0 and kv == physical * size + offset:
                    there = own is None or key < own[b]
                    return bool(there and key <= q and ids[q] == ids[key])
        return False

    given = mask if inner == "mask" else lambda b, h, q, kv: mask(b, h, q, kv)
    made = masks.paged(given, torch.tensor(table), size, pages, own)
    return Case(made, keep, draw(lengths), pages * size, 2)


@case
def padding_from_mask(draw):
    q_len, kv_len = draw(lengths), draw(lengths)
    rows = draw(st.booleans())
    given = bools(draw, 2, max(q_len, kv_len) if rows else kv_len)
    dtype = draw(
        st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
    )
    tokens = given.tolist()
    keep = lambda b, h, q, kv: tokens[b][kv] and (not rows or tokens[b][q])
    return Case(masks.padding_from_mask(given.to(dtype), rows=rows), keep, q_len, kv_len, 2)


@case
def image_spans(draw):
    length, kv_len = draw(lengths), draw(lengths)
    text = draw(st.sampled_from([0, -1]))
    batched, size = draw(st.booleans()), draw(st.one_of(st.none(), st.integers(1, LONGEST)))
    ids = ints(draw, text, text + 2, *([2, length] if batched else [length]))
    mask = masks.image_spans(ids, text=text, size=size)
    rows = ids.reshape(-1, length).tolist()

    def together(own, q, kv):
        stretch = own[min(q, kv) : max(q, kv) + 1]
        return kv < length and stretch[0] != text and len(set(stretch)) == 1

    def keep(b, h, q, kv):
        first = 0 if size is None else q - size + 1
        return first <= kv <= q or together(rows[b], q, kv)

    return Case(mask, keep, length, kv_len, len(rows))
