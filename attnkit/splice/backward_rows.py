"""Decide what the preprocess and the postprocess of a backward compute for whole rows."""

from __future__ import annotations

import functools

from attnkit.codegen.score_form import score_form, split_row
from attnkit.graph.ir import Node
from attnkit.graph.learned_loads import LearnedLoads, learned_loads
from attnkit.splice.backward_sources import RowWork
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.captured_arguments import TensorKind
from attnkit.util import caches


@functools.lru_cache(maxsize=1024)
def cached_learned_loads(
    score: Node | None, needs_grad: tuple[bool, ...], row_sums: bool, softmax: bool = True
) -> LearnedLoads:
    """Return `learned_loads` of a score_mod from a cache."""
    return learned_loads(score, needs_grad, row_sums, softmax)


caches.register(cached_learned_loads.cache_clear)


def row_work(
    score: Node | None,
    settings: BackwardSettings,
    captured: tuple[TensorKind, ...],
    needs_grad: tuple[bool, ...],
    clamp: frozenset[Node],
) -> tuple[RowWork | None, RowWork | None]:
    """Return the score_mod for the preprocess and for the postprocess, None where it has no work.

    Args:
        score: the score_mod; None if there is none.
        settings: compile-time settings of the kernels.
        captured: kinds of the tensors that the score_mod captures, then of those of the mask.
        needs_grad: for each of the score_mod's tensors, whether its gradient is needed.
        clamp: loads whose index the kernels clamp to the tensor's bounds.
    """
    if score is None or settings.weights:
        return None, None
    learned = cached_learned_loads(score, needs_grad, settings.row_sums)
    work = RowWork(score, captured[: len(needs_grad)], needs_grad, clamp)
    shifts = learned.shifts or split_row(score_form(score))[0] is not None
    return work if shifts else None, work if learned.factors else None
