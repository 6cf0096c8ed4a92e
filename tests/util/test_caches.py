"""Check that `attnkit.clear_caches` empties every cache, and that later calls still work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import attnkit
from attnkit import flex_attention, masks
from attnkit.util import caches

# Makes calls of every kind, clears, and lists the caches that are not empty. Facts about the
# machine (a library, a compiler) do not depend on calls and may stay; interned nodes are weak.
PROGRAM = """
import importlib, pkgutil, sys, weakref
import torch, attnkit
from attnkit import flex_attention, masks, mods
from attnkit.util.tensor_cache import VersionedCache

MAY_STAY = {("attnkit.schedule.plan", "has_dsl"), ("attnkit.splice.graph_capture", "_libc"),
            ("attnkit.graph.ir", "_table")}

def caches():
    for name, module in sorted(sys.modules.items()):
        if name.startswith("attnkit"):
            for attribute, x in vars(module).items():
                if isinstance(x, VersionedCache):
                    yield name, attribute, len(x)
                elif hasattr(x, "cache_info"):
                    yield name, attribute, x.cache_info().currsize
                elif isinstance(x, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
                    yield name, attribute, len(x)

q, k, v = torch.randn(3, 1, 2, 64, 16, requires_grad=True)
bias, ids = torch.rand(2, requires_grad=True), torch.arange(64) // 20
mod = lambda score, b, h, i, j: score + bias[h] * (i - j)
for backend in ("cpu", "eager"):
    for _ in range(3):
        mask = masks.causal() & masks.document(ids)
        flex_attention(q, k, v, mod, mask, backend=backend).sum().backward()
attnkit.explain(mod, masks.causal(), q_len=64, heads=2)
used = sum(size > 0 for *_, size in caches())
attnkit.clear_caches()
left = {(n, a) for n, a, size in caches() if size} - MAY_STAY
print(used > 8, sorted(left))
"""


def test_every_cache_is_emptied() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True []", done.stderr


def test_the_oldest_entry_is_dropped() -> None:
    table = {"a": 1, "b": 2}
    caches.drop_oldest(table)
    assert table == {"b": 2}


def test_an_entry_that_another_thread_drops_first_is_no_error() -> None:
    class Emptied(dict[str, int]):
        """Dictionary that is emptied once its keys were read, as if by another thread."""

        def __iter__(self) -> Iterator[str]:
            keys = list(super().__iter__())
            self.clear()
            return iter(keys)

    caches.drop_oldest(Emptied(a=1))
    caches.drop_oldest({})


def test_calls_go_on() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    mask = masks.causal()
    before = [flex_attention(q, k, v, block_mask=mask) for _ in range(3)]
    attnkit.clear_caches()
    after = [flex_attention(q, k, v, block_mask=mask) for _ in range(3)]
    assert all(torch.equal(a, before[0]) for a in before + after)
