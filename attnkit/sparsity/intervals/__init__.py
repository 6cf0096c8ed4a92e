"""Convert masks to interval normal form: each row keeps a union of few kv intervals.

In: a traced mask_mod and lengths. Out: `Intervals` (`normal_form`), or the reason why the mask has
no such form. With intervals a kernel tests a score by two comparisons per interval, and `tiles`
classifies tiles without a search. Imported by `sparsity`, `splice` and `inspection`.
"""
