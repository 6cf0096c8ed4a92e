"""Define `ScoreMod`, a score_mod that declares the shapes of its tables and can be shifted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.tracing.axes import Axes, as_axes, shift_tables
from attnkit.tracing.pickling import Recorded, picklable
from attnkit.tracing.shift import check_shift, checked_label, shift_text, shifted


class ScoreMod(Recorded):
    """Wraps a score_mod with a label and a description of the axes of its tables.

    A `ScoreMod` is itself a score_mod: pass it wherever attnkit or FlexAttention accepts one. The
    functions of `attnkit.mods` return instances.

    Args:
        function: `score_mod(score, b, h, q, kv)`. The score is a float tensor of shape []; the
            other arguments are int32 tensors of shape [] (batch, query head, query position, kv
            position). It returns the new score. It may read captured tensors by index.
        label: text that `repr` returns, for example "alibi(8)"; None for the function's name.
        axes: meaning of the axes of captured tensors, as `attnkit.Axes`. A call with other sizes
            raises a ShapeError.

    Attributes:
        function: the score_mod.
        label: the text that `repr` returns.
        axes: the declared tables.

    Raises:
        ArgumentError: `function` is not callable, `label` is not a string, or `axes` contains
            something other than `Axes`.
        ShapeError: two tables are for different batch sizes or different numbers of heads.

    >>> import torch
    >>> slopes = torch.tensor([0.5, 0.25])
    >>> add = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    >>> ScoreMod(add, "slopes()", axes=[Axes("slopes", slopes, "h")])
    slopes()
    """

    __slots__ = ("axes", "function")

    def __init__(
        self, function: Callable[..., Any], label: str | None = None, *, axes: Sequence[Axes] = ()
    ) -> None:
        if not callable(function):
            raise ArgumentError(
                "score_mod must be a function score_mod(score, b, h, q, kv), got "
                f"{type(function).__name__}"
            )
        self.call = None
        self.function: Callable[..., Any] = function
        self.label: str = checked_label(label, function)
        self.axes: tuple[Axes, ...] = as_axes(
            axes, function.axes if isinstance(function, ScoreMod) else ()
        )

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.function(score, b, h, q, kv)

    @picklable
    def shift(self, q: int | Tensor | None = None, kv: int | Tensor | None = None) -> ScoreMod:
        """Return this score_mod with `q` added to query positions and `kv` added to kv positions.

        The result modifies the score at (q', kv') as this score_mod does at (q' + q, kv' + kv).
        A score_mod that reads positions needs a shift if the queries follow a KV cache, or for one
        chunk of the queries. Negative positions are passed on unchanged. For a shift that changes
        from call to call pass a tensor: each int is a function of its own, which is traced again.

        Args:
            q: shift of the rows: an int of either sign, or an integer tensor of shape [] or [B]
                with one shift per batch entry; None for no shift.
            kv: shift of the columns, in the same forms as `q`.

        Raises:
            ArgumentError: `q` or `kv` has another type or shape.

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
