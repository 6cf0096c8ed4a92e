"""Check attnkit.flex against a walk over PyTorch's module, and the page that lists the result."""

from __future__ import annotations

import flex_names
import pytest
from torch.nn.attention import flex_attention as theirs

import attnkit
from attnkit import flex

ROWS = flex_names.rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_name_argument_and_member_is_there(row: flex_names.Row) -> None:
    assert row.there


def test_the_walk_finds_all() -> None:
    names = {row.name for row in ROWS}
    assert set(theirs.__all__) <= names
    assert {"flex_attention(return_aux)", "BlockMask.kv_indices", "BlockMask._flatten"} <= names
    assert {"BlockMask.as_tuple", "FlexKernelOptions.BACKEND", "AuxOutput.lse"} <= names
    unknown = set(flex_names.DIFFERENCES) - names - set(flex_names.private())
    assert not unknown or flex_names.VERSION != "2.13"
    missing = [name for name in flex_names.private() if not hasattr(flex, name)]
    assert not missing


def test_names_that_neither_has() -> None:
    with pytest.raises(AttributeError, match=r"'attnkit\.flex' has no attribute 'flex_atention'"):
        _ = flex.flex_atention
    assert attnkit.flex is flex


def test_the_page_has_the_tables() -> None:
    page = flex_names.PAGE.read_text()
    if f"The names of torch {flex_names.VERSION}:" in page:
        again = flex_names.files()[flex_names.PAGE]
        assert again == page, "run `python docs/scripts/write.py`"
    assert "The names of torch " in page
