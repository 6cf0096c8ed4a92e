"""The shortest way of a call that was made before: by the same functions, for tensors alike.

`repeats` asks what a call is like, and builds a key to find what was settled for that. Here the
question is only whether it is like one that was made. torch answers for all tensors at once: their
class, dtype, device, shape and strides, whether they require gradients, and whether a mode, a
transform or autocast stands between a call and its kernel. A watch answers for the functions, and
version counters for the data on which tiles depend. A wrong guess costs a microsecond; where torch
lacks what this needs, nothing is kept.
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
from torch.autograd import forward_ad

from attnkit.runtime import torch_ops
from attnkit.runtime.reuse.call_cache import Likeness, is_flex
from attnkit.runtime.torch_ops import Attempt, Settled
from attnkit.sparsity.block_mask import BlockMask
from attnkit.splice import Captured
from attnkit.tracing.guards import GuardedFunction, guarded_function
from attnkit.tracing.identity_guards import READ_ERRORS
from attnkit.util.torch_state import alike, only_devices, undisturbed

# Which tensors are given: of query, key, value, then those that score and mask capture.
_Same: TypeAlias = Callable[..., bool]
# Tensors that the score captures, that the mask captures, and lists of blocks.
_Captured: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
_Key: TypeAlias = tuple[int, int, int, int]

_BUCKETS = 512
_ENTRIES = 4  # of a bucket; the oldest goes
_ATTEMPTS = 32  # where more kinds of calls take turns than a bucket has entries, it learns no more
_LARGEST = 3e38  # of a scale, which is float32 in a kernel

_C: Any = torch._C
_recording: Callable[[], bool] = _C.is_grad_enabled
_ordered: Callable[[], bool] = _C._get_deterministic_algorithms
_modes: Callable[[], int] = _C._len_torch_function_stack
_NOTHING: _Captured = ((), (), ())
_lock = threading.Lock()


def _nothing() -> tuple[Tensor, ...]:
    return ()


@dataclass(eq=False, slots=True)
class _Entry:
    """A call that was made.

    Attributes:
        same: whether tensors are like those of the call.
        enable_gqa, backend, deterministic: of the call.
        ordered, recording: what torch was set to: deterministic algorithms, gradients.
        versions: of the captured tensors whose data matters, by place, and where that lies; and of
            lists of blocks.
        factor: the scale where none is given.
        settled, again: how it was made, and a quicker way, if there is one.
        recorded: it is one for autograd.
    """

    same: _Same
    enable_gqa: bool
    backend: str
    deterministic: bool
    ordered: bool
    recording: bool
    versions: tuple[tuple[int, int, int], ...]
    factor: float
    settled: Settled
    again: Attempt | None
    recorded: bool


class _Lists:
    """The fields of a BlockMask that decide anything, by identity."""

    def __init__(self, mask: Any) -> None:
        names = ["mask_mod", "shape", "seq_lengths", "device"]
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

    def met(self, mask: Any) -> list[Tensor] | None:
        """The tensors, None if a field holds something else."""
        if mask.mask_mod is not self.function():
            return None
        for name, value in self.fields:
            if getattr(mask, name) is not value:
                return None
        found = [getattr(mask, name) for name, _ in self.tensors]
        for t, (_, reference) in zip(found, self.tensors, strict=True):
            if t is not reference():
                return None
        return found


class _Bucket:
    """The calls of the same functions for tensors of as many elements."""

    __slots__ = "attempts capturing entries lists mask owners score".split()

    def __init__(
        self,
        score: GuardedFunction | None,
        mask: GuardedFunction | None,
        lists: _Lists | None,
        owners: tuple[weakref.ref[Any] | None, weakref.ref[Any] | None],
    ) -> None:
        self.score = _nothing if score is None else score.guard.reader(score.record.tensor_order)
        self.mask = _nothing if mask is None else mask.guard.reader(mask.record.tensor_order)
        self.lists, self.owners = lists, owners
        self.capturing = owners != (None, None)
        self.entries: tuple[_Entry, ...] = ()
        self.attempts = 0

    def captured(self, score_mod: Any, block_mask: Any) -> _Captured | None:
        """What the functions capture, and the lists of blocks; None if any has changed."""
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
            lists = self.lists.met(block_mask)
        if scores is None or masks is None or lists is None:
            return None
        return scores, masks, lists


_buckets: dict[_Key, _Bucket] = {}


def made(
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
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Make a call that is like an earlier one: out, or out and LSE; None if it is not.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, backend,
            deterministic: as of `flex_attention`, unchecked; its other arguments are not given.
    """
    found = _found(query, key, value, score_mod, block_mask, enable_gqa, backend, deterministic)
    if found is None or (return_lse is not False and return_lse is not True):
        return None
    entry, scores, masks = found
    if scale is None:
        scale = entry.factor
    elif scale.__class__ is not float or not 0 < scale < _LARGEST:
        return None
    if entry.recorded:
        recorded: Any = torch_ops.record(
            entry.settled, entry.again, scale, masks, return_lse, query, key, value, *scores
        )
        return recorded[:2] if return_lse else recorded  # type: ignore[no-any-return]
    again, captured = entry.again, Captured(scores, masks)
    out = None if again is None else again(query, key, value, captured, scale)
    if out is None:
        attention = entry.settled.attention
        assert attention is not None
        out = attention(query, key, value, captured, scale)
    return out[:2] if return_lse else out[0]


def _found(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: Any,
    backend: Any,
    deterministic: Any,
) -> tuple[_Entry, Sequence[Tensor], Sequence[Tensor]] | None:
    """The call that this one is like, and the tensors that score and mask capture now."""
    try:
        bucket = _buckets.get((id(score_mod), id(block_mask), query.numel(), key.numel()))
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or sizes that are symbols
        return None
    if bucket is None or forward_ad._current_level >= 0:
        return None
    captured = bucket.captured(score_mod, block_mask) if bucket.capturing else _NOTHING
    if captured is None:
        return None
    scores, masks, lists = captured
    for entry in bucket.entries:
        if (
            entry.deterministic is deterministic
            and entry.enable_gqa is enable_gqa
            and entry.backend == backend
            and entry.same(query, key, value, *scores, *masks)
            and entry.recording is _recording()
            and entry.ordered is _ordered()
        ):
            break
    else:
        return None
    if entry.versions:
        tensors = *scores, *masks, *lists
        for i, version, place in entry.versions:
            if tensors[i]._version != version or tensors[i].data_ptr() != place:
                bucket.entries = tuple([e for e in bucket.entries if e is not entry])
                return None
    if _modes() and not only_devices():
        return None
    return entry, scores, masks


def learn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: bool,
    backend: str,
    deterministic: bool,
    like: Likeness,
    settled: Settled,
) -> None:
    """Remember a call that was made, as `settled` says, for `made`; its scale was positive.

    Args:
        query, key, value, score_mod, block_mask, enable_gqa, backend, deterministic: of the call.
        like: what it was like.
        settled: what was settled for that.
    """
    if not like.recalled or settled.attention is None:
        return
    at = id(score_mod), id(block_mask), query.numel(), key.numel()
    bucket = _buckets.get(at)
    if bucket is None or bucket.captured(score_mod, block_mask) is None:
        bucket = _bucket(at, score_mod, block_mask, query.device)
    tensors = (query, key, value, *like.scores, *like.masks)
    if (
        bucket is None
        or bucket.attempts >= _ATTEMPTS
        or any(t.is_inference() for t in like.data)
        or not undisturbed(tensors)
        or torch.is_autocast_enabled(query.device.type)
    ):
        return
    bucket.attempts += 1
    captured = bucket.captured(score_mod, block_mask)
    if captured is None:
        return
    place = {id(t): i for i, t in enumerate([t for part in captured for t in part])}
    same = alike(tensors)
    if same is None or not all(id(t) in place for t in like.data):
        return
    entry = _Entry(
        same,
        enable_gqa,
        backend,
        deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        tuple((place[id(t)], t._version, t.data_ptr()) for t in like.data),
        1 / math.sqrt(query.shape[-1]),
        settled,
        getattr(settled.attention, "again", None),
        torch_ops.records((query, key, value, *like.scores)),
    )
    with _lock:
        bucket.entries = (*bucket.entries, entry)[-_ENTRIES:]


def _bucket(at: _Key, score_mod: Any, block_mask: Any, device: torch.device) -> _Bucket | None:
    """A new bucket, None for functions that are not watched."""
    lists, function = None, block_mask
    if block_mask.__class__ is BlockMask or is_flex(block_mask):
        lists, function = _Lists(block_mask), block_mask.mask_mod
    score = None if score_mod is None else guarded_function(score_mod, "score", device)
    mask = None if function is None else guarded_function(function, "mask", device)
    if (score is None) != (score_mod is None) or (mask is None) != (function is None):
        return None

    def forget(reference: Any) -> None:
        found = _buckets.get(at)
        if found is not None and any(owner is reference for owner in found.owners):
            _buckets.pop(at, None)

    owners = [None if x is None else weakref.ref(x, forget) for x in (score_mod, block_mask)]
    bucket = _Bucket(score, mask, lists, (owners[0], owners[1]))
    with _lock:
        if len(_buckets) >= _BUCKETS and at not in _buckets:
            _buckets.pop(next(iter(_buckets)))
        _buckets[at] = bucket
    return bucket
