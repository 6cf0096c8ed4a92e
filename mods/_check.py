"""Check arguments of mods; error messages name the argument, its value and the expected value."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit import ArgumentError, DeviceError, DTypeError, OptionError, ShapeError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INT_MAX = 2**31 - 1
MOST_DISTANCES = 1 << 24  # largest number of entries of a computed table by distance


def whole(name: str, value: Any, least: int = 0, most: int = INT_MAX) -> int:
    """Check that `value` is an int from `least` to `most` and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value <= most:
        raise OptionError(f"{name} must be an int from {least} to {most}, got {int_text(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Check that `value` is a bool and return it."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {text(value)}")
    return value


def text(value: Any) -> str:
    """Return a short text of any value for an error message, even if its repr raises."""
    try:
        return reprlib.repr(value)
    except Exception:  # an int of thousands of digits, or an error in the caller's own __repr__
        return f"a value of type {type(value).__name__}"


def int_text(value: int) -> str:
    """Return an int as text, or its number of bits if it is too long to print."""
    return str(value) if value.bit_length() < 100 else f"an int of {value.bit_length()} bits"


def has_data(value: Tensor) -> bool:
    """Return whether the data of a tensor can be read (not in torch.compile, not meta or fake)."""
    return not (
        torch.compiler.is_dynamo_compiling()
        or value.is_meta
        or type(value).__name__ == "FakeTensor"
    )


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """Check that `value` is a finite number (above 0 if `positive`) and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{name} must be a number, got {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise OptionError(f"{name} must be finite as a float, got {int_text(value)}")
    if value - value != 0:  # torch.compile knows no math.isfinite of a changing number
        raise OptionError(f"{name} must be finite, got {value}")
    if positive and value <= 0:
        raise OptionError(f"{name} must be greater than 0, got {value}")
    return float(value)


def tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check that `value` is a nonempty dense tensor with a rank in `ranks` and return it.

    `shapes` is the text of the allowed shapes, for error messages.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a tensor {shapes}, got {type(value).__name__}")
    if value.is_nested:
        raise ArgumentError(f"{name} must not be a nested tensor; pass a padded tensor {shapes}")
    if value.layout != torch.strided:
        raise ArgumentError(f"{name} must be dense, got {value.layout}; pass {name}.to_dense()")
    if value.ndim not in ranks:
        raise ShapeError(f"{name} must have shape {shapes}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise ShapeError(f"{name} must not be empty, got shape {tuple(value.shape)}")
    return value


def table(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor as `tensor` does, and that its dtype is one of `FLOATS`; return it."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype not in FLOATS:
        raise DTypeError(f"{name} must hold floats, got {checked.dtype}")
    return checked


def int_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor as `tensor` does, and that its dtype is one of `INTS`; return it."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype not in INTS:
        raise DTypeError(f"{name} must hold integers (torch.int32), got {checked.dtype}")
    return checked


def odd(name: str, value: Tensor, axis: int, shapes: str) -> int:
    """Check that `axis`, which holds distances from -n to n, has an odd size; return the size."""
    size = value.shape[axis]
    if size % 2 == 0:
        raise ShapeError(f"{name} must have shape {shapes}, got {tuple(value.shape)}")
    return size


def extent(value: Tensor) -> tuple[int, int] | None:
    """Return the smallest and the largest value; None if the data cannot be read."""
    if not has_data(value):
        return None
    low, high = torch.stack(torch.aminmax(value)).tolist()
    return int(low), int(high)


def number_text(value: float) -> str:
    """Return a number as text for a label; "..." in torch.compile, where it may be symbolic."""
    return "..." if torch.compiler.is_dynamo_compiling() else str(value)


def shape_text(value: Tensor) -> str:
    """Return a tensor's shape as text; "[...]" in torch.compile, where sizes are symbolic."""
    return "[...]" if torch.compiler.is_dynamo_compiling() else str(list(value.shape))


def own_device(name: str, value: Any) -> torch.device:
    """Check that this machine has the device and return it with its index, such as cuda:0."""
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"{name} must be a device of this machine, such as 'cpu', got {text(value)}: {reason}"
        ) from None
