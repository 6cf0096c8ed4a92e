"""The query and kv lengths that a mask was built for: a range each, joined by intersection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from attnkit.errors import OptionError, ShapeError

Range: TypeAlias = tuple[int, int | None]  # (least, most); None: no limit

ANY: Range = (1, None)
_NAMES = ("query length", "kv length")


class Lengths(NamedTuple):
    """Query and kv lengths that a mask may be used with.

    Attributes:
        q, kv: (least, most), both included; most is None where there is no limit.
    """

    q: Range = ANY
    kv: Range = ANY

    def __str__(self) -> str:
        given = zip(_NAMES, self, strict=True)
        known = [f"{name} {_shown(limits)}" for name, limits in given if limits != ANY]
        return ", ".join(known) or "any lengths"

    def check(self, label: str, q_len: int, kv_len: int) -> None:
        """Lengths at which the mask `label` is used.

        Raises:
            ShapeError: the mask was built for others.
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

    def moved(self, label: str, q: int | None, kv: int | None) -> Lengths:
        """What is left behind the first `q` rows and `kv` columns.

        Any part of that may be used: a window on the mask need not reach to its end.

        Args:
            label: of the mask that is moved.
            q, kv: an int of either sign, None to leave the range as it is.

        Raises:
            ShapeError: nothing is left.
        """
        found = []
        for name, (least, most), by in zip(_NAMES, self, (q, kv), strict=True):
            if by is None:
                found.append((least, most))
                continue
            if most is not None and by >= most:
                raise ShapeError(
                    f"the mask {label} was built for {name} {_shown((least, most))}; shifted by "
                    f"{by} nothing is left of it"
                )
            found.append((1, None if most is None else most - by))
        return Lengths(*found)


def as_lengths(given: Any) -> Lengths:
    """The ranges that a user gave as a (query, kv) pair.

    Args:
        given: None, or a pair whose entries are None (any length), an int (this length) or a
            pair (least, most), most an int or None.

    Raises:
        OptionError: something else, or a length below 1.
    """
    if given is None:
        return Lengths()
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise OptionError(f"lengths must be a (query, kv) pair or None, got {given!r}")
    return Lengths(*(_range(entry, given) for entry in given))


def joined(masks: Iterable[tuple[str, Lengths]]) -> Lengths:
    """The lengths that suit all of some masks.

    Args:
        masks: label and lengths of each.

    Raises:
        ShapeError: no length suits two of them.
    """
    known = list(masks)
    found = []
    for axis, name in enumerate(_NAMES):
        ranges = [(label, lengths[axis]) for label, lengths in known]
        low = max(ranges, key=lambda r: r[1][0])
        limited = [r for r in ranges if r[1][1] is not None]
        high = min(limited, key=lambda r: r[1][1] or 0) if limited else low
        least, most = low[1][0], high[1][1]
        if most is not None and most < least:
            raise ShapeError(
                f"{low[0]} was built for {name} {_shown(low[1])} and {high[0]} for "
                f"{_shown(high[1])}: they cannot be combined; build both for the same {name}"
            )
        found.append((least, most))
    return Lengths(*found)


def _range(entry: Any, given: Any) -> Range:
    pair = entry if isinstance(entry, tuple | list) else ANY if entry is None else (entry, entry)
    if len(pair) == 2 and _whole(pair[0]) and (pair[1] is None or _whole(pair[1])):
        least, most = pair
        if most is None or least <= most:
            return least, most
    raise OptionError(
        f"each of lengths must be None, a positive int, or (least, most), got {given!r}"
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
