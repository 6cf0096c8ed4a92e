"""Bound the values that a node can take inside a tile, by interval arithmetic.

In: graphs, captured tensors, and boxes of (b, h, q, kv). Out: lower and upper bounds of nodes
(`eval_interval`, `eval_blocks`), tables of one-sided expressions (`tables`), ranges of captured
tensors (`boxes`), and the tiles that hold equal values (`equality`). Imported only by `sparsity`.
"""
