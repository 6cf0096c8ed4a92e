"""Describe the arguments of a compiled function (tensors, numbers, a stream) as plain values.

Specs are read from files, and `abi` generates Python code from them. Each spec therefore checks its
own fields: only integers and the names in the tables below are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from attnkit.errors import ArgumentError

# Number types of the DSL and their format characters in `struct`.
NUMBERS = {
    "Int8": "b",
    "Uint8": "B",
    "Int16": "h",
    "Uint16": "H",
    "Int32": "i",
    "Uint32": "I",
    "Int64": "q",
    "Uint64": "Q",
    "Float32": "f",
    "Float64": "d",
    "Boolean": "?",
}
_DTYPES = {
    "Float64": "float64",
    "Float32": "float32",
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
    "Int64": "int64",
    "Int32": "int32",
    "Int16": "int16",
    "Int8": "int8",
    "Uint8": "uint8",
    "Uint16": "uint16",
    "Uint32": "uint32",
    "Uint64": "uint64",
    "Boolean": "bool",
}


@dataclass(frozen=True)
class Dim:
    """Describes a dynamic size or stride, whose value each call passes.

    Attributes:
        width: number of bits of the passed value, 32 or 64.
        divisibility: the generated code assumes that the value is a multiple of this number.
    """

    width: int = 32
    divisibility: int = 1

    def __post_init__(self) -> None:
        if self.width not in (32, 64) or not _is_count(self.divisibility):
            raise ArgumentError(f"{self!r}: expected a width of 32 or 64, and a positive divisor")

    def __str__(self) -> str:
        return "n" if self.divisibility == 1 else f"{self.divisibility}n"


Extent: TypeAlias = int | Dim


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor argument.

    Attributes:
        dtype: name of the torch dtype.
        shape, stride: for each axis a compile-time constant or a `Dim`, in elements.
        align: alignment of the address in bytes.
    """

    dtype: str
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    align: int = 1

    def __post_init__(self) -> None:
        extents = (*self.shape, *self.stride)
        if (
            self.dtype not in _DTYPES.values()
            or len(self.shape) != len(self.stride)
            or not all(type(n) is int or isinstance(n, Dim) for n in extents)
            or not _is_count(self.align)
        ):
            raise ArgumentError(
                f"{self!r}: expected a dtype that kernels take, as many sizes as strides, which "
                "are integers or `Dim`, and a positive alignment"
            )

    @property
    def dynamic_shapes_mask(self) -> tuple[bool, ...]:
        """Return for each axis whether its size is dynamic."""
        return tuple(isinstance(n, Dim) for n in self.shape)

    @property
    def dynamic_strides_mask(self) -> tuple[bool, ...]:
        """Return for each axis whether its stride is dynamic."""
        return tuple(isinstance(n, Dim) for n in self.stride)

    def __str__(self) -> str:
        shape, stride = (", ".join(map(str, part)) for part in (self.shape, self.stride))
        return f"{self.dtype} [{shape}] with strides [{stride}], aligned to {self.align} bytes"


@dataclass(frozen=True)
class NumberSpec:
    """Describes a number argument; `kind` is the name of its type in the DSL, such as "Int32"."""

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in NUMBERS:
            raise ArgumentError(f"{self!r}: expected one of {', '.join(NUMBERS)}")


@dataclass(frozen=True)
class StreamSpec:
    """Describes the CUDA stream, which the caller of a kernel does not pass as an argument."""


Spec: TypeAlias = TensorSpec | NumberSpec | StreamSpec


def read_specs(arguments: Sequence[Any], name: str = "argument") -> Iterator[Spec]:
    """Yield the specs of the fake arguments of `cute.compile`; flatten sequences and skip None.

    Raises:
        ArgumentError: an argument is not a fake tensor, a number of the DSL, a sequence of these, a
            stream or None.
    """
    for i, a in enumerate(arguments):
        kind = type(a).__name__
        if a is None:
            continue
        if isinstance(a, list | tuple):
            yield from read_specs(a, f"{name} {i},")
        elif "stream" in kind.lower():
            yield StreamSpec()
        elif hasattr(a, "dynamic_shapes_mask"):
            yield _tensor(a, f"{name} {i}")
        elif kind in NUMBERS:
            yield NumberSpec(kind)
        else:
            raise ArgumentError(
                f"{name} {i} of a kernel is of type {kind}; expected a fake tensor, a number of "
                "the DSL (cutlass.Int32), a list of these, a stream or None. What is constant "
                "belongs in the callable's own state"
            )


def _tensor(fake: Any, name: str) -> TensorSpec:
    """Return the spec of a fake tensor; `name` is its name in error messages."""
    dtype = _DTYPES.get(fake.element_type.__name__)
    if dtype is None:
        raise ArgumentError(f"{name}: torch has no dtype for {fake.element_type.__name__}")
    narrow = 32 if getattr(fake, "_use_32bit_stride", False) else 64
    return TensorSpec(
        dtype,
        _extents(fake.shape, fake.dynamic_shapes_mask, 32),
        _extents(fake.stride, fake.dynamic_strides_mask, narrow),
        int(getattr(fake, "_assumed_align", None) or 1),
    )


def _extents(values: Sequence[Any], dynamic: Sequence[int], width: int) -> tuple[Extent, ...]:
    """Convert sizes or strides of a fake tensor to constants and `Dim`s."""
    # A symbolic integer has its own width; `width` applies to other dynamic values.
    return tuple(
        Dim(int(getattr(n, "width", width)), int(getattr(n, "divisibility", 1))) if d else int(n)
        for n, d in zip(values, dynamic, strict=True)
    )


def dump_spec(spec: Spec) -> dict[str, Any]:
    """Convert a spec to a dict that JSON can store."""
    return {"is": type(spec).__name__, **asdict(spec)}


def load_spec(value: Any) -> Spec:
    """Convert a dict that `dump_spec` returned back to a spec.

    Raises:
        ArgumentError: `value` does not describe a spec.
    """
    try:
        fields = dict(value)
        kind = _KINDS[fields.pop("is")]
        for part in {"shape", "stride"} & fields.keys():
            fields[part] = tuple(Dim(**n) if isinstance(n, dict) else n for n in fields[part])
        return kind(**fields)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{value!r} is not the spec of an argument") from error


_KINDS: dict[Any, type[Spec]] = {c.__name__: c for c in (TensorSpec, NumberSpec, StreamSpec)}


def _is_count(n: object) -> bool:
    """Return whether `n` is a positive int and not a bool."""
    return type(n) is int and n > 0
