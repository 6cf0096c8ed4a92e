"""Check drawn variants in forward and backward: all head dims, both dtypes, any strides.

Compiling a variant takes most of the time, so each variant is compared completely: output, LSE and
gradients of everything captured, on poisoned memory, twice.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from attnkit import masks, mods
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, Limits, cases, check_variant, variants
from attnkit.testing.quantities import captured_leaves
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

LIMITS = Limits(q_len=(1, 330), kv_len=(1, 330))
DIMS = ((64, 64), (128, 128), (64, 128), (256, 256), (72, 40), (192, 128))
DTYPES = [torch.bfloat16, torch.float16]


def draw(part: int, limits: Limits, dims: tuple[int, int], *, examples: int) -> int:
    """Check drawn variants; return how many gave bit-identical gradients the second time."""
    repeated = []

    @hypothesis.seed(part)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # no shrinking: each smaller example would take a compilation
        suppress_health_check=list(HealthCheck),
    )
    @given(
        variants(limits),
        cases(limits, dtype=DTYPES, sinks=False, statistics=False),
        st.booleans(),
    )
    def drawn(variant: Variant, case: Case, ordered: bool) -> None:
        # hypothesis begins with the smallest example, which is too trivial
        assume(variant != Variant() and case.q_len * case.kv_len > 300)
        case = dataclasses.replace(case, head_dim=dims[0], value_dim=dims[1])
        variant = kit.on_device(variant)
        assume(kit.dense(variant, case).gold["out"].isfinite().all())
        kit.check(variant, case)
        score = variant.trace(torch.device(kit.DEVICE))[0]
        # sums of captured gradients have no order in the kernels
        if not ordered or captured_leaves(score).tensors:
            backward_kit.check(variant, case)
            return
        found = backward_kit.check(variant, case, deterministic=True)
        again = backward_kit.gradients(variant, case, deterministic=True)
        for name, t in found.items():
            assert torch.equal(t, again[name]), f"{name} changes: {case}\n{variant}"
        repeated.append(case)

    drawn()
    return len(repeated)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("part", range(3))
def test_both_directions(part: int, dims: tuple[int, int]) -> None:
    """Drawn variants are exact (in parts that can run in parallel)."""
    draw(11 * DIMS.index(dims) + part, LIMITS, dims, examples=1)


@pytest.mark.parametrize("normalization", ["softmax", "sigmoid", "none"])
def test_sinks_dropout_and_statistics(normalization: str) -> None:
    """Calls of every option are exact, with their gradients."""
    report = check_variant(
        mods.softcap(5.0) if normalization == "none" else mods.alibi(4),
        masks.causal() & masks.sliding_window(90),
        q_len=(1, 330),
        heads=4,
        dtype=DTYPES,
        examples=6,
        device=kit.DEVICE,
        backends=[kit.BACKEND],
        normalization=normalization,
    )
    assert report.ok, str(report)
