"""Find a full bias that the Hopper kernels can copy to shared memory by whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.score_form import NumberFacts, score_form, split_row
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, index_level, reads_rows
from attnkit.splice.tma import begins_aligned

_BYTES = 16  # that one copy moves; its source begins at a multiple of them
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def copied_bias(
    bias: Node | None, tensors: Sequence[Tensor], indices: LoadIndices
) -> Tensor | None:
    """Return the bias whose rows can be copied, or None.

    It has to be the only tensor that has an element for each score, such as table[h, q, kv], and its
    rows have to begin at multiples of 16 bytes.

    Args:
        bias: the bias of a `ScoreForm`.
        tensors: the tensors that it reads, by slot.
        indices: which loads wrap negative indices, and which are clamped.
    """
    nodes = [] if bias is None else ir.topo(bias)
    loads = [n for n in nodes if n.op == "load" and index_level(n) is Level.ELEMENT]
    if len(loads) != 1:
        return None
    (load,) = loads
    exact = not indices.wraps(load) and load not in indices.clamp
    if not (exact and reads_rows(load)):
        return None
    table = tensors[int(str(load.attr))]
    return table if table.dtype in _DTYPES and _has_aligned_rows(table) else None


def backward_bias(
    score: Node | None, facts: NumberFacts | None, tensors: Sequence[Tensor], indices: LoadIndices
) -> Tensor | None:
    """Return the bias whose rows a backward with `bias_first` can copy, or None.

    Args:
        score: the score_mod, which adds a bias.
        facts: what is known of numbers that it reads from tables.
        tensors: the tensors that it reads, by slot.
        indices: see `copied_bias`.
    """
    _, form = split_row(score_form(score, separate_distance=True, facts=facts))
    return copied_bias(form.bias, tensors, indices)


def _has_aligned_rows(t: Tensor) -> bool:
    """Return whether the last axis is contiguous and each row begins at a multiple of 16 bytes."""
    axes = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    whole = all(step * t.element_size() % _BYTES == 0 for n, step in axes if n > 1)
    return t.stride(-1) == 1 and whole and begins_aligned(t)
