"""What a block of scores costs the units of an SM, and how long it takes: predicted, nothing measured.

A variant's own kernel is executed in the emulator for one tile of two lengths; what the longer run
does more is that of its blocks. Units are busy with the instructions that were executed
(`attnkit.emulator.timing.cycles`); the time is that of the event timeline (`attnkit.emulator.timeline`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import AttnkitError, UnsupportedError
from attnkit.jit import emulation
from attnkit.jit.emulation import Timeline, busy
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import Call, Plan, choose
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.targets import SM100, Target, of_template
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns
from attnkit.splice import (
    Lists,
    Program,
    backward_block,
    forward_block,
    run_backward,
    run_forward,
)

SHORT, LONG = 4, 10  # blocks of the two runs: beyond the filling of the pipelines
LISTED = 128  # columns of a Blackwell backward block of one CTA, which two would join


@dataclass(frozen=True)
class Feeds:
    """Clocks of one SM.

    Attributes:
        block: rows and columns of a block of scores.
        head_dim: columns of query, key and value.
        units: for which each unit is busy with a FULL block.
        full, partial: from one FULL, or PARTIAL, block to the next.
        tile: of a tile of rows beside its blocks, where one tile follows another.
        sms: SMs that work on a block together; clocks are of one of them.
        note: what could not be predicted, and why.
    """

    block: tuple[int, int]
    head_dim: int
    units: dict[str, float]
    full: float
    partial: float
    tile: float
    sms: int = 1
    note: str = ""

    @property
    def limit(self) -> str:
        """The unit that is busy longest."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def roofline(self) -> float:
        """How long it is: no order of the instructions is faster."""
        return self.units[self.limit]

    @property
    def cost(self) -> Cost:
        """For a schedule; what is merged is written and read in float32 at 128 bytes a clock."""
        merged = 2 * self.block[0] * self.head_dim * 4 // 128
        return Cost(*(round(x) for x in (self.full, self.partial, self.tile, merged)))

    def __str__(self) -> str:
        rows, columns = self.block
        busiest = sorted(self.units.items(), key=lambda item: -item[1])
        lines = [f"{unit.replace('_', ' '):14} {clocks:6.0f} clocks" for unit, clocks in busiest]
        lines[0] += "   the limit"
        both = f", on {self.sms} SMs" if self.sms > 1 else ""
        over = 100 * (self.full / self.roofline - 1)
        return "\n".join(
            [
                f"a full block of {rows} x {columns} scores, D = {self.head_dim}{both}:",
                *(f"  {line}" for line in lines),
                f"from one full block to the next {self.full:.0f} clocks, {over:+.1f} % of the limit",
                f"from one masked block to the next {self.partial:.0f}, a tile beside them "
                f"{self.tile:.0f}",
                *([f"note: {self.note}"] if self.note else []),
            ]
        )


def forward_feeds(
    variant: Variant,
    target: Target,
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = None,
) -> Feeds:
    """Predict the forward of a variant, for one head.

    Args:
        variant: score_mod and mask.
        target: whose kernel.
        head_dim: of query, key and value.
        dtype: of these.
        block: of the kernel, see `splice.forward_block`; None for that of long sequences where
            little is masked.

    Raises:
        UnsupportedError: there is no such kernel for the variant, or it cannot be emulated here.
    """
    plan = _plan(variant, target, head_dim, dtype)
    if block is None:
        block, _ = forward_block(plan.template, _program(variant), (head_dim, head_dim))
    one = _Forward(plan.template, block, head_dim, dtype)
    return _feeds(one, variant, target)


def backward_feeds(
    variant: Variant,
    target: Target,
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = None,
) -> Feeds:
    """Predict the backward of a variant, its main kernel, for one head.

    A tile is one of kv, its blocks go along q. Arguments and errors are those of `forward_feeds`,
    the block that of `splice.backward_block`; gradients of captured tensors are not computed.
    """
    plan = _plan(variant, target, head_dim, dtype)
    if block is None:
        block = backward_block(plan.template, _program(variant), (head_dim, head_dim))
    if block is None:
        raise UnsupportedError(f"the backward for {target.arch} takes no head dim of {head_dim}")
    return _feeds(_Backward(plan.template, block, head_dim, dtype), variant, target)


def _plan(variant: Variant, target: Target, head_dim: int, dtype: torch.dtype) -> Plan:
    name = str(dtype).removeprefix("torch.")
    modded = variant.score_mod is not None
    call = Call(name, head_dim, head_dim, modded=modded, masked=variant.mask is not None)
    return choose(f"emulate:{target.arch}", device="cpu", call=call)


def _program(variant: Variant) -> Program:
    score, _ = variant.trace(torch.device("cpu"))
    return Program(None if score is None else score.root)


def _feeds(one: _Run, variant: Variant, target: Target) -> Feeds:
    plain = Variant(variant.score_mod)
    short, long = (one.timeline(plain, blocks, FULL) for blocks in (SHORT, LONG))
    before, after = (busy(t.stats, target.arch) for t in (short, long))
    sms = long.stats.ctas  # one CTA each: of one piece of work at a time
    units = {u: (x - before.get(u, 0.0)) / (LONG - SHORT) / sms for u, x in after.items()}
    full = _slope(short, long)
    partial, note = full, ""
    if variant.mask is not None:
        try:
            partial = _slope(*(one.timeline(variant, n, PARTIAL) for n in (SHORT, LONG)))
        except AttnkitError as error:
            note = f"masked blocks are taken to cost what full ones do, as {error}"
    # what is not hidden behind the tile before it
    two = one.timeline(plain, SHORT, FULL, tiles=2)
    tile = max(0.0, two.clocks - short.clocks - SHORT * full)
    return Feeds(one.block, one.head_dim, units, full, partial, tile, sms, note)


def _slope(short: Timeline, long: Timeline) -> float:
    return (long.clocks - short.clocks) / (LONG - SHORT)


@dataclass(frozen=True)
class _Run(ABC):
    """Runs on one CTA.

    Attributes:
        template: whose kernels.
        block: rows and columns of a block.
        head_dim, dtype: of query, key and value.
    """

    template: str
    block: tuple[int, int]
    head_dim: int
    dtype: torch.dtype

    @property
    def listed(self) -> bool:
        """Whether the tiles are block lists."""
        return False

    def timeline(self, variant: Variant, blocks: int, state: int, tiles: int = 1) -> Timeline:
        """The prediction for tiles with so many blocks each, all in one state."""
        rows, columns = self.grid(tiles, blocks)
        lengths = rows * self.block[0], columns * self.block[1], columns * self.block[1]
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn((1, 1, n, self.head_dim), generator=generator).to(self.dtype)
            for n in lengths
        )
        bound = variant.bind(query, key, self.block)
        if bound.program.checked:
            raise UnsupportedError("an index is not proven at these lengths")
        states = torch.full((1, 1, rows, columns), state, dtype=torch.int8)
        runs = BlockRuns.from_states(states, lengths[0], lengths[1], self.block)
        # tiles that are listed are not joined to those of another kernel
        program = dataclasses.replace(bound.program, listed=self.listed)
        captured = (
            bound.score.tensors if bound.score else (),
            bound.mask.tensors if bound.mask else (),
        )
        with torch.no_grad(), emulation.session(timeline=True, ctas=1) as session:
            self.call(variant, program, (query, key, value), captured, runs)
        if not session.ok:
            raise UnsupportedError(f"the kernel faults: {session.reports[0][1]}")
        return max((t for _, t in session.timelines), key=lambda t: t.clocks)

    @abstractmethod
    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        """Rows and columns of blocks."""

    @abstractmethod
    def call(
        self,
        variant: Variant,
        program: Program,
        qkv: tuple[Tensor, Tensor, Tensor],
        captured: Lists,
        runs: BlockRuns,
    ) -> None:
        """Run the kernels."""


class _Forward(_Run):
    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        return tiles, blocks

    def call(
        self,
        variant: Variant,
        program: Program,
        qkv: tuple[Tensor, Tensor, Tensor],
        captured: Lists,
        runs: BlockRuns,
    ) -> None:
        scale = self.head_dim**-0.5
        run_forward(self.template, program, qkv, captured, runs, scale, need_max=False)


class _Backward(_Run):
    @property
    def listed(self) -> bool:
        target = of_template(self.template)
        return self.block[1] == LISTED and target is not None and target.template == SM100.template

    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        return blocks, tiles

    def call(
        self,
        variant: Variant,
        program: Program,
        qkv: tuple[Tensor, Tensor, Tensor],
        captured: Lists,
        runs: BlockRuns,
    ) -> None:
        out, lse = variant(*qkv, backend="eager", return_lse=True)
        saved, wanted = (*qkv, out, lse), [False] * len(captured[0])
        scale = self.head_dim**-0.5
        grads = torch.ones_like(out), None
        run_backward(self.template, program, grads, saved, captured, runs, scale, wanted)
