"""Check that a backward is relaunched for tensors with the same layout, if nothing else changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.runtime.reuse.entries import ATTEMPTS
from attnkit.splice import BackwardInputs, Captured
from attnkit.util import torch_private

pytestmark = pytest.mark.skipif(
    torch_private.tensor_guard([]) is None, reason="torch has no tensor guards"
)

SCALE = 0.5


def saved(length: int = 6, scores: int = 0, masks: int = 0) -> list[Tensor]:
    """Return [query, key, value, out, LSE, *captured tensors], as autograd saves them."""
    q, k, v, out = (torch.randn(1, 2, length, 4) for _ in range(4))
    tables = [torch.randn(2) for _ in range(scores + masks)]
    return [q.requires_grad_(), k, v, out, torch.randn(1, 2, length), *tables]


class Again:
    """Stub of a relaunch that records its tensors and returns numbered gradients."""

    def __init__(self, totals: int = 0) -> None:
        self.seen: list[list[Tensor]] = []
        self.totals = totals

    def __call__(self, tensors: Any) -> list[Tensor]:
        self.seen.append(list(tensors))
        return [torch.full((2,), float(i)) for i in range(3 + self.totals)]


@pytest.fixture(autouse=True)
def as_in_a_backward() -> Any:
    with torch.no_grad():
        yield


def remember(
    backwards: BackwardReuse, tensors: list[Tensor], wanted: list[bool], lse: bool, again: Any
) -> None:
    query, key, value, out, row, *captured = tensors
    inputs = BackwardInputs(
        query=query,
        key=key,
        value=value,
        out=out,
        lse=row,
        grad_out=out.clone(),
        grad_lse=row.clone() if lse else None,
        captured=Captured(captured[: len(wanted)], captured[len(wanted) :]),
        needs_grad=wanted,
        scale=SCALE,
    )
    backwards.remember(inputs, tensors, again)


def known(
    again: Again | None, tensors: list[Tensor], wanted: list[bool], lse: bool
) -> BackwardReuse:
    backwards = BackwardReuse()
    remember(backwards, tensors, wanted, lse, lambda: again)
    return backwards


@pytest.mark.parametrize("lse", [False, True])
def test_a_like_backward_is_relaunched(lse: bool) -> None:
    again = Again(totals=1)
    backwards = known(again, saved(scores=2, masks=1), [False, True], lse)
    tensors = saved(scores=2, masks=1)
    grad_out, grad_lse = torch.randn_like(tensors[3]), tensors[4].clone() if lse else None
    found = backwards.try_fast_path(grad_out, grad_lse, tensors, SCALE, [False, True])
    assert found is not None
    assert len(found) == 5
    assert [None if g is None else g[0].item() for g in found] == [0, 1, 2, None, 3]
    query, key, value, out, row, *rest = tensors
    expected = [
        query,
        key,
        value,
        out,
        grad_out,
        row,
        *rest,
        *([] if grad_lse is None else [grad_lse]),
    ]
    assert [id(t) for t in again.seen[0]] == [id(t) for t in expected]


def test_a_gradient_has_the_dtype_of_its_tensor() -> None:
    tensors = saved(scores=1)
    tensors[5] = tensors[5].to(torch.bfloat16)
    backwards = known(Again(totals=1), tensors, [True], False)
    found = backwards.try_fast_path(tensors[3].clone(), None, tensors, SCALE, [True])
    assert found is not None
    assert found[3] is not None
    assert found[3].dtype is torch.bfloat16


def other_calls() -> dict[str, dict[str, Any]]:
    turned = torch.randn(1, 6, 2, 4).transpose(1, 2)
    double = saved()
    double[1] = double[1].double()
    no_gradient = saved()
    return {
        "scale": {"scale": 0.25},
        "length": {"tensors": saved(7)},
        "strides of the gradient": {"grad_out": turned},
        "dtype": {"tensors": double},
        "gradient of the LSE": {"grad_lse": no_gradient[4].clone()},
        "more tensors": {"tensors": saved(scores=1)},
        "wanted": {"wanted": [True]},
    }


@pytest.mark.parametrize("what", other_calls())
def test_a_different_backward_is_not_relaunched(what: str) -> None:
    again = Again()
    backwards = known(again, saved(), [], False)
    tensors = saved()
    call = {"grad_out": None, "grad_lse": None, "tensors": tensors, "scale": SCALE, "wanted": []}
    call |= other_calls()[what]
    grad = call["tensors"][3].clone() if call["grad_out"] is None else call["grad_out"]
    found = backwards.try_fast_path(
        grad, call["grad_lse"], call["tensors"], call["scale"], call["wanted"]
    )
    assert found is None
    assert not again.seen


def test_a_graph_of_the_backward_itself() -> None:
    tensors = saved()
    backwards = known(Again(), tensors, [], False)
    with torch.enable_grad():
        assert backwards.try_fast_path(tensors[3].clone(), None, tensors, SCALE, []) is None


def test_a_refused_relaunch_returns_none() -> None:
    class Refuses(Again):
        def __call__(self, tensors: Any) -> Any:
            return None

    tensors = saved()
    backwards = known(Refuses(), tensors, [], False)
    assert backwards.try_fast_path(tensors[3].clone(), None, tensors, SCALE, []) is None


def test_learning_ends() -> None:
    backwards, asked = BackwardReuse(), []
    for _ in range(ATTEMPTS + 5):
        remember(backwards, saved(), [], False, lambda: asked.append(1))
    assert len(asked) == ATTEMPTS
