"""Build masks of neighbourhood attention (NATTEN) on 1D, 2D and 3D grids of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit import ArgumentError, Mask, OptionError, picklable
from attnkit.masks._check import grid, sizes, text
from attnkit.masks._grid import check_tile, coordinates


@picklable
def natten(
    shape: Sequence[int],
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    tile: int | Sequence[int] | None = None,
) -> Mask:
    """Build a neighbourhood attention mask, which keeps the `kernel` nearest keys along each axis.

    The window is centred on the query and shifted inwards at the borders, so that every query sees
    the same number of keys. A window of even size has one more key before the query than after it.
    All parameters have the same meaning as in NATTEN.

    Args:
        shape: shape of the token grid, 1 to 3 axes; query and kv length are its product.
        kernel: number of neighbours along each axis, including the query's own position.
        stride: number of neighbouring queries that share one window (generalised neighbourhood
            attention), 1 to `kernel`.
        dilation: distance between neighbours.
        causal: axes along which only the query's position and earlier positions are kept. There the
            window is truncated at the border instead of shifted.
        tile: tile size of a tiled layout (see `tile_order`); None for row-major tokens. A tiled
            layout places nearby tokens next to each other in the sequence, so that fewer blocks are
            computed.

    Returns:
        The mask, for query and kv length equal to the product of `shape`.

    Raises:
        ArgumentError, OptionError: an argument is not as described, or `kernel * dilation` is
            greater than the length of the axis.

    Source: Hassani et al. 2023 (arXiv:2204.07143), dilation arXiv:2209.15001, causal
    arXiv:2403.04690, stride arXiv:2504.16922.

    >>> from attnkit import create_mask
    >>> create_mask(natten((6,), 3), None, None, 6, 6).int()[0, 0]
    tensor([[1, 1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 1, 1, 1],
            [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    lengths = grid("shape", shape)
    kernels = sizes("kernel", kernel, len(lengths))
    strides = sizes("stride", stride, len(lengths))
    dilations = sizes("dilation", dilation, len(lengths))
    directions = _directions(causal, len(lengths))
    parts = None if tile is None else check_tile(lengths, tile)
    axes = tuple(zip(lengths, kernels, strides, dilations, directions, strict=True))
    for axis, (length, width, step, gap, _) in enumerate(axes):
        if width * gap > length:
            raise OptionError(
                f"kernel * dilation must be at most the length {length} of axis {axis}, got "
                f"{width} * {gap}"
            )
        if step > width:
            raise OptionError(f"stride must be at most kernel, got {step} > {width} on axis {axis}")

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        near = [
            _near(at, key, *axis)
            for at, key, axis in zip(
                coordinates(q, lengths, parts), coordinates(kv, lengths, parts), axes, strict=True
            )
        ]
        kept = near[0]
        for other in near[1:]:
            kept = kept & other
        return kept

    extras = {"stride": stride, "dilation": dilation, "causal": causal, "tile": tile}
    plain = {"stride": 1, "dilation": 1, "causal": False, "tile": None}
    named = [f"{name}={value}" for name, value in extras.items() if value != plain[name]]
    label = f"natten({', '.join([str(lengths), str(kernel), *named])})"
    return Mask(keep, label, lengths=(math.prod(lengths),) * 2)


def _near(
    q: Tensor, kv: Tensor, length: int, kernel: int, stride: int, dilation: int, causal: bool
) -> Tensor:
    """Return whether coordinate `kv` is in the window of coordinate `q` along one axis."""
    if dilation == 1:
        return _in_window(q, kv, length, kernel, stride, causal)
    residue = q % dilation
    members = (length - residue + dilation - 1) // dilation  # positions with the query's residue
    inside = _in_window(q // dilation, kv // dilation, members, kernel, stride, causal)
    return (kv % dilation == residue) & inside


def _in_window(
    q: Tensor, kv: Tensor, length: int | Tensor, kernel: int, stride: int, causal: bool
) -> Tensor:
    # the query whose window all queries of the stride group use
    leader = q if stride == 1 else q // stride * stride + (stride - 1 if causal else stride // 2)
    if causal:
        return (kv <= q) & (_at_most(leader, length - 1) - kv < kernel)
    first = _at_most((leader - kernel // 2).clamp(min=0), length - kernel)
    return (kv >= first) & (kv < first + kernel)


def _at_most(x: Tensor, bound: int | Tensor) -> Tensor:
    return torch.minimum(x, bound) if isinstance(bound, Tensor) else x.clamp(max=bound)


def _directions(causal: bool | Sequence[bool], axes: int) -> tuple[bool, ...]:
    flags = (causal,) * axes if isinstance(causal, bool) else causal
    if not isinstance(flags, Sequence) or not all(isinstance(c, bool) for c in flags):
        raise ArgumentError(f"causal must be a bool or a tuple of bools, got {text(causal)}")
    if len(flags) != axes:
        raise OptionError(
            f"causal must have {axes} entries, one per axis, got {text(tuple(flags))}"
        )
    return tuple(flags)
