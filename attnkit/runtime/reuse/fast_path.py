"""Fast path of repeated calls: check guards, then relaunch the kernels.

`call_cache` builds a key for every call, which takes longer. Here guards decide whether a call may
use the prepared call of an earlier one. A tensor guard of torch compares all tensors at once
(class, dtype, device, shape, strides, requires_grad, and the dispatch keys of modes, transforms and
autocast). A function guard detects changes of the functions. The states of tensors detect changes
of data on which the tiles depend. A miss costs a microsecond. If torch has no tensor guards, no
call is stored.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attnkit.runtime import torch_ops
from attnkit.runtime.bind import is_flex
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.data_guard import raise_if_stale
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.runtime.reuse.call_cache import CallKey
from attnkit.runtime.reuse.entries import Entries
from attnkit.sparsity.block_mask import BlockMask
from attnkit.splice import Captured, RepeatedForward
from attnkit.splice.fingerprint_check import stale_report
from attnkit.tracing.guards import GuardedFunction, guarded_function
from attnkit.tracing.identity_guards import READ_ERRORS
from attnkit.util import caches
from attnkit.util.data_state import DataState, setting
from attnkit.util.torch_private import (
    SDPA,
    deterministic_enabled,
    function_mode_count,
    grad_enabled,
    in_forward_ad,
    is_intercepted,
    only_devices,
    tensor_guard,
)

# Tensors that the score captures, tensors that the mask captures, block lists.
_Captured: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
# Ids of score_mod and block_mask, numbers of elements of query and key.
_BucketKey: TypeAlias = tuple[int, int, int, int]

_BUCKETS = 512
_LARGEST = 3e38  # bound on the scale, which is float32 in a kernel
_NOTHING: _Captured = ((), (), ())
_SINK = "softmax with a sink"
_lock = threading.Lock()


def _no_tensors() -> tuple[Tensor, ...]:
    return ()


@dataclass(eq=False, slots=True)
class _Entry:
    """Describes a call that has run and can be repeated.

    Attributes:
        guard: function that returns whether tensors (query, key, value, the score's captured
            tensors, the state of dropout and the sink if there are any, the mask's captured tensors)
            have the same geometry as those of the call.
        kind: the normalization of the call if it has no sink, else `_SINK`.
        drops: whether the call has dropout.
        enable_gqa, backend, deterministic: options of the call.
        ordered: whether torch's deterministic algorithms were enabled.
        recording: whether torch's grad mode was enabled.
        trusting: whether version counters were trusted; then the kernels compare no data.
        data: (position, state) of each captured tensor or block list on whose data tiles or bounds
            proofs depend.
        default_scale: the scale if the caller passes None.
        prepared: the prepared call.
        relaunch: function that relaunches the kernels of the call, which is faster; None if a
            relaunch is impossible.
        recorded: whether autograd recorded the call.
    """

    guard: Callable[..., bool]
    kind: str
    drops: bool
    enable_gqa: bool
    backend: str
    deterministic: bool
    ordered: bool
    recording: bool
    trusting: bool
    data: tuple[tuple[int, DataState], ...]
    default_scale: float
    prepared: PreparedCall
    relaunch: RepeatedForward | None
    recorded: bool


class _BlockLists:
    """Guard of a BlockMask: compares the fields that a prepared call depends on by identity."""

    def __init__(self, mask: Any) -> None:
        names = ["mask_mod", "shape", "device"]
        self.tensors: list[tuple[str, weakref.ref[Tensor]]] = []
        if is_flex(mask):
            names = ["mask_mod", "BLOCK_SIZE", "seq_lengths"]
            tensors = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
            for name in tensors:
                if getattr(mask, name) is None:
                    names.append(name)
                else:
                    self.tensors.append((name, weakref.ref(getattr(mask, name))))
        self.function = weakref.ref(mask.mask_mod)
        self.fields = [(name, getattr(mask, name)) for name in names[1:]]

    def read(self, mask: Any) -> list[Tensor] | None:
        """Return the block lists of a BlockMask; None if a field now holds another object."""
        if mask.mask_mod is not self.function():
            return None
        for name, value in self.fields:
            if getattr(mask, name) is not value:
                return None
        tensors = [getattr(mask, name) for name, _ in self.tensors]
        for t, (_, reference) in zip(tensors, self.tensors, strict=True):
            if t is not reference():
                return None
        return tensors


class _Bucket:
    """Holds the entries of calls with the same `_BucketKey`, and guards of their functions."""

    __slots__ = ("capturing", "entries", "lists", "mask", "owners", "score")

    def __init__(
        self,
        score: GuardedFunction | None,
        mask: GuardedFunction | None,
        lists: _BlockLists | None,
        owners: tuple[weakref.ref[Any] | None, weakref.ref[Any] | None],
    ) -> None:
        self.score = _no_tensors if score is None else score.guard.reader(score.record.tensor_order)
        self.mask = _no_tensors if mask is None else mask.guard.reader(mask.record.tensor_order)
        self.lists, self.owners = lists, owners
        self.capturing = owners != (None, None)
        self.entries: Entries[_Entry] = Entries()

    def captured(self, score_mod: Any, block_mask: Any) -> _Captured | None:
        """Return the captured tensors and the block lists; None if a function has changed."""
        first, second = self.owners
        if (first is not None and first() is not score_mod) or (
            second is not None and second() is not block_mask
        ):
            return None
        try:
            scores, masks = self.score(), self.mask()
        except READ_ERRORS:
            return None
        lists: Sequence[Tensor] | None = ()
        if self.lists is not None:
            lists = self.lists.read(block_mask)
        if scores is None or masks is None or lists is None:
            return None
        return scores, masks, lists


_buckets: dict[_BucketKey, _Bucket] = {}
caches.register(_buckets.clear)


def try_fast_path(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    backend: Any,
    deterministic: Any,
    sink: Any,
    normalization: str,
    dropout: Any,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a call by relaunching an earlier one: return out or (out, LSE), None if a guard fails.

    The function takes the arguments one by one, because building an `AttentionCall` would take a
    tenth of the host time of this path.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, backend,
            deterministic, sink: unchecked arguments of `flex_attention`; its other arguments are
            None.
        normalization: the literal that `AttentionCall` holds, so that identity tells them apart.
        dropout: the state of dropout, or None.
    """
    if stale_report.code[0]:
        raise_if_stale()
    try:
        bucket = _buckets.get((id(score_mod), id(block_mask), query.numel(), key.numel()))
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or their sizes are symbols
        return None
    if bucket is None or in_forward_ad() or functional.scaled_dot_product_attention is not SDPA:
        return None  # the slow path refuses calls inside `context_parallel`
    captured = bucket.captured(score_mod, block_mask) if bucket.capturing else _NOTHING
    if captured is None:
        return None
    scores, masks, _ = captured
    kind, drops = normalization, dropout is not None
    if drops:
        scores = (*scores, dropout)
    if sink is not None:
        scores, kind = (*scores, sink), _SINK
    for entry in bucket.entries.all:
        if (
            entry.deterministic is deterministic
            and entry.kind is kind
            and entry.drops is drops
            and entry.enable_gqa is enable_gqa
            and entry.backend == backend
            and entry.guard(query, key, value, *scores, *masks)
            and entry.recording is grad_enabled()
            and entry.ordered is deterministic_enabled()
            and entry.trusting is setting.trusts
        ):
            break
    else:
        return None
    if entry.data and _edited(entry, [t for part in captured for t in part]):
        bucket.entries.drop(entry)
        return None
    if function_mode_count() and not only_devices():
        return None
    if return_lse is not False and return_lse is not True:
        return None
    if scale is None:
        scale = entry.default_scale
    elif scale.__class__ is not float or not 0 < scale < _LARGEST:
        return None
    prepared, relaunch = entry.prepared, entry.relaunch
    if prepared.launches_check:
        prepared.guard.check()
    if entry.recorded:
        recorded: Any = torch_ops.record(
            prepared, relaunch, scale, masks, return_lse, query, key, value, *scores
        )
        return recorded[:2] if return_lse else recorded  # type: ignore[no-any-return]
    tensors = Captured(scores, masks) if scores or masks else torch_ops.NO_TENSORS
    result = None if relaunch is None else relaunch(query, key, value, tensors, scale, return_lse)
    if result is None:
        assert prepared.attention is not None
        result = prepared.attention(query, key, value, tensors, scale)
    return result[:2] if return_lse else result[0]


def _edited(entry: _Entry, tensors: Sequence[Tensor]) -> bool:
    """Return whether data on which the tiles or the bounds proofs of a call depend has changed.

    The entry's guard has compared the layouts of captured tensors. Block lists are compared by
    identity.
    """
    for place, state in entry.data:
        if not state.holds_in_same_layout(tensors[place]):
            return True
    return False


def remember(call: AttentionCall, key: CallKey, prepared: PreparedCall) -> None:
    """Store an entry for a call that has run, so that `try_fast_path` can repeat it.

    Args:
        call: arguments of the call, with `return_aux` None and a positive scale.
        key: key of the call.
        prepared: the prepared call that ran it.
    """
    if not key.by_identity or prepared.attention is None or prepared.is_dense:
        return
    query = call.query
    bucket_key = id(call.score_mod), id(call.block_mask), query.numel(), call.key.numel()
    bucket = _buckets.get(bucket_key)
    if bucket is None or bucket.captured(call.score_mod, call.block_mask) is None:
        bucket = _new_bucket(bucket_key, call.score_mod, call.block_mask, query.device)
    scores, masks = call.inputs(key.captured).captured
    tensors = (query, call.key, call.value, *scores, *masks)
    if (
        bucket is None
        or any(t.is_inference() for t in key.data)
        or is_intercepted(tensors)
        or torch.is_autocast_enabled(query.device.type)
        or not bucket.entries.may_learn()
    ):
        return
    captured = bucket.captured(call.score_mod, call.block_mask)
    if captured is None:
        return
    place = {id(t): i for i, t in enumerate([t for part in captured for t in part])}
    guard = tensor_guard(tensors)
    if guard is None or not all(id(t) in place for t in key.data):
        return
    bucket.entries.add(
        _Entry(
            guard,
            call.normalization if call.sink is None else _SINK,
            call.dropout is not None,
            call.enable_gqa,
            call.backend,
            call.deterministic,
            deterministic_enabled(),
            torch.is_grad_enabled(),
            setting.trusts,
            tuple(zip([place[id(t)] for t in key.data], prepared.guard.states, strict=True)),
            1 / math.sqrt(query.shape[-1]),
            prepared,
            getattr(prepared.attention, "relaunch", None),
            torch_ops.is_recorded((query, call.key, call.value, *scores)),
        )
    )


def _new_bucket(
    bucket_key: _BucketKey, score_mod: Any, block_mask: Any, device: torch.device
) -> _Bucket | None:
    """Create and register a bucket; return None if a function has no identity guard."""
    lists, function = None, block_mask
    if block_mask.__class__ is BlockMask or is_flex(block_mask):
        lists, function = _BlockLists(block_mask), block_mask.mask_mod
    score = None if score_mod is None else guarded_function(score_mod, "score", device)
    mask = None if function is None else guarded_function(function, "mask", device)
    if (score is None) != (score_mod is None) or (mask is None) != (function is None):
        return None

    # A default argument, because the globals of a module are None at the end of the interpreter.
    def forget(reference: Any, buckets: dict[_BucketKey, _Bucket] = _buckets) -> None:
        bucket = buckets.get(bucket_key)
        if bucket is not None and any(owner is reference for owner in bucket.owners):
            buckets.pop(bucket_key, None)

    owners = [None if x is None else weakref.ref(x, forget) for x in (score_mod, block_mask)]
    bucket = _Bucket(score, mask, lists, (owners[0], owners[1]))
    with _lock:
        if len(_buckets) >= _BUCKETS and bucket_key not in _buckets:
            caches.drop_oldest(_buckets)
        _buckets[bucket_key] = bucket
    return bucket
