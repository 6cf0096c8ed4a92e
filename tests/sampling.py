"""Keep tests that compile many kernels within the time of `make test`.

`make test` runs a sample of each long list of kernels, and `make test-assemblers` runs the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[tuple[Any, ...]], every: int) -> list[Any]:
    """Return `cases` as parameters of a test, marked `exhaustive` but for each `every`-th one.

    The cases of a product of two lists are best sampled at a distance that divides neither length,
    so that the sample has every entry of both.
    """
    return [
        pytest.param(*case, marks=() if i % every == 0 else pytest.mark.exhaustive)
        for i, case in enumerate(cases)
    ]
