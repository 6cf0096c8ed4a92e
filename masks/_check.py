"""Check arguments of masks; error messages name the argument, its value and the expected value."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit import ArgumentError, DeviceError, DTypeError, OptionError, ShapeError

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT_MAX = 2**31 - 1


def whole(name: str, value: Any, least: int = 0, most: int = INT_MAX) -> int:
    """Check that `value` is an int from `least` to `most` and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise OptionError(f"{name} must be at least {least}, got {int_text(value)}")
    if value > most:
        raise OptionError(f"{name} must be at most {most}, got {int_text(value)}")
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


def limit(name: str, value: Any) -> int | None:
    """Check that `value` is a nonnegative int, or None for no limit, and return it."""
    if value is None:
        return None
    if isinstance(value, int) and value < 0:
        raise OptionError(
            f"{name} must be at least 0, or None for no limit (FlashAttention's -1), got "
            f"{int_text(value)}"
        )
    return whole(name, value)


def keys_before(name: str, value: Any, size: Any) -> int | None:
    """Return how many keys before the query a window keeps, from exactly one of two arguments.

    Args:
        name: name of the argument `value`.
        value: number of keys before the query; None for no limit, `...` if not given.
        size: number of keys up to and including the query's own; None if not given.

    Returns:
        The number of keys before the query; None for no limit.
    """
    if (value is ...) == (size is None):
        raise ArgumentError(
            f"give {name} (keys before the query) or size (keys with the query's own), got "
            f"{'both' if size is not None else 'neither'}"
        )
    return limit(name, value) if size is None else whole("size", size, least=1) - 1


def sizes(name: str, value: Any, axes: int, least: int = 1) -> tuple[int, ...]:
    """Check one int per axis and return them as a tuple; a single int applies to all axes."""
    if isinstance(value, int):
        return (whole(name, value, least),) * axes
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(
            f"{name} must be an int or a tuple of {axes} ints, got {type(value).__name__}"
        )
    if len(value) != axes:
        raise OptionError(
            f"{name} must have {axes} entries, one per axis, got {text(tuple(value))}"
        )
    return tuple(whole(f"{name}[{axis}]", size, least) for axis, size in enumerate(value))


def grid(name: str, value: Any, most_axes: int = 3) -> tuple[int, ...]:
    """Check that `value` is a grid shape, a tuple of 1 to `most_axes` positive ints; return it."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(f"{name} must be a tuple of ints, got {type(value).__name__}")
    if not 1 <= len(value) <= most_axes:
        raise OptionError(f"{name} must have 1 to {most_axes} axes, got {text(tuple(value))}")
    lengths = sizes(name, value, len(value))
    if math.prod(lengths) > INT_MAX:
        raise OptionError(f"{name} must have at most {INT_MAX} tokens, got {lengths}")
    return lengths


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


def int_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor as `tensor` does, and that its dtype is an integer dtype; return it.

    int64 values outside int32 are not checked here but when the mask is used.
    """
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype not in INTS:
        raise DTypeError(f"{name} must hold integers (torch.int32), got {checked.dtype}")
    return checked


def number_text(value: float) -> str:
    """Return a number as text for a label; "..." in torch.compile, where it may be symbolic."""
    return "..." if torch.compiler.is_dynamo_compiling() else str(value)


def shape_text(value: Tensor) -> str:
    """Return a tensor's shape as text; "[...]" in torch.compile, where lengths are symbolic."""
    return "[...]" if torch.compiler.is_dynamo_compiling() else str(list(value.shape))


def extent(value: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer tensor, with one device read."""
    low, high = torch.stack(torch.aminmax(value)).tolist()
    return int(low), int(high)


def needs_data(name: str, value: Tensor) -> Tensor:
    """Check that a tensor has data (is not meta or fake) and return it.

    Masks that read the tensor when they are built need this.
    """
    if not (torch.compiler.is_dynamo_compiling() or has_data(value)):
        raise ArgumentError(
            f"{name} must have data, because the mask reads it once; got a tensor "
            f"without data ({'meta' if value.is_meta else 'fake'})"
        )
    return value


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors are on the same device."""
    if value.device != other.device:
        raise DeviceError(
            f"{other_name} is on {other.device}, {name} on {value.device}; move one of them"
        )


def total_length(name: str, lengths: Tensor) -> int:
    """Return the sum of nonnegative lengths; raise if it is larger than 2**31 - 1."""
    total = float(lengths.double().sum())  # a sum of int64 may wrap
    if total > INT_MAX:
        raise OptionError(f"{name} must sum to at most {INT_MAX}, got {total:.0f}")
    return int(total)


def at_least(name: str, value: Tensor, least: int) -> Tensor:
    """Check that no entry is below `least`, if the data can be read, and return the tensor."""
    if not has_data(value):
        return value
    low, _ = extent(value)
    if low < least:
        raise OptionError(f"{name} must be at least {least} everywhere, got {low}")
    return value


def per_batch(name: str, value: Any, least: int = 0) -> Tensor:
    """Check that `value` is an integer tensor [B] with no entry below `least` and return it."""
    return at_least(name, int_tensor(name, value, "[B]", (1,)), least)


def float_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor as `tensor` does, and that its dtype is a float dtype; return it."""
    checked = tensor(name, value, shapes, ranks)
    if not checked.dtype.is_floating_point:
        raise DTypeError(f"{name} must hold floats, got {checked.dtype}")
    return checked


def bool_tensor(name: str, value: Any, shapes: str, ranks: Sequence[int]) -> Tensor:
    """Check a tensor as `tensor` does, and that its dtype is torch.bool; return it."""
    checked = tensor(name, value, shapes, ranks)
    if checked.dtype != torch.bool:
        raise DTypeError(f"{name} must be torch.bool, got {checked.dtype}")
    return checked


def own_device(name: str, value: Any) -> torch.device:
    """Check that this machine has the device and return it with its index, such as cuda:0."""
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"{name} must be a device of this machine, such as 'cpu', got {text(value)}: {reason}"
        ) from None
