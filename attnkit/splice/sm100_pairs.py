"""Decide whether the Blackwell backward runs on pairs of CTAs; `RULES` lists the conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnkit.graph.staging import Level
from attnkit.schedule.work_list import retile
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.backward_template import BackwardCase
from attnkit.splice.runs_cache import cached_for_runs

COLUMNS = 256  # columns of a kv tile of a pair; a single CTA has half


@dataclass(frozen=True)
class Clocks:
    """Holds the predicted clocks of one backward kernel, from benchmarks/blackwell.py.

    Attributes:
        block: clocks of a block.
        tile: clocks that a kv tile takes in addition to its blocks.
    """

    block: int
    tile: int


# How gradients of captured tensors are accumulated: NOTHING: there are none. SUMMED: in registers,
# for indices that depend on the head or the column alone. SPREAD: in memory, once per row or score.
NOTHING, SUMMED, SPREAD = "nothing", "summed", "spread"
SINGLE = {NOTHING: Clocks(5141, 4387), SUMMED: Clocks(5653, 4530), SPREAD: Clocks(12011, 6406)}
PAIR = {NOTHING: Clocks(2954, 4421), SUMMED: Clocks(4209, 2825), SPREAD: Clocks(12024, 2678)}


@dataclass(frozen=True)
class Rule:
    """Holds a condition for using pairs of CTAs, and the message for cases that fail it."""

    holds: Callable[[BackwardCase], bool]
    message: Callable[[BackwardCase], str]


# Rules that are cheap to test come first.
RULES = (
    Rule(
        lambda c: c.widths == (128, 128),
        lambda c: f"pairs are for head dims of 65 to 128, these are computed as {c.widths}",
    ),
    Rule(
        lambda c: not c.lists_override_mask or c.runs.block[1] % COLUMNS == 0,
        lambda c: f"block lists have tiles of {c.runs.block[1]} columns, pairs need {COLUMNS}",
    ),
    Rule(
        lambda c: fewer_clocks(c.runs, kind_of(c.learned)),
        lambda c: f"tiles joined to {COLUMNS} columns are predicted to take longer",
    ),
)


def refusal(case: BackwardCase) -> str:
    """Return the reason why a backward does not use pairs of CTAs; "" if it uses them."""
    return next((rule.message(case) for rule in RULES if not rule.holds(case)), "")


def kind_of(learned: frozenset[Level]) -> str:
    """Return how gradients of captured tensors are accumulated: NOTHING, SUMMED or SPREAD."""
    if not learned:
        return NOTHING
    return SUMMED if learned <= {Level.HEAD, Level.COLUMN} else SPREAD


def fewer_clocks(runs: BlockRuns, kind: str = NOTHING) -> bool:
    """Return whether a pair of CTAs is predicted to take fewer clocks than two single CTAs."""

    def fewer() -> bool:
        single, pair = retile(runs, (128, COLUMNS // 2)), retile(runs, (128, COLUMNS))
        return 2 * _clocks(pair, PAIR[kind]) < _clocks(single, SINGLE[kind])

    return cached_for_runs(runs, ("sm100 pairs", kind), fewer)


def _clocks(runs: BlockRuns, of: Clocks) -> int:
    _, partial, full = runs.counts()
    return (partial + full) * of.block + runs.batch * runs.heads * runs.kv_blocks * of.tile
