"""Outputs and gradients of tiny models of diffusers equal those of its native backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", "0.37", reason="needs diffusers: pip install 'attnkit[diffusers]'")

import diffusers
from torch._dynamo.backends.debugging import aot_eager

import attnkit
import attnkit.integrations.diffusers
from tests.integrations.diffusers import tiny_models
from tests.integrations.diffusers.tiny_models import MODELS, Tiny


@pytest.fixture(autouse=True)
def _registered() -> Any:
    diffusers.logging.set_verbosity_error()
    attnkit.integrations.diffusers.register()
    torch.manual_seed(0)
    yield
    # `set_attention_backend` of a model is also the default of all others
    diffusers.models.attention_dispatch._AttentionBackendRegistry.set_active_backend(
        diffusers.models.attention_dispatch.AttentionBackendName.NATIVE
    )


def _run(tiny: Tiny, backend: str) -> dict[str, Tensor]:
    """Return the output and the gradients of a model."""
    tiny.model.set_attention_backend(backend)
    tiny.model.zero_grad()
    out = tiny.model(**tiny.inputs).sample
    (out.double() ** 2).mean().backward()
    gradients = {n: p.grad for n, p in tiny.model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **gradients}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_native(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error against float64 is at most twice that of the native backend.

    The floor is 4 machine epsilons of the largest value; of all gradients, because the roundings of
    all layers reach each of them.
    """
    tiny = MODELS[name]()
    gold, native = _run(tiny_models.in_float64(tiny), "native"), _run(tiny, "native")
    calls = _count_calls(monkeypatch)
    ours = _run(tiny, "attnkit")
    assert calls
    assert gold.keys() == native.keys() == ours.keys()
    largest = max(g.abs().max() for n, g in gold.items() if n != "out")
    for n, exact in gold.items():
        error, allowed = ((r[n].double() - exact).abs().max() for r in (ours, native))
        size = exact.abs().max() if n == "out" else largest
        assert error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * size, n


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each call of attnkit."""
    calls: list[Any] = []
    run = attnkit.flex.flex_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return run(*arguments, **options)

    monkeypatch.setattr(attnkit.flex, "flex_attention", counted)
    return calls


def test_the_mask_of_a_model_matters() -> None:
    tiny = tiny_models.qwen_image()
    tiny.model.set_attention_backend("attnkit")
    masked = tiny.model(**tiny.inputs).sample
    tiny.inputs["encoder_hidden_states"][1, 4:] += 1
    assert torch.equal(tiny.model(**tiny.inputs).sample, masked)
    tiny.inputs["encoder_hidden_states"][1, 3] += 1
    assert not torch.equal(tiny.model(**tiny.inputs).sample, masked)


@pytest.mark.parametrize("name", ["flux", "ltx"])
def test_compiled_as_one_graph(name: str) -> None:
    tiny = MODELS[name]()
    tiny.model.set_attention_backend("attnkit")
    compiled = torch.compile(tiny.model, fullgraph=True, backend=aot_eager)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**tiny.inputs).sample, tiny.model(**tiny.inputs).sample)


def test_names_and_the_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_models.flux()
    calls = _count_calls(monkeypatch)
    with torch.no_grad():
        with diffusers.attention_backend("attnkit"):
            inside = tiny.model(**tiny.inputs).sample
        assert len(calls) == 2
        torch.testing.assert_close(tiny.model(**tiny.inputs).sample, inside)
        tiny.model.set_attention_backend("attnkit")
        tiny.model.reset_attention_backend()
    assert len(calls) == 2
