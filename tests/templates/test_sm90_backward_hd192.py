"""Compare the Hopper backward for head dims (192, 128), in the emulator, with the float64 oracle.

The limits are those of `test_sm90_backward`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.templates.sm90.backward_hd192_config import Hd192Config
from tests.sampling import sampled
from tests.templates.backward_kit import (
    CAUSAL,
    FP16,
    MODS,
    check,
    check_same_bits,
    draw,
    gradients,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

MLA = (192, 128)


def used(
    mod: Any = None,
    mask: Any = CAUSAL,
    *,
    fixed: bool = False,
    shared: bool = False,
    of: Any = MLA,
) -> str:
    """Return the name of the class of the main kernel that a backward uses."""
    qkv = [
        torch.zeros(1, heads, 256, d, dtype=torch.bfloat16, requires_grad=True)
        for heads, d in ((2, of[0]), (1 if shared else 2, of[0]), (1 if shared else 2, of[1]))
    ]
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(
            *qkv, mod, mask, backend="emulate", deterministic=fixed, enable_gqa=shared
        )
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return type(source.build().function).__name__


@pytest.mark.parametrize(
    "mask", sampled([(CAUSAL & masks.sliding_window(90),), (CAUSAL,), (None,)], 3), ids=str
)
def test_masks_in_all_orders(mask: Any) -> None:
    check(draw(330, dims=MLA, heads=(1, 1)), mask=mask, mode="check")


@pytest.mark.parametrize("lengths", sampled([((257, 129),), ((17, 200),), ((5, 130),)], 3))
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths, dims=MLA, heads=(1, 1)))


def test_narrower_heads_are_padded() -> None:
    check(draw(200, 150, dims=(160, 120), heads=(1, 1), dtype=FP16), mask=CAUSAL)


def test_shared_heads_and_batches() -> None:
    check(draw(140, dims=MLA, heads=(4, 2), batch=(2, 1)), mask=CAUSAL, mode="adversarial")


def test_a_term_that_is_added_to_the_score() -> None:
    check(draw(200, dims=MLA), lambda: mods.alibi(2), CAUSAL)


def test_columns_that_no_query_keeps_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (kv < 40) | (kv >= 300) & (kv < 310)
    mask = create_block_mask(keep, None, None, 200, 512, device="cpu")
    inputs, weights = draw(200, 512, dims=MLA, heads=(1, 1))
    check((inputs, weights), mask=mask)
    found = gradients("emulate", inputs, weights, (), None, mask, None)
    for grad in found[1:3]:
        assert not grad[:, :, 40:300].any()
        assert not grad[:, :, 310:].any()


@pytest.mark.exhaustive
def test_rows_that_keep_no_key_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (q >= 70) & (kv <= q)
    mask = create_block_mask(keep, None, None, 200, 200, device="cpu")
    inputs, weights = draw(200, dims=MLA, heads=(1, 1))
    check((inputs, weights), mask=mask)
    assert not gradients("emulate", inputs, weights, (), None, mask, None)[0][:, :, :70].any()


@pytest.mark.parametrize("columns", sampled([(192,), (128,)], 2))
def test_block_masks(columns: int) -> None:
    keep = lambda b, h, q, kv: (q - kv < 70) & (kv - q < 130)
    mask = create_block_mask(keep, None, None, 250, 310, device="cpu", BLOCK_SIZE=(128, columns))
    check(draw(250, 310, dims=MLA, heads=(1, 1)), mask=mask)


def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + BIAS[h, q - kv + 255]


BIAS = torch.zeros(2, 511, requires_grad=True)
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"mod": mods.softcap(20.0)}, "BackwardHd256"),
    ({"mod": mods.alibi(2)}, "BackwardHd192"),
    ({"mod": relative}, "BackwardHd256"),
    ({"fixed": True}, "BackwardHd192"),
    ({"fixed": True, "shared": True}, "BackwardHd192"),
    ({"mask": None}, "BackwardHd192"),
    ({"of": (192, 192)}, "BackwardHd256"),
]


@pytest.mark.parametrize(("variant", "name"), sampled(OTHERS, 5))
def test_which_variants_have_this_kernel(variant: dict[str, Any], name: str) -> None:
    """A slope or a learned tensor needs registers that this kernel does not have."""
    assert used(**variant) == name


@pytest.mark.parametrize("mask", sampled([(CAUSAL,), (masks.sliding_window(90),)], 2), ids=str)
def test_deterministic_bits_do_not_depend_on_workers_or_order(mask: Any) -> None:
    check_same_bits(MLA, mask)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_sums_in_a_fixed_order(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with kernel.requested_sources() as sources:
        check(draw(330, dims=MLA, heads=heads, batch=(2, 2)), mask=CAUSAL, mode="adversarial")
    keys = [s.key for s in sources if s.name.startswith("backward")]
    assert keys
    assert all("('sum_order', 'descending')" in key for key in keys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["head", "relative"])
def test_variants_of_the_other_kernel(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200, dims=MLA), mod, CAUSAL, captured())


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"head_dim": 128}, "128 and 128"),
        ({"block_q": 128}, "128 x 128"),
        ({"sum_order": "any"}, "sum_order='any'"),
        ({"first_writer": True}, "first writers"),
    ],
)
def test_sizes_that_do_not_work_are_named(sizes: dict[str, Any], named: str) -> None:
    assert named in str(Hd192Config(**sizes).problem())


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("mask", "fixed"),
    sampled(
        [
            (CAUSAL, False),
            (None, False),
            (masks.document(torch.arange(256) // 100) & CAUSAL, False),
            (CAUSAL, True),
        ],
        4,
    ),
)
def test_consumers_do_not_spill_and_products_are_not_serialised(mask: Any, fixed: bool) -> None:
    """The stack frame holds registers of the producer, see `Hd192Config`, and of the warps of turns."""
    qkv: list[Tensor] = [
        torch.zeros(1, 2, 256, d, dtype=torch.bfloat16, requires_grad=True) for d in (192, 192, 128)
    ]
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*qkv, None, mask, backend="emulate", deterministic=fixed)
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    found = kernel.kernel(source)
    assert not any("serialised" in problem for problem in found.artifact.problems)
    assert all(s.stack <= (64 if fixed else 32) for s in found.stats)
