"""Prepare and run the forward and the backward of a template on the traced graphs of a variant.

In: a `KernelCall` (template, graphs, tiles) and tensors. Out: attention and its gradients. This is
the only package that imports templates. `runtime` and `inspection` import it; `inspection` also
reads descriptions of kernels from `forward`, `backward` and `kernel_layout`.
"""

from attnkit.splice.dispatch import (
    Attention,
    backward_replay,
    forward_checks,
    prepare_forward,
    run_backward,
    run_forward,
)
from attnkit.splice.kernel_call import (
    BackwardInputs,
    Captured,
    ForwardInputs,
    ForwardOutputs,
    KernelCall,
    RepeatedForward,
)
from attnkit.splice.program import Program, compute_dtype

__all__ = [
    "Attention",
    "BackwardInputs",
    "Captured",
    "ForwardInputs",
    "ForwardOutputs",
    "KernelCall",
    "Program",
    "RepeatedForward",
    "backward_replay",
    "compute_dtype",
    "forward_checks",
    "prepare_forward",
    "run_backward",
    "run_forward",
]
