"""Check emulated Hopper kernels that read tables by distance, and what torch computes around them.

All variants here run on one forward and one backward kernel: that of a bias by distance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import flex_attention, masks, mods
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.runtime.variant import Variant
from attnkit.splice import distance_calls
from attnkit.splice.distance_calls import DistanceCall
from attnkit.testing import Case
from tests.gpu import backward_kit, cute_kit
from tests.sampling import first_of

pytest.importorskip("cutlass")

HEADS, LENGTHS, FP16 = 2, (70, 100), torch.float16
CASE = Case(*LENGTHS, heads=HEADS, kv_heads=HEADS, head_dim=64, value_dim=64, dtype=FP16)
CAUSAL = masks.causal()


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use tables at any size; return a list to which each computation of tables appends."""
    computed: list[int] = []
    whole = DistanceCall.tables

    def noted(self: DistanceCall, scores: Any) -> Any:
        computed.append(len(self.values.tables.expressions))
        return whole(self, scores)

    monkeypatch.setattr(distance_calls, "LEAST_SCORES", 0)
    monkeypatch.setattr(DistanceCall, "tables", noted)
    monkeypatch.setattr(cute_kit, "DEVICE", "cpu")
    monkeypatch.setattr(cute_kit, "BACKEND", "emulate")
    attnkit.clear_caches()
    return computed


def _learned(*sizes: int) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(
    "ordered", first_of((case,) for case in [False, True]), ids=["any order", "fixed order"]
)
def test_t5_is_exact(tables: list[int], ordered: bool) -> None:
    variant = Variant(mods.t5_bias(_learned(HEADS, 32)), CAUSAL)
    backward_kit.check(variant, CASE, deterministic=ordered)
    assert tables == [1, 1, 1]  # a forward, and backwards through output and LSE


def test_distances_without_a_derivative_do_no_harm() -> None:
    """Masked distances at which an expression is not finite change neither output nor gradients."""
    height, width = _learned(HEADS), _learned(HEADS)

    def bias(guard: bool) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            distance = (q - kv).clamp(min=0) if guard else q - kv
            return s - height[h] * torch.log1p(distance * (1 + width[h]))

        return mod

    found = backward_kit.check(Variant(bias(guard=True), CAUSAL), CASE)
    poisoned = backward_kit.gradients(Variant(bias(guard=False), CAUSAL), CASE)
    assert found.keys() == poisoned.keys()
    for name, t in found.items():
        torch.testing.assert_close(poisoned[name], t)


def test_repeated_calls_read_current_data(
    tables: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables follow edits of captured tensors, NaN included, also where kernels are relaunched."""
    torch.manual_seed(0)
    relaunched: list[bool] = []
    whole = BackwardReuse.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        relaunched.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    bias = _learned(HEADS, 32)
    mod = mods.t5_bias(bias, bidirectional=False)
    qkv = CASE.inputs()
    weight = torch.randn(1, HEADS, LENGTHS[0], 64, dtype=FP16)

    def results(inputs: Any, backend: str) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = flex_attention(*leaves, mod, CAUSAL, backend=backend)
        return [out, *torch.autograd.grad(out, [*leaves, bias], weight.to(out.dtype))]

    for step in range(6):
        with torch.no_grad():
            bias.add_(torch.randn(HEADS, 32)).clamp_(-2, 2)
            if step == 5:
                bias[0, 20] = torch.nan  # distances from 21 to 24
        found, dense = results(qkv, "emulate"), results(qkv, "eager")
        exact = results([t.double() for t in qkv], "eager")
        # dense attention also spreads NaN from a row to the keys that the row does not see
        chosen = slice(0, None, 4 if step == 5 else 1)  # output and bias
        for ours, theirs, true in zip(found[chosen], dense[chosen], exact[chosen], strict=True):
            assert torch.equal(ours.isnan(), true.isnan())
            size = true.nan_to_num().abs().max()
            allowed = 2 * (theirs - true).nan_to_num().abs().max() + size * 2**-10
            assert (ours - true).nan_to_num().abs().max() <= allowed
    assert relaunched[3:] == [True] * 3
    assert tables[-2:] == [1, 1]


def test_a_sink_beside_tables(tables: list[int]) -> None:
    """The sink follows the tables, in new and in relaunched calls; its gradient is the last."""
    bias = _learned(HEADS, 32)
    mod = mods.t5_bias(bias, bidirectional=False)
    weight = torch.randn(1, HEADS, LENGTHS[0], 64, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        sink = torch.tensor([0.5 * step, 2.0])
        qkv, found = CASE.inputs(), []
        for backend, dtype in (("emulate", FP16), ("eager", torch.float64), ("eager", FP16)):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            given = [*(t.to(dtype) for t in qkv), sink.to(wide)]
            leaves = [t.detach().requires_grad_() for t in given]
            out = flex_attention(*leaves[:3], mod, CAUSAL, sink=leaves[3], backend=backend)
            grads = torch.autograd.grad((out * weight.to(dtype)).sum(), [*leaves, bias])
            found.append((out, *grads))
        for ours, true, theirs in zip(*found, strict=True):
            allowed = 2 * (theirs - true).abs().max() + true.abs().max() * 2**-9
            assert (ours - true).abs().max() <= allowed
    assert tables == [1] * 6
