"""Clear the buffers into which a backward without a softmax accumulates.

Without a softmax no score needs the LSE or the delta of its row, so that nothing is read.
"""

from __future__ import annotations

from cutlass import Float32, const_expr, cute

from attnkit.templates.common.preprocess import ROWS, Preprocess, reversed_block_idx


class ClearRows(Preprocess):
    """Writes zeros for LSE and delta of every row, and clears dQ or its flags.

    The main kernels of a softmax and of other weights read the same tables. The arguments are those
    of `Preprocess`, of which `out`, `grad_out`, `lse` and `grad_lse` are not read.
    """

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        grad_lse: cute.Tensor,
        rows_lse: cute.Tensor,
        rows_delta: cute.Tensor,
        sums: cute.Tensor,
        checks: list,
        captured: list,
        totals: list,
        sinks: list,
    ):
        """Write zeros for 64 rows, and clear the sums or the flags of these rows of dQ."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # the kernel before this one may use the buffers
        (block, h, b), (blocks, heads, _) = reversed_block_idx()
        first = (b * heads + h) * blocks + block
        if thread < ROWS:
            inside = block * ROWS + thread < lse.shape[2]
            nothing = Float32(0.0)
            self.write_row(first * ROWS + thread, inside, nothing, nothing, rows_lse, rows_delta)
        self.clear(sums, first, thread)
        if const_expr(len(checks) > 0):
            self.check(checks, first)
