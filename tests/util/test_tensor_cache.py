"""Check that values derived from tensors live exactly until the tensors die or change."""

from __future__ import annotations

import torch

from attnkit.util.tensor_cache import VersionedCache


def test_hit_edit_and_other_tensor() -> None:
    cache: VersionedCache[int] = VersionedCache(4)
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    a, b = torch.zeros(3), torch.zeros(3)
    assert [cache.get("k", [a], make) for _ in range(3)] == [0, 0, 0]
    assert cache.get("k", [b], make) == 1
    assert cache.get("other", [a], make) == 2
    a.add_(1)
    assert cache.get("k", [a], make) == 3
    assert cache.get("k", [a], make) == 3
    assert cache.get("k", [b], make) == 1
    assert cache.get("k", [a, b], make) == 4


def test_views_share_the_version() -> None:
    cache: VersionedCache[int] = VersionedCache(4)
    base = torch.zeros(4)
    view = base[1:]
    assert cache.get(0, [view], lambda: 1) == 1
    base[2] = 5
    assert cache.get(0, [view], lambda: 2) == 2


def test_a_new_tensor_at_an_old_address_is_a_miss() -> None:
    cache: VersionedCache[int] = VersionedCache(64)
    for i in range(50):
        t = torch.full((2,), i)
        assert cache.get(0, [t], lambda i=i: i) == i  # type: ignore[misc]
        del t  # frees it at once: the next one often gets its address


def test_bounded() -> None:
    cache: VersionedCache[int] = VersionedCache(2)
    t = torch.zeros(1)
    for key in (1, 2, 1, 3):
        cache.get(key, [t], lambda key=key: key)  # type: ignore[misc]
    assert cache.get(1, [t], lambda: -1) == 1  # recently used
    assert cache.get(2, [t], lambda: -2) == -2  # dropped
