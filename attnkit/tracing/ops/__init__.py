"""Handlers of the torch functions that a traced function may call, one module per group.

In: the arguments of a torch call, with `Value`s among them. Out: the `Value` of the result, with
PyTorch's meaning. Imported by `tracer` alone; importing this folder registers every handler.
"""

from attnkit.tracing.ops import arith, index, math, search, shape

__all__ = ["arith", "index", "math", "search", "shape"]
