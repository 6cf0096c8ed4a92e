"""Calls that were made before: a call that is like an earlier one is settled already.

What a call is like is a key: the graphs of its functions (found again by `guards.lookup_by_fingerprint`), the
geometry of its tensors, its options; and the data of all tensors on which tiles or proofs of
indices depend, told by identity and version counter. Where any of it cannot be told, the call is
settled anew.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.runtime.torch_ops import Settled
from attnkit.sparsity.block_mask import BlockMask
from attnkit.tracing.guards import TraceRecord, lookup_by_fingerprint, lookup_by_identity
from attnkit.util.tensor_cache import Stamp

_SIZE = 256
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_lock = threading.Lock()


class CapturedStamp(Stamp):
    """A stamp that may be asked while a CUDA graph is captured, which cannot wait for the GPU."""

    def _equal(self, tensor: Tensor, copy: Tensor) -> bool:
        """Whether the data is the same.

        Raises:
            UnsupportedError: it cannot be compared while a CUDA graph is captured.
        """
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a mask reads a tensor that was made in inference mode, of which torch does not "
                "say whether it was edited, and comparing its data would wait for the GPU, which "
                "a CUDA graph cannot; make it outside of torch.inference_mode()"
            )
        return super()._equal(tensor, copy)


_entries: dict[Hashable, tuple[Settled, tuple[CapturedStamp, ...]]] = {}


@dataclass(eq=False, slots=True)  # frozen would take a microsecond more at every call
class Likeness:
    """What a call is like.

    Attributes:
        key: equal for calls that may share what is settled, as far as the stamps hold.
        score, mask: what is known of the functions, None where there is none.
        scores, masks: the captured tensors.
        data: the tensors whose data matters.
        recalled: the functions are those of an earlier call, not others like them.
    """

    key: Hashable
    score: TraceRecord | None
    mask: TraceRecord | None
    scores: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    data: tuple[Tensor, ...]
    recalled: bool = False

    def settled(self) -> Settled | None:
        """What was settled for a call like this; None if nothing, or if data was edited since."""
        found = _entries.get(self.key)
        if found is None:
            return None
        settled, stamps = found
        for t, stamp in zip(self.data, stamps, strict=True):
            if not stamp.holds(t):
                return None
        return settled

    def keep(self, settled: Settled) -> None:
        """Keep what was settled for calls like this."""
        stamps = tuple([CapturedStamp(t) for t in self.data])
        with _lock:
            if len(_entries) >= _SIZE and self.key not in _entries:
                _entries.pop(next(iter(_entries)))
            _entries[self.key] = settled, stamps


def likeness(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    options: Hashable,
) -> Likeness | None:
    """What a call is like; None if that cannot be told without settling it.

    Args:
        query, key, value, score_mod, block_mask: as of `flex_attention`, unchecked.
        options: all else on which it depends what is settled.
    """
    if (
        query.__class__ not in _PLAIN
        or key.__class__ not in _PLAIN
        or value.__class__ not in _PLAIN
    ):
        return None
    try:
        device = query.device
        score = mask = lists = None
        scores: tuple[Tensor, ...] = ()
        masks: tuple[Tensor, ...] = ()
        data: tuple[Tensor, ...] = ()
        again = True
        if score_mod is not None:
            found = lookup_by_identity(score_mod, "score", device)
            if found is None:
                again, found = False, lookup_by_fingerprint(score_mod, "score", device)
            if found is None:
                return None
            score, scores = found
            if score.depends_on_data:
                data = scores
        if block_mask is not None:
            function = block_mask
            if block_mask.__class__ is BlockMask:
                function = block_mask.mask_mod
                lists = block_mask.shape, block_mask.seq_lengths, block_mask.device
            elif is_flex(block_mask):
                function = block_mask.mask_mod
                listed, lists = flex_lists(block_mask)
                data += listed
            found = lookup_by_identity(function, "mask", device)
            if found is None:
                again, found = False, lookup_by_fingerprint(function, "mask", device)
            if found is None:
                return None
            mask, masks = found
            data += masks
        at = (
            *(score, mask, lists, options),
            *(query.shape, key.shape, value.shape),
            *(query.stride(), key.stride(), value.stride()),
            *(query.dtype, key.dtype, value.dtype, device, key.device, value.device),
            *[t.stride() for t in scores],
            *[t.stride() for t in masks],
            *map(id, data),
        )
        return Likeness(at, score, mask, scores, masks, data, again)
    except (AttributeError, TypeError, RuntimeError):  # not strided, not what it must be
        return None


def flex_lists(mask: Any) -> tuple[tuple[Tensor, ...], Hashable]:
    """What PyTorch's BlockMask says beside its mask_mod: tensors, and all else."""
    lists = mask.kv_num_blocks, mask.kv_indices
    full = mask.full_kv_num_blocks, mask.full_kv_indices
    whole = full[0] is not None and full[1] is not None
    return (*lists, *full) if whole else lists, (*mask.BLOCK_SIZE, *mask.seq_lengths, whole)


def is_flex(mask: Any) -> bool:
    """Whether this is PyTorch's BlockMask (whose module is not imported for the question)."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and mask.__class__ is module.BlockMask
