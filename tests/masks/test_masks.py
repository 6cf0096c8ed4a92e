"""Check that every mask equals its definition, eagerly and traced, with exact tiles."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import create_mask, masks
from attnkit.graph.ir import reads
from attnkit.sparsity.classify import classify
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.tracing.tracer import trace
from tests.masks.cases import CASES
from tests.tracing.traced_once import check_traced_once

for module in ("cases_packed", "cases_grid"):
    importlib.import_module(f"tests.masks.{module}")

CPU = torch.device("cpu")
NOT_MASKS = {"Example", "examples", "tile_order", "zero_padding"}
EXAMPLES = masks.examples(40)
LONG = masks.examples(1 << 17)


def test_every_mask_has_a_definition_and_an_example():
    names = set(masks.__all__) - NOT_MASKS
    examples = {name.partition("/")[0] for name in EXAMPLES}
    assert names - set(CASES) == set(), "add a @case of this name to tests/masks/cases.py"
    assert names - examples == set(), "add an instance to masks/_examples.py"
    assert set(CASES) | examples == names, "add it to __all__ of masks/__init__.py"


@pytest.mark.parametrize("name", sorted(CASES))
@given(data=st.data())
def test_mask_is_its_definition(name, data):
    case = data.draw(CASES[name])
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    places = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, 4).tolist()
    want = torch.tensor([bool(case.keep(*place)) for place in places]).reshape(sizes)
    assert torch.equal(create_mask(case.mask, *sizes), want), repr(case.mask)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_traced_mask_is_the_function_called_eagerly(name):
    mask, q_len, kv_len, batch, heads = EXAMPLES[name]
    sizes = (batch, heads, q_len, kv_len)
    dense = create_mask(mask, *sizes)
    for _ in range(200):
        place = tuple(random.randrange(n) for n in sizes)
        eager = mask(*(torch.tensor(i, dtype=torch.int32) for i in place))
        assert eager.dtype == torch.bool
        assert eager.shape == ()
        assert bool(eager) == bool(dense[place])


@pytest.mark.parametrize("examples", [EXAMPLES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_integers_and_indices_are_proven_safe(name, examples):
    mask, q_len, kv_len, batch, heads = examples[name]
    found = trace(mask, "mask")
    assert ("b" in reads(found.root)) == (batch > 1)
    assert ("h" in reads(found.root)) == (heads > 1)
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
    assert not check_bounds([found.root], found.tensors, found.names, **sizes)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_one_trace_serves_every_mask_of_the_same_shape(name, monkeypatch):
    rebuilt = masks.examples(40)[name].mask
    check_traced_once(EXAMPLES[name].mask, rebuilt, "mask", monkeypatch)


@pytest.mark.parametrize("block", [(16, 16), (5, 12)])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_tiles_are_exact(name, block):
    mask, q_len, kv_len, batch, heads = EXAMPLES[name]
    dense = create_mask(mask, batch, heads, q_len, kv_len)
    found = trace(mask, "mask")
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
    runs = classify(found.root, found.tensors, block=block, device=CPU, **sizes)
    rows = [band.split(block[1], dim=-1) for band in dense.split(block[0], dim=-2)]
    states = torch.stack([torch.stack([state(tile) for tile in row], -1) for row in rows], -2)
    assert torch.equal(runs.states().expand(states.shape).int(), states)


def state(tile):
    """Return the state of a tile [B, H, rows, columns]: 0 empty, 1 partial, 2 full."""
    return tile.flatten(-2).any(-1).int() + tile.flatten(-2).all(-1).int()


@pytest.mark.parametrize("length", [32, 33, 64, 100, 257])
def test_examples_fit_their_lengths(length):
    for name, (mask, q_len, kv_len, batch, heads) in masks.examples(length, seed=length).items():
        kept = create_mask(mask, batch, heads, q_len, kv_len)
        assert kept.any(), name
