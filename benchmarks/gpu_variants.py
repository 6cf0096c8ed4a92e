"""Define the masks, score_mods and inputs of the GPU cases, the same for every contender.

A case in gpu_cases.toml names a mask and a score of this module; `problem` draws its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Tensor]

BLOCK = 128  # of the random blocks
# Number of keys that a query attends to, by mask.
WINDOWS = {
    "window": 1024,
    "window_512": 512,
    "window_256": 256,
    "window_128": 128,
    "window_4096": 4096,
}
PREFIX = 1024
SOFTCAPS = {"softcap": 20.0, "softcap_50": 50.0}  # limit on the scores, by score


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of a case.

    Query is [batch, heads, length, head_dim], key is [batch, kv_heads, length, head_dim], and value
    is [batch, kv_heads, length, value_dim].
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, sizes: dict[str, int]) -> Shape:
        """Return the sizes of a case; kv_heads and value_dim default to heads and head_dim."""
        defaults = {"kv_heads": sizes["heads"], "value_dim": sizes["head_dim"]}
        return cls(**(defaults | sizes))


# --- masks: (length, device) -> mask_mod


def causal(length: int, device: torch.device) -> Mod:
    return lambda b, h, q, kv: q >= kv


def window(size: int) -> Callable[[int, torch.device], Mod]:
    """Return a builder of masks where each query attends to itself and `size` - 1 keys before it."""
    return lambda length, device: lambda b, h, q, kv: (q >= kv) & (q - kv < size)


def prefix(length: int, device: torch.device) -> Mod:
    """Return a causal mask where every query also attends to the first 1024 keys."""
    return lambda b, h, q, kv: (q >= kv) | (kv < PREFIX)


def document_cuts(length: int, count: int = 16) -> Tensor:
    """Draw the start positions of all documents but the first, sorted, int64 on the CPU."""
    random = torch.Generator().manual_seed(0)
    return (1 + torch.randperm(length - 1, generator=random)[: count - 1]).sort().values


def documents(length: int, device: torch.device) -> Mod:
    """Return a causal mask within 16 documents with random boundaries."""
    ids = _document_ids(length).to(device)
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def random_blocks(percent: int) -> Callable[[int, torch.device], Mod]:
    """Return a builder of masks that keep `percent` % of the 128 x 128 blocks, at random."""

    def make(length: int, device: torch.device) -> Mod:
        side = -(-length // BLOCK)
        order = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
        table = torch.zeros(side * side, dtype=torch.int32)
        table[order[: round(side * side * percent / 100)]] = 1
        table = table.view(side, side).to(device)
        return lambda b, h, q, kv: table[q // BLOCK, kv // BLOCK] > 0

    return make


MASKS: dict[str, Callable[[int, torch.device], Mod]] = {
    "causal": causal,
    **{name: window(size) for name, size in WINDOWS.items()},
    "prefix": prefix,
    "documents": documents,
    **{f"blocks_{percent}": random_blocks(percent) for percent in (1, 3, 7, 21, 50)},
}


# --- scores: tables that the score_mod captures, and the score_mod over them


@dataclass(frozen=True)
class Score:
    """Build a score_mod from captured tensors, so that a reference can pass them in float64.

    Attributes:
        tables: builds the captured tensors for a shape, on the CPU: float32 with the head as the
            first axis, or int32.
        mod: builds the score_mod from captured tensors.
    """

    tables: Callable[[Shape], tuple[Tensor, ...]]
    mod: Callable[..., Mod]


def _alibi(slopes: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def _slopes(shape: Shape) -> tuple[Tensor, ...]:
    return (2.0 ** (-8 * torch.arange(1, shape.heads + 1) / shape.heads),)


def _softcap(limit: float) -> Mod:
    return lambda score, b, h, q, kv: limit * torch.tanh(score / limit)


def _relative_bias(table: Tensor) -> Mod:
    length = table.shape[1] // 2
    return lambda score, b, h, q, kv: score + table[h, q - kv + length]


def _head_scale(gain: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score * gain[h]


def _t5_bucket(distance: Tensor) -> Tensor:
    """Return T5's bucket of a distance: 16 of one distance each, then 16 that grow to 128."""
    near = distance.clamp(min=0)
    far = 16 + (torch.log(near.clamp(min=1).float() / 16) / math.log(8) * 16).to(torch.int32)
    return torch.where(near < 16, near, far.clamp(max=31))


def _t5(table: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + table[h, _t5_bucket(q - kv)]


def _block_bias(table: Tensor) -> Mod:
    middle = table.shape[1] // 2
    return lambda score, b, h, q, kv: score + table[h, q // 64 - kv // 64 + middle]


def _pair_bias(table: Tensor, classes: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + table[h, classes[q], classes[kv]]


def _pair_tables(
    count: int, classes: Callable[[int], Tensor]
) -> Callable[[Shape], tuple[Tensor, ...]]:
    """Return a builder of a bias for pairs of `count` classes, and of the class by position."""
    return lambda shape: (_random(shape.heads, count, count), classes(shape.length))


def _document_ids(length: int) -> Tensor:
    ids = torch.searchsorted(document_cuts(length), torch.arange(length), right=True)
    return ids.to(torch.int32)


def _types(length: int) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randint(64, (length,), generator=random, dtype=torch.int32)


def _kerple(height: Tensor, width: Tensor) -> Mod:
    return lambda score, b, h, q, kv: (
        score - height[h].abs() * torch.log1p(width[h].abs() * (q - kv).abs())
    )


def _row_scale(table: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score * table[h, q]


def _gate(sums: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + sums[h, q] - sums[h, kv]


def _shift(term: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + term


def _full_bias(table: Tensor) -> Mod:
    return lambda score, b, h, q, kv: score + table[h, q, kv]


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


SCORES: dict[str, Score] = {
    "alibi": Score(_slopes, _alibi),
    **{name: Score(lambda shape: (), partial(_softcap, cap)) for name, cap in SOFTCAPS.items()},
    "relative_bias": Score(lambda shape: (_random(shape.heads, 2 * shape.length),), _relative_bias),
    "head_scale": Score(lambda shape: (1 + 0.1 * _random(shape.heads),), _head_scale),
    "t5": Score(lambda shape: (_random(shape.heads, 32),), _t5),
    "block_bias": Score(
        lambda shape: (_random(shape.heads, 2 * -(-shape.length // 64) + 1),), _block_bias
    ),
    "document_bias": Score(_pair_tables(16, _document_ids), _pair_bias),
    "type_bias": Score(_pair_tables(64, _types), _pair_bias),
    "kerple": Score(
        lambda shape: (_random(shape.heads).abs(), _random(shape.heads).abs() / 16), _kerple
    ),
    "row_scale": Score(lambda shape: (1 + 0.1 * _random(shape.heads, shape.length),), _row_scale),
    "gate": Score(
        lambda shape: (_random(shape.heads, shape.length).abs().div(-64).cumsum(1),), _gate
    ),
    "less_log": Score(lambda shape: (torch.tensor(-math.log(shape.length)),), _shift),
    "full_bias": Score(
        lambda shape: (_random(shape.heads, shape.length, shape.length),), _full_bias
    ),
}


@dataclass(frozen=True)
class Problem:
    """Hold a case with its tensors.

    Attributes:
        shape: sizes of the case.
        query, key, value, grad: [B, H, S, D] in the case's dtype; grad is the gradient of the
            output.
        mask: name in MASKS, or "" to keep everything.
        score: name in SCORES, or "" to leave the scores unchanged.
        mask_mod: the mask_mod, or None to keep everything.
        tables: captured tensors of the score_mod; they require grad if the case learns them.
        sink: float32 [heads], the attention sink; None without one. It requires grad in a backward.
        entropy: whether the call also returns the entropies of the rows.
        normalization: what makes the weights, as in `attnkit.flex_attention`.
        dropout_p: probability of dropping an element of the softmax.
        density: fraction of the (query, key) pairs that the mask keeps.
    """

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask: str
    score: str
    mask_mod: Mod | None
    tables: tuple[Tensor, ...]
    sink: Tensor | None
    entropy: bool
    normalization: str
    dropout_p: float
    density: float

    @property
    def extras(self) -> tuple[Tensor, ...]:
        """Return the captured tensors, followed by the sink if there is one."""
        return self.tables if self.sink is None else (*self.tables, self.sink)

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Return those of `extras` that require grad."""
        return tuple(t for t in self.extras if t.requires_grad)

    @property
    def score_mod(self) -> Mod | None:
        return self.modified_by(self.tables)

    def modified_by(self, tables: tuple[Tensor, ...]) -> Mod | None:
        """Build the score_mod from the captured tensors `tables`; None if the case has none."""
        return SCORES[self.score].mod(*tables) if self.score else None

    def for_backward(self) -> Problem:
        """Return the same problem with inputs that are leaves and require grad."""
        query, key, value = (
            t.detach().requires_grad_() for t in (self.query, self.key, self.value)
        )
        return replace(self, query=query, key=key, value=value)

    def useful_flops(self, backward: bool) -> float:
        """Return the floating-point operations for unmasked scores; backward: 2.5 x forward."""
        s = self.shape
        pairs = s.batch * s.heads * s.length * s.length * self.density
        return (2.5 if backward else 1.0) * 2 * pairs * (s.head_dim + s.value_dim)


def problem(case: dict[str, Any], shape: Shape, device: torch.device, backward: bool) -> Problem:
    """Build a case with normally distributed inputs from a fixed seed."""
    random = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    own = shape.batch, shape.heads, shape.length
    shared = shape.batch, shape.kv_heads, shape.length
    sizes = ((*own, shape.head_dim), (*shared, shape.head_dim), (*shared, shape.value_dim))
    inputs = [
        torch.randn(size, generator=random, device=device).to(dtype)
        for size in (*sizes, (*own, shape.value_dim))
    ]
    mask, score = case.get("mask", ""), case.get("score", "")
    mask_mod = MASKS[mask](shape.length, device) if mask else None
    tables = tuple(t.to(device) for t in SCORES[score].tables(shape)) if score else ()
    if case.get("learned", False) and backward:
        for t in tables:
            t.requires_grad_(t.is_floating_point())
    sink = _random(shape.heads).to(device) if case.get("sink", False) else None
    if sink is not None and backward:
        sink.requires_grad_()
    query, key, value, grad = inputs
    case_problem = Problem(
        shape, query, key, value, grad, mask, score, mask_mod, tables, sink,
        case.get("entropy", False), case.get("normalization", "softmax"),
        case.get("dropout_p", 0.0),
        1.0 if mask_mod is None else _density(mask_mod, shape.length, device),
    )  # fmt: skip
    return case_problem.for_backward() if backward else case_problem


def kept_rows(mask_mod: Mod, rows: Tensor, length: int) -> Tensor:
    """Return the dense mask of the query rows `rows`, bool [len(rows), length]."""
    none = torch.zeros((), dtype=torch.int32, device=rows.device)
    columns = torch.arange(length, dtype=torch.int32, device=rows.device)
    kept: Tensor = mask_mod(none, none, rows[:, None], columns[None])
    return kept.expand(len(rows), length)


def _density(mask_mod: Mod, length: int, device: torch.device, step: int = 1024) -> float:
    rows = torch.arange(length, dtype=torch.int32, device=device)
    kept = sum(int(kept_rows(mask_mod, part, length).sum()) for part in rows.split(step))
    return kept / length**2
