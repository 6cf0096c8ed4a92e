"""Find the range of batch sizes, heads and lengths for which a variant can be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.errors import AttnkitError, BoundsError, OptionError, ShapeError
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask
from attnkit.testing.case import Case
from attnkit.testing.examine import bind
from attnkit.tracing.built_for import sizes_for
from attnkit.tracing.mask import Mask
from attnkit.util.arguments import MAX_LENGTH, check_type, shown

Range = tuple[int, int]

LENGTH = 200  # largest length by default: several of the smallest tiles, the last one ragged
BATCH = 3
HEADS = 8


def _range(name: str, given: int | Range) -> Range:
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    whole = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1] <= MAX_LENGTH:
        raise OptionError(
            f"{name} must be a positive int or a range (low, high) of such, at most {MAX_LENGTH}, "
            f"got {shown(given)}"
        )
    return pair[0], pair[1]


@dataclass(frozen=True)
class Limits:
    """Holds the range of each size from which calls are drawn.

    Attributes:
        q_len, kv_len, batch, heads: range (low, high), both included.

    Raises:
        OptionError: a field is not such a range.
    """

    q_len: Range = (1, LENGTH)
    kv_len: Range = (1, LENGTH)
    batch: Range = (1, BATCH)
    heads: Range = (1, HEADS)

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            if isinstance(given, int):
                raise OptionError(f"{name} must be a range (low, high), got {given}")
            _range(name, given)


ANY_SIZE = Limits()


def check_limits(limits: Any) -> Limits:
    """Check that the argument `limits` is a `Limits` and return it.

    Raises:
        ArgumentError: `limits` is not a `Limits`.
    """
    return check_type("limits", limits, Limits, "an attnkit.testing.Limits")


def find_limits(
    variant: Variant,
    device: torch.device,
    *,
    q_len: int | Range | None = None,
    kv_len: int | Range | None = None,
    batch: int | Range | None = None,
    heads: int | Range | None = None,
) -> Limits:
    """Return the sizes to draw from: the given ones, or ranges that the captured tensors allow.

    Args:
        variant: the variant that will be checked.
        device: where the variant will run.
        q_len, kv_len, batch, heads: a size, a range (low, high), or None to find a range.

    Raises:
        OptionError: an argument is neither a size nor a range.
    """
    fixed: dict[str, Range] = {}
    for name, given in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        if given is not None:
            fixed[name] = _range(name, given)
    for name, size in _of_block_mask(variant).items():
        fixed.setdefault(name, (size, size))
    free = vars(ANY_SIZE) | _of_mask(variant) | _of_tables(variant)
    fixed = {n: r for n, r in free.items() if r[0] == r[1]} | fixed
    ranges = {n: fixed.get(n, free[n]) for n in ("q_len", "kv_len", "batch", "heads")}
    for name in ranges:
        if name not in fixed:
            ranges[name] = (ranges[name][0], _largest(variant, device, ranges, fixed, name))
    return Limits(**ranges)


def cut_notes(
    variant: Variant, device: torch.device, limits: Limits, free: Sequence[str]
) -> list[str]:
    """Return a note for each size whose range is below the default because of the variant.

    Args:
        variant: the variant that will be checked.
        device: where the variant will run.
        limits: the result of `find_limits`.
        free: names of the sizes that the caller did not give.
    """
    notes = []
    least = {name: low for name, (low, _) in vars(limits).items()}
    for name in free:
        low, high = getattr(limits, name)
        if low == high or high >= getattr(ANY_SIZE, name)[1]:
            continue
        refused: AttnkitError | None
        try:
            refused = _refusal(variant, device, least | {name: high + 1})
        except ShapeError as error:  # a mask that was built for such lengths
            refused = error
        if refused is not None:
            notes.append(f"{name} is drawn from {low} to {high} only: {refused}")
    return notes


def _of_block_mask(variant: Variant) -> dict[str, int]:
    """Return the sizes that the block mask of `variant` was built for; {} without a block mask."""
    mask = variant.mask
    if not isinstance(mask, BlockMask) and not hasattr(mask, "kv_num_blocks"):
        return {}
    sizes = {"q_len": mask.seq_lengths[0], "kv_len": mask.seq_lengths[1]}
    return sizes | {n: s for n, s in (("batch", mask.shape[0]), ("heads", mask.shape[1])) if s > 1}


def _of_mask(variant: Variant) -> dict[str, Range]:
    """Return ranges of the lengths that the `Mask` of `variant` allows; {} without a `Mask`."""
    if not isinstance(variant.mask, Mask):
        return {}
    ranges = {}
    for name, (least, most) in zip(("q_len", "kv_len"), variant.mask.lengths, strict=True):
        high = max(LENGTH, least)
        ranges[name] = (least, high if most is None else min(high, most))
    return ranges


def _of_tables(variant: Variant) -> dict[str, Range]:
    """Return the batch size and head count that tables declare, as ranges (count, count)."""
    names = {"b": "batch", "h": "heads"}
    sizes = sizes_for(variant.score_mod, variant.mask)
    return {names[size]: (count, count) for size, count in sizes.items()}


def _largest(
    variant: Variant,
    device: torch.device,
    ranges: dict[str, Range],
    fixed: dict[str, Range],
    name: str,
) -> int:
    """Find the largest legal size `name` by bisection, with the smallest of all other sizes."""
    low, high = ranges[name]
    sizes = {n: fixed[n][0] if n in fixed else ranges[n][0] for n in ranges}
    if _legal(variant, device, sizes | {name: high}) or not _legal(variant, device, sizes):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if _legal(variant, device, sizes | {name: middle}):
            low = middle
        else:
            high = middle
    return low


def _legal(variant: Variant, device: torch.device, sizes: dict[str, int]) -> bool:
    return _refusal(variant, device, sizes) is None


def _refusal(
    variant: Variant, device: torch.device, sizes: dict[str, int]
) -> BoundsError | ShapeError | None:
    """Return the error that `variant` raises for the given sizes; None if it allows them."""
    case = Case(sizes["q_len"], sizes["kv_len"], sizes["batch"], sizes["heads"])
    try:
        bind(variant, case, device)
    except (BoundsError, ShapeError) as error:
        return error
    return None
