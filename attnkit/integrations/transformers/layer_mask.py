"""Define `LayerMask`, the mask that transformers passes to every layer of one type."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attnkit import Mask, UnsupportedError
from attnkit.integrations.transformers.forms import Form, Geometry, clamp
from attnkit.util import caches

_MASKS = 256  # masks in the cache

_masks: dict[tuple[Hashable, torch.device], Mask] = {}
caches.register(_masks.clear)


class LayerMask(FlexBlockMask):
    """Holds a form and the geometry of a call, and makes attnkit's mask from them once.

    It is a subclass of PyTorch's `BlockMask`, because transformers takes an object of that class
    for a finished mask. It has none of its block lists.

    Attributes:
        start, stop: the keys that any query may keep; attention reads no other keys.
        kv_len: number of keys that the mask was made for.
    """

    def __init__(self, form: Form, at: Geometry) -> None:
        first, last = form.span(at)
        start = clamp(first - at.kv_start, at.kv_len)
        stop = clamp(last - at.kv_start, at.kv_len)
        if start >= stop:  # no key is kept, but the operator needs at least one
            start, stop = 0, at.kv_len
        self.start, self.stop, self.kv_len = start, stop, at.kv_len
        self._form, self._at = form, at.keys(start, stop)
        self._by_device: dict[torch.device, Mask | None] = {}

    def on(self, device: torch.device) -> Mask | None:
        """Return the mask for keys `start` to `stop - 1` on a device; None if it keeps them all.

        Masks of the same parameters are one object, so that attnkit's own caches find them without
        looking inside.
        """
        if device not in self._by_device:
            at = replace(self._at, device=device)
            self._by_device[device] = None if self._form.keeps_all(at) else _mask(self._form, at)
        return self._by_device[device]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, 1, query length, kv length)."""
        return self._at.batch, 1, self._at.q_len, self.kv_len

    def contiguous(self) -> LayerMask:
        """Return the mask itself; transformers calls this method for tensors."""
        return self

    def to(self, *arguments: Any, **options: Any) -> LayerMask:
        """Return the mask itself, which moves to the device of the query when it is used."""
        return self

    def __getitem__(self, index: Any) -> LayerMask:
        raise UnsupportedError(
            "this model selects a part of its attention mask, and a mask of attnkit has no rows or "
            'columns to select; use attn_implementation="sdpa"'
        )

    def __repr__(self) -> str:
        return f"LayerMask(shape={self.shape}, keys=[{self.start}, {self.stop}), {self._form})"

    __str__ = __repr__


def _mask(form: Form, at: Geometry) -> Mask:
    """Return the mask of a form, from the cache if its parameters determine it."""
    key = form.key(at)
    if key is None:
        return form.mask(at)
    found = _masks.get((key, at.device))
    if found is None:
        if len(_masks) >= _MASKS:
            caches.drop_oldest(_masks)
        found = _masks[key, at.device] = form.mask(at)
    return found
