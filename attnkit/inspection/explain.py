"""Explain a variant: its formula, derivative, staging, tiles, plan and predicted schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.codegen.distance_tables import distance_tables
from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_sympy import describe
from attnkit.graph.staging import linear, stage
from attnkit.inspection.forecast import (
    GPUS,
    HOPPER_SMS,
    Direction,
    Forecast,
    cycles,
    forecast,
    forecast_backward,
    forecast_forward,
)
from attnkit.inspection.summary import summarize
from attnkit.inspection.throughput import BlockClocks, backward_block_clocks, forward_block_clocks
from attnkit.inspection.weights import describe_weights
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.normalization import resolve
from attnkit.runtime.prepare import prepare
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import Plan
from attnkit.schedule.targets import Target, missing_arch, of_arch
from attnkit.schedule.work_list import retile
from attnkit.sparsity.block_mask import BlockMask, create_block_mask
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.intervals.normal_form import find_intervals
from attnkit.splice import Program
from attnkit.splice.backward import backward_block, first_writer_report
from attnkit.splice.distance_calls import LEAST_SCORES, has_tables, with_tables
from attnkit.splice.forward import forward_block, layout_of
from attnkit.splice.kept_distances import CallSizes
from attnkit.splice.kernel_layout import Layout
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.mask import noop_mask
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import AuxRequest, check_aux, check_dtype, check_size, shown
from attnkit.util.devices import resolve_device
from attnkit.util.dropout import threshold_of


@dataclass(frozen=True)
class Explanation:
    """Holds the result of `explain`; `str` formats it as a report.

    Attributes:
        score: the traced score_mod; None if the score is not changed.
        mask: the traced mask_mod; None if there is no mask.
        runs: tiles of the mask; None if there is no mask.
        plan: template and tile sizes.
        lengths: (batch, query heads, query length, kv length).
        head_dim: of query and key.
        sms: number of SMs of the predicted schedule.
        target: architecture of the predicted kernel; None to predict no kernel.
        variant: the variant.
        dtype: of query, key and value.
        lists_override_mask: whether block lists override the mask function.
        normalization, dropout_p: as in `flex_attention`.
        has_sink: whether there is an attention sink.
        aux: which auxiliary outputs the call returns; None for none.
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
    lists_override_mask: bool = False
    normalization: str = "softmax"
    has_sink: bool = False
    dropout_p: float = 0.0
    aux: AuxRequest | None = None

    @property
    def weights(self) -> str:
        """Format what makes the weights of the modified scores, and what the statistics cost."""
        return describe_weights(self.normalization, self.has_sink, self.dropout_p, self.aux)

    @property
    def formula(self) -> str:
        """Format the traced functions, one on each line."""
        lines = [str(t) for t in (self.score, self.mask) if t is not None]
        kind = "" if self.normalization in ("sigmoid", "none") else "softmax "
        return "\n".join(lines) or f"{kind}attention, no score_mod, no mask"

    @property
    def derivative(self) -> str:
        """Format the derivative of score_mod by the score and by each captured tensor."""
        if self.score is None:
            return "d score' / d score = 1"
        by_score = describe(self.score.root, self.score.names)
        loads = adjoint(self.score.root).loads
        by_captured = [
            f"d {ir.formula(load, self.score.names)} = {ir.formula(c, self.score.names)}"
            for load, c in loads
        ]
        return "\n".join([by_score, *by_captured])

    @property
    def staging(self) -> str:
        """Format how often kernels compute each part: once per head, row, column or element."""
        parts = []
        for traced in (self.score, self.mask):
            if traced is not None:
                parts.append(f"{traced.kind}:\n{_indent(stage(traced.root).table(traced.names))}")
        if self.score is not None:
            tables = distance_tables(self.score.root)
            if tables is not None:
                text = tables.describe(self.score.names)
                parts.append(f"{self._tables_note}:\n{_indent(text)}")
            split = linear(self.score.root)
            if split is not None:
                factor, bias = (ir.formula(n, self.score.names) for n in (split.factor, split.bias))
                parts.append(f"linear in the score: factor {factor}, bias {bias}")
        return "\n".join(parts) or "nothing to compute"

    @property
    def _has_tables(self) -> bool:
        return has_tables(CallSizes(*self.lengths))

    @property
    def _tables_note(self) -> str:
        """Say when GPU kernels read tables by distance."""
        note = "tables that torch computes before a GPU kernel, once per distance"
        return note if self._has_tables else f"{note}, in calls of {LEAST_SCORES} scores or more"

    @property
    def tiles(self) -> str:
        """Format the counts of empty, partial and full tiles, and the share that is computed."""
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
        """Format the kv positions of a row as a union of intervals, or say why there is none."""
        if self.mask is None:
            return "every row keeps everything"
        batch, heads, q_len, kv_len = self.lengths
        intervals = find_intervals(
            self.mask,
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            heads=heads,
            dtype=compute_dtype(self.mask),
        )
        return str(intervals)

    @property
    def forecast(self) -> Forecast | None:
        """Return the simulated schedules, or None if simulating them would take too long."""
        batch, heads, _, _ = self.lengths
        runs = self._tiles
        return forecast(runs, batch=batch, heads=heads, head_dim=self.head_dim, sms=self.sms)

    @property
    def schedule(self) -> str:
        """Format the predicted schedules, with bound and grid order, and how dQ is initialized."""
        forecast = self.forecast
        if forecast is None:
            return "not simulated: more than a million rows of tiles"
        begin = first_writer_report(
            self._program, self._tiles, self.lengths, self.head_dim, self.sms
        )
        return f"{forecast}\ndQ        on Hopper, {begin}"

    @property
    def _tiles(self) -> BlockRuns:
        """Return the runs of the mask's tiles. Without a mask, all tiles are FULL."""
        if self.runs is not None:
            return self.runs
        _, _, q_len, kv_len = self.lengths
        return create_block_mask(
            noop_mask, None, None, q_len, kv_len, BLOCK_SIZE=self.plan.block
        ).runs

    @functools.cached_property
    def layout(self) -> Layout:
        """Return the roles, registers and memory of the forward kernel.

        Raises:
            ArgumentError: no architecture was named.
        """
        dims = self.head_dim, self.head_dim
        block, _ = self._kernel
        return layout_of(self.plan.template, self._program, self.dtype, dims, block)

    @property
    def _program(self) -> Program:
        program = Program(
            None if self.score is None else self.score.root,
            lists_override_mask=self.lists_override_mask,
            normalization="softmax" if self.normalization == "softmax1" else self.normalization,
            dropout=bool(self.dropout_p),
        ).weights
        return with_tables(program) if self._has_tables else program

    @functools.cached_property
    def _kernel(self) -> tuple[tuple[int, int], str]:
        """Return the block size (rows, columns) of the forward kernel, and the reason for it."""
        dims, q_len = (self.head_dim, self.head_dim), self.lengths[2]
        return forward_block(self.plan.template, self._program, dims, self.runs, q_len)

    @functools.cached_property
    def block_clocks(self) -> BlockClocks:
        """Predict the clocks of the forward kernel by running it in the emulator for some seconds.

        Raises:
            ArgumentError: no architecture was named.
            UnsupportedError: the kernel cannot be emulated here.
        """
        (variant, target), (block, _) = self._subject, self._kernel
        return forward_block_clocks(
            variant,
            target,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block=block,
            tables=self._has_tables,
        )

    @functools.cached_property
    def backward_block_clocks(self) -> BlockClocks:
        """Predict the clocks of the backward's main kernel by running it in the emulator."""
        dims = self.head_dim, self.head_dim
        block = backward_block(self.plan.template, self._program, dims, self._tiles)
        variant, target = self._subject
        return backward_block_clocks(
            variant,
            target,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block=block,
            tables=self._has_tables,
        )

    @property
    def _subject(self) -> tuple[Variant, Target]:
        """Return the variant and the architecture of the predicted kernel.

        Raises:
            ArgumentError: no architecture was named.
        """
        if self.target is None or self.variant is None:
            raise ArgumentError("no architecture was named: explain(..., arch='sm_100a')")
        return self.variant, self.target

    def rate(self, backward: bool = False) -> str:
        """Predict the time and the TFLOP/s of the forward or the backward on a GPU, as text.

        Args:
            backward: predict the backward's main kernel.

        Raises:
            ArgumentError, UnsupportedError: see `block_clocks`.
        """
        _, target = self._subject
        if target.arch not in GPUS:
            return f"no GPU for {target.arch} is modelled"
        gpu = GPUS[target.arch]
        makespan = self._simulated(backward).timeline.makespan
        seconds = makespan / (gpu.clock * 1e9)
        text = f"{cycles(makespan)} cycles on {self.sms} SMs, {1e3 * seconds:.3g} ms"
        text += f" at {gpu.clock:.2f} GHz"
        kept = self._count_unmasked()
        if kept is None:
            return text
        flops = (10 if backward else 4) * self.head_dim * kept
        rate = flops / seconds / 1e12
        return f"{text}: {rate:.0f} TFLOP/s of the unmasked scores ({gpu.peak:.0f} peak)"

    def _simulated(self, backward: bool) -> Direction:
        """Simulate the schedule of the architecture's kernel with the predicted clocks as costs."""
        batch, heads, q_len, kv_len = self.lengths
        clocks = self.backward_block_clocks if backward else self.block_clocks
        sizes = {"batch": batch, "heads": heads, "head_dim": self.head_dim}
        sizes["sms"] = max(1, self.sms // clocks.sms)
        runs = self._tiles
        if not backward:
            return forecast_forward(retile(runs, clocks.block), **sizes, cost=clocks.cost)
        variant, _ = self._subject
        mask = noop_mask if self.mask is None else variant.mask
        if not isinstance(mask, BlockMask):
            shape = runs.batch, runs.heads, q_len, kv_len
            runs = create_block_mask(mask, *shape, BLOCK_SIZE=clocks.block).runs
        return forecast_backward(runs, **sizes, cost=clocks.cost)

    def _count_unmasked(self) -> int | None:
        """Count the unmasked scores over batch and heads, or return None if that takes too long."""
        batch, heads, q_len, kv_len = self.lengths
        if self.mask is None or self.runs is None or self.variant is None:
            return batch * heads * q_len * kv_len
        mask = self.variant.mask
        if not isinstance(mask, BlockMask):
            mask = create_block_mask(mask, self.runs.batch, self.runs.heads, q_len, kv_len)
        kept = summarize(mask).kept_positions
        shared = batch * heads // (self.runs.batch * self.runs.heads)
        return None if kept is None else kept * shared

    @property
    def kernel(self) -> str:
        """Format the blocks, roles, memory, clocks and predicted speed of the forward kernel."""
        (rows, columns), why = self._kernel
        chosen = f"blocks of {rows} x {columns}: {why}"
        return f"{chosen}\n{self.layout}\n{self.block_clocks}\n{self.rate()}"

    @property
    def backward_kernel(self) -> str:
        """Format the clocks and the predicted speed of the backward's main kernel."""
        return f"{self.backward_block_clocks}\n{self.rate(backward=True)}"

    def __str__(self) -> str:
        batch, heads, q_len, kv_len = self.lengths
        shown = {} if self.weights == describe_weights() else {"weights": self.weights}
        sections = {
            "formula": self.formula,
            **shown,
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


def _target(arch: str | None, backend: str) -> Target | None:
    """Return the target of the architecture `arch`, or None if `arch` is None.

    Raises:
        ArgumentError: `arch` is no string.
        UnsupportedError: there is no kernel for the architecture.
        OptionError: the caller chose a backend too.
    """
    if arch is None:
        return None
    if not isinstance(arch, str):
        raise ArgumentError(f"arch must be a name such as 'sm_100a' or None, got {shown(arch)}")
    target = of_arch(arch)
    if target is None:
        raise UnsupportedError(f"arch={arch!r}: {missing_arch(arch)}")
    if backend != "auto":
        raise OptionError(f"arch={arch!r} with backend={backend!r}: give one of them")
    return target


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
    normalization: str = "softmax",
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
) -> Explanation:
    """Explain what a variant computes and how it would run, without computing attention.

    >>> from attnkit import explain, masks
    >>> explanation = explain(lambda s, b, h, q, kv: s / 2, masks.causal(), q_len=512)
    >>> print(explanation.formula)
    score(score, b, h, q, kv) = score * 0.5
    mask(b, h, q, kv) = kv <= q
    >>> print(explanation.tiles)
    6 empty, 4 partial, 6 full of 16; 62.5% computed; shared by batch and heads

    Args:
        score_mod: a score_mod, or a whole `Variant` (then without block_mask).
        block_mask: see `flex_attention`.
        q_len: query length.
        kv_len: kv length; q_len if None.
        batch: batch size.
        heads: query heads.
        head_dim: of query and key.
        device: of the tensors.
        kernel_options: see `flex_attention`.
        backend: see `flex_attention`.
        dtype: of query, key and value.
        sms: number of SMs of the predicted schedule. None takes the number of SMs of the GPU with
            architecture `arch`, an H200 or a B200, or of an H200 if there is no such GPU.
        arch: predict the kernel for this architecture, such as "sm_100a". Printing the explanation
            then executes a tile of the kernel in the emulator, which takes up to a minute. It is
            the kernel of a softmax without dropout, and no other is predicted.
        normalization, sink, dropout_p, return_aux: see `flex_attention`. The plan depends on the
            first and the third. No random number is drawn.

    Returns:
        The explanation. Print it to read the report.

    Raises:
        What flex_attention would raise for these functions and lengths.
    """
    target = _target(arch, backend)
    if target is not None:
        backend = f"emulate:{arch}"
    if sms is None:
        sms = GPUS[target.arch].sms if target and target.arch in GPUS else HOPPER_SMS
    variant = score_mod if isinstance(score_mod, Variant) else Variant(score_mod, block_mask)
    kv_len = q_len if kv_len is None else kv_len
    sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    sizes |= {"head_dim": head_dim, "sms": sms}
    batch, heads, q_len, kv_len, head_dim, sms = (check_size(n, s) for n, s in sizes.items())
    query, key = _without_memory(
        (batch, heads, q_len, kv_len), head_dim, check_dtype("dtype", dtype), device
    )
    functions = variant.score_mod, variant.mask
    options: dict[str, Any] = {"kernel_options": kernel_options, "backend": backend}
    options["return_aux"] = return_aux
    options |= _weight_options(query, normalization, sink, dropout_p, return_aux, arch)
    preparation = prepare(AttentionCall(query, key, key, *functions, **options), launchable=False)
    bound = preparation.bound
    return Explanation(
        bound.score,
        bound.mask,
        bound.runs,
        preparation.plan,
        (batch, heads, q_len, kv_len),
        head_dim,
        sms,
        target=target,
        variant=variant,
        dtype=dtype,
        lists_override_mask=bound.program.lists_override_mask,
        normalization=normalization,
        has_sink=sink is not None,
        dropout_p=dropout_p,
        aux=None if return_aux is None else check_aux(False, return_aux),
    )


def _weight_options(
    query: Tensor, normalization: Any, sink: Any, dropout_p: Any, return_aux: Any, arch: str | None
) -> dict[str, Any]:
    """Check what makes the weights; return the arguments of `AttentionCall` that say so.

    Raises:
        OptionError, ConflictError, ArgumentError: as `flex_attention` raises them; or a kernel is
            to be predicted that is not one of a softmax without dropout.
    """
    kind, sink = resolve(normalization, sink, query, False, return_aux)
    state = None
    if threshold_of(dropout_p):  # a plan depends only on whether there is a state
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if arch is not None and (kind != "softmax" or state is not None):
        raise OptionError(
            f"arch={arch!r} predicts the kernel of a softmax without dropout, got normalization="
            f"{normalization!r} and dropout_p={dropout_p}; leave arch out"
        )
    return {"normalization": kind, "sink": sink, "dropout": state}


def _without_memory(
    shape: tuple[int, int, int, int], head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return a query and a key as expanded tensors, which take no memory.

    Args:
        shape: batch, heads, query length and kv length.
    """
    batch, heads, q_len, kv_len = shape
    one = torch.empty(1, dtype=dtype, device=resolve_device(device))
    return one.expand(batch, heads, q_len, head_dim), one.expand(batch, heads, kv_len, head_dim)
