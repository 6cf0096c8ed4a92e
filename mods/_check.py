"""Check arguments of mods; errors name the argument, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit import ArgumentError, DTypeError, OptionError, ShapeError

# score_mod(score, b, h, q, kv): float and four int32 scalars in, a float out.
ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INT_MAX = 2**31 - 1


def whole(name: str, value: Any, least: int = 0) -> int:
    """Check a Python int, at least `least`, and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value <= INT_MAX:
        raise OptionError(f"{name} must be an int from {least} to {INT_MAX}, got {value}")
    return value


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """Check a finite Python number, greater than 0 if `positive`, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise OptionError(f"{name} must be finite, got {value}")
    if positive and value <= 0:
        raise OptionError(f"{name} must be greater than 0, got {value}")
    return float(value)


def tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check that a value is a nonempty tensor of one of the ranks; `shapes` is for the message."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a tensor {shapes}, got {type(value).__name__}")
    if value.ndim not in ranks:
        raise ShapeError(f"{name} must have shape {shapes}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise ShapeError(f"{name} must not be empty, got shape {tuple(value.shape)}")
    return value


def table(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor of floats."""
    checked = tensor(name, value, shapes, ranks)
    if not checked.dtype.is_floating_point:
        raise DTypeError(f"{name} must hold floats, got {checked.dtype}")
    return checked


def int_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor of integers."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype not in INTS:
        raise DTypeError(f"{name} must hold integers (torch.int32), got {checked.dtype}")
    return checked


def odd(name: str, value: Tensor, axis: int, shapes: str) -> int:
    """Check that the axis of distances -n .. n has an odd size, and return the size."""
    size = value.shape[axis]
    if size % 2 == 0:
        raise ShapeError(f"{name} must have shape {shapes}, got {tuple(value.shape)}")
    return size
