"""Translate FlashAttention's options: windows to masks, softcap and slopes to score_mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from attnkit import ArgumentError, Axes, DTypeError, OptionError, ScoreMod, ShapeError, mods
from attnkit.integrations.packed.identity_cache import IdentityCache
from attnkit.util import caches
from attnkit.util.arguments import shown

Function: TypeAlias = Callable[..., Any]
# Keys before and after the query's own place that a row keeps; None for no limit.
Window: TypeAlias = tuple[int | None, int | None]

_score_mods: IdentityCache[Function] = IdentityCache(32)
caches.register(_score_mods.clear)


def read_window(window_size: Any, causal: Any) -> Window:
    """Return the window of a call; a causal call keeps no key after the query's place.

    Args:
        window_size: FlashAttention's (left, right), both included; -1 or None is no limit.
        causal: whether the call is causal.

    Raises:
        ArgumentError: `window_size` is no pair of ints, or `causal` is no bool.
        OptionError: an entry is below -1.
    """
    if not isinstance(causal, bool):
        raise ArgumentError(f"causal must be True or False, got {shown(causal)}")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentError(
            f"window_size must be (left, right), -1 for no limit, got {shown(window_size)}"
        )
    left, right = (_side(side, window_size) for side in window_size)
    return left, 0 if causal else right


def _side(side: Any, window_size: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, int):
        raise ArgumentError(f"window_size must be two ints, got {shown(window_size)}")
    if side < -1:
        raise OptionError(f"window_size must be -1 (no limit) or more, got {shown(window_size)}")
    return None if side == -1 else side


def build_score_mod(
    softcap: Any, alibi_slopes: Any, score_mod: Any, window: Window
) -> Function | None:
    """Return the score_mod of a call: softcap, then ALiBi, then the caller's own; None for none.

    Query positions of the result are places among the keys, at which the window is centred.

    Args:
        softcap: limit on scores; 0 or None for none.
        alibi_slopes: float [H] or [sequences, H], or None: subtract slope * |place - kv|.
        score_mod: the caller's score_mod, or None.
        window: the window of the call.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.
    """
    if score_mod is not None and not callable(score_mod):
        raise ArgumentError(
            "score_mod must be a function score_mod(score, b, h, q, kv) or None, got "
            f"{type(score_mod).__name__}"
        )
    cap = _cap(softcap)
    _check_slopes(alibi_slopes)
    if not cap and alibi_slopes is None:
        return score_mod  # type: ignore[no-any-return]
    # no kept key is after the place of its query: the distance needs no abs
    one_sided = window[1] == 0

    def make() -> Function:
        parts: list[Function] = []
        if cap:
            parts.append(mods.softcap(cap))
        if alibi_slopes is not None:
            own = mods.alibi(alibi_slopes, symmetric=not one_sided)
            axes = Axes("alibi_slopes", alibi_slopes, *("b", "h")[2 - alibi_slopes.ndim :])
            parts.append(ScoreMod(own.function, own.label, axes=[axes]))
        if score_mod is not None:
            parts.append(score_mod)
        return parts[0] if len(parts) == 1 else mods.compose(*parts)

    return _score_mods.get((cap, one_sided), (alibi_slopes, score_mod), make)


def _check_slopes(slopes: Any) -> None:
    """Check what is known without the call; the call compares the sizes."""
    if slopes is None:
        return
    if not isinstance(slopes, Tensor):
        raise ArgumentError(
            f"alibi_slopes must be a tensor [H] or [sequences, H], got {type(slopes).__name__}"
        )
    if slopes.ndim not in (1, 2):
        raise ShapeError(
            f"alibi_slopes must have shape [H] or [sequences, H], got {list(slopes.shape)}"
        )
    if not slopes.is_floating_point():
        raise DTypeError(f"alibi_slopes must hold floats, got {slopes.dtype}")


def _cap(softcap: Any) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise ArgumentError(f"softcap must be a number, 0 for none, got {shown(softcap)}")
    if not 0 <= softcap < float("inf"):
        raise OptionError(f"softcap must be a finite number, 0 for none, got {softcap}")
    return float(softcap)
