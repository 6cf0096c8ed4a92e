"""Handlers of the torch functions that a traced function may call, one module per group.

In: proxies, as the tracer intercepts a torch function. Out: graph nodes with PyTorch's meaning.
Imported by `tracer` alone. Importing this folder registers every handler.
"""

from attnkit.tracing.ops import arith, index, math, search, shape

__all__ = ["arith", "index", "math", "search", "shape"]
