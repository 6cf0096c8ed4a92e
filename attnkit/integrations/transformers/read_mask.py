"""Read the form of a mask from the closures that `transformers.masking_utils` makes.

transformers describes a mask by a function of four indices, most often a combination of a few
standard closures. They are recognized by their code, and their parameters are read from their
cells. A function that is not recognized becomes a `Function`, which attnkit traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.integrations.transformers.forms import (
    CAUSAL,
    And,
    Band,
    Chunks,
    Everything,
    Form,
    Function,
    Groups,
    Or,
    PackedSequences,
    Padding,
    RemappedPositions,
    Table,
)

_Reader: TypeAlias = Callable[[dict[str, Any]], Form]


def read_function(function: Callable[..., Any]) -> Form:
    """Return the form of a `mask_function(b, h, q, kv)` of transformers."""
    code = getattr(function, "__code__", None)
    reader = _readers().get(code) if isinstance(code, CodeType) else None
    if reader is None or code is None:
        return Function(function)
    cells = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    return reader(dict(zip(code.co_freevars, values, strict=True)))


def read_padding(attention_mask: Tensor | None, start: int, length: int) -> Form:
    """Return the form of a padding mask.

    This reads the mask on the host, as transformers does for its own implementations.

    Args:
        attention_mask: [B, positions], True or 1 for tokens; None for no padding. Positions after
            its end are padding.
        start, length: position of the first key, and the number of keys.
    """
    if attention_mask is None:
        return Everything()
    visible = attention_mask[:, start : start + length].bool()
    batch, given = visible.shape
    if given == 0 or bool(visible.all()):
        ends = (attention_mask.shape[1],) * batch
        return Padding((0,) * batch, ends) if given < length else Everything()
    limits = torch.stack(
        (
            visible.sum(1),
            visible.int().argmax(1),  # the first of the largest
            given - visible.flip(1).int().argmax(1),
        )
    ).tolist()
    starts: list[int] = []
    stops: list[int] = []
    for count, first, stop in zip(*limits, strict=True):
        if count not in (0, stop - first):
            return Table(attention_mask.bool())
        starts.append(start + (first if count else length))
        stops.append(start + (stop if count else length))
    return Padding(tuple(starts), tuple(stops))


@functools.cache
def _readers() -> dict[CodeType, _Reader]:
    """Return the reader for the code of each standard closure."""
    from transformers import masking_utils as hf

    some = torch.zeros(1, 1, dtype=torch.int64)
    causal = hf.causal_mask_function
    # name, arguments (None if the function itself is the mask), reader of its closure
    known: list[tuple[str, tuple[Any, ...] | None, _Reader]] = [
        ("causal_mask_function", None, lambda cells: CAUSAL),
        ("bidirectional_mask_function", None, lambda cells: Everything()),
        ("and_masks", (causal,), _read_and),
        (
            "or_masks",
            (causal,),
            lambda cells: Or(tuple(map(read_function, cells["mask_functions"]))),
        ),
        ("sliding_window_overlay", (1,), lambda cells: Band(cells["sliding_window"] - 1, None)),
        (
            "sliding_window_bidirectional_overlay",
            (1,),
            lambda cells: Band(cells["sliding_window"], cells["sliding_window"]),
        ),
        (
            "chunked_overlay",
            (1, some[0]),
            lambda cells: Chunks(cells["chunk_size"], tuple(cells["left_padding"].tolist())),
        ),
        (
            "padding_mask_function",
            (some.bool(),),
            lambda cells: Table(cells["padding_mask"].bool()),
        ),
        (
            "packed_sequence_mask_function",
            (some,),
            lambda cells: PackedSequences(_packed_ids(cells)),
        ),
        (
            "remap_positions_for_packed_sequence",
            (causal, some),
            lambda cells: RemappedPositions(
                read_function(cells["mask_function"]), cells["position_ids"]
            ),
        ),
        ("blockwise_overlay", (some,), lambda cells: Groups(cells["block_sequence_ids"])),
    ]
    readers: dict[CodeType, _Reader] = {}
    for name, arguments, reader in known:
        function = getattr(hf, name, None)
        if function is not None:  # versions differ in the masks that they have
            closure = function if arguments is None else function(*arguments)
            readers[closure.__code__] = reader
    return readers


def _packed_ids(cells: dict[str, Any]) -> Tensor:
    ids: Tensor = cells["packed_sequence_mask"]
    return ids


def _read_and(cells: dict[str, Any]) -> Form:
    """Return the form of a conjunction.

    Tokens of one packed sequence have consecutive positions. So a form that compares positions only
    keeps the same keys by index, and its remapping is dropped beside the mask of the sequences.
    """
    parts = [read_function(function) for function in cells["mask_functions"]]
    if any(isinstance(part, PackedSequences) for part in parts):
        parts = [_without_remapping(part) for part in parts]
    return And(tuple(parts))


def _without_remapping(form: Form) -> Form:
    relative = isinstance(form, RemappedPositions) and _compares_only(form.inner)
    return form.inner if isinstance(form, RemappedPositions) and relative else form


def _compares_only(form: Form) -> bool:
    """Return whether a form depends on the distance of query and key alone."""
    if isinstance(form, And | Or):
        return all(_compares_only(part) for part in form.parts)
    return isinstance(form, Band | Everything)
