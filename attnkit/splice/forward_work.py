"""Choose the kernel of a forward and build its work list."""

from __future__ import annotations

from torch import Tensor

from attnkit.codegen.score_form import score_form
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.schedule.scheduler import Shape, schedule_forward
from attnkit.schedule.targets import Target
from attnkit.schedule.work_list import WorkList, full_runs, retile, work_list
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.program import Program
from attnkit.splice.runs_cache import cached_for_runs, on_host_if_few
from attnkit.splice.template_registry import forward_template


def choose_kernel(
    head_dims: tuple[int, int],
    runs: BlockRuns | None,
    program: Program,
    target: Target,
    q_len: int | None,
    light: bool = True,
) -> tuple[Kernel, str]:
    """Choose the forward kernel for the tiles in `runs`; return the kernel and the reason as text.

    Args:
        head_dims: head dims of query and key, and of value.
        runs: tiles to visit; None for all.
        program: the score and mask graphs.
        target: the target that the kernel is compiled for.
        q_len: length of the query, None for a long one.
        light: whether no statistics are needed and the softmax scale is above 0.
    """
    form = score_form(program.score)
    candidates = kernels(
        *head_dims,
        program.score is not None,
        target.template,
        only_slope=light and program.has_softmax and form.only_slope,
        dropout=program.dropout,
        q_len=q_len,
    )
    return forward_template(target).choose(
        candidates, head_dims, runs, program.lists_override_mask, form
    )


def near_runs(runs: BlockRuns, query: Tensor) -> BlockRuns:
    """Copy `runs` to the CPU if they have few rows; choosing a kernel then costs less there."""
    return on_host_if_few(runs, query.shape[0] * query.shape[1] * runs.q_blocks)


def forward_work(
    runs: BlockRuns | None,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workers: int,
    split: bool,
    batch_together: bool = False,
) -> WorkList:
    """Return the work list of a forward on the device of `query`, cached under `runs`.

    Args:
        runs: tiles to visit; None for all.
        kernel: the kernel, which determines the tile sizes.
        query, key, value: tensors of the call; only their shapes, dtype and device are read.
        workers: number of CTAs that run at once.
        split: whether long rows may be split along KV.
        batch_together: see `Shape`.
    """
    if runs is None:
        runs = full_runs(query.shape[2], key.shape[2], kernel.block, query.device)
    tiles = runs
    shape = Shape(
        query.shape[0],
        query.shape[1],
        kernel.block[1] * (key.shape[3] + value.shape[3]) * key.element_size(),
        kv_heads=key.shape[1],
        kv_batch=key.shape[0],
        batch_together=batch_together,
    )

    def build() -> WorkList:
        fine = retile(near_runs(tiles, query), kernel.block)
        order = schedule_forward(fine, shape, workers=workers, split=split)
        return work_list(fine, order).to(query.device)

    return cached_for_runs(runs, ("forward", shape, kernel.block, workers, split), build)
