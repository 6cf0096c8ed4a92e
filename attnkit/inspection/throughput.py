"""Predict how long a block of scores takes on an SM, and how long each unit is busy with it.

Nothing is measured. The emulator executes the variant's kernel for a tile with few blocks and for a
tile with more blocks. The difference is the cost of the additional blocks. The clocks of a unit are
counted from the instructions that were executed (`attnkit.emulator.timing.cycles`). The time is
taken from the event timeline (`attnkit.emulator.timing.timeline`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnkit.codegen.score_form import adds_only_slope
from attnkit.errors import AttnkitError, UnsupportedError
from attnkit.jit import emulation
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import Call, Plan, choose
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.targets import SM100, Target, of_template
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns
from attnkit.splice import (
    BackwardInputs,
    Captured,
    ForwardInputs,
    KernelCall,
    Program,
    run_backward,
    run_forward,
)
from attnkit.splice.backward import backward_block, backward_column_parts
from attnkit.splice.distance_calls import with_tables
from attnkit.splice.forward import forward_block

if TYPE_CHECKING:
    from attnkit.jit.emulator_runs import Timeline

SHORT, LONG = 4, 10  # blocks of the two emulated tiles: enough to fill the pipelines
LISTED = 128  # columns of a Blackwell backward block of one CTA; a pair of CTAs would join two


@dataclass(frozen=True)
class BlockClocks:
    """Holds the predicted clocks of an SM for a block of scores, as in FlashAttention-4's tables.

    Attributes:
        block: rows and columns of a block of scores.
        head_dim: head dim of query, key and value.
        units: clocks for which each unit is busy with a FULL block.
        full, partial: clocks from one FULL, or PARTIAL, block to the next.
        tile: clocks that a tile adds to those of its blocks, if it follows another tile.
        sms: number of SMs that work on a block together. All clocks are clocks of one SM.
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
        """Return the name of the unit that is busy longest."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def roofline(self) -> float:
        """Return the clocks of the busiest unit, a lower bound for any order of instructions."""
        return self.units[self.limit]

    @property
    def cost(self) -> Cost:
        """Return the cost model that `attnkit.schedule` takes.

        `merge` assumes that partial results are written and read in float32 at 128 bytes a clock.
        """
        merge = 2 * self.block[0] * self.head_dim * 4 // 128
        return Cost(*(round(x) for x in (self.full, self.partial, self.tile, merge)))

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
                f"from one full block to the next {self.full:.0f} clocks, "
                f"{over:+.1f} % of the limit",
                f"from one masked block to the next {self.partial:.0f}, a tile beside them "
                f"{self.tile:.0f}",
                *([f"note: {self.note}"] if self.note else []),
            ]
        )


def forward_block_clocks(
    variant: Variant,
    target: Target,
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = None,
    tables: bool = True,
) -> BlockClocks:
    """Predict the clocks of a variant's forward kernel, for one head.

    Args:
        variant: score_mod and mask.
        target: architecture of the kernel.
        head_dim: of query, key and value.
        dtype: of query, key and value.
        block: rows and columns of the kernel's blocks, see `splice.forward.forward_block`; None for
            the blocks that are chosen for long sequences with few masked blocks.
        tables: whether expressions of q - kv are tables, as they are for long sequences.

    Raises:
        UnsupportedError: there is no such kernel for the variant, or it cannot be emulated here.
    """
    plan = _plan(variant, target, head_dim, dtype)
    if block is None:
        block, _ = forward_block(plan.template, _program(variant, tables), (head_dim, head_dim))
    return _block_clocks(_Forward(plan.template, block, head_dim, dtype, tables), variant, target)


def backward_block_clocks(
    variant: Variant,
    target: Target,
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = None,
    tables: bool = True,
) -> BlockClocks:
    """Predict the clocks of the main kernel of a variant's backward, for one head.

    A tile is a kv tile here, with blocks along q. Gradients of captured tensors are not computed.

    Args:
        variant, target, head_dim, dtype: see `forward_block_clocks`.
        block: rows and columns of the kernel's blocks, see `splice.backward.backward_block`; None
            for the blocks that it chooses without the mask's tiles.
        tables: see `forward_block_clocks`.

    Raises:
        UnsupportedError: there is no such kernel for the variant, or it cannot be emulated here.
    """
    plan = _plan(variant, target, head_dim, dtype)
    if block is None:
        block = backward_block(plan.template, _program(variant, tables), (head_dim, head_dim))
    if block is None:
        raise UnsupportedError(f"the backward for {target.arch} takes no head dim of {head_dim}")
    return _block_clocks(_Backward(plan.template, block, head_dim, dtype, tables), variant, target)


def _plan(variant: Variant, target: Target, head_dim: int, dtype: torch.dtype) -> Plan:
    """Return the plan of a variant for the emulated kernel of `target`."""
    name = str(dtype).removeprefix("torch.")
    score = _program(variant, False).score
    call = Call(
        name,
        head_dim,
        head_dim,
        modded=score is not None,
        only_slope=adds_only_slope(score),
        masked=variant.mask is not None,
    )
    return choose(f"emulate:{target.arch}", device="cpu", call=call)


def _program(variant: Variant, tables: bool) -> Program:
    score, _ = variant.trace(torch.device("cpu"))
    program = Program(None if score is None else score.root)
    return with_tables(program) if tables else program


def _block_clocks(run: _Run, variant: Variant, target: Target) -> BlockClocks:
    """Predict clocks from the timelines of a short tile, a long tile, and two short tiles."""
    from attnkit.jit.emulator_runs import busy

    plain = Variant(variant.score_mod)
    short, long = (run.timeline(plain, blocks, FULL) for blocks in (SHORT, LONG))
    before, after = (busy(t.stats, target.arch) for t in (short, long))
    sms = long.stats.ctas  # each SM runs one CTA
    units = {u: (x - before.get(u, 0.0)) / (LONG - SHORT) / sms for u, x in after.items()}
    full = _slope(short, long)
    partial, note = full, ""
    if variant.mask is not None:
        try:
            partial = _slope(*(run.timeline(variant, n, PARTIAL) for n in (SHORT, LONG)))
        except AttnkitError as error:
            note = f"masked blocks are taken to cost what full ones do, as {error}"
    # A second tile overlaps with the first; what it adds on top of its blocks is not hidden.
    two = run.timeline(plain, SHORT, FULL, tiles=2)
    tile = max(0.0, two.clocks - short.clocks - SHORT * full)
    return BlockClocks(run.block, run.head_dim, units, full, partial, tile, sms, note)


def _slope(short: Timeline, long: Timeline) -> float:
    """Return the clocks per additional block, from the timelines of a short and a long tile."""
    return (long.clocks - short.clocks) / (LONG - SHORT)


@dataclass(frozen=True)
class _Run(ABC):
    """Runs a forward or backward on a few CTAs (or one cluster) in the emulator to get its timeline.

    Attributes:
        template: name of the plan's template.
        block: rows and columns of a block.
        head_dim, dtype: of query, key and value.
        tables: whether expressions of q - kv are tables.
    """

    template: str
    block: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    tables: bool

    @property
    def ctas(self) -> int:
        """Return the number of CTAs, or clusters, that compute the tiles."""
        return 1

    @property
    def lists_override_mask(self) -> bool:
        """Return whether to pass tiles as block lists, so that kernels do not join them."""
        return False

    def timeline(self, variant: Variant, blocks: int, state: int, tiles: int = 1) -> Timeline:
        """Run tiles of `blocks` blocks in the emulator, and return the slowest kernel's timeline.

        Args:
            variant: score_mod and mask.
            blocks: number of blocks of each tile.
            state: state of all blocks, FULL or PARTIAL.
            tiles: number of tiles.

        Raises:
            UnsupportedError: the kernel faults, or indices must be checked at these lengths.
        """
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
        program = dataclasses.replace(bound.program, lists_override_mask=self.lists_override_mask)
        call = KernelCall(self.template, program, runs, tables=self.tables)
        captured = Captured(
            bound.score.tensors if bound.score else (),
            bound.mask.tensors if bound.mask else (),
        )
        with torch.no_grad(), emulation.session(timeline=True, ctas=self.ctas) as session:
            scale = self.head_dim**-0.5
            self.run(variant, call, ForwardInputs(query, key, value, captured, scale))
        if not session.ok:
            raise UnsupportedError(f"the kernel faults: {session.reports[0][1]}")
        return max((t for _, t in session.timelines), key=lambda t: t.clocks)

    @abstractmethod
    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        """Return the number of rows and of columns of blocks that the mask has."""

    @abstractmethod
    def run(self, variant: Variant, call: KernelCall, inputs: ForwardInputs) -> None:
        """Run one forward, or one backward, in the emulator."""


class _Forward(_Run):
    """Runs a forward, whose tiles are rows of blocks."""

    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        return tiles, blocks

    def run(self, variant: Variant, call: KernelCall, inputs: ForwardInputs) -> None:
        run_forward(call, inputs)


class _Backward(_Run):
    """Runs a backward, whose tiles are columns of blocks."""

    @property
    def ctas(self) -> int:
        return backward_column_parts(self.template, (self.head_dim, self.head_dim))

    @property
    def lists_override_mask(self) -> bool:
        target = of_template(self.template)
        return self.block[1] == LISTED and target is not None and target.template == SM100.template

    def grid(self, tiles: int, blocks: int) -> tuple[int, int]:
        return blocks, tiles

    def run(self, variant: Variant, call: KernelCall, inputs: ForwardInputs) -> None:
        qkv = inputs.query, inputs.key, inputs.value
        out, lse = variant(*qkv, backend="eager", return_lse=True)
        grads = torch.ones_like(out), None
        needs_grad = [False] * len(inputs.captured.scores)
        run_backward(call, BackwardInputs.of(inputs, (out, lse), grads, needs_grad))
