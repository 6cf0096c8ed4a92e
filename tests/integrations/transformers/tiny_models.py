"""Tiny models with random weights: two layers, hidden size 64, head dim 16."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip(
    "transformers", "5", reason="needs transformers 5: pip install 'attnkit[transformers]'"
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
WINDOW = 6
LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Tiny:
    """A model, and inputs for it.

    Attributes:
        model: in evaluation mode, float32.
        inputs: keyword arguments of a forward.
        mask: bool [B, S], outputs to compare; None for all.
    """

    model: Any
    inputs: dict[str, Tensor]
    mask: Tensor | None = None


def _decoder(model: str, **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(transformers, model.replace("ForCausalLM", "Config"))
        return getattr(transformers, model)(config(**{**SIZES, **settings}))

    return build


def _llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **SIZES,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        intermediate_size_mlp=64,
        num_local_experts=2,
        moe_layers=[],
    )
    return transformers.Llama4ForCausalLM(config)


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM", sliding_window=WINDOW),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "gemma2": _decoder(
        "Gemma2ForCausalLM",
        sliding_window=WINDOW,
        layer_types=LAYERS,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=None,
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=LAYERS)
    ),
    "gpt-oss": _decoder(
        "GptOssForCausalLM",
        sliding_window=WINDOW,
        layer_types=LAYERS,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "llama4": _llama4,
}


def decoder(name: str, *, side: str = "left", length: int = 20) -> Tiny:
    """Return a decoder and a batch of two prompts, the first of which is padded on a side."""
    ids = torch.randint(3, VOCABULARY, (2, length))
    mask = torch.ones(2, length, dtype=torch.int64)
    if side:
        mask[0, slice(None, 5) if side == "left" else slice(-5, None)] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    return Tiny(randomized(DECODERS[name]()), inputs, mask.bool())


def modernbert() -> Tiny:
    """Return an encoder with full and bidirectional sliding layers."""
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        local_attention=8,
        layer_types=LAYERS,
        pad_token_id=0,
    )
    ids = torch.randint(3, VOCABULARY, (2, 24))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, -7:] = 0
    model = randomized(transformers.ModernBertForMaskedLM(config))
    return Tiny(model, {"input_ids": ids, "attention_mask": mask}, mask.bool())


def t5() -> Tiny:
    """Return an encoder and a decoder with learned relative biases."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    ids = torch.randint(3, VOCABULARY, (2, 18))
    mask = torch.ones(2, 18, dtype=torch.int64)
    mask[1, -5:] = 0
    model = randomized(transformers.T5ForConditionalGeneration(config))
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 9)),
    }
    return Tiny(model, inputs)


def whisper() -> Tiny:
    """Return an encoder of sound and a decoder of text."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    model = randomized(transformers.WhisperForConditionalGeneration(config))
    inputs = {
        "input_features": torch.randn(2, 8, 32),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 9)),
    }
    return Tiny(model, inputs)


def vit() -> Tiny:
    """Return an encoder of images, which passes no mask."""
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=24,
        patch_size=4,
        num_labels=5,
    )
    model = randomized(transformers.ViTForImageClassification(config))
    return Tiny(model, {"pixel_values": torch.randn(2, 3, 24, 24)})


ENCODERS = {"modernbert": modernbert, "t5": t5, "whisper": whisper, "vit": vit}


def randomized(model: Any) -> Any:
    """Replace the weights of a model, so that attention is far from uniform."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / math.sqrt(weight[0].numel()))
            elif "sinks" in name:
                weight.normal_(0, 2)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    return model.eval()


def in_float64(tiny: Tiny) -> Tiny:
    """Return a copy in float64."""
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in tiny.inputs.items()}
    return Tiny(copy.deepcopy(tiny.model).double(), inputs, tiny.mask)


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention in float64 throughout; transformers' own softmax is float32 at most."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    for bias in (position_bias, attention_mask):
        if bias is not None:
            scores = scores + bias
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None
