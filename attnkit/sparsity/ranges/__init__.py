"""Interval arithmetic over boxes of positions: what a node can be inside of a tile.

In: graphs and boxes of (b, h, q, kv). Out: lower and upper bounds, equality sets and table summaries
from which tiles are classified. Imported by `sparsity` alone.
"""
