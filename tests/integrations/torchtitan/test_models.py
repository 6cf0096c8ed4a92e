"""torchtitan's Llama 3 with attnkit equals the same model with dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "torchtitan.models.common.attention",
    reason="needs torchtitan 0.3 with Triton, which the CPU build of torch does not bring",
    exc_type=ImportError,
)

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import activation_checkpoint as activation
from torchtitan.models.common import attention as torchtitan_attention
from torchtitan.models.llama3 import llama3_configs

import attnkit
from attnkit import masks
from attnkit.integrations.torchtitan import FlexAttention, SelectiveAC
from tests.integrations.packed_reference import check_close

BATCH, LENGTH = 2, 40
Theirs: Any = torchtitan_attention.FlexAttention


class Dense(Theirs):  # type: ignore[misc]
    """Dense attention in the dtype of the query, from the mask at every position."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        mask, repeats = options["attention_masks"], q.shape[2] // k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        function = getattr(mask, "mask_mod", mask)
        at = [torch.arange(n) for n in (*q.shape[:3], k.shape[2])]
        b, h, i, j = torch.meshgrid(*at, indexing="ij")
        scale = options.get("scale")
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if (score_mod := options.get("score_mod")) is not None:
            scores = score_mod(scores, b, h, i, j)
        scores = scores.masked_fill(~function(b, h, i, j), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        transform = options.get("out_transform")
        return out if transform is None else transform(out, scores.logsumexp(-1).transpose(1, 2))


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # the compiled function needs a compiler of C++
    monkeypatch.setattr(torchtitan_attention, "_compiled_create_block_mask", create_block_mask)


def llama() -> Any:
    """Return the debug model of Llama 3 with two layers, in float32, with attnkit inside."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = FlexAttention.Config()
    model = config.build()
    model.init_states()
    return model


def positions() -> Tensor:
    """Return positions of packed documents, of 15 and 25 tokens and of 30 and 10."""
    return torch.stack([torch.cat([torch.arange(n), torch.arange(40 - n)]) for n in (15, 30)])


def run(model: Any, tokens: Tensor, mask: Any) -> list[Tensor]:
    """Return the logits and all gradients."""
    model.zero_grad()
    logits = model(tokens, positions(), mask)
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


def use_dense(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.inner_attention = Dense(Theirs.Config())


def test_llama() -> None:
    """Its own block mask, attnkit's, and a mask of attnkit give the same; as dense attention."""
    model, tokens = llama(), torch.randint(0, 2048, (BATCH, LENGTH))
    theirs = model.get_attention_masks(positions())
    assert isinstance(model.layers["0"].attention.inner_attention, FlexAttention)
    ids = (positions() == 0).cumsum(1).int()
    ours = attnkit.flex.create_block_mask(
        masks.causal() & masks.document(ids), BATCH, None, LENGTH, LENGTH, device="cpu"
    )
    found = [run(model, tokens, m) for m in (theirs, ours, masks.causal() & masks.document(ids))]
    use_dense(model)
    dense = run(model, tokens, theirs)
    exact = run(model.double(), tokens, theirs)
    for results in found:
        check_close(results, exact, dense)


def test_call_form() -> None:
    """GQA, a scale, a score_mod, and a transform of the output that reads the LSE."""
    slopes = torch.rand(4)
    options = {
        "attention_masks": masks.causal(),
        "score_mod": lambda s, b, h, q, kv: s - slopes[h] * (q - kv),
        "scale": 0.3,
        "enable_gqa": True,
        "out_transform": lambda out, lse: out * (lse - 1).sigmoid()[..., None],
        "meant_for": "another module",
    }
    ours, dense = FlexAttention.Config().build(), Dense(Theirs.Config())
    tensors = [torch.randn(2, 20, heads, 16) for heads in (4, 2, 2)]

    def gradients(module: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = module(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

    single = gradients(dense, torch.float32)
    check_close(gradients(ours, torch.float32), gradients(dense, torch.float64), single)


def test_compiled_as_one_graph() -> None:
    model, tokens = llama(), torch.randint(0, 2048, (BATCH, LENGTH))
    mask = model.get_attention_masks(positions())
    expected = run(model, tokens, mask)
    for layer in model.layers.values():
        layer.compile(backend=aot_eager, fullgraph=True)
    torch.testing.assert_close(run(model, tokens, mask), expected)


class Count(TorchDispatchMode):
    """Counts the calls of attnkit's operator that no cache answers."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.attnkit.attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "calls"), [(SelectiveAC, 2), (activation.SelectiveAC, 4)])
def test_selective_checkpointing(policy: Any, calls: int) -> None:
    """Attention does not run again in the backward, as it does with torchtitan's own list."""
    model, tokens = llama(), torch.randint(0, 2048, (BATCH, LENGTH))
    mask = model.get_attention_masks(positions())
    expected = run(model, tokens, mask)
    policy(policy.Config()).apply(model)
    with Count() as count:
        found = run(model, tokens, mask)
    torch.testing.assert_close(found, expected)
    assert count.calls == calls


@pytest.mark.parametrize(
    ("policy", "again"), [(SelectiveAC, False), (activation.SelectiveAC, True)]
)
def test_selective_checkpointing_compiled(policy: Any, again: bool) -> None:
    model, tokens = llama(), torch.randint(0, 2048, (BATCH, LENGTH))
    mask = model.get_attention_masks(positions())
    expected = run(model, tokens, mask)
    policy(policy.Config()).apply(model)
    backwards: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        backwards.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(run(model, tokens, mask), expected)
    assert backwards
    assert all("attnkit.attention_backward" in code for code in backwards)
    assert all(("attnkit.attention.default" in code) is again for code in backwards)


@pytest.mark.parametrize("mask", [None, {"full": None}, torch.ones(4, 4)])
def test_what_is_no_mask(mask: Any) -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(attnkit.ArgumentError, match="attention_masks must be"):
        FlexAttention.Config().build()(q, q, q, attention_masks=mask)


def test_options_of_the_configuration() -> None:
    q = torch.randn(1, 8, 2, 16)
    config = FlexAttention.Config(block_size=(256, 128), kernel_options={"BACKEND": "FLASH"})
    out = config.build()(q, q, q, attention_masks=masks.causal())
    eager = FlexAttention.Config(backend="eager").build()(q, q, q, attention_masks=masks.causal())
    torch.testing.assert_close(out, eager)
    with pytest.raises(attnkit.OptionError, match="backend"):
        FlexAttention.Config(backend="none").build()(q, q, q, attention_masks=masks.causal())
