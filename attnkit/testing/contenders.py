"""Build calls of the same attention by attnkit and by PyTorch's functions, to compare them.

A function that cannot compute a variant says why, by a `CannotRunError` when its call is built or
by its own error when it runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from attnkit import masks
from attnkit.errors import AttnkitError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask, create_block_mask
from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.quantities import Captured, differentiated
from attnkit.tracing.mask import Mask
from attnkit.tracing.score_mod import ScoreMod

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS = "attnkit"


class CannotRunError(AttnkitError):
    """Raised if a function of PyTorch cannot compute a variant; the message says why."""


@dataclass(frozen=True)
class Problem:
    """Holds the call that every contender computes.

    Attributes:
        variant: score_mod and mask.
        case: sizes, dtype and seed.
        device: where to run.
        backward: whether gradients are computed too.
    """

    variant: Variant
    case: Case
    device: torch.device
    backward: bool

    @property
    def grouped(self) -> bool:
        """Return whether query heads share heads of key and value."""
        return self.case.heads != self.case.kv_heads

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, which require grad."""
        return self.case.inputs(self.device)

    @cached_property
    def grad(self) -> Tensor:
        """Return the gradient of the output."""
        return self.case.cotangents(self.device)[0].to(self.case.dtype)

    @cached_property
    def captured(self) -> Captured:
        """Return the tensors of the score_mod that learn."""
        score, _ = self.variant.trace(self.device)
        return differentiated(self.variant.score_mod, score, self.device)

    @cached_property
    def kept(self) -> Tensor | None:
        """Return the dense mask, bool, broadcastable to [B, Hq, Sq, Skv]; None without a mask."""
        if self.variant.mask is None:
            return None
        function = getattr(self.variant.mask, "mask_mod", self.variant.mask)
        return plain.dense_mask(function, self.case.dense_shape, self.device)

    @cached_property
    def score_bytes(self) -> int:
        """Return the bytes of all scores in float32."""
        batch, heads, q_len, kv_len = self.case.dense_shape
        return 4 * batch * heads * q_len * kv_len

    def refuse_dense(self, copies: int) -> None:
        """Raise if `copies` float32 tensors of all scores need more than half of the memory.

        Raises:
            CannotRunError: they do.
        """
        need, room = copies * self.score_bytes, free_memory(self.device) / 2
        if need > room:
            raise CannotRunError(
                f"it holds every score, about {need / 2**30:.1f} GiB, more than half of the memory"
            )


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device; of the host for a CPU, infinite if they are not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float("inf")
    return 1024.0 * int(found.split()[1])


def attnkit_call(p: Problem) -> Attention:
    """Return the call of attnkit; it classifies tiles at its first call."""
    return lambda q, k, v: p.variant(q, k, v, enable_gqa=p.grouped)


def flex_compiled(p: Problem) -> Attention:
    """Return the call of FlexAttention in torch.compile; its block mask is built here."""
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    return _flex(p, compiled)


def flex_eager(p: Problem) -> Attention:
    """Return the call of FlexAttention without torch.compile, which holds every score.

    Raises:
        CannotRunError: the scores do not fit in memory.
    """
    p.refuse_dense(4)
    return _flex(p, flex.flex_attention)


def _flex(p: Problem, function: Callable[..., Any]) -> Attention:
    """Return a call of FlexAttention's `function` with the variant's functions and lists."""
    score_mod, mask = _plain(p.variant.score_mod), None
    if p.variant.mask is not None:
        blocks = p.variant.mask
        if not isinstance(blocks, BlockMask):
            blocks = create_block_mask(blocks, *p.case.dense_shape, p.device)
        mask = blocks.to_flex()
        mask.mask_mod = _plain(mask.mask_mod)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return function(  # type: ignore[no-any-return]
                q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=p.grouped
            )

    return call


def _plain(function: Any) -> Any:
    """Return a plain function in place of a `Mask` or `ScoreMod`, which torch.compile inlines."""
    if isinstance(function, Mask):
        return lambda b, h, q, kv: function(b, h, q, kv)
    if isinstance(function, ScoreMod):
        return lambda score, b, h, q, kv: function(score, b, h, q, kv)
    return function


def sdpa(p: Problem) -> Attention:
    """Return the call of `scaled_dot_product_attention` with a dense mask or bias, built here.

    A causal mask is `is_causal`. A score_mod that adds to the score is a bias.

    Raises:
        CannotRunError: there is no bias for the score_mod, or it does not fit in memory.
    """
    score, mask = p.variant.trace(p.device)
    bias: Tensor | None = None
    causal = False
    if mask is not None and score is None and p.case.q_len == p.case.kv_len:
        _, plain_causal = Variant(None, masks.causal()).trace(p.device)
        causal = plain_causal is not None and mask.root is plain_causal.root
    if not causal and (score is not None or mask is not None):
        p.refuse_dense(2)
        bias = p.kept
    if score is not None:
        if adjoint(score.root).dscore is not ir.arg("grad"):
            raise CannotRunError("the score_mod is more than a bias that is added to the score")
        if p.backward and p.captured.tensors:
            names = ", ".join(p.captured.names)
            raise CannotRunError(f"its bias is a constant here, and the score_mod learns {names}")
        zeros = torch.zeros(p.case.dense_shape, device=p.device)
        with torch.no_grad():
            bias = plain.modified(p.variant.score_mod, zeros)  # type: ignore[arg-type]
            if p.kept is not None:
                bias = bias.masked_fill(~p.kept, -torch.inf)
            bias = bias.to(p.case.dtype)
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=p.grouped
    )


CONTENDERS: dict[str, Callable[[Problem], Attention]] = {
    OURS: attnkit_call,
    "FlexAttention, compiled": flex_compiled,
    "FlexAttention, eager": flex_eager,
    "SDPA": sdpa,
}
