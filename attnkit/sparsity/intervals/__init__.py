"""The interval normal form of a mask: each row keeps a union of few kv intervals.

In: a traced mask_mod and lengths. Out: `Intervals` (`normal_form`), by which a kernel tests a score
with two comparisons per interval and `tiles` classifies tiles without a search, or the reason why
the mask has no such form. Imported by `sparsity`, `splice` and `inspection`.
"""
