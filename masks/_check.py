"""Check arguments of masks; errors name the argument, the value and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit import ArgumentError, DTypeError, OptionError, ShapeError

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INT_MAX = 2**31 - 1


def whole(name: str, value: Any, least: int = 0, most: int = INT_MAX) -> int:
    """Check a Python int from `least` to `most`, and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise OptionError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise OptionError(f"{name} must be at most {most}, got {value}")
    return value


def limit(name: str, value: Any) -> int | None:
    """Check a distance, an int from 0 on or None for no limit, and return it."""
    if value is None:
        return None
    if isinstance(value, int) and value < 0:
        raise OptionError(f"{name} must be at least 0, or None for no limit, got {value}")
    return whole(name, value)


def sizes(name: str, value: Any, axes: int, least: int = 1) -> tuple[int, ...]:
    """Check one int per axis, and return them; a single int stands for all axes."""
    if isinstance(value, int):
        return (whole(name, value, least),) * axes
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(
            f"{name} must be an int or a tuple of {axes} ints, got {type(value).__name__}"
        )
    if len(value) != axes:
        raise OptionError(f"{name} must have {axes} entries, one per axis, got {tuple(value)}")
    return tuple(whole(f"{name}[{axis}]", size, least) for axis, size in enumerate(value))


def grid(name: str, value: Any, most_axes: int = 3) -> tuple[int, ...]:
    """Check the shape of a grid of tokens: a tuple of 1 to `most_axes` positive ints."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(f"{name} must be a tuple of ints, got {type(value).__name__}")
    if not 1 <= len(value) <= most_axes:
        raise OptionError(f"{name} must have 1 to {most_axes} axes, got {tuple(value)}")
    return sizes(name, value, len(value))


def tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check that a value is a nonempty tensor of one of the ranks; `shapes` is for the message."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a tensor {shapes}, got {type(value).__name__}")
    if value.ndim not in ranks:
        raise ShapeError(f"{name} must have shape {shapes}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise ShapeError(f"{name} must not be empty, got shape {tuple(value.shape)}")
    return value


def int_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check an integer tensor; a later check at use covers int64 values that exceed 32 bits."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype not in INTS:
        raise DTypeError(f"{name} must hold integers (torch.int32), got {checked.dtype}")
    return checked


def shape_text(value: Tensor) -> str:
    """Format a tensor's shape for a label; "[...]" in torch.compile, where lengths are symbolic."""
    return "[...]" if torch.compiler.is_dynamo_compiling() else str(list(value.shape))


def extent(value: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value, with one read from the device."""
    low, high = torch.stack(torch.aminmax(value)).tolist()
    return int(low), int(high)


def at_least(name: str, value: Tensor, least: int) -> Tensor:
    """Check that no entry is below `least`; not in torch.compile, which has no data to check."""
    if torch.compiler.is_dynamo_compiling():
        return value
    low, _ = extent(value)
    if low < least:
        raise OptionError(f"{name} must be at least {least} everywhere, got {low}")
    return value


def per_batch(name: str, value: Any, least: int = 0) -> Tensor:
    """Check an integer tensor [B] with no entry below `least`."""
    return at_least(name, int_tensor(name, value, "[B]", (1,)), least)


def bool_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a bool tensor."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype != torch.bool:
        raise DTypeError(f"{name} must be torch.bool, got {checked.dtype}")
    return checked
