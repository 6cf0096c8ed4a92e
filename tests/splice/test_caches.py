"""Check that `attnkit.clear_caches` empties the caches of splice, schedule and codegen."""

from __future__ import annotations

import importlib
import pkgutil
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import attnkit
from attnkit import codegen, flex_attention, masks, mods, schedule, splice
from attnkit.jit import emulation
from attnkit.util.tensor_cache import VersionedCache

# caches of code that is loaded once and does not depend on calls
NOT_DATA = {"attnkit.splice.graph_capture.driver", "attnkit.splice.graph_capture._libc"}


def modules() -> Iterator[ModuleType]:
    for room in (splice, schedule, codegen):
        for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            yield importlib.import_module(found.name)


def sizes() -> dict[str, int]:
    """Return the number of entries of each cache in the tested modules, by name."""
    found: dict[str, int] = {}
    for module in modules():
        members: dict[str, Any] = dict(vars(module))
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                members |= {f"{name}.{k}": getattr(value, k) for k in vars(value)}
        for name, value in members.items():
            where = f"{module.__name__}.{name}"
            if hasattr(value, "cache_info"):
                found[f"{value.__module__}.{value.__qualname__}"] = value.cache_info().currsize
            elif isinstance(value, VersionedCache):
                found[where] = len(value)
            elif isinstance(value, weakref.WeakKeyDictionary):
                found[where] = len(value)
    return {name: size for name, size in found.items() if name not in NOT_DATA}


def test_all_caches_are_emptied() -> None:
    q, k, v = (torch.zeros(1, 2, 150, 64, dtype=torch.bfloat16) for _ in range(3))
    for t in (q, k, v):
        t.requires_grad_()
    with emulation.session(execute=False):
        out = flex_attention(q, k, v, mods.alibi(2), masks.causal(), backend="emulate:sm_90a")
        out.sum().backward()
    used = [name for name, size in sizes().items() if size]
    assert len(used) > 8
    assert any("forward_source" in name for name in used)
    assert any("backward" in name for name in used)
    attnkit.clear_caches()
    assert sizes() == dict.fromkeys(sizes(), 0)
