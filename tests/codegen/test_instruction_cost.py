"""Compare the estimated instruction count of a score_mod with the machine code of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit import masks
from attnkit.codegen.instruction_cost import instructions
from attnkit.graph.ir import F32, SIGNATURES, Node, arg, load, node
from attnkit.graph.simplify import build
from attnkit.jit import emulation, kernel
from attnkit.runtime.variant import Variant
from attnkit.tracing.guards import trace_cached

CPU = torch.device("cpu")
TABLE = torch.zeros(4096)
GRID = torch.zeros(256, 256)


def score(mod: Any) -> Node:
    return trace_cached(mod, "score", CPU).root


def test_values_per_row_are_not_counted() -> None:
    assert instructions() == 0
    assert instructions(score(lambda s, b, h, q, kv: s)) == 0
    assert instructions(score(lambda s, b, h, q, kv: s * torch.log(q + 1.0))) == 1
    assert instructions(score(lambda s, b, h, q, kv: s * torch.log(kv + 1.0))) > 6


@given(st.integers(1, 6), st.integers(1, 6))
def test_shared_operations_count_once(first: int, second: int) -> None:
    """Operations that two expressions share are counted once.

    Here, the longer of two chains of tanh contains the shorter one.
    """
    chain = [arg("score")]
    for _ in range(max(first, second)):
        chain.append(build("tanh", chain[-1]))
    both = instructions(chain[first], chain[second])
    assert both == instructions(chain[max(first, second)]) == 3 * max(first, second)


def test_instructions_of_loads_and_divisions() -> None:
    index = build("add", arg("q"), arg("kv"))
    row, place = load(0, F32, [arg("q")]), load(0, F32, [arg("q"), arg("kv")])
    distance = load(0, F32, [build("sub", arg("q"), arg("kv"))])
    assert instructions(row) == 0
    assert instructions(place) > instructions(distance) - 1 > instructions(index) > 0
    by_seven = score(lambda s, b, h, q, kv: s + kv // 7)
    by_row = score(lambda s, b, h, q, kv: s + kv // (q + 1))
    by_float = score(lambda s, b, h, q, kv: s % 2.5)
    assert instructions(by_seven) < instructions(by_row) < instructions(by_float)


def test_operations_of_one_instruction_are_known() -> None:
    """The operations that are estimated as one instruction are exactly those listed here.

    A new operation needs an estimate or an entry.
    """
    floats = [(op, len(takes)) for op, (takes, _) in SIGNATURES.items() if set(takes) <= {"f", "n"}]
    leaves = arg("score"), arg("grad"), arg("scale")
    nodes = [node(op, *leaves[:count]) for op, count in floats if op != "round"]
    single = {n.op for n in nodes if instructions(n) == 1}
    assert single == {"add", "sub", "mul", "neg", "abs", "min", "max", "floor"}


MODS = {
    "none": lambda s, b, h, q, kv: s * torch.sign(h - 0.5),
    "exp": lambda s, b, h, q, kv: torch.exp(s),
    "erf": lambda s, b, h, q, kv: torch.erf(s),
    "erfinv": lambda s, b, h, q, kv: torch.erfinv(s),
    "lgamma": lambda s, b, h, q, kv: torch.lgamma(s),
    "hypot": lambda s, b, h, q, kv: torch.hypot(s, h - 0.5),
    "atan2": lambda s, b, h, q, kv: torch.atan2(s, h - 0.5),
    "distance": lambda s, b, h, q, kv: s + TABLE[q - kv + 256],
    "grid": lambda s, b, h, q, kv: s + GRID[q, kv],
    "divided": lambda s, b, h, q, kv: s + kv % 7,
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """Return a function that counts the machine instructions of a mod's forward kernel.

    The kernels are compiled with separate code for each of 128 columns, in masked and unmasked
    blocks. Other kernels do not have that code, so a separate cache is used.
    """
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    from attnkit.templates.sm100 import softmax

    @functools.cache
    def count(name: str) -> int:
        qkv: list[Tensor] = [torch.zeros(1, 1, 256, 128, dtype=torch.bfloat16)] * 3
        with emulation.session(execute=False), kernel.requested_sources() as sources:
            Variant(MODS[name], masks.causal())(
                *qkv, backend="emulate:sm_100a", kernel_options={"BLOCK_M": 256, "BLOCK_N": 128}
            )
        return sum(s.code for s in kernel.kernel(sources[0]).artifact.stats) // 16

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "HEAVY", 1000)
        patch.setattr(kernel, "_kernels", {})
        patch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield count


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in MODS if name != "none"])
def test_estimates_are_of_the_size_of_the_machine_code(
    name: str, code: Callable[[str], int]
) -> None:
    """The estimate is within a factor of two of the machine code."""
    taken = (code(name) - code("none")) / (2 * 128)
    found = instructions(score(MODS[name])) - instructions(score(MODS["none"]))
    assert found / 2 <= taken <= 2 * found, (found, taken)
