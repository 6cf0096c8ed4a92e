"""Draw the random bits of attention dropout with torch operators: what every backend must draw.

The bits of element (b, h, q, kv) come from one call of Philox-4x32 with 7 rounds (Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), the fewest that pass all tests
of BigCrush there. Its 16 bytes serve the 16 elements that agree in all bits of q and kv but bits 0
and 3. A GPU thread owns half of such elements both in the accumulator of S, which has rows q, q + 8
and columns kv, kv + 1, kv + 8, and in that of S^T. `docs/tutorials/dropout.md` has the definition for one
element in plain Python.

A call's state is an int64 tensor [2] on the device of the query: seed and offset. Its bits 55 to 62
are the threshold, so that nothing but the tensor is needed to repeat the bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.util.arguments import shown

STEPS = 256  # an element has one random byte, so that probabilities are multiples of 1 / 256
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
THRESHOLD_BIT = 55  # of both words of a state
_SHARED = 9  # bits of q and of kv in which the 16 elements of a call of Philox differ
_UNIT = 16  # consecutive positions to which whole calls of Philox belong
_LOW = 0xFFFFFFFF


def threshold_of(dropout_p: Any) -> int:
    """Return how many of the 256 values of a byte drop an element; 0 without dropout.

    Raises:
        ArgumentError: `dropout_p` is not a number.
        OptionError: it is outside of [0, 1), or so close to 0 or 1 that it would be rounded to it.
    """
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise ArgumentError(f"dropout_p must be a number in [0, 1), got {shown(dropout_p)}")
    compiling = torch.compiler.is_compiling()  # then it may be a symbol, which has no text
    if not 0 <= dropout_p < 1:
        got = "a number outside of it" if compiling else str(dropout_p)
        raise OptionError(f"dropout_p must be in [0, 1), got {got}")
    threshold = math.floor(dropout_p * STEPS + 0.5)
    if dropout_p and not 0 < threshold < STEPS:
        given = "dropout_p" if compiling else f"dropout_p={dropout_p}"
        raise OptionError(
            f"{given} would be rounded to {'0' if dropout_p < 0.5 else '1'}, as attnkit drops "
            f"elements with a probability of n / {STEPS}; expected 0, or a number from 1 / "
            f"{2 * STEPS} to 1 - 1 / {2 * STEPS}"
        )
    return threshold


def draw_state(dropout_p: Any, device: torch.device) -> Tensor | None:
    """Draw the state of a call's dropout from torch's generator of `device`; None for no dropout.

    The draw is one operator on the device. It neither synchronizes nor leaves torch's bookkeeping
    of generators, so that a CUDA graph draws anew in each replay, and checkpointing repeats it.

    Args:
        dropout_p: the probability; it is rounded to a multiple of 1 / 256.
        device: device of the query.

    Returns:
        int64 [2]: seed and offset.

    Raises:
        ArgumentError, OptionError: see `threshold_of`.
        UnsupportedError: torch cannot draw here, as inside of torch.func.vmap.
    """
    threshold = threshold_of(dropout_p)
    if not threshold:
        return None
    low = threshold << THRESHOLD_BIT
    high = min(low + (1 << THRESHOLD_BIT), 2**63 - 1)
    try:
        return torch.randint(low, high, (2,), dtype=torch.int64, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(
            f"dropout_p={dropout_p}: torch cannot draw random numbers on {device} here ({reason}); "
            "call attention outside of the transform, or pass dropout_p=0"
        ) from error


def threshold_in(state: Tensor) -> Tensor:
    """Return the dropout threshold that a random state contains, int64 [], 1 to 255."""
    return state[1] >> THRESHOLD_BIT


def survivor_scale(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / (probability that an element is kept) of a state, a tensor [] of `dtype`."""
    return STEPS / (STEPS - threshold_in(state)).to(dtype)


def kept(
    state: Tensor, b: Tensor, h: Tensor, heads: int, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Return which elements of a rectangle of the score matrices are kept.

    Args:
        state: int64 [2], see `draw_state`.
        b, h: batch elements and query heads, integers that broadcast to [nb, nh].
        heads: number of query heads.
        rows, columns: first position and end of q, and of kv.

    Returns:
        bool [nb, nh, rows, columns].
    """
    calls_q, calls_kv = (_calls(ends, state.device) for ends in (rows, columns))
    matrix = (b.to(torch.int64) * heads + h)[..., None, None]
    seed, offset = state[0], state[1]
    counter = calls_q[:, None], calls_kv, matrix, offset & _LOW
    words = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
    drawn = torch.stack(torch.broadcast_tensors(*words), dim=-1)  # [nb, nh, calls, calls, 4]
    shifts = torch.arange(0, 32, 8, device=state.device)
    below = (drawn[..., None] >> shifts & 255) < threshold_in(state)  # [..., word, byte]
    nb, nh = below.shape[:2]
    # A call has bits 1 and 2 of a position, and its unit of 16. A word has bits 0, a byte bits 3,
    # each as kv, q.
    grid = below.view(nb, nh, len(calls_q) // 4, 4, len(calls_kv) // 4, 4, 2, 2, 2, 2)
    grid = grid.permute(0, 1, 2, 9, 3, 7, 4, 8, 5, 6)
    whole = grid.reshape(nb, nh, 4 * len(calls_q), 4 * len(calls_kv))
    (top, bottom), (left, right) = (
        (first % _UNIT, first % _UNIT + end - first) for first, end in (rows, columns)
    )
    return ~whole[:, :, top:bottom, left:right]


def _calls(ends: tuple[int, int], device: torch.device) -> Tensor:
    """Return the positions of the calls of Philox that cover [first, end), without shared bits."""
    first = ends[0] // _UNIT * _UNIT
    end = max(-(-ends[1] // _UNIT) * _UNIT, first)
    at = torch.arange(first, end, 2, device=device)  # bit 0 is shared
    return at[at & _SHARED == 0]


def philox(counter: tuple[Any, ...], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Compute Philox-4x32 with 7 rounds.

    Args:
        counter: four words, int64 tensors of values below 2^32 that broadcast together.
        key: two words.

    Returns:
        Four random words, int64 tensors of values below 2^32.
    """
    x, (k0, k1) = counter, key
    for i in range(ROUNDS):
        # a product may wrap to a negative int64, of which the lower 64 bits are right
        first, second = x[0] * MULTIPLIERS[0], x[2] * MULTIPLIERS[1]
        y0 = (second >> 32 & _LOW) ^ x[1] ^ (k0 + i * WEYL[0] & _LOW)
        y2 = (first >> 32 & _LOW) ^ x[3] ^ (k1 + i * WEYL[1] & _LOW)
        x = y0, second & _LOW, y2, first & _LOW
    return x
