"""Without torchtitan the names say what is missing."""

from __future__ import annotations

import sys

import pytest

import attnkit
import attnkit.integrations.torchtitan as integration


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("attnkit.integrations.torchtitan.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan.models.common", None)
    with pytest.raises(attnkit.UnsupportedError, match=r"needs torchtitan 0\.3"):
        _ = integration.FlexAttention
    with pytest.raises(AttributeError, match="Other"):
        _ = integration.Other
