"""A mask as a union of few kv intervals per row.

In: a traced mask_mod. Out: `Intervals` (two comparisons per score in a kernel, tiles without any
search), or the reason why the mask has no such form. Imported by `sparsity`, `splice` and
`inspection`.
"""
