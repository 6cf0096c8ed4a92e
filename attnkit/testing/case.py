"""Describe one attention call by sizes, dtype, strides and a seed, and create its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.runtime.normalization import check_normalization
from attnkit.testing.dropped import survivor_factors
from attnkit.util.arguments import (
    check_dtype,
    check_flag,
    check_scale,
    check_seed,
    check_size,
    check_sizes,
    shown,
)
from attnkit.util.dropout import threshold_of

Shape = tuple[int, int, int, int]


def _contiguous(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    return draw(*shape)


def _transposed(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    b, h, s, d = shape
    return draw(b, s, h, d).transpose(1, 2)


def _columns(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    b, h, s, d = shape
    return draw(b, h, d, s).transpose(2, 3)


def _sliced(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    b, h, s, d = shape
    return draw(b, h + 1, s + 3, d + 2)[:, 1:, 2 : 2 + s, 1 : 1 + d]


def _stepped(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    b, h, s, d = shape
    return draw(b, h, 2 * s, 2 * d)[:, :, ::2, 1::2]


def _expanded(shape: Shape, draw: Callable[..., Tensor]) -> Tensor:
    b, _, s, d = shape
    return draw(b, 1, s, d).expand(shape)


_WIDEST = 1e30  # largest `spread`; for much larger query and key, scores overflow float64
_DRAW = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "columns": _columns,
    "sliced": _sliced,
    "stepped": _stepped,
    "expanded": _expanded,
}

#: Memory layouts of a [B, H, S, D] tensor. contiguous: in this order; transposed: [B, S, H, D];
#: columns: [B, H, D, S]; sliced: the inner part of a larger tensor; stepped: every second row and
#: feature of a larger tensor; expanded: one head shared by all, stride 0.
LAYOUTS = tuple(_DRAW)


@dataclass(frozen=True)
class Case:
    """Describes one attention call: sizes, dtype, strides and the seed of its random tensors.

    Attributes:
        q_len: query length.
        kv_len: kv length.
        batch: batch size of the query.
        heads: query heads.
        kv_heads: heads of key and value, a divisor of `heads`.
        kv_batch: batch size of key and value, 1 or `batch`.
        head_dim: head dim of query and key.
        value_dim: head dim of value.
        dtype: dtype of query, key and value.
        layouts: memory layouts of query, key and value, each one of `LAYOUTS`.
        block: (q, kv) tile sizes to test in addition to the default ones.
        scale: factor on q k^T; 1 / sqrt(head_dim) if None.
        spread: standard deviation of query and key; large values give a peaked softmax.
        sink: whether each head has an attention sink, a random logit.
        normalization: as in `flex_attention`; all but "softmax" take no sink.
        dropout_p: probability of dropping a weight.
        statistics: whether to compare entropies (of a softmax) and column sums too.
        seed: seed of the random numbers.

    Raises:
        ShapeError: a size is below 1, or the sizes are inconsistent.
        OptionError: a layout is unknown, or another field has the wrong type.
        DTypeError: `dtype` is not a dtype that attention supports.

    >>> query, key, value = Case(q_len=5, kv_len=7, heads=2).inputs()
    >>> query.shape, key.shape
    (torch.Size([1, 2, 5, 8]), torch.Size([1, 1, 7, 8]))
    """

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    kv_batch: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    block: tuple[int, int] = (16, 16)
    scale: float | None = None
    spread: float = 1.0
    sink: bool = False
    normalization: str = "softmax"
    dropout_p: float = 0.0
    statistics: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_fields()
        if self.heads % self.kv_heads:
            raise ShapeError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.kv_batch not in (1, self.batch):
            raise ShapeError(f"kv_batch must be 1 or batch={self.batch}, got {self.kv_batch}")
        unknown = [name for name in self.layouts if name not in LAYOUTS]
        if len(self.layouts) != 3 or unknown:
            raise OptionError(
                f"layouts must be three of {', '.join(LAYOUTS)}, got {shown(self.layouts)}"
            )

    def _check_fields(self) -> None:
        """Check the type and range of each field; relations between fields are not checked here.

        Raises:
            OptionError, DTypeError: a field has the wrong type.
            ShapeError: a size is below 1.
        """
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.type == "int" and field.name != "seed":
                if type(size) is int and size < 1:
                    raise ShapeError(f"{field.name} must be at least 1, got {size}")
                check_size(field.name, size)
        check_dtype("dtype", self.dtype)
        if not isinstance(self.block, tuple):
            raise OptionError(f"block must be a (query, kv) pair, got {shown(self.block)}")
        check_sizes("block", self.block)
        check_scale(self.scale, self.head_dim)
        check_seed(self.seed)
        check_flag("sink", self.sink)
        threshold_of(self.dropout_p)
        check_normalization(self.normalization)
        check_flag("statistics", self.statistics)
        if self.sink and self.normalization != "softmax":
            raise OptionError(f"normalization={self.normalization!r} takes no sink")
        if type(self.spread) not in (int, float) or not 0 <= self.spread <= _WIDEST:
            raise OptionError(
                f"spread must be a number from 0 to {_WIDEST:g}, got {shown(self.spread)}"
            )
        if not isinstance(self.layouts, tuple | list):
            raise OptionError(
                f"layouts must be three of {', '.join(LAYOUTS)}, got {shown(self.layouts)}"
            )

    @property
    def kind(self) -> str:
        """Return the normalization, "softmax" for softmax1, which is one with sinks of 0."""
        return "softmax" if self.normalization == "softmax1" else self.normalization

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of the results that are compared, the output first."""
        names: tuple[str, ...] = ("out",)
        if self.kind == "softmax":
            names = ("out", "lse", "max_scores", *(["entropy"] if self.statistics else []))
        return (*names, "column_sums") if self.statistics else names

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of query, key and value."""
        return (
            (self.batch, self.heads, self.q_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, self.value_dim),
        )

    @property
    def dense_shape(self) -> Shape:
        """Return the shape [B, Hq, Sq, Skv] of the scores."""
        return self.batch, self.heads, self.q_len, self.kv_len

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Return random normal query, key and value in the case's layouts; all require grad."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = []
        for shape, layout, std in zip(
            self.shapes, self.layouts, (self.spread, self.spread, 1.0), strict=True
        ):
            t = _DRAW[layout](shape, self._normal(generator, std, device))
            tensors.append(t.detach().requires_grad_())
        return tensors[0], tensors[1], tensors[2]

    def sinks(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the sinks [Hq] of a dense softmax, float32 or float64; None without a sink.

        They are random and require grad; those of softmax1 are zeros, which do not.
        """
        if self.normalization == "softmax1":
            return torch.zeros(self.heads, dtype=self._wide, device=device)
        if not self.sink:
            return None
        generator = torch.Generator().manual_seed(self.seed + 2)
        numbers = 2 * torch.randn(self.heads, generator=generator, dtype=torch.float64)
        return numbers.to(device, self._wide).requires_grad_()

    def survivors(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the factors that dropout gives the softmax, [B, Hq, Sq, Skv]; None without it."""
        if not self.dropout_p:
            return None
        where = torch.device(device)
        return survivor_factors(self.dropout_p, self.dropout_seed, self.dense_shape, where)

    @property
    def dropout_seed(self) -> int:
        """Return the seed of torch's generator before a call with dropout."""
        return self.seed + 3

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def cotangents(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return random gradients of the output [B, Hq, Sq, Dv] and of the LSE [B, Hq, Sq]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.heads, self.q_len)
        out = self._normal(generator, 1.0, device)(*shape, self.value_dim)
        lse = self._normal(generator, 1.0, device)(*shape)
        return out, lse.to(self._wide)

    def cotangent(self, result: str, device: torch.device | str = "cpu") -> Tensor:
        """Return the random gradient of one of the `results`."""
        if result in ("out", "lse"):
            return self.cotangents(device)[result == "lse"]
        generator = torch.Generator().manual_seed(self.seed + 4)
        length = self.kv_len if result == "column_sums" else self.q_len
        shape = self.batch, self.heads, length
        return self._normal(generator, 1.0, device)(*shape).to(self._wide)

    def _normal(
        self, generator: torch.Generator, std: float, device: torch.device | str
    ) -> Callable[..., Tensor]:
        def draw(*shape: int) -> Tensor:
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (numbers * float(std)).to(device, self.dtype)

        return draw

    def __str__(self) -> str:
        q, k, v = self.shapes
        parts = [f"{str(self.dtype).removeprefix('torch.')} q{list(q)} k{list(k)} v{list(v)}"]
        if set(self.layouts) != {"contiguous"}:
            parts.append(f"layouts {'/'.join(self.layouts)}")
        parts.append(f"block {self.block[0]}x{self.block[1]}")
        if self.scale is not None:
            parts.append(f"scale {self.scale:g}")
        if self.sink:
            parts.append("sink")
        if self.normalization != "softmax":
            parts.append(self.normalization)
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p:g}")
        if self.statistics:
            parts.append("statistics")
        return " ".join([*parts, f"spread {self.spread:g} seed {self.seed}"])

    def code(self) -> str:
        """Return the Python expression that creates this case, without default arguments."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"Case({', '.join(shown)})"
