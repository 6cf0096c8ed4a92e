"""Logits, gradients and generated tokens of tiny models equal those of transformers' eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip(
    "transformers", "5", reason="needs transformers 5: pip install 'attnkit[transformers]'"
)

from transformers.masking_utils import eager_mask  # noqa: E402

import attnkit.integrations.transformers  # noqa: E402
from tests.integrations.transformers import tiny_models  # noqa: E402
from tests.integrations.transformers.tiny_models import DECODERS, ENCODERS, Tiny  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    transformers.logging.set_verbosity_error()
    attnkit.integrations.transformers.register()
    transformers.AttentionInterface.register("dense", tiny_models.dense)
    transformers.AttentionMaskInterface.register("dense", eager_mask)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _run(tiny: Tiny, implementation: str) -> dict[str, Tensor]:
    """Return the logits and the gradients of a model."""
    tiny.model.set_attn_implementation(implementation)
    tiny.model.zero_grad()
    logits = tiny.model(**tiny.inputs).logits
    if tiny.mask is not None:
        logits = logits[tiny.mask]
    (logits.double() ** 2).mean().backward()
    gradients = {n: p.grad for n, p in tiny.model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def _check(tiny: Tiny) -> None:
    """Compare with float64: the error is at most twice that of eager mode in the same dtype.

    The floor is that of `attnkit.testing`: 4 machine epsilons of the largest value. For gradients
    that is the largest of the model, because the roundings of all layers reach each of them, and
    some are exactly 0, as that of the bias of the keys.
    """
    gold = _run(tiny_models.in_float64(tiny), "dense")
    eager, ours = _run(tiny, "eager"), _run(tiny, "attnkit")
    assert gold.keys() == eager.keys() == ours.keys()
    largest = max(g.abs().max() for name, g in gold.items() if name != "logits")
    for name, exact in gold.items():
        error, allowed = ((r[name].double() - exact).abs().max() for r in (ours, eager))
        size = exact.abs().max() if name == "logits" else largest
        assert error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * size, name


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_padding(name: str) -> None:
    _check(tiny_models.decoder(name, side="left"))


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "llama4"])
def test_padding_on_the_right(name: str) -> None:
    _check(tiny_models.decoder(name, side="right"))


def test_the_same_padding_in_every_row() -> None:
    tiny = tiny_models.decoder("llama4")
    first = {name: t[:1] for name, t in tiny.inputs.items()}
    assert tiny.mask is not None
    _check(Tiny(tiny.model, first, tiny.mask[:1]))


def test_padding_with_holes() -> None:
    tiny = tiny_models.decoder("llama")
    tiny.inputs["attention_mask"][1, 3:6] = 0
    _check(Tiny(tiny.model, tiny.inputs, tiny.inputs["attention_mask"].bool()))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str) -> None:
    _check(ENCODERS[name]())


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_packed_sequences(name: str) -> None:
    tiny = tiny_models.decoder(name, side="")
    positions = torch.cat([torch.arange(n) for n in (7, 9, 4)])[None]
    inputs = {"input_ids": tiny.inputs["input_ids"], "position_ids": positions}
    tiny.model.config.use_cache = False  # with a cache, transformers takes them for one sequence
    _check(Tiny(tiny.model, inputs))
    tiny.model.set_attn_implementation("attnkit")
    alone = tiny.model(inputs["input_ids"][:, 7:16]).logits
    torch.testing.assert_close(tiny.model(**inputs).logits[:, 7:16], alone, atol=1e-4, rtol=1e-4)


def test_masks_that_the_user_prepared() -> None:
    tiny = tiny_models.decoder("llama", side="")
    kept = torch.rand(2, 1, 20, 20) < 0.5
    kept |= torch.eye(20, dtype=torch.bool)
    added = torch.zeros(2, 1, 20, 20).masked_fill(~kept, torch.finfo(torch.float32).min)
    tiny.inputs["attention_mask"] = added
    _check(tiny)
    logits = tiny.model(**tiny.inputs).logits
    tiny.inputs["attention_mask"] = kept
    torch.testing.assert_close(tiny.model(**tiny.inputs).logits, logits)


def _generated(tiny: Tiny, implementation: str, **options: Any) -> Tensor:
    tiny.model.set_attn_implementation(implementation)
    inputs = {k: v for k, v in tiny.inputs.items() if k != "decoder_input_ids"}
    tokens = tiny.model.generate(**inputs, max_new_tokens=9, do_sample=False, **options)
    assert isinstance(tokens, Tensor)
    return tokens


def _check_generated(tiny: Tiny, **options: Any) -> None:
    expected = _generated(tiny, "eager", **options)
    assert torch.equal(_generated(tiny, "attnkit", **options), expected)
    assert len(expected.unique()) > 3  # not one token over and over


@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str) -> None:
    _check_generated(tiny_models.decoder(name))


@pytest.mark.parametrize("side", ["left", ""])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_a_static_cache(name: str, side: str) -> None:
    _check_generated(tiny_models.decoder(name, side=side), cache_implementation="static")


def test_a_static_cache_is_used_again() -> None:
    """The second text starts at position 0 of the cache, which the first one filled."""
    found = []
    for implementation in ("eager", "attnkit"):
        torch.manual_seed(0)
        tiny = tiny_models.decoder("gemma2", side="")
        cache = transformers.StaticCache(config=tiny.model.config, max_cache_len=40)
        for _ in range(2):
            cache.reset()
            found.append(_generated(tiny, implementation, past_key_values=cache))
    assert all(torch.equal(tokens, found[0]) for tokens in found)


@pytest.mark.parametrize("name", ["gpt-oss", "t5"])
def test_generate_with_beams(name: str) -> None:
    tiny = tiny_models.decoder(name) if name in DECODERS else ENCODERS[name]()
    _check_generated(tiny, num_beams=3)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_with_an_assistant(name: str) -> None:
    tiny = tiny_models.decoder(name, side="")
    tiny.inputs["input_ids"] = tiny.inputs["input_ids"][:1]
    tiny.inputs["attention_mask"] = tiny.inputs["attention_mask"][:1]
    assistant = tiny_models.decoder(name).model
    _check_generated(tiny, assistant_model=assistant)


def test_generate_from_sound() -> None:
    tiny = tiny_models.whisper()
    _check_generated(tiny)


def test_another_name_and_backend() -> None:
    attnkit.integrations.transformers.register("attnkit-dense", backend="eager")
    tiny = tiny_models.decoder("gemma2")
    results = []
    for name in ("attnkit", "attnkit-dense"):
        tiny.model.set_attn_implementation(name)
        results.append(tiny.model(**tiny.inputs).logits[tiny.mask])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    assert not torch.equal(*results)


def test_graphs_of_torch_compile_break_at_attention() -> None:
    """Otherwise a graph holds one mask, and is compiled again for every other padding."""
    for interface in (transformers.AttentionInterface(), transformers.AttentionMaskInterface()):
        assert interface["attnkit"]._torchdynamo_disable


def test_a_model_that_drops_the_mask_is_refused() -> None:
    """Doge adds the mask of a layer to its own only if it is a tensor: tokens saw later ones."""
    config = transformers.DogeConfig(**tiny_models.SIZES)
    model = transformers.DogeForCausalLM(config).eval()
    model.set_attn_implementation("attnkit")
    with pytest.raises(attnkit.UnsupportedError, match=r"doge models leave out.*use .*eager"):
        model(torch.ones(1, 4, dtype=torch.int64))
