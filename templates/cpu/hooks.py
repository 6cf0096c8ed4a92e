"""Define the hooks of a variant for this template: its score and mask functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Describes positions in the score tensor [B, Hq, Sq, Skv].

    The fields are int32 tensors that broadcast together.

    Attributes:
        b: batch element.
        h: query head.
        q: query position.
        kv: kv position.
    """

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor


class Hooks(Protocol):
    """Computes the scores, the mask and the score gradients of a variant.

    Scores, gradients and results are float64 if the query is float64, and float32 otherwise. For
    `score`, `dscore` and `captured_grad` the tile has the shapes b [nb, 1, 1, 1], h [1, nh, 1, 1],
    q [1, 1, nq, 1] and kv [1, 1, 1, nkv]. `score` may overwrite `s`, and `dscore` both `s` and
    `grad`; no other argument is changed. A result is valid until the next call of a hook.

    Attributes:
        has_score: False if scores pass through unchanged; `score` and `dscore` are then not called.
        needs_captured_grad: whether `backward` calls `captured_grad`.
        has_softmax: whether a softmax makes the weights of the values; otherwise the modified
            scores are the weights, 0 where masked.
        sink: [Hq], one more logit in the denominator of each row; None for none.
        survivor_scale: 0-d, the factor of weights that dropout keeps; None without dropout. Then
            `survivors` is not called.
        sink_grad: [Hq], to which `backward` adds the gradient of the sink; None to compute none.
    """

    has_score: bool
    needs_captured_grad: bool
    has_softmax: bool
    sink: Tensor | None
    sink_grad: Tensor | None

    @property
    def survivor_scale(self) -> Tensor | None: ...

    def survivors(
        self, b: Tensor, h: Tensor, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        """Return which elements of a rectangle dropout keeps, bool [nb, nh, rows, columns].

        Args:
            b: batch elements, [nb, 1].
            h: query heads, [nh].
            rows, columns: first position and end of q, and of kv.
        """
        ...

    def score(self, s: Tensor, tile: Tile) -> Tensor:
        """Return the modified scores of raw scores `s`, broadcastable to [nb, nh, nq, nkv]."""
        ...

    def keep(self, tile: Tile) -> Tensor:
        """Return the mask, bool, broadcastable to the tile's positions.

        The template calls it only for partial tiles, many at a time. The positions are
        b [1, nb, 1, 1, 1], h [1, 1, nh, 1, 1], q [n, 1, 1, nq, 1] and kv [n, 1, 1, 1, nkv].
        """
        ...

    def dscore(self, s: Tensor, grad: Tensor, tile: Tile) -> Tensor:
        """Return the gradient of the raw scores `s`, broadcastable to [nb, nh, nq, nkv].

        `grad` is the gradient of the modified scores; it is 0 where the mask is false.
        """
        ...

    def captured_grad(self, s: Tensor, grad: Tensor, tile: Tile) -> None:
        """Add the tile's gradients of captured tensors to their sums.

        The arguments are the same as for `dscore`.
        """
        ...
