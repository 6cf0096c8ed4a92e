"""Define numbers that the kernels of both architectures use."""

from __future__ import annotations

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")

# Arrivals that complete a phase where one elected thread arrives: the producer, which announces the
# bytes to come, or the tensor cores by a commit.
ONE_ARRIVAL = 1

# How far, in log2, the maximum of a row may grow before the softmax rescales its sum and output:
# P stays below 2**8, and the sum below 2**8 times the columns, far from the float32 limit
# (FlashAttention-4's lazy rescaling).
RESCALE_THRESHOLD = 8.0
