"""Tiny diffusion transformers with random weights: two heads of 16, one or two layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip(
    "diffusers", "0.37", reason="needs diffusers: pip install 'attnkit[diffusers]'"
)

HEADS = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}


@dataclass(frozen=True)
class Tiny:
    """A model in float32, and the keyword arguments of a forward."""

    model: Any
    inputs: dict[str, Any]


def flux() -> Tiny:
    """Joint attention of text and image without a mask, in a double and in a single block."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        **HEADS,
    )
    return Tiny(
        model,
        {
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": torch.randn(2, 7, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.tensor([0.3, 0.6]),
            "img_ids": torch.randint(0, 4, (16, 3)).float(),
            "txt_ids": torch.zeros(7, 3),
        },
    )


def qwen_image() -> Tiny:
    """Joint attention with a bool mask: the text of the second sample is shorter."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        **HEADS,
    )
    return Tiny(
        model,
        {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": torch.randn(2, 7, 32),
            "encoder_hidden_states_mask": torch.arange(7) < torch.tensor([[7], [4]]),
            "timestep": torch.tensor([0.3, 0.6]),
            "img_shapes": [[(1, 4, 4)]] * 2,
        },
    )


def ltx() -> Tiny:
    """Cross-attention with an additive mask, which keeps one row of keys of each sample."""
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=32, **HEADS
    )
    return Tiny(
        model,
        {
            "hidden_states": torch.randn(2, 2 * 3 * 3, 8),
            "encoder_hidden_states": torch.randn(2, 7, 32),
            "encoder_attention_mask": (torch.arange(7) < torch.tensor([[5], [7]])).float(),
            "timestep": torch.tensor([[0.3], [0.6]]),
            "num_frames": 2,
            "height": 3,
            "width": 3,
        },
    )


def wan() -> Tiny:
    """Self-attention of video tokens and cross-attention to text and to an image."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        image_dim=32,
        added_kv_proj_dim=32,
        rope_max_seq_len=32,
        **HEADS,
    )
    return Tiny(
        model,
        {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 6]),
            "encoder_hidden_states": torch.randn(2, 7, 32),
            "encoder_hidden_states_image": torch.randn(2, 5, 32),
        },
    )


MODELS = {"flux": flux, "qwen_image": qwen_image, "ltx": ltx, "wan": wan}


def in_float64(tiny: Tiny) -> Tiny:
    """Return a copy in float64."""

    def double(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    model = copy.deepcopy(tiny.model).double()
    return Tiny(model, {name: double(t) for name, t in tiny.inputs.items()})
