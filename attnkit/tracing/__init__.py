"""From Python functions to graphs: run the function once on symbols.

In: a `score_mod`, a `mask_mod` or a `Mask`. Out: a `Traced` graph with its captured tensors, and the
guards that say when the trace may be reused. Imported by `sparsity` and every room above it.
"""
