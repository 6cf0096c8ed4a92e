"""Trace Python functions to expression graphs by running each function once on proxy values.

In: a `score_mod`, a `mask_mod` or a `Mask` (`mask`). Out: a `Traced` graph with its captured
tensors (`tracer`), the guards that decide whether a trace may be reused (`guards`,
`identity_guards`), and the check of captured float64 numbers (`float64_checks`). `sparsity` and the
packages above it import this package. It imports `graph`, `util` and `errors`.
"""
