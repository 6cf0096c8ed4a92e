"""Define minimax polynomials for 2**f by coefficients, lowest power first.

They minimise the relative error (Remez exchange). The range reduction is Cody and Waite's (1980):
x = j + f with an integer j, so that 2**x = 2**j * 2**f.
"""

from __future__ import annotations

# f in [0, 1), by degree; exactly 1 at 0, so that a row's largest probability is exactly 1
EXP2_FROM_FLOOR = {
    3: (1.0, 0.695116758, 0.227644995, 0.0770670399),
    4: (1.0, 0.693044841, 0.241280198, 0.0522424728, 0.0134266838),
    5: (1.0, 0.693151295, 0.240164444, 0.0557999127, 0.00901703071, 0.00186713005),
}
# f in [-1/2, 1/2], of degree 3
EXP2_FROM_NEAREST = (0.99992823, 0.69326093, 0.24260865, 0.05517065)
