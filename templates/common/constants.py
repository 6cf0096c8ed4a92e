"""Define constants that the kernels of both architectures use."""

from __future__ import annotations

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")

# Arrival count of mbarriers with a single arriving thread or unit: the elected thread of a producer
# (arrive.expect_tx), or the tensor core (tcgen05.commit).
ONE_ARRIVAL = 1

# The softmax rescales a row's sum and output only when the row maximum has grown by more than this,
# in log2 units (FlashAttention-4's lazy rescaling). P then stays below 2**8, and the sum below 2**8
# times the number of columns, far from the float32 limit.
RESCALE_THRESHOLD = 8.0
# 2**x is 0 in float32 below this x; x is clamped to it where 2**x * x must be 0 and not NaN
LEAST_EXPONENT = -256.0
