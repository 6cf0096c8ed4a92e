"""Read the cycle counter and timer of each SM in a kernel, to compute the SM clock.

Import this module only where there is a CUDA device, because Triton comes with PyTorch's CUDA
builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stamp(rows):
    # row of this block: SM, cycles, nanoseconds
    row = rows + 3 * tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    nanoseconds = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(row, sm.to(tl.int64))
    tl.store(row + 1, cycles)
    tl.store(row + 2, nanoseconds)


def stamp(device: torch.device) -> Tensor:
    """Launch a kernel that reads the cycle counter and timer of every SM, without waiting for it.

    Returns:
        int64 [blocks, 3], with columns SM, cycles, nanoseconds. There are four blocks per SM.
    """
    blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    rows = torch.empty(blocks, 3, dtype=torch.int64, device=device)
    _stamp[(blocks,)](rows, num_warps=1)
    return rows
