"""Prepare the GPU backward of a variant: choose the compile-time settings, build the call.

The parts that are specific to an architecture are in a `BackwardTemplate`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnkit.codegen.score_form import adds_full_bias, score_form
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node
from attnkit.graph.staging import index_level
from attnkit.schedule.targets import SM90, Target, gpu_target
from attnkit.schedule.whole_heads import WholeHeads
from attnkit.schedule.work_list import full_runs, retile
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice import backward_prepare, exact_sums, gqa_packing
from attnkit.splice.backward_call import BackwardCall
from attnkit.splice.backward_rows import cached_learned_loads
from attnkit.splice.backward_template import BackwardCase, BackwardSettings
from attnkit.splice.backward_work import arrivals, scheduled, whole_heads
from attnkit.splice.class_sums import sums_by_class
from attnkit.splice.kernel_call import BackwardInputs, KernelCall
from attnkit.splice.program import Program
from attnkit.splice.template_registry import backward_template
from attnkit.util import caches

_DEFAULT_LENGTH = 4096  # length of both sequences, if the caller gives no tiles


def supports(kernel_call: KernelCall, inputs: BackwardInputs) -> bool:
    """Return whether the GPU kernels of the call's template can compute this backward."""
    return not reason_against(kernel_call, inputs)


def reason_against(kernel_call: KernelCall, inputs: BackwardInputs) -> str:
    """Return why the GPU kernels of the call's template cannot compute this backward; "" if they can."""
    program, spec, runs = kernel_call.program, kernel_call.spec, kernel_call.runs
    query = inputs.query
    if spec.target is None:
        return "the forward was no GPU kernel"
    template = backward_template(spec.target)
    head_dims = query.shape[-1], inputs.value.shape[-1]
    widths = template.widths(head_dims)
    if query.dtype not in (torch.bfloat16, torch.float16) or widths is None:
        return f"it has none for {query.dtype} and head dims {head_dims[0]} and {head_dims[1]}"
    if program.checked:
        return "an index of a captured tensor is not proven to stay inside it"
    if not (spec.emulated or query.is_cuda):
        return "the query is not on a CUDA device"
    if inputs.grad_entropy is not None and not template.entropies(
        widths, any(inputs.needs_grad), inputs.dropout is not None
    ):
        return "the entropy has a gradient, together with captured tensors, dropout or wide heads"
    if not program.has_softmax and not template.weights(widths, any(inputs.needs_grad)):
        return "without a softmax it has no kernel for these head dims, or for gradients of captured tensors"
    if spec.deterministic and not template.ordered(widths):
        return "its kernel for these head dims does not add in a fixed order"
    if spec.deterministic and not exact_sums.fit(query, inputs.key, _learned(inputs)):
        return "deterministic sums of the captured tensors' gradients would overflow or take too much memory"
    if runs is not None and program.lists_override_mask:  # tiles of block lists cannot be joined
        columns = template.block_kv(widths, {})
        if runs.block[0] % 64 or runs.block[1] % columns:
            return f"tiles of {runs.block} are no multiples of its (64, {columns})"
    return ""


def _learned(inputs: BackwardInputs) -> list[Tensor]:
    """Return the captured tensors whose gradients are needed."""
    pairs = zip(inputs.captured.scores, inputs.needs_grad, strict=True)
    return [t for t, need in pairs if need]


def prepare(kernel_call: KernelCall, inputs: BackwardInputs) -> BackwardCall:
    """Return the cached or new `BackwardCall` for tensors like `inputs`; `supports` must hold.

    A deterministic call accumulates dQ, dK and dV in a fixed order, and the gradients of captured
    tensors exactly.
    """
    return backward_prepare.prepare(
        kernel_call, inputs, functools.partial(_settings_of, kernel_call, inputs)
    )


def _settings_of(
    kernel_call: KernelCall,
    inputs: BackwardInputs,
    program: Program,
    needs_grad: tuple[bool, ...],
) -> BackwardSettings:
    """Return the settings of kernels for the graphs in `program`.

    Args:
        kernel_call, inputs: see `prepare`.
        program: the graphs, which may read numbers from tables.
        needs_grad: whether each tensor that the score reads, tables included, needs a gradient.
    """
    spec, runs = kernel_call.spec, kernel_call.runs
    query, key, value = inputs.query, inputs.key, inputs.value
    assert spec.target is not None
    template = backward_template(spec.target)
    widths = template.widths((query.shape[-1], value.shape[-1]))
    assert widths is not None
    softmax = program.has_softmax
    learned = cached_learned_loads(program.score, needs_grad, template.row_sums(widths), softmax)
    case = BackwardCase(
        widths,
        runs or full_runs(query.shape[2], key.shape[2], (128, 128), query.device),
        additive=softmax and score_form(program.score).additive,
        learned=frozenset(index_level(load) for load, _ in learned.scores),
        lists_override_mask=program.lists_override_mask,
        deterministic=spec.deterministic,
        dropout=inputs.dropout is not None,
        full_bias=softmax and inputs.grad_entropy is None and adds_full_bias(program.score),
        shared=_shares(query, key),
    )
    one_hot = sums_by_class(
        learned.scores, inputs.captured.scores, template.one_hot(case), key.shape[2], query.device
    )
    if one_hot:
        case = replace(case, learned=frozenset(), full_bias=False)
    switches = template.switches(case)
    light = _light(program, bool(learned.scores))
    if one_hot:
        switches = switches | {"one_hot": True}
    if inputs.grad_entropy is not None:  # which q blocks of 64 rows leave registers for
        switches, light = switches | {"with_entropy": True}, False
    if not softmax:  # as do weights that are no multiples of dS
        switches, light = switches | {"weights": True}, False
    if inputs.dropout is not None:
        switches = switches | {"with_dropout": True}
    if (
        template.packs(case)
        and not (one_hot or inputs.grad_entropy is not None or not softmax)
        and gqa_packing.pays(kernel_call, inputs)
    ):
        switches = switches | {"pack_gqa": True, "accumulate": False}
    return _settings(spec.target, query, key, value, spec.deterministic, light, switches)


def first_writer_report(
    program: Program,
    runs: BlockRuns,
    lengths: tuple[int, int, int, int],
    head_dim: int,
    workers: int,
) -> str:
    """Return a sentence: who writes dQ first in the Hopper backward, and why.

    Args:
        program: the score and mask graphs. No captured tensor may need a gradient.
        runs: tiles to visit.
        lengths: batch, heads and length of query, and length of key and value.
        head_dim: head dim of query, key and value.
        workers: number of CTAs that run at once.
    """
    widths = backward_template(SM90).widths((head_dim, head_dim))
    if widths is None:
        return f"no kernel for head_dim={head_dim}"
    batch, heads, q_len, kv_len = lengths
    query, key = (
        torch.empty(batch, heads, n, head_dim, dtype=torch.bfloat16, device="meta")
        for n in (q_len, kv_len)
    )
    settings = _settings(SM90, query, key, key, False, _light(program), {})
    fine = retile(runs, settings.block)
    schedule, first = scheduled(fine, settings, query, key, workers)
    whole = whole_heads(fine, settings, schedule, first)
    if isinstance(whole, WholeHeads):
        return (
            f"one CTA computes a whole head and writes dQ, {whole.saved} cycles less than with sums"
        )
    if arrivals(fine, settings, first, (batch, heads)) is not None:
        return "the kernel counts the kv tiles at each q tile: the first stores, the last writes dQ"
    if isinstance(first, str):
        return f"zeros are written before: {first}"
    return f"the first kv tile at each q tile stores, {first.saved} cycles less than with zeros"


def _shares(query: Tensor, key: Tensor) -> bool:
    """Return whether several query heads or batch elements share a head of key and value."""
    return key.shape[:2] != query.shape[:2]


@functools.lru_cache(maxsize=1024)
def _has_slope(score: Node) -> bool:
    return adjoint(score).dscore is not ir.arg("grad")


def backward_block(
    template: str,
    program: Program,
    head_dims: tuple[int, int],
    runs: BlockRuns | None = None,
) -> tuple[int, int] | None:
    """Return (rows, columns) of a block of a template's backward; None for unsupported head dims.

    The result assumes that no captured tensor needs a gradient. If two CTAs share a block, the
    columns are those of both CTAs.

    Args:
        template: a plan's template.
        program: the score and mask graphs.
        head_dims: head dims of query and key, and of value.
        runs: tiles to visit; None for the tiles of long sequences without a mask.

    Raises:
        ArgumentError: `template` is not a GPU kernel.
    """
    settings = backward_template(gpu_target(template))
    widths = settings.widths(head_dims)
    if widths is None:
        return None
    runs = runs or full_runs(_DEFAULT_LENGTH, _DEFAULT_LENGTH, (128, 128), torch.device("cpu"))
    additive = score_form(program.score).additive
    case = BackwardCase(
        widths, runs, additive, learned=frozenset(), lists_override_mask=program.lists_override_mask
    )
    switches = settings.switches(case)
    ctas = 2 if switches.get("two_cta") else 1
    return settings.block_q(widths, _light(program)), ctas * settings.block_kv(widths, switches)


def backward_column_parts(template: str, head_dims: tuple[int, int]) -> int:
    """Return the number of work tiles that share a kv tile in the backward of a GPU template.

    Each computes a part of the columns of the gradients. It is 1 if the template has no backward
    for these head dims of query and value.

    Raises:
        ArgumentError: `template` is not a GPU kernel.
    """
    settings = backward_template(gpu_target(template))
    widths = settings.widths(head_dims)
    return 1 if widths is None else settings.column_parts(widths)


caches.register(_has_slope.cache_clear)


def _light(program: Program, learned: bool = False) -> bool:
    """Return whether dS = P (dP - delta), without a full bias or sums of captured gradients.

    Args:
        program: the score and mask graphs.
        learned: whether the kernel sums gradients of captured tensors.
    """
    if program.score is None:
        return not learned
    return not (learned or _has_slope(program.score) or adds_full_bias(program.score))


def _settings(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    deterministic: bool,
    light: bool,
    switches: dict[str, Any],
) -> BackwardSettings:
    template, dims = backward_template(target), (query.shape[-1], value.shape[-1])
    widths = template.widths(dims)
    assert widths is not None
    config = {
        "dtype": str(query.dtype).removeprefix("torch."),
        "head_dim": widths[0],
        "head_dim_v": widths[1],
        "block_q": template.block_q(widths, light),
        "accumulate": _shares(query, key),
        "sum_order": "descending" if deterministic else "",
    } | switches
    return BackwardSettings(target, tuple(sorted(config.items())), dims, template)
