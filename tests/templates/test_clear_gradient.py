"""Check the kernel that clears the elements of a stored gradient which no score writes."""

from __future__ import annotations

import pytest
import torch

from attnkit.graph.ir import Node, arg, const

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit.emulated_kernel import EmulatedKernel
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice import stored_gradients
from attnkit.splice.stored_gradients import CallSizes
from tests.sampling import sampled

B, H, Q, KV = (arg(name) for name in ("b", "h", "q", "kv"))
SIZES = CallSizes(batch=1, heads=2, q_len=80, kv_len=4300)


def cleared(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cleared gradient [3, rows, columns], and which elements it should keep as NaN."""
    sizes, block = SIZES, (64, 128)
    grid = torch.rand(1, sizes.heads, -(-sizes.q_len // 64), -(-sizes.kv_len // 128)) < 0.5
    runs = BlockRuns.from_states(grid.to(torch.int8) * 2, sizes.q_len, sizes.kv_len, block)
    total = torch.full((3, rows, columns), torch.nan)
    visited = stored_gradients._words(stored_gradients.visited_blocks(runs))
    slices = stored_gradients._slices([H, Q, KV], total.shape, runs, sizes)
    kernel = EmulatedKernel(stored_gradients.clear_source("sm_90a"))
    with emulation.session() as session:
        kernel(total, visited, slices, sizes.q_len, sizes.kv_len)
    assert session.ok
    kept = torch.zeros(total.shape, dtype=torch.bool)
    scores = grid[0].repeat_interleave(64, 1).repeat_interleave(128, 2)
    kept[:2, : sizes.q_len, : sizes.kv_len] = scores[:, : sizes.q_len, : sizes.kv_len]
    return total, kept


@pytest.mark.parametrize(("rows", "columns"), sampled([(80, 4300), (95, 4303), (140, 4500)], 2))
def test_what_is_cleared(rows: int, columns: int) -> None:
    """Rows of whole vectors and others, with more blocks than a word has bits."""
    total, kept = cleared(rows, columns)
    assert torch.equal(total.isnan(), kept)
    assert not total[~kept].any()


@pytest.mark.parametrize(
    ("index", "sizes", "owns"),
    [
        ((H, Q, KV), SIZES, True),
        ((B, H, Q, KV), SIZES, True),
        ((const(1), H, Q, KV), SIZES, True),
        ((Q, KV), CallSizes(1, 1, 150, 4300), True),
        ((Q, KV), SIZES, False),
        ((H, Q, KV), CallSizes(2, 2, 150, 4300), False),
        ((H, KV, Q), SIZES, False),
        ((H, H, Q, KV), SIZES, False),
        ((const(-1), H, Q, KV), SIZES, False),
    ],
)
def test_whether_scores_have_elements_of_their_own(
    index: tuple[Node, ...], sizes: CallSizes, owns: bool
) -> None:
    assert stored_gradients.owns_elements(index, sizes) is owns
