"""Check that compiled Hopper forward kernels spill no registers and serialise no products.

No GPU is needed: emulated calls request the same kernels as calls on a GPU, and nothing is executed
here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from attnkit import AuxRequest, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import cutlass

from attnkit.jit import build, emulation
from attnkit.jit import kernel as compiled
from tests.sampling import sampled

LENGTH = 1536  # raw scores at head dim 64 have tiles of 192 rows
SHORT = 256  # and of 128 rows
HEADS = 2
BIAS = torch.linspace(-1.0, 1.0, 2 * LENGTH - 1).repeat(HEADS, 1)
IDS = torch.arange(LENGTH) // 768
KEPT = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
BLOCKS = torch.ones(12, 12, dtype=torch.int32).tril()


def dense(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Mask without intervals that loads from a table for each score."""
    return KEPT[q, kv]


def blocks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Mask without intervals whose table indices depend on the row or the column alone."""
    return BLOCKS[q // 128, kv // 128] > 0


VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (None, None),
    "alibi": lambda: (mods.alibi(HEADS), masks.causal()),
    "softcap": lambda: (mods.softcap(20.0), masks.causal()),
    "relative bias": lambda: (lambda s, b, h, q, kv: s + BIAS[h, q - kv + LENGTH - 1], None),
    "documents": lambda: (None, masks.document(IDS) & masks.causal()),
    "blocks": lambda: (None, blocks),
    "alibi, blocks": lambda: (mods.alibi(HEADS), blocks),
    "softcap, dense": lambda: (mods.softcap(20.0), dense),
    "full bias, dense": lambda: (mods.full_bias(KEPT.float()), dense),
    "softcap and alibi, blocks": lambda: (
        mods.compose(mods.softcap(4.0), mods.alibi(HEADS), mods.log_sigmoid()),
        blocks,
    ),
}
PLAIN, SIDES = ("plain", "alibi", "documents", "blocks"), (64, 128, 256)
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512), (576, 512)]
# other variants are compiled at every other of the head dims, in turns
CASES = [
    (name, *dims)
    for i, name in enumerate(VARIANTS)
    for dims in (DIMS if name in PLAIN else DIMS[i % 2 :: 2])
]


def source(
    name: str,
    head_dim: int,
    value_dim: int,
    entropy: bool = False,
    normalization: str = "softmax",
    length: int = LENGTH,
) -> compiled.Source:
    """Return the source of the forward kernel of variant `name`, with or without entropies."""
    score, mask = VARIANTS[name]()
    query, key = (torch.zeros(1, HEADS, length, head_dim, dtype=torch.bfloat16) for _ in range(2))
    value = torch.zeros(1, HEADS, length, value_dim, dtype=torch.bfloat16)
    with emulation.session(execute=False), compiled.requested_sources() as sources:
        aux = AuxRequest(entropy=True) if entropy else None
        flex_attention(
            *(query, key, value, score, mask),
            backend="emulate",
            return_aux=aux,
            normalization=normalization,
        )
    (result,) = sources
    return result


@functools.cache
def kernel(name: str, head_dim: int, value_dim: int) -> compiled.Kernel:
    """Return the forward kernel of variant `name`, compiled once per test run."""
    return compiled.kernel(source(name, head_dim, value_dim))


@pytest.mark.assembled
@pytest.mark.parametrize(("name", "head_dim", "value_dim"), sampled(CASES, 11))
def test_no_spills_and_no_serialised_products(name: str, head_dim: int, value_dim: int) -> None:
    compiled_kernel = kernel(name, head_dim, value_dim)
    assert compiled_kernel.artifact.arch == "sm_90a"
    assert compiled_kernel.artifact.problems == ()
    assert [s.stack for s in compiled_kernel.stats] == [0]


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "head_dim"),
    sampled([("plain", 64), ("alibi", 128), ("blocks", 128), ("plain", 256)], 2),
)
def test_entropies_spill_no_registers(name: str, head_dim: int) -> None:
    compiled_kernel = compiled.kernel(source(name, head_dim, head_dim, entropy=True))
    assert compiled_kernel.artifact.problems == ()


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "entropy", "normalization"),
    sampled(list(product(PLAIN, [False, True], ["softmax"])), 5)
    + sampled(list(product(PLAIN, [False], ["sigmoid", "none"])), 5),
)
def test_short_queries_of_narrow_heads(name: str, entropy: bool, normalization: str) -> None:
    here = source(name, 64, 64, entropy, normalization, SHORT)
    assert "('warpgroups', 2)" in here.key
    compiled_kernel = compiled.kernel(here)
    assert compiled_kernel.artifact.problems == ()
    assert [s.stack for s in compiled_kernel.stats] == [0]


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "head_dim", "normalization"),
    sampled(list(product(PLAIN, SIDES, ["sigmoid", "none"])), 7),
)
def test_weights_without_a_softmax(name: str, head_dim: int, normalization: str) -> None:
    """No registers spill, no products are serialised, and a sigmoid has few special functions."""
    here = source(name, head_dim, head_dim, normalization=normalization)
    compiled_kernel = compiled.kernel(here)
    assert compiled_kernel.artifact.problems == ()
    columns = int(re.search(r"'block_kv', (\d+)", here.key)[1])
    scores = 64 * columns // 128 if normalization == "sigmoid" else 0
    for loop in product_loops(compiled_kernel.ptx):
        powers, reciprocals = (sum(op in line for line in loop) for op in ("ex2.approx", "rcp."))
        if name == "alibi":  # a branch for small weights, and one for any
            assert (powers, reciprocals) == (2 * scores, 0)
        else:  # every second pair of scores shares a reciprocal
            assert (powers, reciprocals) == (scores, scores // 4)
        assert not any("div." in line for line in loop)


def test_passes_that_are_left_out_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = source("softcap, dense", 64, 64)
    if not build._SKIPPED_PASSES.get((cutlass.__version__, here.arch)):
        pytest.skip("no passes are left out for this version of the DSL")
    monkeypatch.setattr(build, "_SKIPPED_PASSES", {})
    whole = build.compile_source(here)
    assert whole.code == kernel("softcap, dense", 64, 64).artifact.code


def loops(ptx: str) -> list[list[str]]:
    """Return the lines of each loop in PTX, from a label to a later branch back to it."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith("$L")}
    found = []
    for i, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if target and labels[target[1]] < i:
            found.append(lines[labels[target[1]] : i + 1])
    return found


def product_loops(ptx: str) -> list[list[str]]:
    """Return the innermost loops that contain wgmma products."""
    inside = [loop for loop in loops(ptx) if any("wgmma.mma_async" in line for line in loop)]
    return [a for a in inside if not any(len(b) < len(a) and b[0] in a for b in inside)]


@pytest.mark.parametrize("name", ["alibi", "documents"])
def test_full_blocks_are_computed_without_the_mask(name: str) -> None:
    """The kernel has a mainloop for full blocks, without mask selects, and one for masked blocks.

    The latter selects between score and -inf for each of a thread's scores.
    """
    counts = sorted(
        sum(line.startswith(("selp.f32", "selp.b32")) for line in loop)
        for loop in product_loops(kernel(name, 128, 128).ptx)
    )
    scores_of_a_thread = 64 * 128 // 128
    assert len(counts) == 2
    assert counts[0] < scores_of_a_thread // 8  # of the maximum, a few a row
    assert counts[1] - counts[0] >= scores_of_a_thread
