"""Build score_mods that add a learned bias by relative position."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, ScoreMod, picklable
from attnkit.mods._check import odd, shape_text, table


@picklable
def relative_bias(bias: Tensor) -> ScoreMod:
    """Build a score_mod that adds `bias[h, W + clamp(kv - q, -W, W)]` to the score.

    The first axis is the heads. For an nn.Embedding weight [2 * W + 1, H], pass
    `relative_bias(weight.T)`. Queries that follow a cache need `.shift(q=...)`.

    Args:
        bias: float [H, 2 * W + 1], learned; entry W is for `kv == q`.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `bias` is not a float tensor of that shape.

    Source: Shaw et al. 2018, arXiv:1803.02155, as a bias per head.

    >>> import torch
    >>> q, kv = torch.arange(4)[:, None], torch.arange(4)
    >>> bias = torch.tensor([[-1.0, 0.0, 1.0]])
    >>> relative_bias(bias)(torch.zeros(4, 4), 0, torch.tensor(0), q, kv)
    tensor([[ 0.,  1.,  1.,  1.],
            [-1.,  0.,  1.,  1.],
            [-1., -1.,  0.,  1.],
            [-1., -1., -1.,  0.]])
    """
    shapes = "[H, 2 * W + 1]"
    reach = odd("bias", table("bias", bias, shapes, (2,)), 1, shapes) // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + bias[h, (kv - q).clamp(-reach, reach) + reach]

    label = f"relative_bias({shape_text(bias)})"
    return ScoreMod(score_mod, label, axes=[Axes("bias", bias, "h", None)])


@picklable
def bias_2d(bias: Tensor) -> ScoreMod:
    """Build a score_mod that adds a learned bias by relative position on an R x C grid of tokens.

    The bias is `bias[h, R - 1 + row(q) - row(kv), C - 1 + column(q) - column(kv)]`. Swin stores the
    same numbers as [(2 * R - 1) * (2 * C - 1), H]; pass
    `relative_position_bias_table.view(2 * R - 1, 2 * C - 1, H).permute(2, 0, 1)`.

    Args:
        bias: float [H, 2 * R - 1, 2 * C - 1], learned. Tokens must be in row-major order, and query
            and kv length at most R * C.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `bias` is not a float tensor of that shape.

    Source: Liu et al. 2021 (Swin), arXiv:2103.14030, section 3.2.

    >>> import torch
    >>> q, kv = torch.arange(4)[:, None], torch.arange(4)
    >>> bias = torch.arange(9.0).reshape(1, 3, 3)
    >>> bias_2d(bias)(torch.zeros(4, 4), 0, torch.tensor(0), q, kv)
    tensor([[4., 3., 1., 0.],
            [5., 4., 2., 1.],
            [7., 6., 4., 3.],
            [8., 7., 5., 4.]])
    """
    shapes = "[H, 2 * R - 1, 2 * C - 1]"
    table("bias", bias, shapes, (3,))
    rows, columns = ((odd("bias", bias, axis, shapes) + 1) // 2 for axis in (1, 2))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        down = q // columns - kv // columns + (rows - 1)
        across = q % columns - kv % columns + (columns - 1)
        return score + bias[h, down, across]

    axes = [Axes("bias", bias, "h", None, None), Axes("R * C", rows * columns, "len")]
    return ScoreMod(score_mod, f"bias_2d({shape_text(bias)})", axes=axes)
