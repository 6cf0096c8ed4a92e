"""`explain`: formula, derivative, staging, tiles, plan and schedule of a variant, to read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_sympy import describe
from attnkit.graph.staging import linear, stage
from attnkit.inspection.forecast import (
    CARDS,
    HOPPER_SMS,
    Forecast,
    cycles,
    forecast,
    forecast_backward,
    forecast_forward,
)
from attnkit.inspection.summary import summarize
from attnkit.inspection.throughput import Feeds, backward_feeds, forward_feeds
from attnkit.runtime.prepare import planned
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import Plan
from attnkit.schedule.targets import Target, missing_arch, of_arch
from attnkit.schedule.work_list import fitted
from attnkit.sparsity.block_mask import BlockMask, create_block_mask
from attnkit.sparsity.block_runs import BLOCK, BlockRuns
from attnkit.sparsity.intervals.normal_form import find_intervals
from attnkit.splice import (
    Layout,
    Program,
    backward_block,
    first_parts,
    forward_block,
    layout_of,
)
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.mask import noop_mask
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import check_options, check_size


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str` gives the report.

    Attributes:
        score: the traced score_mod, None where the score stays as it is.
        mask: the traced mask_mod, None where everything is kept.
        runs: tiles of the mask, None where everything is kept.
        plan: template and tile sizes.
        lengths: (batch, query heads, query length, kv length).
        head_dim: width of query and key.
        sms: SMs that the schedule is predicted for.
        target: what a kernel is predicted for, None for none.
        variant: what is explained.
        dtype: of query, key and value.
        listed: block lists overrule the mask function.
    """

    score: Traced | None
    mask: Traced | None
    runs: BlockRuns | None
    plan: Plan
    lengths: tuple[int, int, int, int]
    head_dim: int = 64
    sms: int = HOPPER_SMS
    target: Target | None = None
    variant: Variant | None = None
    dtype: torch.dtype = torch.bfloat16
    listed: bool = False

    @property
    def formula(self) -> str:
        """The traced functions, one a line."""
        found = [str(t) for t in (self.score, self.mask) if t is not None]
        return "\n".join(found) or "softmax attention, no score_mod, no mask"

    @property
    def derivative(self) -> str:
        """The derivative of score_mod by the score, and the gradient of each captured tensor."""
        if self.score is None:
            return "d score' / d score = 1"
        own = describe(self.score.root, self.score.names)
        loads = adjoint(self.score.root).loads
        shown = [
            f"d {ir.formula(load, self.score.names)} = {ir.formula(c, self.score.names)}"
            for load, c in loads
        ]
        return "\n".join([own, *shown])

    @property
    def staging(self) -> str:
        """Where each part is computed: per head, row, column or element."""
        parts = []
        for traced in (self.score, self.mask):
            if traced is not None:
                parts.append(f"{traced.kind}:\n{_indent(stage(traced.root).table(traced.names))}")
        if self.score is not None:
            split = linear(self.score.root)
            if split is not None:
                factor, bias = (ir.formula(n, self.score.names) for n in (split.factor, split.bias))
                parts.append(f"linear in the score: factor {factor}, bias {bias}")
        return "\n".join(parts) or "nothing to compute"

    @property
    def tiles(self) -> str:
        """Counts of empty, partial and full tiles, and the share that is computed."""
        if self.runs is None:
            return "all tiles full (no mask)"
        empty, partial, full = self.runs.counts()
        shared = [w for w, n in (("batch", self.runs.batch), ("heads", self.runs.heads)) if n == 1]
        note = f"; shared by {' and '.join(shared)}" if shared else ""
        return (
            f"{empty} empty, {partial} partial, {full} full of {empty + partial + full}; "
            f"{100 * self.runs.density():.1f}% computed{note}"
        )

    @property
    def intervals(self) -> str:
        """What each row keeps, as a union of few intervals of kv, or why it is none."""
        if self.mask is None:
            return "every row keeps everything"
        batch, heads, q_len, kv_len = self.lengths
        found = find_intervals(
            self.mask,
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            heads=heads,
            dtype=compute_dtype(self.mask),
        )
        return str(found)

    @property
    def forecast(self) -> Forecast | None:
        """The schedule, simulated; None where that would take too long."""
        batch, heads, _, _ = self.lengths
        runs = self._tiles
        return forecast(runs, batch=batch, heads=heads, head_dim=self.head_dim, sms=self.sms)

    @property
    def schedule(self) -> str:
        """Pieces, splits and predicted cycles, against the bound and grid order; how dQ begins."""
        found = self.forecast
        if found is None:
            return "not simulated: more than a million rows of tiles"
        begin = first_parts(self._program, self._tiles, self.lengths, self.head_dim, self.sms)
        return f"{found}\ndQ        on Hopper, {begin}"

    @property
    def _tiles(self) -> BlockRuns:
        """The runs, also of a mask that keeps everything."""
        if self.runs is not None:
            return self.runs
        _, _, q_len, kv_len = self.lengths
        return create_block_mask(
            noop_mask, None, None, q_len, kv_len, BLOCK_SIZE=self.plan.block
        ).runs

    @functools.cached_property
    def layout(self) -> Layout:
        """Roles, registers and memory of the kernel.

        Raises:
            ArgumentError: nothing is predicted for an architecture.
        """
        dims = self.head_dim, self.head_dim
        block, _ = self._kernel
        return layout_of(self.plan.template, self._program, self.dtype, dims, block)

    @property
    def _program(self) -> Program:
        return Program(None if self.score is None else self.score.root, listed=self.listed)

    @functools.cached_property
    def _kernel(self) -> tuple[tuple[int, int], str]:
        """Rows and columns of the kernel's blocks, and why these."""
        dims, q_len = (self.head_dim, self.head_dim), self.lengths[2]
        return forward_block(self.plan.template, self._program, dims, self.runs, q_len)

    @functools.cached_property
    def feeds(self) -> Feeds:
        """Clocks of the kernel by unit and by block; executes it in the emulator, some seconds.

        Raises:
            ArgumentError: nothing is predicted for an architecture.
            UnsupportedError: the kernel cannot be emulated here.
        """
        subject, (block, _) = self._subject, self._kernel
        return forward_feeds(*subject, head_dim=self.head_dim, dtype=self.dtype, block=block)

    @functools.cached_property
    def backward_feeds(self) -> Feeds:
        """The same of the backward."""
        dims = self.head_dim, self.head_dim
        block = backward_block(self.plan.template, self._program, dims, self._tiles)
        subject = self._subject
        return backward_feeds(*subject, head_dim=self.head_dim, dtype=self.dtype, block=block)

    @property
    def _subject(self) -> tuple[Variant, Target]:
        if self.target is None or self.variant is None:
            raise ArgumentError("no architecture was named: explain(..., arch='sm_100a')")
        return self.variant, self.target

    def rate(self, backward: bool = False) -> str:
        """Time and TFLOP/s of a pass on one card, predicted."""
        variant, target = self._subject
        if target.arch not in CARDS:
            return f"no card for {target.arch} is modelled"
        card = CARDS[target.arch]
        batch, heads, q_len, kv_len = self.lengths
        shared = (self.backward_feeds if backward else self.feeds).sms
        sizes = {"batch": batch, "heads": heads, "head_dim": self.head_dim}
        sizes["sms"] = max(1, self.sms // shared)
        if backward:
            mask = noop_mask if self.mask is None else variant.mask
            runs = self._tiles
            if not isinstance(mask, BlockMask):
                size = runs.batch, runs.heads, q_len, kv_len
                block = self.backward_feeds.block
                runs = create_block_mask(mask, *size, BLOCK_SIZE=block).runs
            found = forecast_backward(runs, **sizes, cost=self.backward_feeds.cost)
        else:
            tiles = fitted(self._tiles, self.feeds.block)
            found = forecast_forward(tiles, **sizes, cost=self.feeds.cost)
        seconds = found.timeline.makespan / (card.clock * 1e9)
        text = f"{cycles(found.timeline.makespan)} cycles on {self.sms} SMs, {1e3 * seconds:.3g} ms"
        text += f" at {card.clock:.2f} GHz"
        kept = self._kept()
        if kept is None:
            return text
        flops = (10 if backward else 4) * self.head_dim * kept
        rate = flops / seconds / 1e12
        return f"{text}: {rate:.0f} TFLOP/s of the kept scores ({card.peak:.0f} peak)"

    def _kept(self) -> int | None:
        """Scores that the mask keeps, over batch and heads; None where counting takes too long."""
        batch, heads, q_len, kv_len = self.lengths
        if self.mask is None or self.runs is None or self.variant is None:
            return batch * heads * q_len * kv_len
        mask = self.variant.mask
        if not isinstance(mask, BlockMask):
            mask = create_block_mask(mask, self.runs.batch, self.runs.heads, q_len, kv_len)
        kept = summarize(mask).kept
        shared = batch * heads // (self.runs.batch * self.runs.heads)
        return None if kept is None else kept * shared

    @property
    def kernel(self) -> str:
        """The kernel for an architecture: roles, memory, clocks, predicted speed."""
        (rows, columns), why = self._kernel
        chosen = f"blocks of {rows} x {columns}: {why}"
        return f"{chosen}\n{self.layout}\n{self.feeds}\n{self.rate()}"

    @property
    def backward_kernel(self) -> str:
        """The backward's main kernel for an architecture: clocks, predicted speed."""
        return f"{self.backward_feeds}\n{self.rate(backward=True)}"

    def __str__(self) -> str:
        batch, heads, q_len, kv_len = self.lengths
        sections = {
            "formula": self.formula,
            "derivative": self.derivative,
            "staging": self.staging,
            f"tiles (B={batch} H={heads} Sq={q_len} Skv={kv_len})": self.tiles,
            "intervals": self.intervals,
            "plan": str(self.plan),
            f"schedule (predicted for {self.sms} SMs, not measured)": self.schedule,
        }
        if self.target is not None:
            sections[f"kernel for {self.target.arch} (predicted, not measured)"] = self.kernel
        return "\n".join(f"{name}\n{_indent(text)}" for name, text in sections.items())


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def explain(
    score_mod: Callable[..., Any] | Variant | None = None,
    block_mask: Any = None,
    *,
    q_len: int,
    kv_len: int | None = None,
    batch: int = 1,
    heads: int = 1,
    head_dim: int = 64,
    device: torch.device | str = "cpu",
    kernel_options: dict[str, Any] | None = None,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    sms: int | None = None,
    arch: str | None = None,
) -> Explanation:
    """Say what a variant means and how it would run; computes no attention.

    Args:
        score_mod: score_mod, or a whole `Variant` (then without block_mask).
        block_mask: as of `flex_attention`.
        q_len: query length.
        kv_len: kv length; q_len if None.
        batch: batch size.
        heads: query heads.
        head_dim: width of query and key.
        device: where the tensors would live.
        kernel_options: as of `flex_attention`.
        backend: as of `flex_attention`.
        dtype: of query, key and value.
        sms: SMs of the GPU that the schedule is predicted for; those of the architecture's card,
            an H200 if none is named.
        arch: predict the kernel for this architecture, say "sm_100a": printing the explanation
            executes a tile of it in the emulator.

    Returns:
        The explanation; print it.

    Raises:
        What flex_attention would raise for these functions and lengths.
    """
    target = None
    if arch is not None:
        target = of_arch(arch)
        if target is None:
            raise UnsupportedError(f"arch={arch!r}: {missing_arch(arch)}")
        if backend != "auto":
            raise OptionError(f"arch={arch!r} with backend={backend!r}: give one of them")
        backend = f"emulate:{arch}"
    if sms is None:
        sms = CARDS[arch].sms if arch in CARDS else HOPPER_SMS
    variant = score_mod if isinstance(score_mod, Variant) else Variant(score_mod, block_mask)
    sizes = tuple(
        check_size(name, n)
        for name, n in (
            ("batch", batch),
            ("heads", heads),
            ("q_len", q_len),
            ("kv_len", q_len if kv_len is None else kv_len),
            ("head_dim", head_dim),
            ("sms", sms),
        )
    )
    batch, heads, q_len, kv_len, head_dim, sms = sizes
    block, notes = check_options(kernel_options, BLOCK)
    # shapes only: no memory is used for the tensors
    one = torch.empty(1, dtype=dtype, device=device)
    query = one.expand(batch, heads, q_len, head_dim)
    key = one.expand(batch, heads, kv_len, head_dim)
    plan, bound = planned(variant, query, key, key, backend, block, notes)
    shape = (batch, heads, q_len, kv_len)
    return Explanation(
        *(bound.score, bound.mask, bound.runs, plan, shape, head_dim, sms),
        target=target,
        variant=variant,
        dtype=dtype,
        listed=bound.program.listed,
    )
