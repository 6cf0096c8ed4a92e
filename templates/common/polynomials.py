"""Define minimax polynomials for 2**f by their coefficients, lowest power first.

They minimise the relative error (Remez exchange). The range reduction of powers is Cody and Waite's
(1980): x = j + f with an integer j, so that 2**x = 2**j * 2**f.
"""

from __future__ import annotations

# All are exactly 1 at f = 0: equal scores give probabilities without error, so that the LSE of a row
# whose scores are all 0 has none, and a row's largest probability is exactly 1.

# f in [0, 1), by degree
EXP2_FROM_FLOOR = {
    3: (1.0, 0.695116758, 0.227644995, 0.0770670399),
    4: (1.0, 0.693044841, 0.241280198, 0.0522424728, 0.0134266838),
    5: (1.0, 0.693151295, 0.240164444, 0.0557999127, 0.00901703071, 0.00186713005),
}
# f in [-1/2, 1/2], of degree 3
EXP2_FROM_NEAREST = (1.0, 0.6932829, 0.24221095, 0.055008933)
