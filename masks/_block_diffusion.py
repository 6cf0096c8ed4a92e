"""Mask for training block diffusion language models."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._check import whole


@picklable
def block_diffusion(length: int, block: int) -> Mask:
    """Build the training mask of block diffusion, for a noisy copy of a text followed by the text.

    Positions `0 .. length - 1` hold the noisy copy, and positions `length .. 2 * length - 1` hold
    the clean text. Both are split into blocks of `block` tokens. A noisy block sees itself and the
    earlier clean blocks. A clean block sees itself and the earlier clean blocks.

    Args:
        length: tokens of the text; query and kv length are `2 * length`.
        block: tokens per diffusion block.

    Returns:
        The mask, for query and kv length `2 * length`.

    Raises:
        ArgumentError, OptionError: an argument is not a positive int.

    Source: Arriola et al. 2025 (BD3-LM), arXiv:2503.09573, section 3.2 and appendix B.6.

    >>> from attnkit import create_mask
    >>> create_mask(block_diffusion(4, 2), None, None, 8, 8).int()[0, 0]
    tensor([[1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    """
    whole("length", length, least=1)
    whole("block", block, least=1)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_block, kv_block = q % length // block, kv % length // block
        q_clean, kv_clean = q >= length, kv >= length
        itself = (q_block == kv_block) & (q_clean == kv_clean)
        return itself | (kv_clean & (kv_block < q_block))

    return Mask(keep, f"block_diffusion({length}, {block})", lengths=(2 * length,) * 2)
