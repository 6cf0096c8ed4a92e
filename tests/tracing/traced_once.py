"""Check that functions that differ only in their data share one trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnkit
from attnkit.tracing import guards
from attnkit.tracing.tracer import Kind, trace


def check_traced_once(
    function: Callable[..., Any],
    rebuilt: Callable[..., Any],
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that `function`, called twice, and its copy `rebuilt` are traced once in total."""
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return trace(*args)

    monkeypatch.setattr(guards, "trace", counted)
    attnkit.clear_caches()
    cpu = torch.device("cpu")
    roots = [guards.trace_cached(f, kind, cpu).root for f in (function, function, rebuilt)]
    assert count == 1
    assert roots[0] is roots[1] is roots[2]
