"""The expression graph of a score_mod or mask_mod, and its interpretations.

In: typed, interned nodes (`ir`). Out: simplified graphs, derivatives (`adjoint`), the loop level at
which each value is known (`staging`), affine forms, and evaluation by torch (the oracle) and by
sympy (formulas). Imported by `tracing` and every room above it; imports only `util` and `errors`.
"""
