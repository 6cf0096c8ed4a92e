"""Check that a call passes its query through few files, and only through those listed."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for a kernel

import attnkit
from attnkit import flex_attention, masks
from attnkit.splice import forward, workers
from attnkit.util import devices
from attnkit.util.package import FOLDER

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
MOST = 20


class Kernel:
    """Stub of a compiled kernel that launches nothing."""

    stats = ()

    def __call__(self, *arguments: Any) -> None:
        pass

    def relauncher(self, arguments: Any, changing: Any) -> None:
        return None


def _holds(x: Any, query: Tensor) -> bool:
    """Return whether `x` is the query, or a tuple or dataclass that contains it."""
    if isinstance(x, tuple | list):
        return any(y is query for y in x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return any(getattr(x, f.name, None) is query for f in dataclasses.fields(x))
    return x is query


@contextmanager
def files_that_see(query: Tensor) -> Iterator[list[str]]:
    """Yield a list that collects the package files whose functions receive the query, in order."""
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(FOLDER) or name[len(FOLDER) :] in seen:
            return
        if any(_holds(x, query) for x in list(frame.f_locals.values())):
            seen.append(name[len(FOLDER) :])

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(before)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(workers, "sm_count", lambda device: 132)
    monkeypatch.setattr(forward, "kernel", lambda source, **options: Kernel())
    attnkit.clear_caches()


@pytest.mark.usefixtures("hopper")
def test_the_files_of_a_cold_call_are_few_and_those_of_the_page() -> None:
    query, key, value = torch.randn(3, 1, 2, 512, 64).to(torch.bfloat16)
    slopes = torch.rand(2)
    mod = lambda score, b, h, q, kv: score - slopes[h] * (q - kv)
    with files_that_see(query) as seen:
        flex_attention(query, key, value, mod, masks.causal(), backend="cute")
    assert seen[0] == "runtime/api.py"
    assert len(seen) <= MOST
    page = PAGE.read_text().partition("<!-- cold call -->")[2].partition("<!-- end of")[0]
    assert re.findall(r"`([a-z0-9_/]+\.py)`", page) == seen
