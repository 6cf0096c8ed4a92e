"""Call the attention of a model's layer as transformers does: with its own functions, or without it.

Where transformers is installed, a contender is the function that its `AttentionInterface` has for a
name, with the mask that its `create_causal_mask` makes. Where it is not, functions here make the same
calls of FlexAttention, SDPA, FlashAttention-2 and attnkit. `described` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_contenders import OURS, Run, Sweep, Unsuitable
from gpu_variants import SOFTCAPS, WINDOWS, Problem
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import attnkit

try:
    import transformers
except ImportError:
    transformers = None

NAMES = (OURS, "flex_attention", "sdpa", "flash_attention_2")
Interface = Callable[..., tuple[Tensor, Any]]


def described() -> str:
    """Return what calls the contenders, as the field "interface" of a row."""
    if transformers is None:
        return "the calls of transformers' interface from a plain module; it is not installed"
    return f"AttentionInterface of transformers {transformers.__version__}"


class Layer(nn.Module):
    """Holds what an attention function of transformers reads from the layer that calls it."""

    def __init__(self, p: Problem, name: str, config: Any) -> None:
        super().__init__()
        self.num_key_value_groups = p.shape.heads // p.shape.kv_heads
        self.is_causal, self.layer_idx, self.config = True, 0, config
        self.scaling = p.shape.head_dim**-0.5
        self.sliding_window, self.softcap = WINDOWS.get(p.mask), SOFTCAPS.get(p.score)
        self.implementation = name
        self.train(p.query.requires_grad)


def contenders() -> dict[str, Sweep]:
    """Return the contenders of a layer's case, by the names of transformers' implementations."""
    build = _own_run if transformers is None else _transformers_run
    return {name: {"default": partial(build, name=name)} for name in NAMES}


def _run(p: Problem, layer: Layer, function: Interface, mask: Any) -> Run:
    """Return a call of an attention function as a layer makes it.

    Query, key and value lie in memory as [B, S, H, D], since a layer views its projections so, and
    the output has that shape.
    """
    options: dict[str, Any] = {} if layer.softcap is None else {"softcap": layer.softcap}

    def turned(t: Tensor) -> Tensor:
        return t.transpose(1, 2)

    leaves = tuple(
        turned(t).detach().contiguous().requires_grad_(t.requires_grad)
        for t in (p.query, p.key, p.value)
    )

    def call() -> Tensor:
        return function(
            layer, *map(turned, leaves), mask, dropout=0.0, scaling=layer.scaling,
            sliding_window=layer.sliding_window, **options,
        )[0]  # fmt: skip

    return Run(call, leaves, turned, turned)


def _transformers_run(p: Problem, name: str) -> Run:
    """Build a call through the function and the mask that transformers has for `name`."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    import attnkit.integrations.transformers

    attnkit.integrations.transformers.register(OURS)
    window = WINDOWS.get(p.mask)
    kind = transformers.LlamaConfig if window is None else transformers.MistralConfig
    config = kind(
        hidden_size=p.shape.heads * p.shape.head_dim, num_hidden_layers=1,
        num_attention_heads=p.shape.heads, num_key_value_heads=p.shape.kv_heads,
        head_dim=p.shape.head_dim, **({} if window is None else {"sliding_window": window}),
    )  # fmt: skip
    config._attn_implementation = name
    if name == "sdpa" and p.score:  # it ignores the argument, with a warning at most
        raise Unsuitable("`sdpa` attention does not support `softcap`")
    functions = transformers.AttentionInterface()
    if name == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        raise Unsuitable("flash-attn is not installed")
    embeddings = p.query.new_empty(p.shape.batch, p.shape.length, 1)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = make(config, embeddings, None, None)
    return _run(p, Layer(p, name, config), functions[name], mask)


def _own_run(p: Problem, name: str) -> Run:
    """Build the same call without transformers."""
    make = {
        OURS: _own_attnkit, "flex_attention": _own_flex, "sdpa": _own_sdpa,
        "flash_attention_2": _own_flash,
    }  # fmt: skip
    return _run(p, Layer(p, name, None), *make[name](p))


def _own_attnkit(p: Problem) -> tuple[Interface, Any]:
    score_mod = None if not p.score else attnkit.mods.softcap(SOFTCAPS[p.score])

    def attention(
        layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        out = attnkit.flex_attention(
            query, key, value, score_mod, mask, scale=scaling,
            enable_gqa=layer.num_key_value_groups > 1,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attention, p.mask_mod


def _own_flex(p: Problem) -> tuple[Interface, Any]:
    """Compile FlexAttention as transformers does, with its score_mod and the LSE."""
    compiled = torch.compile(flex.flex_attention)
    aux = flex.AuxRequest(lse=True) if p.query.device.type != "cpu" else None
    length, device = p.shape.length, p.query.device
    mask = flex.create_block_mask(
        p.mask_mod,
        p.shape.batch,
        None,
        length,
        length,
        device=device,
        _compile=device.type != "cpu",
    )

    def attention(
        layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
        softcap: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        found: Any = compiled(
            query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=True, scale=scaling,
            return_aux=aux,
        )  # fmt: skip
        out = found if aux is None else found[0]
        return out.transpose(1, 2).contiguous(), None

    return attention, mask


def _own_sdpa(p: Problem) -> tuple[Interface, Any]:
    if p.score:
        raise Unsuitable("`sdpa` attention does not support `softcap`")
    mask = None
    if p.mask in WINDOWS:  # transformers then passes a dense mask and repeats keys and values
        index = torch.arange(p.shape.length, device=p.query.device)
        mask = p.mask_mod(None, None, index[:, None], index[None])[None, None]

    def attention(
        layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if mask is not None:
            key, value = (t.repeat_interleave(layer.num_key_value_groups, 1) for t in (key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=mask is None
        )
        return out.transpose(1, 2).contiguous(), None

    return attention, mask


def _own_flash(p: Problem) -> tuple[Interface, Any]:
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise Unsuitable(f"flash-attn is not installed ({error})") from None

    def attention(
        layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
        sliding_window: int | None = None, softcap: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        own = {} if sliding_window is None else {"window_size": (sliding_window - 1, 0)}
        own |= {} if softcap is None else {"softcap": softcap}
        turned = (t.transpose(1, 2) for t in (query, key, value))
        return flash_attn_func(*turned, softmax_scale=scaling, causal=True, **own), None

    return attention, None
