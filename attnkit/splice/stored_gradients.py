"""Decide which gradients of full biases are stored instead of added, and clear what is not stored.

Each score adds its gradient to that of the element of the bias that it reads. If no other score of
the call reads this element, as in `table[b, h, q, kv]`, the sum has one term, and the main kernel
stores it. A store costs less than an addition, and the memory need not be zero before. If batch
elements share a bias, as in `table[h, q, kv]`, one of them stores and the others add, see
`templates.sm90.backward_leaders`.

Blocks that the mask leaves empty, and elements beyond the lengths of the call, are not stored. A
kernel of its own clears them, from tables that are built with the work list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.codegen.load_indices import LoadIndices
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node, arg
from attnkit.graph.staging import Level, index_level, index_repeats
from attnkit.jit.kernel import Build, Source
from attnkit.schedule.work_list import full_runs, retile
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.backward_rows import cached_learned_loads
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.runs_cache import cached_for_runs, on_host_if_few, wait_for_tables
from attnkit.util import caches

_WORD = 32  # blocks per word of `Unwritten.visited`


@dataclass(frozen=True)
class CallSizes:
    """Holds the sizes of a call: batch, query heads, and both lengths."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(query: Tensor, key: Tensor) -> CallSizes:
        """Return the sizes of a call with these tensors."""
        batch, heads, q_len = query.shape[:3]
        return CallSizes(batch, heads, q_len, key.shape[2])


@dataclass(frozen=True, eq=False)
class Unwritten:
    """Describes the elements of a gradient that no score writes, as the clearing kernel reads it.

    Attributes:
        source: the kernel, `templates.common.clear_gradient.ClearGradient`.
        visited, slices: its tables.
        sizes: sizes of the call.
    """

    source: Source
    visited: Tensor
    slices: Tensor
    sizes: CallSizes

    def arguments(self, total: Tensor) -> tuple[Tensor | int, ...]:
        """Return the arguments of the kernel that clears these elements of `total`."""
        view = total.view(-1, *total.shape[-2:])
        return view, self.visited, self.slices, self.sizes.q_len, self.sizes.kv_len


@dataclass(frozen=True, eq=False)
class StoredGradient:
    """Describes a gradient that the main kernel stores.

    Attributes:
        slot: number of its tensor among those that the score captures.
        led: whether batch element 0 stores it, and the others add theirs.
        unwritten: the elements to clear; None if there are none.
    """

    slot: int
    led: bool
    unwritten: Unwritten | None


def stored_gradients(
    score: Node | None,
    needs_grad: tuple[bool, ...],
    settings: BackwardSettings,
    indices: LoadIndices,
    sizes: CallSizes,
) -> tuple[dict[int, tuple[Node, ...]], dict[int, tuple[Node, ...]]]:
    """Return the tensors whose gradients the main kernel can store.

    Args:
        score: the score_mod.
        needs_grad: whether each tensor that it reads needs a gradient.
        settings: compile-time settings of the kernels.
        indices: the loads whose index is wrapped or clamped.
        sizes: sizes of the call.

    Returns:
        Two dictionaries, from the number of a tensor to the index at which the scores read it. In
        the tensors of the first, each score of the call has its own element. In those of the
        second, each score of a batch element has its own, and batch elements share it.
    """
    if score is None or not settings.bias_first or settings.deterministic:
        return {}, {}
    learned = cached_learned_loads(score, needs_grad, settings.row_sums).scores
    of_score = (adjoint(score).dscore, *(cotangent for _, cotangent in learned))
    repeat = any(index_level(n) is Level.ELEMENT and index_repeats(n) for n, _ in learned)
    if repeat or any(n is not arg("grad") for n in of_score):
        return {}, {}  # the kernel computes gradients where it has the scores, and adds them
    readers = [n.attr for n in ir.topo(score) if n.op == "load"]
    own: dict[int, tuple[Node, ...]] = {}
    shared: dict[int, tuple[Node, ...]] = {}
    for load, _ in learned:
        slot = int(str(load.attr))
        exact = not indices.wraps(load) and load not in indices.clamp
        if not exact or readers.count(load.attr) > 1:
            continue
        if owns_elements(load.args, sizes):
            own[slot] = load.args
        elif owns_elements(load.args, replace(sizes, batch=1)):
            shared[slot] = load.args
    return own, shared


def owns_elements(index: Sequence[Node], sizes: CallSizes) -> bool:
    """Return whether no two scores of a call read the same element, and rows run along kv.

    Args:
        index: the index at which the scores read the tensor.
        sizes: sizes of the call.
    """
    if tuple(index[-2:]) != (arg("q"), arg("kv")):
        return False
    outer = index[:-2]
    fixed = [n for n in outer if n not in (arg("b"), arg("h"))]
    if len(set(outer) - set(fixed)) + len(fixed) < len(outer):  # table[h, h, q, kv]
        return False
    if not all(n.op == "const" and int(n.attr) >= 0 for n in fixed):  # type: ignore[arg-type]
        return False
    counts = ((arg("b"), sizes.batch), (arg("h"), sizes.heads))
    return all(count == 1 or n in outer for n, count in counts)


def unwritten(
    index: tuple[Node, ...],
    shape: torch.Size,
    runs: BlockRuns | None,
    settings: BackwardSettings,
    sizes: CallSizes,
    device: torch.device,
) -> Unwritten | None:
    """Return the elements of a stored gradient that no score writes; None if there are none.

    The result is cached under `runs`.

    Args:
        index: the index at which the scores read the tensor, see `owns_elements`.
        shape: shape of the tensor.
        runs: tiles that the main kernel visits; None for all.
        settings: compile-time settings of the kernels.
        sizes: sizes of the call.
        device: device of the kernels.
    """
    if runs is None:
        runs = full_runs(sizes.q_len, sizes.kv_len, settings.block, device)
    tiles = runs

    def build() -> Unwritten | None:
        rows = sizes.batch * sizes.heads * max(tiles.q_blocks, tiles.kv_blocks)
        fine = retile(on_host_if_few(tiles, rows), settings.block)
        grid = visited_blocks(fine)
        slices = _slices(index, shape, fine, sizes)
        inside = tuple(shape[-2:]) == (sizes.q_len, sizes.kv_len)
        if inside and bool(grid.all()) and bool((slices >= 0).all()):
            return None
        tables = _words(grid).to(device), slices.to(device)
        wait_for_tables(device)
        return Unwritten(clear_source(settings.target.arch), *tables, sizes)

    key = ("unwritten", ir.text(*index), tuple(shape), settings.block, settings.target.arch, sizes)
    return cached_for_runs(runs, key, build)


def visited_blocks(runs: BlockRuns) -> Tensor:
    """Return the blocks that a backward visits, bool [masks, q blocks, kv blocks]."""
    both = runs.full_t.expanded(runs.q_blocks) | runs.partial_t.expanded(runs.q_blocks)
    return both.view(runs.batch * runs.heads, runs.kv_blocks, runs.q_blocks).transpose(1, 2)


def _words(grid: Tensor) -> Tensor:
    """Pack a grid of bool into int32 [masks, rows, words], the first block in the lowest bit."""
    masks, rows, blocks = grid.shape
    words = -(-blocks // _WORD)
    bits = grid.new_zeros(masks, rows, words * _WORD, dtype=torch.int64)
    bits[:, :, :blocks] = grid
    places = torch.arange(_WORD, device=grid.device)
    packed = (bits.view(masks, rows, words, _WORD) << places).sum(-1)
    signed = torch.where(packed < 1 << 31, packed, packed - (1 << 32))
    return signed.to(torch.int32)


def _slices(index: Sequence[Node], shape: torch.Size, runs: BlockRuns, sizes: CallSizes) -> Tensor:
    """Return which row of `visited_blocks` belongs to each slice of a gradient; -1 for none.

    A slice is a part [q, kv]. The result is int32 [slices].
    """
    device = runs.device
    places = {"b": torch.zeros((), dtype=torch.int64, device=device)}
    places["h"] = places["b"]
    written = torch.ones((), dtype=torch.bool, device=device)
    outer = shape[:-2]
    for axis, (n, size) in enumerate(zip(index, outer, strict=False)):
        at = torch.arange(size, device=device)
        at = at.view([size if i == axis else 1 for i in range(len(outer))])
        if n.op == "const":
            written = written & (at == int(n.attr))  # type: ignore[arg-type]
        else:
            places[str(n.attr)] = at
            written = written & (at < (sizes.batch if n is arg("b") else sizes.heads))
    row = (places["b"] * (runs.batch > 1)) * runs.heads + places["h"] * (runs.heads > 1)
    return torch.where(written, row, -1).expand(outer).reshape(-1).to(torch.int32)


@functools.lru_cache(maxsize=16)
def clear_source(arch: str) -> Source:
    """Return the source of the kernel that clears what no score writes."""

    def build() -> Build:
        from attnkit.splice.fake_backward_arguments import clear_arguments
        from attnkit.templates.common.clear_gradient import ClearGradient

        return Build(ClearGradient(), clear_arguments())

    return Source(f"clear gradient for {arch}", arch, build, "clear gradient")


caches.register(clear_source.cache_clear)
