"""Check the comparison of two checkouts without a GPU: order of processes, rows and refusals."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

committed = importlib.import_module("committed")
trees = importlib.import_module("gpu_host_trees")


def test_checkouts_alternate_and_the_first_round_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def measured(tree: Path, cache: Path) -> dict[str, Any]:
        assert cache.name == str(tree)  # a checkout keeps its own disk cache
        order.append(str(tree))
        first = len(order) <= 2  # fills the caches
        return {"import, s": 100.0 if first else {"before": 2.0, "after": 1.0}[str(tree)]}

    monkeypatch.setattr(trees, "measured", measured)
    rows = trees.compare({"before": Path("before"), "after": Path("after")}, 3)
    assert order == ["before", "after", "after", "before"] * 2
    (row,) = rows
    assert (row["before_median"], row["after_median"], row["ratio"]) == (2.0, 1.0, 0.5)
    assert row["rounds"] == 3
    assert row["before_spread"] == row["after_spread"] == 0
    assert "ratio 0.500" in trees.line(row)


def test_the_other_checkout_must_be_the_commit_it_claims(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    given = f"bc161a8edc77:{committed.digest(tmp_path)}"
    assert trees.verified(tmp_path, given) == "bc161a8edc77"
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(SystemExit):
        trees.verified(tmp_path, given)


def test_a_process_that_fails_is_reported(tmp_path: Path) -> None:
    """The worker ends with an error here, because there is no GPU or no package in the folder."""
    with pytest.raises(SystemExit, match=r"ended with 1|not imported from"):
        trees.measured(tmp_path, tmp_path / "cache")
