"""Which tiles of the score matrix are empty, partial or full, and proofs about indices.

In: a traced mask and the lengths of a call. Out: `BlockRuns`, the one sparse format, `BlockMask`, and
index bounds. Imported by `schedule` and every room above it; knows no GPU.
"""
