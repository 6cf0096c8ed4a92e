"""Define what the torch functions that a mod or mask may call mean in a trace.

In: the arguments of a torch call, with `Value`s among them. Out: the `Value` of the result, with
PyTorch's meaning. One module per group of functions; importing this folder registers every handler.
Imported by `tracer` alone.
"""

from attnkit.tracing.ops import arith, index, math, search, shape

__all__ = ["arith", "index", "math", "search", "shape"]
