"""Define the handlers of the torch functions that a score_mod or a mask_mod may call.

A handler takes the arguments of a torch call, at least one of them a `Value`, and returns the
`Value` of the result, with the semantics of PyTorch. Each module handles one group of functions.
Importing this package registers all handlers. Only `tracer` imports it.
"""

from attnkit.tracing.ops import (
    arith,
    autograd,
    index,
    linear,
    lookup,
    math,
    operators,
    search,
    shape,
)

__all__ = ["arith", "autograd", "index", "linear", "lookup", "math", "operators", "search", "shape"]
