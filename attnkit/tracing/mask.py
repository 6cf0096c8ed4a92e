"""Define `Mask`, a mask_mod with operators: `causal() & sliding_window(1024) | prefix(128)`.

A mask is a function `mask_mod(b, h, q, kv)` that returns True for the scores that attention keeps.
`Mask` adds boolean operators. Building or combining masks is cheap: attention traces the mask and
classifies its tiles at its first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, FunctionError, OptionError
from attnkit.tracing.axes import Axes, as_axes, joined, shift_tables
from attnkit.tracing.mask_lengths import Lengths, as_lengths, intersect
from attnkit.tracing.pickling import Recorded, picklable
from attnkit.tracing.shift import check_shift, checked_label, may_precede, shift_text, shifted
from attnkit.util.arguments import index_instead, shown

MaskMod: TypeAlias = Callable[..., Any]
Frame: TypeAlias = Literal["", "common", "separate"]

_SIGNS = {"and": "&", "or": "|", "xor": "^"}


class Mask(Recorded):
    """Wraps a mask_mod so that it combines with other masks by `&`, `|`, `^` and `~`.

    A `Mask` is itself a mask_mod: pass it wherever attnkit or FlexAttention accepts one. One of the
    two operands of an operator may be a plain function.

    Args:
        function: `mask_mod(b, h, q, kv)`. Each argument is an int32 tensor of shape [] (batch,
            query head, query position and kv position); the function returns a bool tensor of shape
            [], True where attention keeps the score. It may read captured tensors by index.
        label: text that `repr` returns, for example "causal()"; None for the function's name.
        lengths: (query length, kv length) that the mask was built for; None for any lengths. Each
            entry is an int, None for any length, or a (least, most) pair, in which most may be
            None. Using the mask at other lengths raises a ShapeError.
        axes: meaning of the axes of captured tensors, as `attnkit.Axes`. A call with other sizes
            raises a ShapeError.
        frame: "common" if the mask compares query positions with key positions; "separate" if
            queries and keys are packed at different offsets, so that their positions are not
            comparable; "" if neither applies. The operators reject a combination of "common" and
            "separate". A shifted mask has frame "".

    Attributes:
        function: the mask_mod; None for a combination of masks.
        label: the text that `repr` returns.
        lengths: the query and kv lengths that the mask allows; for a combination, the lengths that
            all its parts allow.
        axes: the declared tables; for a combination, the tables of all its parts.
        frame: see the argument; for a combination, the frame of its parts.
        op: "" for a plain mask; "and", "or", "xor" or "not" for a combination.
        parts: the masks that `op` combines.

    Raises:
        ArgumentError: `function` is not callable, `label` is not a string, or `axes` contains
            something other than `Axes`.
        OptionError: `lengths` is malformed or has a length below 1, `frame` is unknown, or an
            operator combines "common" with "separate".
        ShapeError: an operator combines masks that have no length in common, or whose tables are
            for different batch sizes or different numbers of heads.

    >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
    >>> causal & (lambda b, h, q, kv: q - kv < 1024)
    causal() & <lambda>
    >>> ~causal | Mask(lambda b, h, q, kv: kv < 128, "prefix(128)")
    ~causal() | prefix(128)
    """

    __slots__ = ("axes", "frame", "function", "lengths", "op", "parts")

    def __init__(
        self,
        function: MaskMod,
        label: str | None = None,
        *,
        lengths: Any = None,
        axes: Sequence[Axes] = (),
        frame: Frame = "",
    ) -> None:
        if not callable(function):
            raise FunctionError(
                f"a mask must be a function mask_mod(b, h, q, kv), got {type(function).__name__}"
                f"{index_instead(function)}"
            )
        self.call = None
        self.function: MaskMod | None = function
        self.label: str = checked_label(label, function)
        self.op = ""
        self.parts: tuple[Mask, ...] = ()
        inner = function if isinstance(function, Mask) else None
        own = as_lengths(lengths)
        self.lengths: Lengths = own if inner is None or lengths is not None else inner.lengths
        self.axes: tuple[Axes, ...] = as_axes(axes, () if inner is None else inner.axes)
        self.frame: Frame = _checked_frame(frame) or ("" if inner is None else inner.frame)

    @classmethod
    def _join(cls, op: str, *parts: Any) -> Mask:
        masks = tuple(p if isinstance(p, Mask) else Mask(p) for p in parts)
        common = _common(masks)
        if op != "not":  # `a | b | c` has three parts: nested parts would exceed Python's stack
            masks = tuple(x for m in masks for x in (m.parts if m.op == op else (m,)))
        whole = cls.__new__(cls)
        whole.call, whole.function, whole.op, whole.parts = None, None, op, masks
        labels = [f"({m.label})" if m.op not in ("", "not", op) else m.label for m in masks]
        whole.label = f"~{labels[0]}" if op == "not" else f" {_SIGNS[op]} ".join(labels)
        whole.lengths = common
        whole.axes = joined([m.axes for m in masks])
        whole.frame = _common_frame(masks)
        return whole

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if self.function is not None:
            return self.function(b, h, q, kv)
        values = [part(b, h, q, kv) for part in self.parts]
        if self.op == "not":
            return ~values[0] if not isinstance(values[0], bool) else not values[0]
        result = values[0]
        for value in values[1:]:
            if self.op == "and":
                result = result & value
            elif self.op == "or":
                result = result | value
            else:
                result = result ^ value
        return result

    def __and__(self, other: MaskMod) -> Mask:
        return Mask._join("and", self, other)

    def __rand__(self, other: MaskMod) -> Mask:
        return Mask._join("and", other, self)

    def __or__(self, other: MaskMod) -> Mask:
        return Mask._join("or", self, other)

    def __ror__(self, other: MaskMod) -> Mask:
        return Mask._join("or", other, self)

    def __xor__(self, other: MaskMod) -> Mask:
        return Mask._join("xor", self, other)

    def __rxor__(self, other: MaskMod) -> Mask:
        return Mask._join("xor", other, self)

    def __invert__(self) -> Mask:
        return self.parts[0] if self.op == "not" else Mask._join("not", self)

    @picklable
    def shift(self, q: int | Tensor | None = None, kv: int | Tensor | None = None) -> Mask:
        """Return this mask with `q` added to query positions and `kv` added to kv positions.

        The result keeps (q', kv') where this mask keeps (q' + q, kv' + kv), so row 0 of the result
        is row `q` of this mask. Positions before row 0 or column 0 of this mask are masked. The
        result is a window on this mask, for example for one chunk of the queries. It accepts any
        number of the remaining rows and columns, also after a shift by 0. For a shift that changes
        from call to call pass a tensor: each int is a mask of its own, which is traced again.

        Args:
            q: shift of the rows: an int of either sign, or an integer tensor of shape [] or [B]
                with one shift per batch entry; None for no shift.
            kv: shift of the columns, in the same forms as `q`. The values of a tensor may change
                between calls, so the result accepts any length along an axis shifted by a tensor.

        Raises:
            ArgumentError: `q` or `kv` has another type or shape.
            ShapeError: the mask was built for fixed lengths, and the shift leaves no row or column.

        >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
        >>> causal.shift(q=5)  # the queries follow 5 keys of a cache
        causal().shift(q=5)
        """
        q_shift, kv_shift = check_shift("q", q), check_shift("kv", kv)
        lengths = _shifted_lengths(self, q_shift, kv_shift)

        def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
            row, column = shifted(q, q_shift, b), shifted(kv, kv_shift, b)
            kept = self(b, h, row, column)
            for position, by in ((row, q_shift), (column, kv_shift)):
                kept = (position >= 0) & kept if may_precede(by) else kept
            return kept

        inner = f"({self.label})" if self.op else self.label
        label = f"{inner}.shift({shift_text(q_shift, kv_shift)})"
        axes = [table.shifted(q_shift, kv_shift) for table in self.axes]
        axes += shift_tables(q=q_shift, kv=kv_shift)
        return Mask(keep, label, lengths=lengths, axes=axes)

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo."):
            return True  # torch 2.11 tests the truth of every object that a compiled function calls
        raise ArgumentError(
            f"the mask {self.label} has no truth value; combine masks with `&`, `|`, `~`, not with "
            "`and`, `or`, `not`, and compare with `is None`"
        )

    def __repr__(self) -> str:
        return self.label


def and_masks(*mask_mods: MaskMod) -> Mask:
    """Return the intersection of masks: keep a score if every mask keeps it.

    Without arguments the result keeps all scores.

    Args:
        mask_mods: masks or plain mask_mod functions.

    Raises:
        ArgumentError: an argument is not callable.
        ShapeError: the masks have no length in common.
    """
    return Mask._join("and", *mask_mods) if mask_mods else Mask(noop_mask)


def or_masks(*mask_mods: MaskMod) -> Mask:
    """Return the union of masks: keep a score if any mask keeps it.

    Without arguments the result keeps no score.

    Args:
        mask_mods: masks or plain mask_mod functions.

    Raises:
        ArgumentError: an argument is not callable.
        ShapeError: the masks have no length in common.
    """
    return Mask._join("or", *mask_mods) if mask_mods else ~Mask(noop_mask)


@picklable
def per_head(masks: Sequence[MaskMod]) -> Mask:
    """Return a mask that applies `masks[h]` to query head h.

    Attention with another number of query heads raises a ShapeError.

    Args:
        masks: one mask or mask_mod per query head; the list may repeat a mask.

    Raises:
        ArgumentError: `masks` is empty, or is not a sequence of callables.
        ShapeError: the masks have no length in common.

    >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
    >>> per_head([causal, noop_mask])
    per_head([causal(), noop_mask])
    """
    return _per("head", masks)


@picklable
def per_batch(masks: Sequence[MaskMod]) -> Mask:
    """Return a mask that applies `masks[b]` to batch entry b.

    Attention with another batch size raises a ShapeError.

    Args:
        masks: one mask or mask_mod per batch entry; the list may repeat a mask.

    Raises:
        ArgumentError: `masks` is empty, or is not a sequence of callables.
        ShapeError: the masks have no length in common.

    >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
    >>> per_batch([causal, noop_mask])
    per_batch([causal(), noop_mask])
    """
    return _per("batch", masks)


def _per(what: str, masks: Sequence[MaskMod]) -> Mask:
    if not isinstance(masks, Sequence) or not masks:
        raise ArgumentError(
            f"per_{what} takes one mask per {'head' if what == 'head' else 'batch entry'} in a "
            f"list, got {shown(masks)}"
        )
    different = {id(m): m if isinstance(m, Mask) else Mask(m) for m in masks}
    place = {key: i for i, key in enumerate(different)}
    choice = [place[id(m)] for m in masks]
    options = tuple(different.values())
    # The choice is a captured tensor on each device in use, not arithmetic on h, so that an index
    # beyond the masks raises the same error as any other out-of-bounds index.
    tables: dict[str, Tensor] = {}

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = h if what == "head" else b
        device = getattr(at, "device", None)
        table = tables.get(str(device))
        if table is None and torch.compiler.is_dynamo_compiling():
            table = torch.tensor(choice, dtype=torch.int32, device=device)
        elif table is None:
            with torch.inference_mode(False):
                table = tables[str(device)] = torch.tensor(choice, dtype=torch.int32, device=device)
        chosen = table[at]
        *others, last = (option(b, h, q, kv) for option in options)
        if not others:
            return (chosen == 0) & last
        kept = last
        for i in reversed(range(len(others))):
            kept = torch.where(chosen == i, others[i], kept)
        return kept

    labels = [different[id(m)].label for m in masks]
    axes = [Axes("the number of masks", len(masks), "h" if what == "head" else "b")]
    axes += [table for option in options for table in option.axes]
    label = f"per_{what}([{', '.join(labels)}])"
    frame = _common_frame(options)
    return Mask(keep, label, lengths=_common(options), axes=axes, frame=frame)


def _common(masks: Sequence[Mask]) -> Lengths:
    return intersect((m.label, m.lengths) for m in masks)


def _checked_frame(frame: Any) -> Frame:
    if not isinstance(frame, str) or frame not in ("", "common", "separate"):
        raise OptionError(f'frame must be "", "common" or "separate", got {shown(frame)}')
    return frame  # type: ignore[return-value]


def _common_frame(masks: Sequence[Mask]) -> Frame:
    """Return the frame of a combination of masks: that of any part whose frame is not "".

    Raises:
        OptionError: one mask has the frame "common" and another "separate".
    """
    first = {m.frame: m.label for m in reversed(masks)}
    if "common" in first and "separate" in first:
        raise OptionError(
            f"{first['common']} compares the positions of queries and keys, but "
            f"{first['separate']} packs them at different offsets, so the combination is "
            "ambiguous; pass the mask as within=... to the mask of documents, which applies it "
            'inside of each document, with align="bottom-right" as FlashAttention does'
        )
    if "separate" in first:
        return "separate"
    return "common" if "common" in first else ""


def _shifted_lengths(mask: Mask, q: int | Tensor | None, kv: int | Tensor | None) -> Lengths:
    """Return the lengths that a shifted mask allows: any length on an axis shifted by a tensor."""
    ints = [None if isinstance(by, Tensor) else by for by in (q, kv)]
    limited = mask.lengths.shifted(mask.label, *ints)
    free = Lengths()
    return Lengths(
        free.q if isinstance(q, Tensor) else limited.q,
        free.kv if isinstance(kv, Tensor) else limited.kv,
    )


def noop_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep every score. This is the mask_mod of attention without a mask.

    Returns:
        A bool tensor of shape []; True where `b` is a number.
    """
    return b.new_ones((), dtype=torch.bool) if hasattr(b, "new_ones") else True
