"""Choose the Blackwell forward kernel with the fewest predicted clocks for a mask.

A pair of CTAs needs fewer clocks for a block than two single CTAs. But its tiles have 512 rows, so
it visits more blocks at the edges of the mask. Masks are classified in tiles of 128 rows. Each
kernel joins several of these into one of its own tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from attnkit.codegen.instruction_cost import instructions
from attnkit.codegen.score_form import ScoreForm
from attnkit.schedule.kernel_table import Kernel, fitting_kernel
from attnkit.schedule.work_list import retile
from attnkit.sparsity.block_runs import BlockRuns

ROWS = 128  # rows of a query tile


@dataclass(frozen=True)
class Clocks:
    """Holds the predicted clocks of one kernel on an SM (`attnkit explain --arch sm_100a`).

    Attributes:
        full, partial: clocks from one FULL, or PARTIAL, block to the next.
        tile: clocks that an output tile takes in addition to its blocks.
        modded: `full` and `partial` of the kernel with a score_mod, without the instructions of the
            score_mod itself.
    """

    full: int
    partial: int
    tile: int
    modded: tuple[int, int]


ClocksByTile: TypeAlias = dict[tuple[int, int], Clocks]

# Clocks that one instruction per score adds to a block of 128 x 128. An SM issues an instruction
# for 128 scores per clock.
INSTRUCTION = 128


def choose_kernel(
    candidates: Sequence[Kernel],
    head_dims: tuple[int, int],
    runs: BlockRuns | None,
    lists_override_mask: bool,
    form: ScoreForm,
) -> tuple[Kernel, str]:
    """Choose one of `candidates` for a mask; return the kernel and the reason as text.

    Args:
        candidates: kernels for these head dims, best first.
        head_dims: head dims of query and value.
        runs: tiles to visit; None for all. Tiles of more than 128 rows select the kernel with the
            same tile sizes.
        lists_override_mask: whether block lists override the mask, so that tiles cannot be joined.
        form: the score_mod.
    """
    if runs is None:
        return candidates[0], "nothing is masked"
    exact = next((k for k in candidates if k.block == runs.block), None)
    if exact is not None and (exact.block[0] > ROWS and not lists_override_mask):
        return exact, "its tiles were asked for"
    known = clocks_of(head_dims)
    rivals = [
        k for k in candidates if k.block in known and (not lists_override_mask or divides(k, runs))
    ]
    if not rivals:
        return fitting_kernel(
            candidates, runs.block, lists_override_mask
        ), "its tiles fit those of the mask"
    totals = {k: total(k, known[k.block], runs, form) for k in rivals}
    best, *others = sorted(rivals, key=lambda k: totals[k])
    name = "a pair of CTAs" if best.ctas > 1 else "one CTA"
    if not others:
        return best, f"{name}: block lists with tiles of {runs.block} fit no other"
    rival = next((k for k in others if k.ctas != best.ctas), others[0])
    ratio = totals[best] / max(1, totals[rival])
    what = f"{rival.block[0]} x {rival.block[1]}"
    return best, f"{name}: predicted {ratio:.3f} of the clocks of {what} for these tiles"


def divides(kernel: Kernel, runs: BlockRuns) -> bool:
    """Return whether the tile sizes of `runs` are multiples of the tile sizes of `kernel`."""
    return not any(old % new for old, new in zip(runs.block, kernel.block, strict=True))


def total(kernel: Kernel, clocks: Clocks, runs: BlockRuns, form: ScoreForm) -> int:
    """Predict the clocks that a kernel takes for a mask, summed over all SMs."""
    full, partial = clocks.full, clocks.partial
    if not form.plain:
        full, partial = clocks.modded
        scores = kernel.block[0] // kernel.ctas * kernel.block[1]
        parts = [n for n in (form.factor, form.bias) if n is not None]
        extra = instructions(*parts) * INSTRUCTION * scores // ROWS**2
        full, partial = full + extra, partial + extra
    tiles = retile(runs, kernel.block)
    _, some, whole = tiles.counts()
    rows = tiles.batch * tiles.heads * tiles.q_blocks
    return kernel.ctas * (whole * full + some * partial + rows * clocks.tile)


def clocks_of(head_dims: tuple[int, int]) -> ClocksByTile:
    """Return the clocks of each kernel by its tile sizes; {} if these head dims have one kernel."""
    wide, deep = head_dims
    if deep > ROWS or wide > 192 or max(head_dims) <= 96:
        return {}
    return _WIDE if wide > ROWS else _SQUARE


_SQUARE: ClocksByTile = {
    (512, 128): Clocks(2113, 3133, 3247, modded=(2448, 3387)),
    (256, 128): Clocks(2353, 3279, 3280, modded=(2597, 3541)),
    (128, 128): Clocks(1690, 2064, 3742, modded=(1692, 2279)),
}
_WIDE: ClocksByTile = {
    (512, 128): Clocks(2560, 3329, 3585, modded=(2560, 3600)),
    (256, 64): Clocks(1841, 2372, 6154, modded=(1841, 2600)),
    (128, 64): Clocks(1055, 1236, 4118, modded=(1055, 1400)),
}
