"""Define the ranges of query and kv lengths that masks allow, and check the lengths of calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from attnkit.errors import OptionError, ShapeError
from attnkit.util.arguments import shown

Range: TypeAlias = tuple[int, int | None]  # (least, most), None for no upper limit

ANY: Range = (1, None)
_NAMES = ("query length", "kv length")


class Lengths(NamedTuple):
    """Holds the ranges of query and kv lengths that a mask allows.

    Attributes:
        q, kv: (least, most) length, both included; most is None if there is no upper limit.
    """

    q: Range = ANY
    kv: Range = ANY

    def __str__(self) -> str:
        sides = zip(_NAMES, self, strict=True)
        limited = [f"{name} {_shown(limits)}" for name, limits in sides if limits != ANY]
        return ", ".join(limited) or "any lengths"

    def check(self, label: str, q_len: int, kv_len: int) -> None:
        """Raise a ShapeError if the mask named `label` does not allow these lengths.

        Raises:
            ShapeError: the mask was built for other lengths.
        """
        for side, name, limits, got in zip(
            self._fields, _NAMES, self, (q_len, kv_len), strict=True
        ):
            least, most = limits
            if limits == ANY or (got >= least and (most is None or got <= most)):
                continue
            part = f", or use a part of it: mask.shift({side}=first position)"
            raise ShapeError(
                f"the mask {label} was built for {name} {_shown(limits)}, got {got}; build it for "
                f"the lengths that it is used with{part if got < least else ''}"
            )

    def shifted(self, label: str, q: int | None, kv: int | None) -> Lengths:
        """Return the lengths that the mask allows after a shift by `q` rows and `kv` columns.

        A shifted mask is a window that need not reach the end of the original mask, so it allows
        every length from 1 to the number of remaining rows or columns.

        Args:
            label: label of the mask, for messages.
            q, kv: an int of either sign; None to keep the range.

        Raises:
            ShapeError: no row or no column remains.
        """
        ranges = []
        for name, (least, most), by in zip(_NAMES, self, (q, kv), strict=True):
            if by is None:
                ranges.append((least, most))
                continue
            if most is not None and by >= most:
                raise ShapeError(
                    f"the mask {label} was built for {name} {_shown((least, most))}; shifted by "
                    f"{by} nothing is left of it"
                )
            ranges.append((1, None if most is None else most - by))
        return Lengths(*ranges)


def as_lengths(value: Any) -> Lengths:
    """Parse the `lengths` argument of a mask to `Lengths`.

    Args:
        value: None, or a (query, kv) pair. Each entry is None (any length), an int (this length) or
            a pair (least, most), in which most is an int or None.

    Raises:
        OptionError: `value` has another form, or has a length below 1.
    """
    if value is None:
        return Lengths()
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptionError(f"lengths must be a (query, kv) pair or None, got {shown(value)}")
    return Lengths(*(_range(*side) for side in zip(_NAMES, value, strict=True)))


def intersect(masks: Iterable[tuple[str, Lengths]]) -> Lengths:
    """Return the intersection of the lengths that several masks allow.

    Args:
        masks: label and lengths of each mask.

    Raises:
        ShapeError: two masks have no length in common.
    """
    masks = list(masks)
    common = []
    for axis, name in enumerate(_NAMES):
        ranges = [(label, lengths[axis]) for label, lengths in masks]
        low = max(ranges, key=lambda r: r[1][0])
        limited = [r for r in ranges if r[1][1] is not None]
        high = min(limited, key=lambda r: r[1][1] or 0) if limited else low
        least, most = low[1][0], high[1][1]
        if most is not None and most < least:
            raise ShapeError(
                f"{low[0]} was built for {name} {_shown(low[1])} and {high[0]} for "
                f"{_shown(high[1])}: they cannot be combined; build both for the same {name}"
            )
        common.append((least, most))
    return Lengths(*common)


def _range(name: str, entry: Any) -> Range:
    pair = entry if isinstance(entry, tuple | list) else ANY if entry is None else (entry, entry)
    if len(pair) == 2 and _whole(pair[0]) and (pair[1] is None or _whole(pair[1])):
        least, most = pair
        if most is None or least <= most:
            return least, most
    raise OptionError(
        f"the {name} in lengths must be None, a positive int, or (least, most) with "
        f"least <= most, got {shown(entry)}"
    )


def _whole(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1


def _shown(limits: Range) -> str:
    least, most = limits
    if most is None:
        return f"{least} or more"
    if least == most:
        return str(most)
    return f"{most} at most" if least == 1 else f"{least} to {most}"
