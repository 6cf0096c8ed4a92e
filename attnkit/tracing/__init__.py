"""Trace Python functions to graphs, by running each once on proxy values.

In: a `score_mod`, a `mask_mod` or a `Mask` (`mask`). Out: a `Traced` graph with its captured
tensors (`tracer`), the guards that say whether a trace may be reused (`guards`, `identity_guards`),
and the check of captured float64 numbers (`float64_checks`). Imported by `sparsity` and every room
above it; imports `graph`, `util` and `errors`.
"""
