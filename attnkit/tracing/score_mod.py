"""Define `ScoreMod`, a score_mod that declares its tables and can be shifted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.tracing.axes import Axes, as_axes, shift_tables
from attnkit.tracing.shift import check_shift, checked_label, shift_text, shifted


class ScoreMod:
    """Wraps a score_mod with a label and the meaning of the axes of its tables.

    A `ScoreMod` is itself a score_mod: pass it wherever attnkit or FlexAttention takes one. The
    functions of `attnkit.mods` return one.

    Args:
        function: `score_mod(score, b, h, q, kv)`. The score is a float tensor of shape []; the
            others are int32 tensors of shape [] (batch, query head, query position, kv position).
            Returns the new score. It may read captured tensors by index.
        label: text that `repr` shows, for example "alibi(8)"; the function's name if None.
        axes: what the axes of captured tensors mean, as `attnkit.Axes`. A call with other sizes
            is a ShapeError.

    Attributes:
        function: the score_mod.
        label: the text that `repr` shows.
        axes: the declared tables.

    Raises:
        ArgumentError: function is not callable, or axes are not `Axes`.
        ShapeError: two tables are for different batch sizes or different heads.

    >>> import torch
    >>> slopes = torch.tensor([0.5, 0.25])
    >>> add = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    >>> ScoreMod(add, "slopes()", axes=[Axes("slopes", slopes, "h")])
    slopes()
    """

    __slots__ = ("__weakref__", "axes", "function", "label")

    def __init__(
        self, function: Callable[..., Any], label: str | None = None, *, axes: Sequence[Axes] = ()
    ) -> None:
        if not callable(function):
            raise ArgumentError(
                "score_mod must be a function score_mod(score, b, h, q, kv), got "
                f"{type(function).__name__}"
            )
        self.function = function
        self.label: str = checked_label(label, function)
        self.axes: tuple[Axes, ...] = as_axes(
            axes, function.axes if isinstance(function, ScoreMod) else ()
        )

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.function(score, b, h, q, kv)

    def shift(self, q: int | Tensor | None = None, kv: int | Tensor | None = None) -> ScoreMod:
        """Return this mod moved along the queries or the keys, as `Mask.shift` moves a mask.

        The result treats (q', kv') as this mod treats (q' + q, kv' + kv). A mod that reads
        positions needs it for queries that follow a cache, or for one chunk of the queries. A
        position may become negative; the mod computes with it as it is.

        Args:
            q: shift of the rows: an int of either sign, or an integer tensor of shape [] or [B],
                one shift per batch entry; None to leave the rows as they are.
            kv: shift of the columns, as for `q`.

        Raises:
            ArgumentError: q or kv is something else.

        >>> alibi = ScoreMod(lambda s, b, h, q, kv: s + 0.5 * (kv - q), "alibi()")
        >>> alibi.shift(q=5)  # the queries follow 5 keys of a cache
        alibi().shift(q=5)
        """
        q_shift, kv_shift = check_shift("q", q), check_shift("kv", kv)

        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return self(score, b, h, shifted(q, q_shift, b), shifted(kv, kv_shift, b))

        label = f"{self.label}.shift({shift_text(q_shift, kv_shift)})"
        axes = [table.shifted(q_shift, kv_shift) for table in self.axes]
        axes += shift_tables(q=q_shift, kv=kv_shift)
        return ScoreMod(score_mod, label, axes=axes)

    def __repr__(self) -> str:
        return self.label
