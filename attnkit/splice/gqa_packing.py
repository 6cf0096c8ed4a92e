"""Decide whether one work tile of a backward computes all query heads of a kv head (GQA packing).

Without packing each query head has work tiles of its own. Their parts of dK and dV are added in
float32, in memory that is cleared before and rounded afterwards. That costs most where a kv tile
visits few q tiles, as with a window. A packed work tile loads its keys and values once, and keeps
dK and dV in registers from head to head.
"""

from __future__ import annotations

from attnkit.graph import ir
from attnkit.splice import workers
from attnkit.splice.graph_capture import is_capturing
from attnkit.splice.kernel_call import BackwardInputs, KernelCall

MOST_ROWS = 2048  # that a kv tile visits in a head, on average; with more, the additions are few
LEAST_WORK_TILES = 3  # for each CTA: packed heads have fewer work tiles, which balance less well


def pays(kernel_call: KernelCall, inputs: BackwardInputs) -> bool:
    """Return whether to pack heads: the variant allows it, and it is likely faster.

    The score_mod may read nothing but the score, and the mask every index but the head. The tiles
    must not depend on data, so that one kernel serves all calls of these shapes.
    """
    program, runs, query, key = kernel_call.program, kernel_call.runs, inputs.query, inputs.key
    score = set() if program.score is None else ir.reads(program.score) - {"score"}
    if (
        query.shape[1] == key.shape[1]
        or query.shape[0] != key.shape[0]
        or runs is None
        or runs.batch * runs.heads > 1
        or program.mask is None
        or score
        or "h" in ir.reads(program.mask)
        or inputs.captured.scores
        or inputs.captured.masks
    ):
        return False
    spec = kernel_call.spec
    # Counting the tiles waits for the device, which a capture forbids. The kernel of deterministic
    # calls must not depend on that: their tables wait for the device anyway.
    if is_capturing(query.device) and not spec.deterministic:
        return False
    _, partial, full = runs.counts()
    if (partial + full) * runs.block[0] > MOST_ROWS * runs.kv_blocks:
        return False
    work_tiles = key.shape[0] * key.shape[1] * runs.kv_blocks
    count = workers.REFERENCE_SMS
    if not spec.deterministic:
        count = workers.worker_count(query.device, spec.emulated)
    return work_tiles >= LEAST_WORK_TILES * count
