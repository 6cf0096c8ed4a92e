"""Define the compile-time configuration of the Hopper backward for head dims above 256."""

from __future__ import annotations

from dataclasses import dataclass, fields

from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd256_config import HEAD_DIMS, Hd256Config

CTAS = 2  # CTAs that share a work tile, each with half of the columns


@dataclass(frozen=True)
class Hd512Config(Hd256Config):
    """Holds the sizes and switches of the Hopper backward kernel for head dims above 256.

    The attributes are those of `Hd256Config`; head dims may be twice those of `HEAD_DIMS`. The
    kernel supports no fixed order of sums.

    Attributes:
        split_columns: True, which selects the kernel.
    """

    head_dim: int = 512
    head_dim_v: int = 512
    split_columns: bool = True

    @property
    def part(self) -> Hd512PartConfig:
        """Return the configuration of one CTA, which has half of the columns."""
        own = {f.name: getattr(self, f.name) for f in fields(Hd256Config)}
        halves = {"head_dim": self.head_dim // CTAS, "head_dim_v": self.head_dim_v // CTAS}
        return Hd512PartConfig(**(own | halves))

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA."""
        return self.part.smem_bytes

    def problem(self) -> str | None:
        """Return the reason why the config is invalid, or None if it is valid."""
        expected = tuple(CTAS * d for d in HEAD_DIMS)
        if self.head_dim not in expected or self.head_dim_v not in expected:
            return (
                f"head dims of {self.head_dim} and {self.head_dim_v}: expected some of {expected}"
            )
        if not self.split_columns:
            return "split_columns=False with a head dim above 256: expected True"
        if self.sum_order:
            return f"sum_order={self.sum_order!r} with a head dim above 256: expected ''"
        return self.part.problem()


@dataclass(frozen=True)
class Hd512PartConfig(Hd256Config):
    """Holds the sizes and switches of one of the two CTAs, whose head dims are half of the whole."""

    stages = 1  # of dO: the memory of another stage holds the other CTA's S and dP
    delta_share = 1.0 / CTAS  # both CTAs initialise dP, and their sums are added

    @property
    def partial_floats(self) -> int:
        """Floats of S or dP of a q block, for one consumer."""
        return ROWS * self.block_q // 2

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: those of `Hd256Config`, and S and dP of the other CTA."""
        return Hd256Config.smem_bytes.__get__(self) + 2 * 2 * 4 * self.partial_floats
