"""Keep tests that compile many kernels within the time of `make test`.

`make test` runs a sample of each long list of kernels, and `make test-assemblers` runs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
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


def crossed(*lists: Sequence[Any]) -> list[Any]:
    """Return the product of `lists` as parameters of a test, most of them marked `exhaustive`.

    The sample is a diagonal of the product: it has every entry of every list, as few times as
    possible.
    """
    places = list(product(*(range(len(entries)) for entries in lists)))
    longest = max(len(entries) for entries in lists)
    diagonal = {tuple(i % len(entries) for entries in lists) for i in range(longest)}
    return [
        pytest.param(
            *(entries[i] for entries, i in zip(lists, place, strict=True)),
            marks=() if place in diagonal else pytest.mark.exhaustive,
        )
        for place in places
    ]


def diagonal(*lists: Sequence[Any]) -> list[Any]:
    """Return a diagonal of the product of `lists` as parameters of a test, as `first_of` does.

    It has every entry of every list, as few times as possible. This is for lists that meet in no
    code, such as masks and head dims.
    """
    longest = max(len(entries) for entries in lists)
    return first_of(tuple(entries[i % len(entries)] for entries in lists) for i in range(longest))


def first_of(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return `cases` as parameters of a test, all but the first marked `exhaustive`."""
    everything = list(cases)
    return sampled(everything, len(everything))
