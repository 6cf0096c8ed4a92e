"""Define the expression graph of a score_mod or mask_mod, and evaluate it.

In: typed, interned nodes (`ir`), built by the tracer. Out: simplified graphs (`simplify`),
gradients (`adjoint`), the level at which each value is known (`staging`), affine forms (`affine`),
values in torch (`eval_torch`, the reference) and formulas in sympy (`eval_sympy`). Imported by
`tracing` and every room above it; imports only `errors`.
"""
