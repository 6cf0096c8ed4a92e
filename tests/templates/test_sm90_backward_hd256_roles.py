"""Compare the Hopper backward for head dim 256, in the emulator, with the float64 oracle.

The limits are those of `test_sm90_backward`. Masks, lengths, block masks and compiled kernels are
tested in `test_sm90_backward_hd256`, beside the kernel for other variants.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig
from tests.sampling import sampled
from tests.templates.backward_kit import (
    CAUSAL,
    FP16,
    check,
    check_same_bits,
    draw,
    gradients,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

DIMS = (256, 256)
BIAS = torch.zeros(2, 511, requires_grad=True)


def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + BIAS[h, q - kv + 255]


def used(
    mod: Any = None,
    mask: Any = CAUSAL,
    *,
    fixed: bool = False,
    shared: bool = False,
    of: Any = DIMS,
    p: float = 0.0,
) -> str:
    """Return the name of the class of the main kernel that a backward uses."""
    qkv = [
        torch.zeros(1, heads, 256, d, dtype=torch.bfloat16, requires_grad=True)
        for heads, d in ((2, of[0]), (1 if shared else 2, of[0]), (1 if shared else 2, of[1]))
    ]
    options: dict[str, Any] = {"deterministic": fixed, "enable_gqa": shared, "dropout_p": p}
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*qkv, mod, mask, backend="emulate", **options)
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return type(source.build().function).__name__


VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"mod": mods.alibi(2), "of": (200, 256)}, "BackwardHd256Roles"),
    ({"mod": mods.softcap(20.0)}, "BackwardHd256"),
    ({"mask": None, "of": (256, 72)}, "BackwardHd256Roles"),
    ({"mod": relative}, "BackwardHd256"),
    ({"fixed": True}, "BackwardHd256Roles"),
    ({"fixed": True, "shared": True}, "BackwardHd256"),
    ({"p": 0.1}, "BackwardHd256"),
    ({"of": (192, 192)}, "BackwardHd256"),
]


@pytest.mark.parametrize(("variant", "name"), sampled(VARIANTS, 5))
def test_which_variants_have_this_kernel(variant: dict[str, Any], name: str) -> None:
    """Slopes, sums score by score, turns at shared sums and dropout are left to the other kernel."""
    assert used(**variant) == name


@pytest.mark.parametrize("mask", sampled([(CAUSAL,), (masks.sliding_window(90),)], 2), ids=str)
def test_deterministic_bits_do_not_depend_on_workers_or_order(mask: Any) -> None:
    check_same_bits(DIMS, mask)


def test_sums_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with kernel.requested_sources() as sources:
        check(draw(300, dims=DIMS), mask=CAUSAL, mode="adversarial")
    keys = [s.key for s in sources if s.name.startswith("backward")]
    assert keys
    assert all("('sum_order', 'descending')" in key for key in keys)


def test_shared_heads_and_batches() -> None:
    check(draw(140, dims=DIMS, heads=(4, 2), batch=(2, 1)), mask=CAUSAL, mode="adversarial")


def test_a_term_that_is_added_to_the_score() -> None:
    mask = CAUSAL & masks.sliding_window(90)
    check(draw(150, dims=DIMS, dtype=FP16), lambda: mods.alibi(2), mask)


def test_columns_that_no_query_keeps_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (kv < 40) | (kv >= 200) & (kv < 210)
    inputs, weights = draw(100, 256, dims=DIMS, heads=(1, 1))
    check((inputs, weights), mask=keep)
    found = gradients("emulate", inputs, weights, (), None, keep, None)
    for grad in found[1:3]:
        assert not grad[:, :, 40:200].any()
        assert not grad[:, :, 210:].any()


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"head_dim": 192}, "192 and 256"),
        ({"block_q": 128}, "block_q=128"),
        ({"sum_order": "ascending", "accumulate": True}, "order of shared sums"),
        ({"with_dropout": True}, "dropout"),
    ],
)
def test_sizes_that_do_not_work_are_named(sizes: dict[str, Any], named: str) -> None:
    assert named in str(Hd256RolesConfig(**sizes).problem())
