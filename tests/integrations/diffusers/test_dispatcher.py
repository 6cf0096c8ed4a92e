"""Calls of diffusers' dispatcher equal dense attention; names of the dispatcher are known."""

from __future__ import annotations

import copy
import enum
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("diffusers", "0.37", reason="needs diffusers: pip install 'attnkit[diffusers]'")

from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    dispatch_attention_fn,
)

import attnkit
import attnkit.integrations.diffusers
from attnkit.integrations.diffusers import dispatcher, register
from tests.integrations.flash_attn.test_packed import compare

BATCH, HEADS, KV_HEADS = 2, 4, 2
MASKS = ["none", "causal", "keys", "1d", "2d", "heads", "row", "full", "queries"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    extra = {
        name: options.pop(name)
        for name in ("return_lse", "score_mod", "window_size")
        if name in options
    }
    return dispatch_attention_fn(
        query, key, value, attention_kwargs=extra, backend="attnkit", **options
    )


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention of [B, S, H, D] in the dtype of the inputs; LSE [B, H, Sq]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if mask is not None:
        if mask.shape == (q.shape[0], k.shape[2]):
            mask = mask[:, None, None]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ v).transpose(1, 2), lse


def draw_mask(name: str, q_len: int, kv_len: int, additive: bool) -> Tensor | None:
    shapes = {
        "keys": (BATCH, kv_len),
        "1d": (kv_len,),
        "2d": (q_len, kv_len),
        "heads": (HEADS, 1, kv_len),
        "row": (BATCH, 1, 1, kv_len),
        "full": (BATCH, HEADS, q_len, kv_len),
        "queries": (BATCH, 1, q_len, 1),
    }
    if name not in shapes:
        return None
    return torch.randn(shapes[name]) if additive else torch.rand(shapes[name]) < 0.7


@given(
    q_len=st.integers(1, 12),
    kv_len=st.integers(1, 12),
    name=st.sampled_from(MASKS),
    additive=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 99),
)
def test_random_calls(
    q_len: int, kv_len: int, name: str, additive: bool, scale: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    shapes = (q_len, HEADS, 8), (kv_len, KV_HEADS, 8), (kv_len, KV_HEADS, 16)
    tensors = [torch.randn(BATCH, *shape) for shape in shapes]
    mask = draw_mask(name, q_len, kv_len, additive)
    learned = mask is not None and mask.is_floating_point()
    causal = name == "causal"

    def run(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Any:
        given_mask = bias[0] if bias else mask
        return attend(
            *(q, k, v),
            attn_mask=given_mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=True,
            return_lse=True,
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Any:
        return dense(q, k, v, bias[0] if bias else mask, causal, scale)

    compare(run, reference, [*tensors, mask] if learned and mask is not None else tensors)


def test_masks_and_score_mods_of_attnkit() -> None:
    q = torch.randn(BATCH, 40, HEADS, 8)
    table = torch.arange(40)[:, None] - torch.arange(40)
    keep = (table >= 0) & (table < 9)
    window = attnkit.masks.causal() & attnkit.masks.sliding_window(size=9)
    expected = attend(q, q, q, attn_mask=keep)
    block_mask = attnkit.flex.create_block_mask(window, None, None, 40, 40, device="cpu")
    for mask in (window, block_mask, lambda b, h, q, kv: (kv <= q) & (q - kv < 9)):
        torch.testing.assert_close(attend(q, q, q, attn_mask=mask), expected)
    bias = torch.randn(40, 40)
    half = attend(q, q, q, attn_mask=bias, score_mod=lambda s, b, h, q, kv: s / 2)
    exact = dense(*[q.double()] * 3, bias.double(), False, 0.5 * 8**-0.5)[0]
    torch.testing.assert_close(half.double(), exact, rtol=1e-5, atol=1e-5)


def test_additive_masks_of_minus_infinity() -> None:
    """They drop keys, and a whole row of them has output 0, as in the native backend."""
    q = torch.randn(BATCH, 6, HEADS, 8, requires_grad=True)
    keep = torch.rand(BATCH, 1, 6, 6) < 0.5
    keep[0, 0, 2] = False
    out = attend(q, q, q, attn_mask=torch.where(keep, 0.0, -torch.inf))
    torch.testing.assert_close(out, attend(q, q, q, attn_mask=keep))
    assert not out[0, 2].any()
    assert torch.autograd.grad(out.square().sum(), q)[0].isfinite().all()


def test_on_an_emulated_gpu() -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    register("attnkit-emulated", backend="emulate")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 24, 2, 64).bfloat16()
    mask = torch.rand(1, 1, 1, 24) < 0.7
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="attnkit-emulated")
    exact = dense(*(t.double() for t in (q, k, v)), mask, False, None)[0]
    theirs = dense(q, k, v, mask, False, None)[0]
    allowed = 2 * (theirs - exact).abs().max() + torch.finfo(torch.bfloat16).eps
    assert (out - exact).abs().max() <= allowed


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 1.0}, attnkit.OptionError, r"dropout_p must be in \[0, 1\)"),
        ({"window_size": (4, 0)}, attnkit.OptionError, "masks.sliding_window"),
        (
            {"is_causal": True, "attn_mask": torch.ones(6, 6).bool()},
            attnkit.OptionError,
            "one mask",
        ),
        ({"parallel_config": SimpleNamespace()}, attnkit.UnsupportedError, "context parallelism"),
        ({"attn_mask": torch.ones(3, 6).bool()}, attnkit.ShapeError, r"\[2, 4, 6, 6\]"),
        ({"attn_mask": torch.ones(1, 2, 4, 6, 6).bool()}, attnkit.ShapeError, "broadcast"),
        ({"attn_mask": torch.ones(6, 6).int()}, attnkit.DTypeError, "bool or float"),
        ({"attn_mask": [1]}, attnkit.ArgumentError, "block_mask"),
        ({"return_lse": 1}, attnkit.OptionError, "return_lse"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    q = torch.randn(BATCH, 6, HEADS, 8)
    with pytest.raises(error, match=words):
        attend(q, q, q, **options)


def test_shapes_are_those_of_diffusers() -> None:
    q = torch.randn(6, HEADS, 8)
    with pytest.raises(attnkit.ShapeError, match=r"\[B, S, H, D\]"):
        attend(q, q, q)
    with pytest.raises(attnkit.ArgumentError, match="query must be a tensor"):
        attend(None, q, q)  # type: ignore[arg-type]


def test_private_names_of_diffusers() -> None:
    """The dispatcher has what `dispatcher.py` uses."""
    registry = attention_dispatch._AttentionBackendRegistry
    assert issubclass(AttentionBackendName, str)
    assert issubclass(AttentionBackendName, enum.Enum)
    assert callable(registry.register)
    assert isinstance(registry._supports_context_parallel, set)


def test_the_name_is_like_those_of_diffusers() -> None:
    name: Any = AttentionBackendName("attnkit")
    assert AttentionBackendName.ATTNKIT is name  # type: ignore[attr-defined]
    assert AttentionBackendName["ATTNKIT"] is name
    assert list(AttentionBackendName).count(name) == 1
    assert name == "attnkit"
    assert name in AttentionBackendName
    assert AttentionBackendName.__members__["ATTNKIT"] is name
    assert copy.deepcopy(name) is name
    assert pickle.loads(pickle.dumps(name)) is name
    members = len(AttentionBackendName)
    register()
    assert len(AttentionBackendName) == members


def test_one_of_their_names_is_replaced() -> None:
    """In a process of its own, because it lasts."""
    code = """
import torch, attnkit, attnkit.integrations.diffusers
from diffusers.models import attention_dispatch as d
attnkit.integrations.diffusers.register("native")
q = torch.randn(1, 6, 2, 8)
try:
    d.dispatch_attention_fn(q, q, q, dropout_p=1.0, backend="native")
except attnkit.OptionError:
    print("native" in d._AttentionBackendRegistry._supports_context_parallel)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("name", ["", "Attnkit", None])
def test_names_that_diffusers_cannot_find(name: Any) -> None:
    with pytest.raises(attnkit.ArgumentError, match="lower case"):
        register(name)


def test_another_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(attnkit.UnsupportedError, match="another attention dispatcher"):
        dispatcher.add_backend("other", lambda: None)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(attnkit.UnsupportedError, match="cannot be imported"):
        dispatcher.add_backend("other", lambda: None)
