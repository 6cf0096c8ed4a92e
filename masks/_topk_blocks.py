"""Mask of key blocks that a router selects for each query block."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import Axes, Mask, ShapeError, picklable
from attnkit.masks._check import int_tensor, shape_text, tensor, whole

MOST_SELECTED = 128  # indices per row, a limit because the comparison is unrolled


@picklable
def topk_blocks(selected: Tensor, q_block: int, kv_block: int) -> Mask:
    """Build a block-sparse mask, which keeps the kv blocks selected for the query's block.

    The query's own block is kept only if it is selected; MoBA always selects it. The mask reads
    `selected` when it is used, so one mask suffices for a router that writes its selection into the
    same tensor at each step. Combine the mask with `causal()` if the model is causal.

    Args:
        selected: int [..., query blocks, K], the selected kv blocks of each query block in any
            order, -1 for an unused entry, K up to 128; or bool [..., query blocks, kv blocks].
            The leading dimensions "..." are absent, [H] or [B, H].
        q_block: queries per block (1 if each query has its own selection).
        kv_block: keys per block.

    Returns:
        The mask, for query lengths up to `q_block` times the number of query blocks.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: NSA (Yuan et al. 2025, arXiv:2502.11089): `q_block=1`; MoBA (Lu et al. 2025,
    arXiv:2502.13189); VSA (Zhang et al. 2025, arXiv:2505.13389): bool, tiles of a video.

    >>> import torch
    >>> from attnkit import create_mask
    >>> selected = torch.tensor([[0, -1], [0, 2]])
    >>> create_mask(topk_blocks(selected, 2, 2), None, None, 4, 6).int()[0, 0]
    tensor([[1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1],
            [1, 1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    return blocks_mask("selected", selected, q_block, kv_block)


def blocks_mask(name: str, selected: Tensor, q_block: int, kv_block: int) -> Mask:
    """Return the mask of `topk_blocks`; error messages call the tensor `selected` by `name`."""
    whole("q_block", q_block, least=1)
    whole("kv_block", kv_block, least=1)
    shapes = "[query blocks, K], [H, query blocks, K] or [B, H, query blocks, K]"
    tensor(name, selected, shapes, (2, 3, 4))
    leading = ("b", "h")[4 - selected.ndim :]
    label = f"topk_blocks({shape_text(selected)}, {q_block}, {kv_block})"
    if selected.dtype == torch.bool:

        def keep_marked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return _row(selected, b, h, q // q_block)[kv // kv_block]

        marked = Axes(name, selected, *leading, ("q", q_block), ("kv", kv_block))
        return Mask(keep_marked, label, axes=[marked])
    count = int_tensor(name, selected, shapes, (2, 3, 4)).shape[-1]
    if count > MOST_SELECTED:
        raise ShapeError(
            f"{name} must have at most {MOST_SELECTED} indices per query block, got {count}; "
            "give a bool tensor [..., query blocks, kv blocks] instead"
        )

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (_row(selected, b, h, q // q_block) == kv // kv_block).any(-1)

    return Mask(keep, label, axes=[Axes(name, selected, *leading, ("q", q_block), None)])


def _row(selected: Tensor, b: Tensor, h: Tensor, block: Tensor) -> Tensor:
    """Return the selection of query block `block`, a tensor [K] or [kv blocks]."""
    if selected.ndim == 2:
        return selected[block]
    return selected[h, block] if selected.ndim == 3 else selected[b, h, block]
