"""Registered caches are cleared together."""

from __future__ import annotations

import pytest

from attnkit.util import caches


def test_all_registered_caches_are_cleared_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_clears", [])
    first, second, order = {1: 1}, [2], []
    for clear in (first.clear, second.clear, lambda: order.append(len(first) + len(second))):
        caches.register(clear)
    caches.clear_all()
    assert (first, second, order) == ({}, [], [0])
