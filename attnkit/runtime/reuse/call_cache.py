"""Cache prepared calls, so that a call with a known key needs no preparation.

The key contains the graphs of the functions (looked up by identity, else by fingerprint), the
shapes, strides, dtypes and devices of the tensors, the options, and the ids of all tensors on whose
data tiles or bounds proofs depend. The guard of a prepared call detects edits of that data. A call
without a key is prepared each time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.simplify import TRUE
from attnkit.runtime.bind import flex_lists, is_flex
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.sparsity.block_mask import BlockMask
from attnkit.splice import Captured
from attnkit.tracing.guards import TraceRecord, lookup_by_fingerprint, lookup_by_identity
from attnkit.tracing.tracer import Kind
from attnkit.util import caches
from attnkit.util.arguments import AuxRequest
from attnkit.util.data_state import setting
from attnkit.util.torch_private import PLAIN

_SIZE = 256
_lock = threading.Lock()


_entries: dict[Hashable, PreparedCall] = {}
caches.register(_entries.clear)


@dataclass(eq=False, slots=True)  # frozen would take a microsecond more at every call
class CallKey:
    """Holds the cache key of a call, and the captured tensors of the call.

    Attributes:
        key: hashable key. Calls with equal keys may share a prepared call as long as its guard
            reports no edit of data.
        score, mask: the traces of score_mod and mask_mod; None without the function.
        captured: the captured tensors.
        data: the tensors on whose data tiles or bounds proofs depend, in the order of
            `TracedVariant.data_guard`.
        by_identity: whether both traces were found by the identity of the functions, not by
            fingerprint.
    """

    key: Hashable
    score: TraceRecord | None
    mask: TraceRecord | None
    captured: Captured
    data: tuple[Tensor, ...]
    by_identity: bool = False

    def fits(self, prepared: PreparedCall, captured: Captured) -> bool:
        """Return whether `prepared` and `captured` have the same graphs and tensors as this key."""
        program = prepared.kernel_call.program
        return _is_trace_of(self.score, program.score, ir.arg("score")) and (
            _is_trace_of(self.mask, program.mask, TRUE)
            and _are_identical(self.captured.scores, captured.scores)
            and _are_identical(self.captured.masks, captured.masks)
        )


def _is_trace_of(record: TraceRecord | None, root: Node | None, identity: Node) -> bool:
    """Return whether `root` is the graph of `record`; None stands for the graph `identity`."""
    return (identity if record is None else record.root) is (identity if root is None else root)


def _are_identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def lookup(key: CallKey | None) -> PreparedCall | None:
    """Return the prepared call of a key; None if there is none or its data has been edited."""
    prepared = None if key is None else _entries.get(key.key)
    if key is None or prepared is None or not prepared.guard.holds(key.data):
        return None
    return prepared


def store(key: CallKey, prepared: PreparedCall) -> None:
    """Store a prepared call for later calls with this key."""
    with _lock:
        if len(_entries) >= _SIZE and key.key not in _entries:
            caches.drop_oldest(_entries)
        _entries[key.key] = prepared


def key_of(call: AttentionCall) -> CallKey | None:
    """Build the cache key of a call; return None if the call must first be traced or checked.

    Args:
        call: arguments of the call, unchecked.
    """
    query, key, value, sink = call.query, call.key, call.value, call.sink
    if query.__class__ not in PLAIN or key.__class__ not in PLAIN or value.__class__ not in PLAIN:
        return None
    if sink is not None and sink.__class__ not in PLAIN:
        return None
    options = _options(call)
    if options is None:
        return None
    try:
        device = query.device
        score = mask = lists = None
        scores: tuple[Tensor, ...] = ()
        masks: tuple[Tensor, ...] = ()
        data: tuple[Tensor, ...] = ()
        by_identity = True
        if call.score_mod is not None:
            known = _lookup_function(call.score_mod, "score", device)
            if known is None:
                return None
            score, scores, by_identity = known
            data = tuple([scores[i] for i in score.data_slots])
        block_mask = call.block_mask
        if block_mask is not None:
            function = block_mask
            if block_mask.__class__ is BlockMask:
                function = block_mask.mask_mod
                lists = block_mask.shape, block_mask.seq_lengths, block_mask.device
            elif is_flex(block_mask):
                function = block_mask.mask_mod
                tensors, lists = flex_lists(block_mask)
                data += tensors
            known = _lookup_function(function, "mask", device)
            if known is None:
                return None
            mask, masks, same = known
            by_identity = by_identity and same
            data += masks
        key_parts = (
            score,
            mask,
            lists,
            options,
            *[(t.shape, t.stride(), t.dtype, t.device) for t in (query, key, value)],
            None if sink is None else (sink.shape, sink.stride(), sink.dtype, sink.device),
            call.dropout is not None,
            *[t.stride() for t in scores],
            *[t.stride() for t in masks],
            *map(id, data),
            setting.trusts,
        )
        return CallKey(key_parts, score, mask, Captured(scores, masks), data, by_identity)
    except (AttributeError, TypeError, RuntimeError):  # wrong types, or tensors without strides
        return None


def reason_without_key(call: AttentionCall) -> str:
    """Return why a call that has run has no key, or not that of its traces; for the log."""
    for name in ("query", "key", "value", "sink"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.__class__ not in PLAIN:
            return f"{name} is of type {type(tensor).__name__}, not a plain tensor"
    if _options(call) is None:
        return "kernel_options or an option of another type than the usual one"
    mask = call.block_mask
    if mask.__class__ is BlockMask or is_flex(mask):
        mask = mask.mask_mod
    for name, function, kind in (("score_mod", call.score_mod, "score"), ("mask", mask, "mask")):
        known = function is None or _lookup_function(function, kind, call.query.device)  # type: ignore[arg-type]
        if not known:
            return (
                f"the {name} reads something that may change unseen: an object or a class with "
                "attributes, a numpy array, an import, a random number or a setting"
            )
    return "a function reads other objects than when it was traced"


def _lookup_function(
    function: Any, kind: Kind, device: torch.device
) -> tuple[TraceRecord, tuple[Tensor, ...], bool] | None:
    """Look up a trace; return (record, captured tensors, whether found by identity), or None."""
    known = lookup_by_identity(function, kind, device)
    if known is not None:
        return *known, True
    known = lookup_by_fingerprint(function, kind, device)
    return None if known is None else (*known, False)


def _options(call: AttentionCall) -> Hashable | None:
    """Return the options that a prepared call depends on; None if an option must be checked first.

    A prepared call depends only on the sign of the scale.
    """
    scale = call.scale
    if scale is None:
        positive = True
    elif scale.__class__ is float and -math.inf < scale < math.inf:
        positive = scale > 0
    else:
        return None
    if (
        call.enable_gqa.__class__ is not bool
        or call.return_lse.__class__ is not bool
        or call.deterministic.__class__ is not bool
        or call.backend.__class__ is not str
        or call.kernel_options is not None
    ):
        return None
    need_max = need_entropy = False
    if call.return_aux is not None:
        if call.return_aux.__class__ is not AuxRequest or call.return_lse:
            return None
        need_max = bool(call.return_aux.needs_row_maxima)
        need_entropy = bool(call.return_aux.entropy)
    statistics = need_max, need_entropy
    kind = call.normalization
    return call.enable_gqa, call.backend, call.is_deterministic, positive, statistics, kind
