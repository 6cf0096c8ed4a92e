"""Check dQ without a memset on a GPU against a backward that clears its sums first.

A kv tile that adds to a chunk before it is stored, or stores it later, is visible because memory
holds NaN or the results of an earlier call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import flex_attention, masks, mods
from attnkit.schedule import arrivals, first_writer, whole_heads
from attnkit.splice import backward_prepare, backward_work
from attnkit.splice.backward_work import BackwardWork
from tests.gpu import cute_kit as kit
from tests.gpu.test_repeated_backwards import close, forget, poison, replayed  # noqa: F401

CAUSAL = masks.causal()
HEADS = 8


@contextmanager
def storing(wanted: bool) -> Iterator[list[BackwardWork]]:
    """Force or disable first-writer stores inside the `with` block; yield the list of tables."""
    found: list[BackwardWork] = []
    plain = backward_work.build_tables

    def kept(*args: Any) -> BackwardWork:
        found.append(plain(*args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_work, "build_tables", kept)
        patch.setattr(first_writer, "BYTES_A_CLOCK", 1 if wanted else 1 << 40)
        forget()
        yield found
        forget()


def drawn(length: int, dim: int, kv_heads: int, batch: int = 1) -> list[Tensor]:
    random = torch.Generator(kit.DEVICE).manual_seed(length)
    shapes = [(batch, h, length, dim) for h in (HEADS, kv_heads, kv_heads, HEADS)]
    made = [torch.randn(s, generator=random, device=kit.DEVICE) for s in shapes]
    return [t.to(torch.bfloat16).requires_grad_() for t in made]


def gradients(
    made: list[Tensor], mask: Any, mod: Any = None, deterministic: bool = False
) -> list[Tensor]:
    *qkv, grad = made
    options = {"backend": kit.BACKEND, "deterministic": deterministic}
    out = flex_attention(*qkv, mod, mask, enable_gqa=True, **options)
    return list(torch.autograd.grad(out, qkv, grad))


def bands(length: int) -> dict[str, Any]:
    ids = torch.arange(length, device=kit.DEVICE) // 600
    return {
        "window": CAUSAL & masks.sliding_window(512),
        "both sides": masks.sliding_window(300),
        "documents": CAUSAL & masks.document(ids),
        "causal": CAUSAL,
        "all": None,
    }


@pytest.mark.parametrize("name", ["window", "both sides", "documents", "causal"])
@pytest.mark.parametrize(
    ("dim", "kv_heads", "length"), [(128, 8, 4096), (64, 8, 4096), (128, 2, 2990)]
)
def test_equals_a_backward_that_clears(
    replayed: list[bool],  # noqa: F811
    name: str,
    dim: int,
    kv_heads: int,
    length: int,
) -> None:
    made, mask = drawn(length, dim, kv_heads), bands(length)[name]
    with storing(False) as works:
        expected = gradients(made, mask)
        assert not works[-1].flags
    with storing(True) as works:
        for _ in range(12):
            poison()
            close(gradients(made, mask), expected)
        assert works[-1].flags
    assert replayed[-1]


def test_mod_with_a_derivative() -> None:
    made = drawn(2048, 64, 8)
    with storing(False):
        expected = gradients(made, CAUSAL, mods.softcap(20.0))
    with storing(True) as works:
        close(gradients(made, CAUSAL, mods.softcap(20.0)), expected)
        assert works[-1].flags


def test_many_waiting_ctas() -> None:
    """Results are right, without a deadlock, if all kv tiles wait for the first q tile."""
    made = drawn(4096, 128, 8)
    with storing(False):
        expected = gradients(made, None)
    with storing(True) as works:
        for _ in range(5):
            close(gradients(made, None), expected)
        assert works[-1].flags


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_ctas_than_run_at_once(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right with three times as many CTAs as can run at once."""
    made, mask = drawn(4096, 128, 8), bands(4096)["window"]
    with storing(False):
        expected = gradients(made, mask)
    plain = backward_prepare.worker_count
    monkeypatch.setattr(backward_prepare, "worker_count", lambda *args: 3 * plain(*args))
    with storing(True) as works:
        for _ in range(5):
            close(gradients(made, mask, deterministic=deterministic), expected)
        assert works[-1].workers == works[-1].work_tiles.shape[0]
        assert works[-1].first_writer


def test_graph() -> None:
    made = drawn(4096, 128, 8)
    mask = bands(4096)["window"]
    with storing(True) as works:
        expected = gradients(made, mask)
        assert works[-1].flags
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradients(made, mask)
        for _ in range(10):
            for t in found:
                t.fill_(torch.nan)
            graph.replay()
            close(found, expected)


@pytest.mark.parametrize(
    ("name", "dim", "kv_heads"),
    # heads are not packed if the mask reads a captured tensor, as documents do
    [
        *product(["causal", "window", "documents"], [128, 64], [8]),
        *product(["causal", "window"], [128], [2]),
    ],
)
def test_whole_heads_equal_sums(
    replayed: list[bool],  # noqa: F811
    name: str,
    dim: int,
    kv_heads: int,
) -> None:
    """One CTA sums dQ of a whole head in its own memory, which holds the head before."""
    made, mask = drawn(430, dim, kv_heads, 70), bands(430)[name]
    with whole(False) as works:
        expected = gradients(made, mask)
        assert works[-1].starts is None
    with whole(True) as works:
        for _ in range(12):
            poison()
            close(gradients(made, mask), expected)
        assert works[-1].starts is not None
    assert replayed[-1]


@contextmanager
def whole(wanted: bool) -> Iterator[list[BackwardWork]]:
    """Force or disable whole heads inside the `with` block; yield the list of tables."""
    with storing(True) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_heads, "BYTES_A_CLOCK", 1)
        patch.setattr(whole_heads, "MOST", 16 if wanted else 0)
        yield found


def sparse(length: int, name: str) -> Any:
    """Return a mask that keeps few kv tiles for a q tile."""
    random = torch.Generator().manual_seed(length)
    rows = 64 if name == "half blocks" else 128
    kept = torch.rand(HEADS, length // rows + 1, length // 128 + 1, generator=random) < 0.05
    kept = kept.to(kit.DEVICE)
    if name == "same q tiles":
        return lambda b, h, q, kv: q % 1024 < 128
    return lambda b, h, q, kv: kept[h, q // rows, kv // 128]


@pytest.mark.parametrize("name", ["blocks", "half blocks", "same q tiles"])
@pytest.mark.parametrize(("dim", "length"), [(128, 4096), (64, 4000)])
def test_sums_in_the_order_of_arrival(
    replayed: list[bool],  # noqa: F811
    name: str,
    dim: int,
    length: int,
) -> None:
    made, mask = drawn(length, dim, HEADS), sparse(length, name)
    with counting(False) as works:
        expected = gradients(made, mask)
        assert works[-1].visits is None
    with counting(True) as works:
        for _ in range(50):
            poison()
            close(gradients(made, mask), expected)
        assert works[-1].visits is not None
    assert replayed[-1]


@contextmanager
def counting(wanted: bool) -> Iterator[list[BackwardWork]]:
    """Force or disable sums in the order of arrival in the `with` block; yield the list of tables."""
    with storing(False) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_heads, "MOST", 0)
        patch.setattr(arrivals, "MOST", 64 if wanted else 0)
        patch.setattr(arrivals, "MOST_AT_ONE", 64)
        yield found
