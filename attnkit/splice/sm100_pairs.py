"""When the Blackwell backward works in pairs of CTAs: a rule each for what they need and gain."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from attnkit.sparse import BlockRuns
from attnkit.splice.backward_work import fitted

COLUMNS = 256  # of a kv tile of a pair; a single CTA has half


@dataclass(frozen=True)
class Clocks:
    """What a block and the rest of a kv tile take, predicted (`python benchmarks/blackwell.py`)."""

    block: int
    tile: int


SINGLE, PAIR = Clocks(5141, 4387), Clocks(2954, 4421)


@dataclass(frozen=True, eq=False)
class Case:
    """What the rules look at.

    Attributes:
        widths: head dims as computed.
        learned: whether captured tensors have gradients.
        ordered: whether sums are formed in a fixed order.
        listed: whether block lists overrule the mask.
        runs: tiles to visit.
    """

    widths: tuple[int, int]
    learned: bool
    ordered: bool
    listed: bool
    runs: BlockRuns


@dataclass(frozen=True)
class Rule:
    """Something that pairs need: whether it holds, and what to say if it does not."""

    holds: Callable[[Case], bool]
    message: Callable[[Case], str]


# The cheap ones first.
RULES = (
    Rule(
        lambda c: c.widths == (128, 128),
        lambda c: f"pairs are for head dims of 65 to 128, these are computed as {c.widths}",
    ),
    Rule(
        lambda c: not c.learned,
        lambda c: "gradients of captured tensors were not predicted for pairs",
    ),
    Rule(
        # turns wait for CTAs before them, and all of a GPU's SMs need not fall into pairs
        lambda c: not c.ordered,
        lambda c: "a fixed order of sums needs every CTA resident, and pairs may not all be",
    ),
    Rule(
        lambda c: not c.listed or c.runs.block[1] % COLUMNS == 0,
        lambda c: f"block lists have tiles of {c.runs.block[1]} columns, pairs need {COLUMNS}",
    ),
    Rule(
        lambda c: fewer_clocks(c.runs),
        lambda c: f"tiles joined to {COLUMNS} columns are predicted to take longer",
    ),
)


def refusal(case: Case) -> str:
    """Why a backward does not take pairs, "" if it does."""
    return next((rule.message(case) for rule in RULES if not rule.holds(case)), "")


_known: weakref.WeakKeyDictionary[BlockRuns, bool] = weakref.WeakKeyDictionary()


def fewer_clocks(runs: BlockRuns) -> bool:
    """Whether two SMs are predicted to need less for these tiles as a pair than each alone."""
    if runs not in _known:
        single, pair = fitted(runs, (128, COLUMNS // 2)), fitted(runs, (128, COLUMNS))
        _known[runs] = 2 * _clocks(pair, PAIR) < _clocks(single, SINGLE)
    return _known[runs]


def _clocks(runs: BlockRuns, of: Clocks) -> int:
    _, partial, full = runs.counts()
    return (partial + full) * of.block + runs.batch * runs.heads * runs.kv_blocks * of.tile
