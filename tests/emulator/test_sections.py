"""Check that every test of PTX semantics names the sections of the PTX ISA that specify them."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from tests.emulator import (
    test_arithmetic,
    test_barriers,
    test_clusters,
    test_copies,
    test_global_races,
    test_matrix,
    test_memory,
    test_tcgen05,
    test_tensor_memory,
    test_warp,
)
from tests.emulator.sections import SECTIONS, section

SEMANTICS = [
    test_arithmetic,
    test_barriers,
    test_clusters,
    test_copies,
    test_global_races,
    test_matrix,
    test_memory,
    test_tcgen05,
    test_tensor_memory,
    test_warp,
]


@pytest.mark.parametrize("module", SEMANTICS, ids=lambda m: m.__name__.split(".")[-1])
def test_tests_of_semantics_name_their_sections(module: ModuleType) -> None:
    tests = inspect.getmembers(module, inspect.isfunction)
    without = [n for n, f in tests if n.startswith("test_") and not hasattr(f, "sections")]
    assert without == []


def test_every_listed_section_is_tested() -> None:
    cited = {
        t for m in SEMANTICS for _, f in inspect.getmembers(m) for t in getattr(f, "sections", ())
    }
    assert cited == set(SECTIONS)


def test_a_title_that_is_not_listed_is_refused() -> None:
    with pytest.raises(KeyError, match="no section"):
        section("Wishful Thinking")
